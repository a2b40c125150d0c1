"""The end of an engine: of one that is closed, of one that fails while it is built, and of one that nobody closed.

vLLM has its groups of ranks once per process, and whatever shuts a core down takes them along, and torch's process
group too. Here vLLM's own finaliser has no part, its groups go with the last engine, and the process group stays.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..runtime import process
from .building import replaced

_alive: set[Any] = set()  # vLLM's cores that weren't shut down, and a token for each that is being built
_set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it


@contextlib.contextmanager
def closed_if_it_fails() -> Iterator[None]:
    """While a `vllm.LLM` is built: if that fails, what there was of it is gone when the error arrives."""
    if _alive:
        _free_memory()  # an engine that was dropped without being closed makes room
    token, handled = object(), sys.exc_info()[1]
    _alive.add(token)
    try:
        yield
    except BaseException as error:
        for core in _ownerless_cores():
            _stop(core)
        process.forget_frames(error, but=handled)
        _free_memory()
        raise
    finally:
        _alive.discard(token)
        _leave_groups_with_the_last()


def closes_with(owner: object, llm: Any) -> weakref.finalize:
    """What closes a `vllm.LLM`: when it is called, when ``owner`` is collected, or at the end of the process."""
    client = llm.llm_engine.engine_core
    if (theirs := getattr(client, "_finalizer", None)) is not None:  # not in every version
        theirs.detach()
    _alive.add(client.engine_core)
    return weakref.finalize(owner, _shut_down, client.engine_core)


def _shut_down(core: Any) -> None:
    _alive.discard(core)
    _stop(core)
    _leave_groups_with_the_last()
    torch.set_num_threads = _set_num_threads
    _free_memory()


def _stop(core: Any) -> None:
    """Let vLLM shut a core down, and nothing that others may need."""
    from vllm.distributed import parallel_state

    with contextlib.ExitStack() as spared:
        for name in ("destroy_distributed_environment", "destroy_model_parallel"):
            spared.enter_context(replaced(parallel_state, name, lambda: None))
        spared.enter_context(replaced(gc, "collect", lambda *_: 0))  # done once, when it is down: half a second each
        with contextlib.suppress(Exception):  # names differ between versions; letting go of it frees the memory
            core.shutdown()


def _ownerless_cores() -> list[Any]:
    """Those of engines whose building failed after the core was there."""
    from vllm.v1.engine.core_client import InprocClient

    clients = [found for found in gc.get_objects() if type(found) is InprocClient and hasattr(found, "engine_core")]
    cores = [client.engine_core for client in clients if client.engine_core not in _alive]
    for client in clients:
        if (theirs := getattr(client, "_finalizer", None)) is not None:
            theirs.detach()
    return cores


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
    gc.unfreeze()  # vLLM freezes what exists when it is built
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
