"""The places of the package that check the device: `on_cpu`, `.is_cuda`, `device.type`, `torch.cuda` and similar.

`of_package` finds the places in the source. `cuda_places.toml` lists them by the way that runs them. `reached` counts
the places that ran in this process and got a GPU's answer. It needs the environment `WATCHED`, and this module must be
imported before the package.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__)
WATCHED = {"COLOGRAD_CUDA_PLACES": "watched"}
PACKAGE = HERE.parents[2] / "colograd"
WAYS = ("device", "fake", "v2", "arguments", "gpu")
ANSWERS: dict[str, Callable[[Any], bool]] = {  # name in the source -> function: whether a value is a GPU's
    "is_cuda": bool,
    "on_gpu": bool,
    "on_cpu": lambda answer: not answer,
    "_on_cpu": lambda answer: not answer,
    "type": lambda answer: answer == "cuda",
    "cuda": lambda answer: True,
    "accelerator": lambda answer: True,
    "device": bool,  # of `device == "cuda"`
}
WORDS = ("is_cuda", "on_cpu", "on_gpu", "device.type", "torch.cuda", "torch.accelerator", 'device == "cuda"')


def of_package() -> Counter[str]:
    """Count the places by "FILE FUNCTION". FUNCTION is empty at the level of the module."""
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        finder = _Finder(path.relative_to(PACKAGE).as_posix())
        source = path.read_text(encoding="utf-8")
        if any(word in source for word in WORDS):  # most files need no parsing
            finder.visit(ast.parse(source))
        counts.update(function for function, _ in finder.places)
    return counts


def table() -> dict[str, Any]:
    return tomllib.loads(HERE.with_suffix(".toml").read_text(encoding="utf-8"))


def listed(way: str) -> Counter[str]:
    """Count the places that the table lists for a way, by "FILE FUNCTION"."""
    entries = table()[way].items()
    return Counter({place: entry["places"] if isinstance(entry, dict) else entry for place, entry in entries})


def _name(node: ast.AST) -> str:
    """Return the key of `ANSWERS` for a node that checks the device, or nothing."""
    match node:
        case ast.Attribute(value=ast.Name("torch"), attr="cuda" | "accelerator" as name):
            return name
        case ast.Attribute(attr="is_cuda" | "on_cpu" | "_on_cpu" | "on_gpu" as name, ctx=ast.Load()):
            return name
        case ast.Name("on_cpu" | "on_gpu" as name, ast.Load()):
            return name
        case ast.Attribute(value=ast.Name(id="device") | ast.Attribute(attr="device" | "_device"), attr="type"):
            return "type"
        case ast.Compare(left=ast.Name("device"), comparators=[ast.Constant("cuda")]):
            return "device"
    return ""


class _Finder(ast.NodeTransformer):
    """Finds a module's places, and replaces each by a call that reports its answer."""

    def __init__(self, file: str) -> None:
        self.places: list[tuple[str, str]] = []  # "FILE FUNCTION", key of `ANSWERS`
        self._file, self._scope = file, list[str]()

    def visit(self, node: ast.AST) -> Any:
        scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if scope:
            self._scope.append(node.name)  # type: ignore[attr-defined]
        types = {name: vars(node).pop(name) for name in ("annotation", "returns") if name in vars(node)}
        self.generic_visit(node)
        vars(node).update(types)
        if scope:
            self._scope.pop()
        if not (name := _name(node)):
            return node
        self.places.append((f"{self._file} {'.'.join(self._scope)}", name))
        number = ast.Constant(len(self.places) - 1)
        call = ast.Call(ast.Name("__answer__", ast.Load()), [number, node], [])  # type: ignore[list-item]
        return ast.fix_missing_locations(ast.copy_location(call, node))


_reached: set[tuple[str, int]] = set()


def reached() -> Counter[str]:
    """Count the places that got a GPU's answer so far, by "FILE FUNCTION"."""
    return Counter(function for function, _ in _reached)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        self._finder = _Finder(path.rpartition(f"{os.sep}colograd{os.sep}")[2])  # of a copy of the package too
        tree = self._finder.visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        def answer(number: int, value: Any) -> Any:
            function, name = self._finder.places[number]
            if ANSWERS[name](value):
                _reached.add((function, number))
            return value

        module.__answer__ = answer
        super().exec_module(module)


class _Importer(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("colograd."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            return spec
        return importlib.util.spec_from_file_location(
            name,
            spec.origin,
            loader=_Loader(name, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )


if WATCHED.items() <= os.environ.items():
    sys.meta_path.insert(0, _Importer())
