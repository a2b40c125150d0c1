"""`SiblingDrafts`: vLLM drafts from other completions of the same prompt, where few sequences run.

Checking drafts makes a step wider. Where few sequences run, as at the end of a round, a step takes the time of reading
the weights, whatever its width; where many do, it would take longer for what it saves. So nothing is drafted there, and
steps are those of an engine without drafts.

Prompts and tokens are vLLM's own: of its requests, nothing has to be told. What has been sampled in this process is
remembered (`CompletionMemory`); a resumed run remembers anew. The rollout log would not do for that: it keeps a run's
last rounds, which rarely are a whole epoch.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from .draft_index import REACH, START, CompletionMemory, propose

DRAFT_TOKENS = 7  # at most, of one sequence in one step


class SiblingDrafts:
    """A proposer as vLLM's `custom_class` takes it: built with its configuration, asked after each step."""

    def __init__(self, vllm_config: Any) -> None:
        self._context = int(vllm_config.model_config.max_model_len)
        self.memory = CompletionMemory()
        self._running: dict[str, Any] = {}  # vLLM's requests by its names: CachedRequestState
        self._runner: Any = None
        self.most_sequences = 0

    def attach(self, runner: Any, most_sequences: int) -> None:
        """Draft for ``runner``'s requests where at most ``most_sequences`` of them run."""
        self._runner, self.most_sequences = runner, most_sequences
        # It fills all drafts with zeros as long as one sequence is near the context's end; `propose` ends drafts there.
        runner.effective_drafter_max_model_len = sys.maxsize

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Drafts of each row of the batch, behind what a step has just sampled; empty where there is none."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._runner is None:
            return drafts
        self.follow_requests()
        if len(sampled_token_ids) > self.most_sequences:
            self.memory.end_tail()
            return drafts
        for row, sampled in enumerate(sampled_token_ids):
            if sampled:  # else its prompt isn't read yet
                request = self._running[self._runner.input_batch.req_ids[row]]
                drafts[row] = self._draft(request, int(num_tokens_no_spec[row]))
        return drafts

    def _draft(self, request: Any, length: int) -> list[int]:
        written = request.output_token_ids
        left = min(request.sampling_params.max_tokens - len(written), self._context - length)
        most = min(DRAFT_TOKENS, left - 1)  # one more is sampled behind the drafts
        if most < 1:
            return []
        text = [START, *written] if len(written) < REACH else written[-REACH:]
        return propose(self.memory.of(request.prompt_token_ids), text, most)

    def follow_requests(self) -> None:
        """Remember completions that have ended since the last step, and take up new requests."""
        now = self._runner.requests
        for name in self._running.keys() - now.keys():
            ended = self._running.pop(name)
            if ended.prompt_token_ids is not None and ended.output_token_ids:
                self.memory.add(ended.prompt_token_ids, ended.output_token_ids)
        for name in now.keys() - self._running.keys():
            self._running[name] = now[name]


def sibling_drafts_config() -> dict[str, Any]:
    """vLLM's ``speculative_config`` for `SiblingDrafts`.

    Raises:
        RuntimeError: this vLLM takes no proposer of ours.
    """
    if importlib.util.find_spec("vllm.v1.spec_decode.custom_class_proposer") is None:
        from vllm import __version__ as found

        raise RuntimeError(
            f"drafts is 'siblings', but vLLM {found} takes no drafts from outside: install 0.32, or set drafts: none."
        )
    path = f"{__name__}.{SiblingDrafts.__name__}"
    return {"method": "custom_class", "model": path, "num_speculative_tokens": DRAFT_TOKENS}
