"""Rules of the package's structure, checked in the source: imports, circles, names, parameters."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import ROOT, TESTS

from colograd.runtime import registry

PACKAGE = ROOT / "colograd"
VLLM_OBJECTS = {"core", "engine_core", "llm", "llm_engine", "lora_manager", "model_executor", "vllm_config"}
FILES = sorted(PACKAGE.rglob("*.py"))
# Modules that __init__.py imports on first use (see docs/architecture.md), and the types that annotate riders.
LAZY = {("__init__.py", "config/__init__.py"), ("__init__.py", "trainer.py"), ("riders.py", "batch.py")}
MOST_PARAMETERS = 8
MANY_PARAMETERS = {("trainer.py", "GRPOTrainer.__init__")}  # TRL's signature
MANY_PARAMETERS |= {("policy/head_kernels.py", name) for name in ("_add_tile", "_turn_to_gradient")}  # Triton's


def floors() -> list[str]:
    """Folders and single modules in the order of docs/architecture.md."""
    block = re.search(r"```floors\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.split()[0].rstrip("/") for line in block.group(1).splitlines()]


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every import at any level, those for types too: `colograd/x/y.py`'s as `x/y.py`, others by name."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (module_file(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (module_file(f"{base}.{alias.name}") for alias in node.names)


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


def own_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def each_file(check: Callable[[Path], None]) -> Callable[[], None]:
    """Turn a check of one file into a test that runs it on the package and lists the files that break the rule."""

    def test() -> None:
        broken: dict[str, str] = {}
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                broken[own_name(path)] = str(error)
        assert not broken

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Map each module of the package to the modules of the package that it imports."""
    modules = {own_name(path): imports(path) for path in FILES}
    return {name: {other for other in found if other in modules and other != name} for name, found in modules.items()}


def owner(name: str) -> str:
    """Owner of a file: `extensions/images`, `apps`, or `core`."""
    room, _, rest = name.partition("/")
    if room == "extensions":
        return f"extensions/{rest.partition('/')[0].removesuffix('.py')}"
    return "apps" if room == "apps" else "core"


def optional_imports() -> set[tuple[str, str]]:
    """Return each import that a torn-down extension would break: file, and the extension or `apps`."""
    return {
        (name, owner(imported))
        for name, found in arrows().items()
        for imported in found
        if owner(imported) not in ("core", owner(name)) and imported != "extensions/__init__.py"
        if owner(name) != "apps"
    }


def test_core_and_extensions_import_no_extension() -> None:
    assert not optional_imports()


def test_every_seam_is_described_offered_and_asked() -> None:
    asked: dict[str, set[str]] = {"core": set(), "extensions": set()}
    offered: set[str] = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("hooks", "hooks_of", "names"):
                seam = node.args[-1]
                if isinstance(seam, ast.Constant):
                    asked["core" if owner(own_name(path)) == "core" else "extensions"].add(str(seam.value))
    for name in ("apps", *(f"extensions.{name}" for name in registry.installed())):
        offered |= {key.partition(":")[0] for key in importlib.import_module(f"colograd.{name}").HOOKS}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert offered == asked["core"] | asked["extensions"]
    assert not {seam for seam in asked["core"] if f"`{seam}`" not in page}


@each_file
def test_a_module_imports_only_from_its_own_floor_and_those_below(path: Path) -> None:
    order, own = floors(), own_name(path)
    for imported in arrows()[own]:
        if (own, imported) in LAZY or imported == "extensions/__init__.py":
            continue
        here, there = own.split("/")[0], imported.split("/")[0]
        assert order.index(there) <= order.index(here), f"{own} imports {imported}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: {other for other in found if (name, other) not in LAZY} for name, found in arrows().items()}
    while free := {name for name, found in graph.items() if not found}:
        graph = {name: found - free for name, found in graph.items() if name not in free}
    assert not graph, f"in circles, or above one: {sorted(graph)}"


def test_the_floors_are_what_there_is() -> None:
    there = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert set(floors()) == there


def test_the_reading_of_imports_sees_them_all() -> None:
    """Every form of import is read and resolved. The other tests depend on that."""
    assert {"training/learner.py", "sharding/__init__.py"} <= imports(PACKAGE / "trainer.py")
    assert "engine/protocol.py" in imports(PACKAGE / "weights" / "sync.py")
    assert "parallel/ranks.py" in imports(PACKAGE / "train.py"), "inside a function"
    assert "trainer.py" in imports(PACKAGE / "train.py") | imports(PACKAGE / "__init__.py"), "for types"


@each_file
def test_only_the_engine_imports_vllm(path: Path) -> None:
    uses = [name for name in imports(path) if name.split(".")[0] == "vllm"]
    assert not uses or path.parent.name == "engine", uses


