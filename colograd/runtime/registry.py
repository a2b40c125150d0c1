"""Find extensions (optional features) and their functions and classes for a seam, a named place where the core calls
extensions. In the core only this module imports extensions."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from .. import extensions

APPS = "apps"


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the names of the extensions that have a folder or file, in the order of `extensions.EXTENSIONS`."""
    return tuple(name for name in extensions.EXTENSIONS if importlib.util.find_spec(f"{extensions.__name__}.{name}"))


@functools.cache
def hooks(seam: str) -> tuple[Any, ...]:
    """Return all extensions' offers (functions or classes) for a seam, a place where the core calls extensions."""
    return tuple(offer for name in installed() for offer in hooks_of(name, seam))


@functools.cache
def hooks_of(extension: str, seam: str) -> tuple[Any, ...]:
    """Import and return the offers of one extension (or of `apps`) for a seam; () if it has none or is missing."""
    package = f"{extensions.__name__}.{extension}" if extension != APPS else f"{__package__.partition('.')[0]}.{APPS}"
    if importlib.util.find_spec(package) is None:
        return ()
    paths = importlib.import_module(package).HOOKS.get(seam, ())
    offers = []
    for path in (paths,) if isinstance(paths, str) else paths:
        module, _, name = path.partition(":")
        offers.append(getattr(importlib.import_module(f"{package}.{module}" if module else package), name))
    return tuple(offers)


def names(seam: str) -> dict[str, str]:
    """Return the names in `HOOKS` keys "``seam``:name", each with the extension that has the key. Import no offer."""
    offered: dict[str, str] = {}
    for name in installed():
        keys = importlib.import_module(f"{extensions.__name__}.{name}").HOOKS
        offered |= {key.partition(":")[2]: name for key in keys if key.startswith(f"{seam}:")}
    return offered


def require(extension: str, setting: str, instead: str = "remove the setting") -> None:
    """Raise ValueError if an extension's folder is missing. ``setting`` is the text of the setting that needs the
    extension, such as `router_replay: true`. ``instead`` is the error's second remedy, after restoring the folder."""
    if extension not in installed():
        raise ValueError(
            f"{setting} needs the extension `{extension}`, but colograd/extensions/{extension} is missing: restore "
            f"that folder, or {instead}."
        )
