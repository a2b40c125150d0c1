"""Pages: generated pages are fresh, and links lead somewhere."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from families import read
from paths import ROOT
from transformers import TrainingArguments

from colograd.config.sharding import TENSOR
from colograd.extensions.experts.model import TRIED
from colograd.extensions.experts.model import WHOLE as UNSPLIT
from colograd.extensions.tensor_parallel.model import CUT
from colograd.memory.description import WHOLE

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_address_of_the_repository_stands_once(generate: ModuleType) -> None:
    """In setup.cfg; `make docs` writes it into README.md and the notebooks."""
    pages = [page for page, _ in generate.pages() if page.suffix == ".ipynb" or page.name == "README.md"]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert len(pages) == 6 and all(setup["metadata"]["url"] in generate.with_address(page) for page in pages)


def test_generated_pages_are_fresh(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow  # the test above compares all pages
def test_a_stale_page_is_noticed_and_left_alone(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("models.md", "models.json", "design.md", "metrics.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    (tmp_path / "trl.md").write_text("old\n")
    assert generate.main(["--check"]) == 1
    assert "configuration.md, trl.md" in capsys.readouterr().out
    assert (tmp_path / "trl.md").read_text() == "old\n" and not (tmp_path / "configuration.md").exists()
    assert generate.main([]) == 0 and (tmp_path / "configuration.md").exists()


def test_families_table_cells_have_tests() -> None:
    record = read()
    for family, columns in record["tried"].items():
        assert family in record["families"] and set(columns) <= set(record["columns"])
        for column, tests in columns.items():
            for test in tests:
                told = told_by(*test.split("::"))
                assert told, f"{test} is gone: rename it in docs/models.json, or run its successor with --families"
                assert column in told, f"{test} tells of {', '.join(sorted(told))}: not of {column}"


@functools.cache
def told_by(path: str, name: str) -> set[str]:
    """Columns that a test passes to ``tried``."""
    found = [n for n in tree_of(path).body if isinstance(n, ast.FunctionDef) and n.name == name]
    calls = [n for test in found for n in ast.walk(test) if getattr(getattr(n, "func", None), "id", "") == "tried"]
    named = {keyword.arg for call in calls for keyword in call.keywords}
    parts = [part for call in calls for place in call.args[1:] for part in ast.walk(place)]
    return named | {part.value for part in parts if isinstance(part, ast.Constant)}


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def test_a_field_that_trl_adds_has_to_be_accounted_for(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = generate.trl_fields()
    monkeypatch.setattr(generate, "trl_fields", lambda: {**fields, "brand_new": "None"})
    with pytest.raises(SystemExit, match=r"fields that GRPOConfig doesn.t: brand_new"):
        generate.moving()


@pytest.mark.slow
def test_a_metric_that_trl_adds_has_to_be_accounted_for(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = generate.trl_metrics()
    assert len(found) > 30 and {"reward", "rewards/{}/mean", "completions/mean_length", "kl"} <= set(found)
    assert set(generate.OTHER_METRICS) | set(generate.METRIC_NOTES) <= set(found)
    monkeypatch.setattr(generate, "trl_metrics", lambda: [*found, "brand/new"])
    with pytest.raises(SystemExit, match="TRL's metric brand/new is not logged here: say why in"):
        generate.moving()
    monkeypatch.setattr(generate, "trl_metrics", lambda: found)
    monkeypatch.setitem(generate.OTHER_METRICS, "reward", "no reason")
    with pytest.raises(SystemExit, match="TRL's metric reward is logged here: remove it from"):
        generate.moving()


def test_every_knob_stands_in_one_section(generate: ModuleType) -> None:
    sections = generate.sections(generate.GRPOConfig)
    names = [name for section in sections.values() for name in section]
    fields = {field.name for field in dataclasses.fields(generate.GRPOConfig) if field.init}
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert len(names) == len(set(names)) and fields - inherited <= set(names) <= fields
    assert set(names) & inherited == set(sections[generate.INHERITED]), "a group takes no field of transformers"
    assert "" not in sections and set(generate.sections(generate.ModelConfig)) == {""}


def test_fields_called_limited_are_fields_of_ours_and_theirs(generate: ModuleType) -> None:
    assert set(generate.LIMITED) <= set(generate.trl_fields()) & set(generate.own_names(generate.GRPOConfig))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([\w-]+)\)", text):
        assert anchor in anchors((page.parent / target) if target else page), f"{target}#{anchor}"
    for target in re.findall(
        r"(?<![\w./-])((?:recipes|requirements|docs|colograd)/[\w./-]+\.(?:yaml|txt|md|py))", text
    ):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`(grpo_[\w.]+\.yaml)`", text):
        assert (ROOT / "recipes" / target).exists(), target


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def test_the_site_s_navigation_has_every_page() -> None:
    """The navigation has each page once. The README links all pages except the changelog."""
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(there | {"index.md", "changelog.md"})
    readme = (ROOT / "README.md").read_text()
    assert [name for name in there if f"(docs/{name}" not in readme] == []


def test_the_site_s_navigation_has_every_notebook() -> None:
    """docs/site.py makes a page of each notebook. A page that isn't in the navigation would be hard to find."""
    named = re.findall(r": notebooks/(\w+)\.ipynb$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_pages_are_few_and_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len(pages) - 1 <= 22
    assert sum(len(page.read_text().split()) for page in pages) <= 40_000


def test_site_builds_with_formulas(tmp_path: Path) -> None:
    """The build is strict: every link, and every name of the API page, leads somewhere."""
    python = ROOT / ".venv-site" / "bin" / "python"
    if not python.exists():
        pytest.skip("mkdocs isn't there: make test and make site make .venv-site")
    command = [python, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = (tmp_path / "notebooks" / "quickstart.html").read_text()
    assert "<th>Training Reward</th>" in notebook and 'href="../downloads/quickstart.ipynb"' in notebook
    assert (tmp_path / "downloads" / "quickstart.ipynb").is_file()
    for page in ("losses", "guide/distillation"):
        html = (tmp_path / f"{page}.html").read_text()
        text = re.sub(r"<[^>]+>", "", re.sub(r"<(code|script)\b.*?</\1>", "", html, flags=re.DOTALL))
        assert html.count("<math") == sum(formulas(page)) and "$" not in text, page


def formulas(page: str) -> tuple[int, int]:
    """How many formulas a page has in its lines, and how many in lines of their own."""
    text = re.sub(r"`[^`]*`", "", (ROOT / "docs" / f"{page}.md").read_text())
    blocks = re.findall(r"\$\$.*?\$\$", text, re.DOTALL)
    return len(re.findall(r"\$[^$]+\$", re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL))), len(blocks)


def test_the_installation_page_names_every_extra() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert [name for name in parser["options.extras_require"] if f"`{name}`" not in page] == []


REFUSALS = [  # page, a passage's beginning, names in it
    ("guide/distillation.md", "- **Place**", (*WHOLE, "fsdp", *TENSOR, "sequence_parallel_size")),
]


@pytest.mark.parametrize(("page", "beginning", "names"), REFUSALS)
def test_lists_of_refusals_are_whole(page: str, beginning: str, names: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / page).read_text()
    passage = re.split(r"\n\n|\n- |\n\| ", text[text.index(beginning) :])[0]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}(?![\w+])", passage)] == []