@each_file
def test_only_the_engine_touches_vllms_objects(path: Path) -> None:
    """Other folders use the engine's protocol, and one place builds the engine."""
    if path.parent.name == "engine":
        return
    found = [
        ast.unparse(node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and (node.attr in VLLM_OBJECTS or (node.attr == "model" and ast.unparse(node.value).endswith("engine")))
    ]
    assert not found, "a method of `engine.protocol.Engine` returns tensors or numbers instead"
    assert "engine/vllm_engine.py" not in imports(path) or path == PACKAGE / "training" / "assembly.py"


def test_batch_imports_torch_only() -> None:
    allowed = sys.stdlib_module_names | {"torch", "riders", "batch"}
    for name in ("batch.py", "riders.py"):
        assert {name.split(".")[0] for name in imports(PACKAGE / name)} <= allowed


def test_no_module_is_named_like_a_package() -> None:
    """`accelerate launch colograd/train.py` puts colograd/ first on the path, where a module would hide the package."""
    others = {
        name for name, owners in importlib.metadata.packages_distributions().items() if set(owners) != {"colograd"}
    }
    taken = others | sys.stdlib_module_names
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert not (names - {"__init__"}) & taken


@pytest.mark.parametrize("folder", [path.parent for path in FILES if path.name == "__init__.py"], ids=lambda p: p.name)
def test_each_folder_says_what_it_is_for(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def test_the_tests_lie_where_the_packages_folders_are() -> None:
    """`tests/engine` tests `colograd/engine`; `tests/house` has the tests of the whole."""
    others = {"house", "helpers", "scripts", "benchmarks", "soak"}
    there = {path.name for path in TESTS.iterdir() if any(path.glob("*.py"))}
    assert there - others <= {path.name for path in PACKAGE.iterdir()}
    assert not list(TESTS.glob("test_*.py"))


def test_no_test_imports_another() -> None:
    """Pieces that several tests use lie in tests/helpers."""
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    for path in TESTS.rglob("*.py"):
        named = set(re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert not named & tests, path


@each_file
def test_nothing_is_left_to_do(path: Path) -> None:
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())


def test_one_room_knows_each_way_of_sharding() -> None:
    """No other room uses their classes. Only rooms in `told` may use the names."""
    from colograd.runtime import registry
    from colograd.sharding.zero import STRATEGIES

    offered = [registry.hooks(f"sharding:{name}")[0] for name in registry.names("sharding")]
    classes = {way.__name__ for way in (*STRATEGIES.values(), *offered)}
    told = {"config", "sharding", "memory", "apps", "weights", "policy", "extensions"}
    for path in FILES:
        room, source = own_name(path).split("/")[0], path.read_text()
        if room not in ("sharding", "extensions"):
            assert not classes & set(re.findall(r"\w+", source)), path
        if room not in told:
            named = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
            assert not {"gradients", "fsdp"} & named, path  # "optimizer" is a phase of a step too


@each_file
def test_a_configuration_is_written_to_by_its_own_room_alone(path: Path) -> None:
    """Other folders call a configuration's `resolve_*`. A trainer's configuration is frozen."""
    from colograd.config import GRPOConfig

    if own_name(path).startswith("config/"):
        return
    for node in ast.walk(tree(path)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in GRPOConfig.__dataclass_fields__:
                owner = ast.unparse(target.value).rpartition(".")[2]
                assert owner not in ("args", "config"), f"line {target.lineno}: {ast.unparse(target)}"


def functions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, int]]:
    """Each function's qualified name and its number of parameters, without `self`, `cls`, `*args` and `**kwargs`."""
    for inner in ast.iter_child_nodes(node):
        name = owner
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{owner}.{inner.name}".lstrip(".")
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            given = inner.args
            names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            yield name, len([each for each in names if each not in {"self", "cls"}])
        yield from functions(inner, name)


@each_file
def test_no_function_has_many_parameters(path: Path) -> None:
    own = own_name(path)
    many = {(own, name) for name, count in functions(tree(path)) if count > MOST_PARAMETERS}
    assert not many - MANY_PARAMETERS, f"more than {MOST_PARAMETERS}: pass a class"


def test_test_names_are_short_and_docstrings_plain() -> None:
    """A test's name has at most 12 words. No docstring, of the package either, starts with What, Of or Those."""
    for path in (*FILES, *sorted(TESTS.rglob("*.py"))):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                assert not re.match(r"(What|Of|Those)\b", ast.get_docstring(node) or ""), f"{path}: a docstring"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert node.name.count("_") <= 12, f"{path}: {node.name}"
