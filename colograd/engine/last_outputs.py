"""What aborted requests have written: vLLM makes a last output of each, for those who stream from its server.

`LLMEngine` has nobody to give them to. So while requests are aborted, a list stands in the place of their streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any


class _Outputs(list[Any]):
    """In the place of vLLM's RequestOutputCollector."""

    def put(self, output: Any) -> None:
        self.append(output)


@contextlib.contextmanager
def last_outputs(core: Any, requests: Collection[str]) -> Iterator[dict[str, Any]]:
    """While the context lasts, requests of ``core`` (vLLM's LLMEngine) may be aborted; afterwards the mapping has the
    last output of each.

    Raises:
        RuntimeError: this vLLM makes none.
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
