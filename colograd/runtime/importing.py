"""Import objects by path (`package.module:name`, or `package.module.name` as in TRL), and redirect renamed modules."""

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
    """Import the object at the import path ``spec``, also from the current directory. A failure is a ValueError that
    begins with ``what``. If ``candidate`` accepts a value of a similar name, the error suggests that name."""
    module_name, attribute = _split(spec)
    # Installed scripts (`colograd`, `torchrun`) lack the current directory in `sys.path`; `python -m` has it.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # Python's cached directory listing may be older than the user's file.
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # Importing a user's module may raise any exception.
        raise ValueError(
            f"{what} {spec!r}: module {module_name!r} can't be imported ({type(error).__name__}: {error}). Modules "
            f"are found in the current directory ({os.getcwd()}) and among the installed packages."
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
    module, colon, attribute = spec.partition(":")
    if not colon:
        module, _, attribute = spec.rpartition(".")
    return module, attribute


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for renamed modules. ``moved`` maps old module paths, used by published recipes, model cards and
    notebooks, to new paths. An old and a new path give the same module object."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = dict(moved)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        parent, _, child = name.rpartition(".")
        if name not in self._moved and parent in self._moved:
            self._moved[name] = f"{self._moved[parent]}.{child}"
        return importlib.machinery.ModuleSpec(name, self) if name in self._moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._moved[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's `__spec__`, because Python has just replaced it by a spec for the old path."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
