"""Lockstep of an engine's ranks: the first rank calls vLLM, and the other ranks repeat its calls.

Each rank has a vLLM with its own scheduler, and all schedulers must get the same calls between steps. A round's calls
depend on clocks, rewards, tools and the user's code. So these run on the first rank only, which sends each call of vLLM
(requests, aborts, steps) to the other ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..parallel import faults
from ..parallel.lockstep import Lockstep
from .building import replaced

TOLD = ("add_request", "abort_request")  # methods of LLMEngine; their calls are sent to other ranks before a step


@contextlib.contextmanager
def leading(core: Any, group: Lockstep) -> Iterator[None]:
    """Repeat requests, aborts and steps of ``core`` (vLLM's LLMEngine) on the other ranks. Runs on the first rank."""
    calls: list[bytes] = []  # pickled calls since the last step

    def told(name: str) -> Callable[..., Any]:
        own = getattr(core, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            as_given = pickle.dumps((name, args, kwargs))  # pickled first, since vLLM may modify its arguments
            result = own(*args, **kwargs)  # a call that fails here isn't sent
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
    """Repeat the first rank's calls until the body of its `leading` ends. Runs on the other ranks."""
    goes_on = True
    while goes_on:
        calls, goes_on = group.listen()
        with faults.telling("a step of the engine"):
            for name, args, kwargs in map(pickle.loads, calls):
                getattr(core, name)(*args, **kwargs)
            if goes_on:
                core.step()


class _Outputs(list[Any]):
    """A list in the role of vLLM's RequestOutputCollector."""

    put = list.append


@contextlib.contextmanager
def last_outputs(core: Any, requests: Collection[str]) -> Iterator[dict[str, Any]]:
    """Collect the last output of each request of ``core`` (vLLM's LLMEngine) that is aborted in the body.

    The outputs have all tokens that the requests have written. vLLM makes such outputs only for streaming clients of
    its server. So a list takes the place of a client's stream while requests are aborted.

    The yielded mapping, from request to output, is filled when the body ends.
    """
    found, outputs, wanted = dict[str, Any](), _Outputs(), set(requests)
    for state in core.output_processor.request_states.values():
        if state.external_req_id in wanted:
            state.queue = outputs
    yield found
    found |= {output.request_id: output for output in outputs}
    if lacking := wanted - found.keys():
        raise RuntimeError(
            f"vLLM told nothing of {len(lacking)} of {len(wanted)} requests that were stopped: carry_over can't be had "
            "with this version, leave it out."
        )
