"""Tests of the core that cover an extension too. They are skipped in a copy without that extension's folder or file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from colograd.runtime import registry

MISSING = re.compile(r"needs the extension `(\w+)`|No module named 'colograd\.extensions\.(\w+)")


def has(*extensions: str) -> bool:
    return {*extensions} <= {*registry.installed()}


def needs(*extensions: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(*extensions), reason=f"needs the extensions {', '.join(extensions)}")


def case(value: object, *extensions: str) -> object:
    """Return a value of `pytest.mark.parametrize` that needs some extensions."""
    return pytest.param(value, marks=needs(*extensions))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Skip a test that ends with the error for a missing extension. It asked for that extension by a setting."""
    try:
        return (yield)
    except Exception as error:
        names = {name for pair in MISSING.findall(str(error)) for name in pair if name}
        if names and not has(*names):
            pytest.skip(f"needs the extension {', '.join(sorted(names - {*registry.installed()}))}")
        raise


pytest_runtest_setup = pytest_runtest_call
