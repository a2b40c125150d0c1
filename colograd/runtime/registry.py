"""Find what extensions and applications offer. This is the only module of the core that imports either."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from .. import extensions

APPS = "apps"


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the names of the extensions whose folder is there, in the order of their list."""
    return tuple(name for name in extensions.EXTENSIONS if importlib.util.find_spec(_module(name)) is not None)


@functools.cache
def hooks(seam: str) -> tuple[Any, ...]:
    """Import and return what the extensions offer at a seam of the core, in the order of their list, then `apps`."""
    return tuple(offer for name in (*installed(), APPS) for offer in hooks_of(name, seam))


@functools.cache
def hooks_of(extension: str, seam: str) -> tuple[Any, ...]:
    """Import and return what one extension, or `apps`, offers at a seam; () if it is missing or has no such offer."""
    if extension not in installed() and (extension != APPS or importlib.util.find_spec(_module(APPS)) is None):
        return ()
    paths = importlib.import_module(_module(extension)).HOOKS.get(seam, ())
    return tuple(_offer(extension, path) for path in ((paths,) if isinstance(paths, str) else paths))


def require(extension: str, setting: str, instead: str = "remove the setting") -> None:
    """Check that an extension is installed.

    Args:
        setting: the setting and its value that need it, as in `router_replay: true`.
        instead: the other remedy, for what is no setting.

    Raises:
        ValueError: its folder is missing.
    """
    if extension not in installed():
        raise ValueError(
            f"{setting} needs the extension `{extension}`, but colograd/extensions/{extension} is missing: restore "
            f"that folder, or {instead}."
        )


def _module(extension: str) -> str:
    return f"{__package__.partition('.')[0]}.{APPS}" if extension == APPS else f"{extensions.__name__}.{extension}"


def _offer(extension: str, path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{_module(extension)}.{module}"), name)