@pytest.mark.parametrize(
    ("page", "beginning", "families"),
    [
        ("guide/several-gpus.md", "With `sharding: tensor` the policy has", CUT),
        ("models.md", "- **Refused at start**", sorted({*TRIED} - {*UNSPLIT})),
    ],
)
def test_lists_of_families_are_whole(page: str, beginning: str, families: Sequence[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    passage = re.split(r"\n\n|\n- ", text[text.index(beginning) :])[0]
    letters = re.sub(r"[^a-z0-9]", "", passage.lower())
    assert [name for name in families if name.replace("_", "") not in letters] == []


def test_every_trainer_s_source_has_its_date() -> None:
    header = next(
        line for line in (ROOT / "docs" / "design.md").read_text().splitlines() if line.startswith("| | Colograd | TRL")
    )
    trainers = [cell.strip().removesuffix(" 1.16") for cell in header.split("|")[2:-1]]
    table = (ROOT / "docs" / "design.md").read_text().partition("| Trainer | Rows | Source |")[2].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows if row[0]] == trainers
    assert [source for _, _, source in rows if not re.search(r"\b20\d\d-\d\d-\d\d\b", source)] == []


def test_readme_and_quickstart_runs_have_different_folders() -> None:
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md")]
    named = [name for text in texts for name in re.findall(r"(?:GRPOConfig\(\"|--output_dir )(runs/[\w-]+)", text)]
    assert len(named) == len(set(named)) >= 3, named


def test_names_beside_unsloth_s_are_ours(generate: ModuleType) -> None:
    """The middle column of its tables, and the arguments in Python."""
    text = (ROOT / "docs" / "unsloth.md").read_text()
    columns = [row.split(" | ")[1] for row in text.splitlines() if row.startswith("| `") and row.count(" | ") == 2]
    named = {name for column in columns for name in re.findall(r"`(\w+)`", column)} - {"model"}
    groups = (generate.GRPOConfig, generate.ModelConfig, generate.ScriptArguments)
    assert len(named) > 25 and named <= {name for group in groups for name in generate.own_names(group)} | {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    names: dict[str, Any] = {}
    exec(compile(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], "unsloth.md", "exec"), names)
    assert names["args"].prompts_per_step == 1 and names["adapter"].r == 32


def test_the_architecture_names_files_that_are_there() -> None:
    """The page names existing files, and the most frequent additions take at most two files."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.compile(r"`((?:\w+/)*\w+\.py)`")
    assert [
        name for name in named.findall(text) if not any((ROOT / of / name).exists() for of in ("colograd", "."))
    ] == []
    assert len(text.splitlines()) <= 200
    rows = text.partition("## Where do I add")[2].strip().splitlines()[4:14]
    assert [row.split(" | ")[0].strip("| ").removeprefix("a ").removeprefix("an ") for row in rows][:6] == [
        "loss", "reward", "rider", "engine", "sharding strategy", "extension",
    ]  # fmt: skip
    assert [row for row in rows if len(set(named.findall(row))) > 2] == []
