"""The last outputs of aborted requests, with all tokens that they have written.

vLLM makes such an output for each aborted request of its server's streaming clients. `LLMEngine` has no such clients.
So a list takes the place of their streams while requests are aborted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any


class _Outputs(list[Any]):
    """A list in the role of vLLM's RequestOutputCollector."""

    def put(self, output: Any) -> None:
        self.append(output)


@contextlib.contextmanager
def last_outputs(core: Any, requests: Collection[str]) -> Iterator[dict[str, Any]]:
    """Collect the last output of each request of ``core`` (vLLM's LLMEngine) that is aborted in the body.

    The yielded mapping, from request to output, is filled when the body ends.

    Raises:
        RuntimeError: this vLLM makes no last output of aborted requests.
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
