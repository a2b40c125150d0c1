"""Cases of the core's tests that cover an extension. They are skipped if its folder is missing."""

from __future__ import annotations

import pytest

from colograd.runtime import registry


def has(*extensions: str) -> bool:
    return {*extensions} <= {*registry.installed()}


def needs(*extensions: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(*extensions), reason=f"needs the extensions {', '.join(extensions)}")


def case(value: object, *extensions: str) -> object:
    """Return a value of `pytest.mark.parametrize` that needs some extensions."""
    return pytest.param(value, marks=needs(*extensions))
