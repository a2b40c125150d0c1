"""Find what extensions offer. This is the only module of the core that imports `colograd.extensions`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from .. import extensions


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the names of the extensions whose folder is there, in the order of their list."""
    return tuple(name for name in extensions.EXTENSIONS if importlib.util.find_spec(_module(name)) is not None)


@functools.cache
def hooks(seam: str) -> tuple[Any, ...]:
    """Import and return what the extensions offer at a seam of the core, in the order of their list."""
    return tuple(offer for name in installed() for offer in hooks_of(name, seam))


@functools.cache
def hooks_of(extension: str, seam: str) -> tuple[Any, ...]:
    """Import and return what one extension offers at a seam; () if it is missing or offers nothing there."""
    if extension not in installed():
        return ()
    paths = importlib.import_module(_module(extension)).HOOKS.get(seam, ())
    return tuple(_offer(extension, path) for path in ((paths,) if isinstance(paths, str) else paths))


def require(extension: str, setting: str) -> None:
    """Check that an extension is installed.

    Args:
        setting: the setting and its value that need it, as in `router_replay: true`.

    Raises:
        ValueError: its folder is missing.
    """
    if extension not in installed():
        raise ValueError(
            f"{setting} needs the extension `{extension}`, but colograd/extensions/{extension} is missing: restore "
            "that folder, or remove the setting."
        )


def _module(extension: str) -> str:
    return f"{extensions.__name__}.{extension}"


def _offer(extension: str, path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{_module(extension)}.{module}"), name)
