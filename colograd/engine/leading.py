"""Lockstep of the ranks of one engine (tensor parallelism): the other ranks repeat the first rank's calls of vLLM.

Each rank has a vLLM with a scheduler, and all schedulers must get the same calls between steps. The calls of a
generation depend on clocks, rewards, tools and the user's code. So this code runs on the first rank only. The first
rank sends each call of vLLM (add request, abort request, step) to the other ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..parallel import faults
from ..parallel.shards import Lockstep
from .building import replaced

TOLD = ("add_request", "abort_request")  # methods of LLMEngine that the other ranks repeat before a step


@contextlib.contextmanager
def leading(core: Any, group: Lockstep) -> Iterator[None]:
    """Send the first rank's requests, aborts and steps of ``core`` (vLLM's LLMEngine) to the engine's other ranks."""
    calls: list[bytes] = []  # pickled calls of vLLM since the last step

    def told(name: str) -> Callable[..., Any]:
        own = getattr(core, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            as_given = pickle.dumps((name, args, kwargs))  # Pickled first, because vLLM may modify arguments.
            result = own(*args, **kwargs)  # A call that fails on this rank isn't sent to the other ranks.
            calls.append(as_given)
            return result

        return call

    own_step = core.step

    def step() -> Any:
        group.tell((calls, True))
        calls.clear()
        with faults.telling("a step of the engine"):
            return own_step()

    with contextlib.ExitStack() as stack:
        for name in TOLD:
            stack.enter_context(replaced(core, name, told(name)))
        stack.enter_context(replaced(core, "step", step))
        try:
            yield
        finally:
            group.tell((calls, False))


def follow(core: Any, group: Lockstep) -> None:
    """Repeat the first rank's calls of vLLM on another rank, until the first rank leaves its `leading` context."""
    goes_on = True
    while goes_on:
        calls, goes_on = group.listen()
        with faults.telling("a step of the engine"):
            for name, args, kwargs in map(pickle.loads, calls):
                getattr(core, name)(*args, **kwargs)
            if goes_on:
                core.step()


class _Outputs(list[Any]):
    """A list with the method `put` of vLLM's RequestOutputCollector."""

    put = list.append


@contextlib.contextmanager
def last_outputs(core: Any, requests: Collection[str]) -> Iterator[dict[str, Any]]:
    """Collect the last output of each request of ``core`` (vLLM's LLMEngine) that is aborted in the context.

    An output has all tokens that the request has sampled. vLLM makes outputs of aborted requests only for streaming
    clients of its server. So each request gets a list in place of a client's stream.

    The context's value is a mapping from request name to output. The mapping is filled when the context ends.
    """
    found, outputs, wanted = dict[str, Any](), _Outputs(), set(requests)
    for state in core.output_processor.request_states.values():
        if state.external_req_id in wanted:
            state.queue = outputs
    yield found
    found |= {output.request_id: output for output in outputs}
    if lacking := wanted - found.keys():
        raise RuntimeError(
            f"vLLM returned no output for {len(lacking)} of {len(wanted)} requests that were stopped: `carry_over` "
            "doesn't work with this version of vLLM. Remove the setting."
        )
