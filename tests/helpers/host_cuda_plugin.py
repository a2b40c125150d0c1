"""For pytest: any test on the device of `host_cuda`, those marked `gpu` too. A test that raced fails.

PYTHONPATH=tests/helpers:. python -m pytest -p host_cuda_plugin -m gpu tests/policy
"""

from __future__ import annotations

from collections.abc import Iterator

import host_cuda

record = host_cuda.install(total=16 * host_cuda.GIB)

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _engines_on_the_device() -> None:
    import host_cuda_cases
    import host_cuda_engine

    host_cuda_engine.prepare()
    host_cuda_cases.shorten()


@pytest.fixture(autouse=True)
def _without_races() -> Iterator[None]:
    record.clear()
    yield
    assert not record.races, record.races
