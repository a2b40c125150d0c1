"""Shutdown of an engine that is closed, that fails while it is built, or that was dropped without being closed.

All engines of a process share vLLM's process groups, but vLLM's shutdown of any engine destroys these groups, and
torch's group. So vLLM's finaliser, which shuts down a dropped engine, is detached. Here vLLM's groups are destroyed
with the last engine, and torch's group stays.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..runtime import failures
from .building import replaced

_alive: set[Any] = set()  # vLLM's running engine cores, and a token for each engine that is being built.
_set_num_threads = torch.set_num_threads  # Torch's own function, because vLLM's CPU worker replaces it.


@contextlib.contextmanager
def closed_if_it_fails() -> Iterator[None]:
    """Free the memory of the `vllm.LLM` that is built in this context, if the context fails."""
    if _alive:
        _free_memory()  # frees engines that were dropped without being closed
    token, handled = object(), sys.exc_info()[1]
    _alive.add(token)
    try:
        yield
    except BaseException as error:
        from vllm.v1.engine.core_client import InprocClient

        clients = [each for each in gc.get_objects() if type(each) is InprocClient and hasattr(each, "engine_core")]
        for core in map(_detached_core, clients):
            if core not in _alive:  # this engine core belongs to the failed `vllm.LLM`
                _shut_down(core)
        failures.forget_frames(error, but=handled)
        _free_memory()
        raise
    finally:
        _alive.discard(token)
        _leave_groups_with_the_last()


def closes_with(owner: object, llm: Any) -> weakref.finalize:
    core = _detached_core(llm.llm_engine.engine_core)
    _alive.add(core)
    return weakref.finalize(owner, _shut_down, core)


def _detached_core(client: Any) -> Any:
    if (theirs := getattr(client, "_finalizer", None)) is not None:  # some versions of vLLM have no finaliser
        theirs.detach()
    return client.engine_core


def _shut_down(core: Any) -> None:
    from vllm.distributed import parallel_state

    _alive.discard(core)
    with (
        replaced(parallel_state, "destroy_distributed_environment", lambda: None),
        replaced(parallel_state, "destroy_model_parallel", lambda: None),
        replaced(gc, "collect", lambda *_: 0),  # `_free_memory` collects garbage. vLLM's collection takes 0.5 s.
        contextlib.suppress(Exception),  # If the shutdown fails, dropping the core frees its memory.
    ):
        core.shutdown()
    _leave_groups_with_the_last()
    torch.set_num_threads = _set_num_threads
    _free_memory()


def _leave_groups_with_the_last() -> None:
    from vllm.distributed import parallel_state

    if _alive:
        return
    with contextlib.suppress(Exception):
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None


def _free_memory() -> None:
    gc.unfreeze()  # undoes vLLM's `gc.freeze`, because frozen objects aren't collected
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
