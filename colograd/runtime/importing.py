"""Imports: objects by import path (`package.module:name`, or with a dot as in TRL), modules by former paths, and
packages that are loaded when they are first used.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def is_import_path(spec: str) -> bool:
    """Return whether ``spec`` is an import path, and not a plain name."""
    return all(_split(spec))


def find_object(spec: str, what: str, candidate: Callable[[Any], bool]) -> Any:
    """Import the object at ``spec``; modules in the current directory are found.

    Args:
        what: the object's name in errors, such as ``reward function``.
        candidate: whether an object of the module may be proposed in place of a missing one.

    Raises:
        ValueError: the module can't be imported, or has no such attribute.
    """
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


def import_when_used(name: str) -> None:
    """Delay ``import name``: the first use of an attribute or a submodule loads the package.

    Does nothing if the package is imported already or not installed. (Before Python 3.12 `importlib.util.LazyLoader`
    fails for packages that import their own modules.)
    """
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Waiting
    sys.modules[name] = module
    if not any(isinstance(finder, _Below) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Below())


class _Waiting(ModuleType):
    """A package that isn't loaded yet."""

    _lock = threading.RLock()

    def __getattr__(self, attribute: str) -> Any:
        _run(self)
        return getattr(self, attribute)


def _run(package: ModuleType) -> None:
    """Load a waiting package, once."""
    with _Waiting._lock:
        if type(package) is not _Waiting:
            return
        package.__class__ = ModuleType  # type: ignore[assignment]
        spec = package.__spec__
        assert spec is not None and spec.loader is not None
        try:
            spec.loader.exec_module(package)
        except BaseException:
            sys.modules.pop(package.__name__, None)  # as after a failed import
            raise


class _Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The import of a submodule of a waiting package, which loads the package first. The package may import that
    submodule itself; then it must not run a second time, because its classes would be others."""

    def __init__(self) -> None:
        self._own: dict[str, importlib.machinery.ModuleSpec | None] = {}  # specs of imported submodules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package = sys.modules.get(name.partition(".")[0])
        if name in sys.modules or type(package) is not _Waiting:
            return None
        _run(package)
        if (module := sys.modules.get(name)) is None:
            return None
        # Python uses the spec of the loaded module, so it must be this one.
        self._own[name] = module.__spec__
        module.__spec__ = importlib.machinery.ModuleSpec(name, self)
        return module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own.pop(module.__name__)


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of modules by former paths, which published recipes, cards and notebooks name.

    Either path gives the same module object.

    Args:
        moved: former path -> present path.
    """

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in self._moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._moved[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which Python has just replaced by the spec of its former path. Nothing has to
        run."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
