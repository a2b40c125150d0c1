"""Records of the model families that tests tried, for the table in docs/models.md.

    def test_a_mixture_is_trained(family, tried):
        ...
        tried(family, "packed", shared="experts copied: they are transposed")

``pytest --families`` writes the records of passed tests into docs/models.json, and ``python docs/generate.py`` makes
the table. tests/house/test_docs.py fails if a recorded test no longer takes ``tried`` or no longer names the column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paths import DOCS

RECORD = DOCS / "models.json"
TOLD: pytest.StashKey[list[tuple[str, str, str]]] = pytest.StashKey()
PASSED: pytest.StashKey[dict[str, list[tuple[str, str, str]]]] = pytest.StashKey()


def read() -> dict[str, Any]:
    """Return the record. ``tried`` is family -> column -> test -> text of the cell; an empty text means yes."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record a try: ``tried(family, "a column", "another", a_third="the cell's text in place of yes")``."""
    known, told = read(), request.node.stash.setdefault(TOLD, [])

    def tell(family: str, *columns: str, **said: str) -> None:
        assert family in known["families"], f"docs/models.json has no family {family}: add its title there"
        for column, text in {**dict.fromkeys(columns, ""), **said}.items():
            assert column in known["columns"], f"docs/models.json has no column {column}: {', '.join(known['columns'])}"
            told.append((family, column, text))

    return tell


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families", action="store_true", help="write what was tried of which family: docs/models.json")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.passed and TOLD in item.stash:
        test = item.nodeid.partition("[")[0]
        item.config.stash.setdefault(PASSED, {}).setdefault(test, []).extend(item.stash[TOLD])
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--families"):
        return
    record = read()
    for test, told in session.config.stash.get(PASSED, {}).items():
        for family in {family for family, _, _ in told}:
            for tests in record["tried"].get(family, {}).values():
                tests.pop(test, None)
        for family, column, text in told:
            record["tried"].setdefault(family, {}).setdefault(column, {})[test] = text
    tried = record["tried"]
    record["tried"] = {
        family: {
            column: dict(sorted(tried[family][column].items()))
            for column in record["columns"]
            if tried[family].get(column)
        }
        for family in record["families"]
        if family in tried
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
