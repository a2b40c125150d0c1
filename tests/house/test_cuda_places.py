"""Every check of the device in the package runs with a GPU's answer, or docs/design.md has the reason."""

from __future__ import annotations

from collections import Counter

import cuda_places
from paths import TESTS


def test_every_place_has_its_way_in_the_table() -> None:
    """Run a new check of the device in a case of `host_cuda_cases.py` or elsewhere, and add it to the table."""
    assert set(cuda_places.table()) <= set(cuda_places.WAYS)
    listed = sum((cuda_places.listed(way) for way in cuda_places.WAYS), Counter[str]())
    places = cuda_places.of_package()
    assert not places - listed, "cuda_places.toml lacks them"
    assert not listed - places, "cuda_places.toml lists them, but the package doesn't have them"


def test_tests_of_the_table_exist() -> None:
    entries = [entry for way in ("v2", "arguments") for entry in cuda_places.table()[way].values()]
    for test in {entry["test"] for entry in entries}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), test
