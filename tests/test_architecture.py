"""The house rules of the package, read from its source: who imports whom, names, sizes."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "colograd"
FILES = sorted(PACKAGE.rglob("*.py"))
# What __init__.py imports on first use, as docs/architecture.md says.
LAZY = {("__init__.py", "config/__init__.py"), ("__init__.py", "trainer.py")}
MAX_FILE, MAX_FUNCTION = 500, 60  # lines

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def rooms() -> list[str]:
    """The modules in the order that docs/architecture.md gives them."""
    block = re.search(r"```rooms\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.split()[0] for line in block.group(1).splitlines()]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether only for types) of every import at any level: `colograd/x.py`'s as `x.py`, others by name."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield module_file(name), id(node) in for_types


def module_file(name: str) -> str:
    """`colograd.data.order.StepOrder` -> `data/order.py`; a name of another package stays as it is."""
    head, *rest = name.split(".")
    if head != PACKAGE.name:
        return name
    for length in range(len(rest), -1, -1):
        inner = "/".join(rest[:length])
        if length and (PACKAGE / f"{inner}.py").is_file():
            return f"{inner}.py"
        if (PACKAGE / inner / "__init__.py").is_file():
            return f"{inner}/__init__.py".lstrip("/")
    raise AssertionError(name)


@each_file
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    order = rooms()
    own = path.relative_to(PACKAGE).as_posix()
    for imported, only_types in imports(path):
        if imported not in order or (own, imported) in LAZY:
            continue
        same_folder = "/" in own and own.split("/")[0] == imported.split("/")[0]
        if only_types and same_folder:
            continue
        assert order.index(imported) < order.index(own), f"{own} imports {imported}"


def test_the_reading_of_imports_sees_them_all(tmp_path: Path) -> None:
    """The other tests are worth what this one is: every form of import is found and resolved."""
    found = set(imports(PACKAGE / "trainer.py"))
    assert {("evaluation.py", False), ("weights/__init__.py", False), ("logprobs.py", False)} <= found
    assert ("engine.py", False) in set(imports(PACKAGE / "weights" / "copied.py"))
    assert ("config/grpo.py", True) in set(imports(PACKAGE / "config" / "check.py"))
    assert ("train.py", False) in set(imports(PACKAGE / "cli.py")), "inside a function"


@each_file
def test_only_the_engine_and_what_builds_it_import_vllm(path: Path) -> None:
    uses = [name for name, _ in imports(path) if name.split(".")[0] == "vllm"]
    assert not uses or path.name in ("engine.py", "sampling.py", "slots.py", "cpu_kernels.py"), uses


def test_batch_imports_torch_only() -> None:
    allowed = sys.stdlib_module_names | {"torch"}
    assert {name.split(".")[0] for name, _ in imports(PACKAGE / "batch.py")} <= allowed


def test_no_module_is_named_like_a_package() -> None:
    """`accelerate launch colograd/train.py` puts colograd/ first on the path, where it would take the other's place."""
    others = {
        name for name, owners in importlib.metadata.packages_distributions().items() if set(owners) != {"colograd"}
    }
    taken = others | sys.stdlib_module_names
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert not (names - {"__init__"}) & taken


@each_file
def test_a_file_has_at_most_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE


@each_file
def test_a_function_has_at_most_60_lines_or_a_reason(path: Path) -> None:
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            beside = "\n".join(lines[max(node.lineno - 2, 0) : node.body[0].lineno])
            assert length <= MAX_FUNCTION or "# long because" in beside, f"{node.name} has {length} lines"


@each_file
def test_nothing_is_left_to_do(path: Path) -> None:
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
