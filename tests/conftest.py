"""Fixtures: a tiny random chat model in an ordinary model folder, and a task on it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # for tests and their child processes

import launching
from families import pytest_addoption, pytest_runtest_makereport, pytest_sessionfinish, tried  # noqa: F401
from model_runner_v2 import pytest_collection_modifyitems  # noqa: F401
from needs import pytest_runtest_call, pytest_runtest_setup  # noqa: F401

from colograd.runtime import process

process.quiet_logs(verbose=False)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job, and so of all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Start the server that forks tests' programs while pytest-xdist's workers import and collect."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[launching.ADDRESS] = launching.start()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random float32 weights and a byte tokenizer."""
    import tiny

    return tiny.make_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 (biases, untied head) of two layers."""
    import tiny

    return tiny.make_model(tmp_path_factory.mktemp("models") / "tiny-qwen2", family="qwen2", tied=False)


@pytest.fixture
def closing():
    """Closes the trainers that it was given when the test ends: ``closing(GRPOTrainer(...))``."""
    trainers: list[Any] = []
    yield lambda trainer: trainers.append(trainer) or trainer
    for trainer in trainers:
        trainer.close()


@pytest.fixture(scope="session")
def vllm_imported() -> Iterator[None]:
    """Import all modules of the engines, and take their objects out of garbage collection.

    vLLM freezes all objects when an engine is built and unfreezes them when it ends. Each unfreeze lets the collector
    search the objects of 7,000 modules: half of the time of a trainer that takes a few steps.
    """
    import launcher

    launcher.preload()
    gc.collect()
    gc.freeze()
    theirs = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    yield
    gc.freeze, gc.unfreeze = theirs
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _for_engines(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("engine"):
        request.getfixturevalue("vllm_imported")


@pytest.fixture
def scorer_of() -> Iterator[Any]:
    """Makes a `Scorer` of reward functions, which is closed after the test."""
    from colograd.rewards import Scorer, resolve_rewards

    made: list[Any] = []

    def make(*functions: Any, **settings: Any) -> Any:
        made.append(Scorer(resolve_rewards(list(functions), None), **settings))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()
