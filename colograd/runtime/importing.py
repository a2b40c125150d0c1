"""Imports: objects by import path (`package.module:name`, or with a dot as in TRL), and modules by former paths."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def is_import_path(spec: str) -> bool:
    return all(_split(spec))


def find_object(spec: str, what: str, candidate: Callable[[Any], bool]) -> Any:
    """Import the object at ``spec``; modules in the current directory are found. The ValueError if that fails calls it
    ``what``, and proposes a similar name of the module for which ``candidate`` returns True."""
    module_name, attribute = _split(spec)
    # Scripts that are installed (`colograd`, `torchrun`) don't have the current directory on the path, `python -m` has.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # the file may be younger than the directory listing that Python keeps
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does while it is imported
        raise ValueError(
            f"{what} {spec!r}: module {module_name!r} can't be imported ({type(error).__name__}: {error}). It is "
            f"looked for in the current directory ({os.getcwd()}) and among the installed packages."
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        names = [name for name, value in vars(module).items() if candidate(value)]
        near = difflib.get_close_matches(attribute, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{what} {spec!r}: module {module_name!r} ({getattr(module, '__file__', 'no file')}) has no attribute "
            f"{attribute!r}.{hint}"
        ) from None


def _split(spec: str) -> tuple[str, str]:
    """Split a path into module and attribute; one is empty if there is no path."""
    module, colon, attribute = spec.partition(":")
    if not colon:
        module, _, attribute = spec.rpartition(".")
    return module, attribute


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of modules by former paths, which published recipes, cards and notebooks name. Either path gives the same
    module object. ``moved`` has the present path by the former one."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in self._moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._moved[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which Python has just replaced by that of its former path. Nothing has to run."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
