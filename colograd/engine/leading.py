"""An engine of several ranks: what its first rank tells vLLM, the others tell theirs.

Each rank has a vLLM with a scheduler of its own, and between steps all must have been told the same. What a round tells
them depends on clocks, rewards, tools and the user's code. So all of that runs on the first rank alone, which passes on
what reaches vLLM: requests, aborts and steps.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from ..parallel import faults
from ..parallel.lockstep import Lockstep
from .building import replaced

TOLD = ("add_request", "abort_request")  # methods of vLLM's LLMEngine that are told on before the next step


@contextlib.contextmanager
def leading(core: Any, group: Lockstep) -> Iterator[None]:
    """On the first rank: whoever calls ``core`` (vLLM's LLMEngine) in the body, it is called on the other ranks too."""
    calls: list[bytes] = []  # since the last step

    def told(name: str) -> Callable[..., Any]:
        own = getattr(core, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            as_given = pickle.dumps((name, args, kwargs))  # vLLM may write into what it is given
            result = own(*args, **kwargs)  # what vLLM refuses here isn't told
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
    """On the other ranks: do what the first one tells, until its body is over."""
    goes_on = True
    while goes_on:
        calls, goes_on = group.listen()
        with faults.telling("a step of the engine"):
            for name, args, kwargs in map(pickle.loads, calls):
                getattr(core, name)(*args, **kwargs)
            if goes_on:
                core.step()
