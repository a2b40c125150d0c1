"""Isolation of the policy from vLLM's changes to transformers' classes.

vLLM's transformers backend decorates transformers' model classes in place for its compiler. The policy has the same
class in the same process, so it would run through vLLM's ``__call__``, and the next model couldn't be loaded. vLLM also
replaces some of transformers' registered configurations by its own, and the next policy would get these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

_Class = tuple[tuple[type, ...], dict[str, Any]]  # bases and attributes of a class


@contextlib.contextmanager
def classes_apart(model: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Restore transformers' classes and configurations after vLLM has built ``model()``, also if that fails.

    Modules of vLLM's model that have a changed class get a new class with the changes.
    """
    before = {kind: (kind.__bases__, dict(vars(kind))) for kind in _subclasses(PreTrainedModel)}
    try:
        with _registered_before():
            yield
        theirs = {kind: _own_class(kind, before[kind]) for kind in before if kind.__bases__ != before[kind][0]}
    except BaseException:
        for kind, (bases, _) in before.items():
            if kind.__bases__ != bases:
                _restore(kind, before[kind])
        raise
    for module in model().modules() if theirs else ():
        if type(module) in theirs:
            module.__class__ = theirs[type(module)]


@contextlib.contextmanager
def _registered_before() -> Iterator[None]:
    """Restore the registered configuration of each model type that transformers knows, when the context ends."""
    registered: dict[str, Any] = CONFIG_MAPPING._extra_content
    before = dict(registered)
    try:
        yield
    finally:
        for model_type in registered.keys() & CONFIG_MAPPING._mapping.keys():
            del registered[model_type]
        registered |= before


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for found in subclasses:
        yield found
        yield from _subclasses(found)


def _own_class(kind: type, before: _Class) -> type:
    """Restore ``kind``, and return a subclass with the attributes and bases that were added to it."""
    added = tuple(base for base in kind.__bases__ if base not in before[0])
    changed = _restore(kind, before)
    return type(kind.__name__, (kind, *added), changed | {"__module__": kind.__module__})


def _restore(kind: type, before: _Class) -> dict[str, Any]:
    """Restore ``kind``, and return the attributes that were new or changed."""
    bases, own = before
    changed = {name: value for name, value in vars(kind).items() if value is not own.get(name)}
    changed = {name: value for name, value in changed.items() if name not in ("__dict__", "__weakref__")}
    for name in changed:
        if name in own:
            setattr(kind, name, own[name])
        else:
            delattr(kind, name)
    kind.__bases__ = bases
    return changed
