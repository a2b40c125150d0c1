"""`SiblingDrafts`: vLLM drafts from other completions of the same prompt, where few sequences run.

Checking drafts makes a step wider. A step of few tokens takes the time of reading the weights, whatever their number;
with more, each takes its part of the time. So a draft is made where it is probable enough for the number of sequences
that run, and drafts fill steps up to a number of tokens. With more than half as many sequences, in the bulk of a round,
nothing is drafted.

Prompts and tokens are those of vLLM's requests. A request that goes on from an earlier one's tokens says how many of
what it reads are these (`SPENT`). What has been sampled in this process is remembered (`CompletionMemory`); a resumed
run remembers anew. The rollout log would not do for that: it keeps a run's last rounds, which rarely are a whole epoch.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from .draft_index import REACH, START, CompletionMemory, key_of, likeliest, propose

SPENT = "colograd_spent"  # in a request's `extra_args`
HOOK = "vllm.v1.spec_decode.custom_class_proposer"  # vLLM 0.31 has it
DRAFT_TOKENS = 7  # at most, of one sequence in one step
# Tokens that are computed in the time that a step takes whatever it computes: on a CPU measured with 135M parameters
# (47 ms, and 1 to 2 ms per token above 8), on a GPU its multiplications in the time of reading a weight, not measured.
FIXED_ON_CPU, FIXED_ON_GPU = 25, 150
# Tokens of a step up to which drafts fill it, by default: more would take the time of looking them up.
MOST_ON_CPU, MOST_ON_GPU = 32, 64


@dataclass(frozen=True, slots=True)
class _Request:
    state: Any  # vLLM's CachedRequestState
    key: bytes  # of its prompt
    before: list[int]  # what it reads behind the prompt: tokens of earlier requests

    @classmethod
    def of(cls, state: Any) -> _Request:
        ids = state.prompt_token_ids
        first = len(ids) - (state.sampling_params.extra_args or {}).get(SPENT, 0)
        return cls(state, key_of(ids[:first], [each.identifier for each in state.mm_features]), ids[first:])

    def completion(self) -> list[int]:
        """What was sampled, up to where it ended: a step may have sampled more behind a drafted end."""
        params, tokens = self.state.sampling_params, self.state.output_token_ids
        ends = {*(params.stop_token_ids or ())} if params.ignore_eos else params.all_stop_token_ids
        stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return [*self.before, *tokens[: min(stop + 1, params.max_tokens)]]


class SiblingDrafts:
    """A proposer as vLLM's `custom_class` takes it: built with its configuration, asked after each step."""

    def __init__(self, vllm_config: Any) -> None:
        self._context = int(vllm_config.model_config.max_model_len)
        self.memory = CompletionMemory()
        self._running: dict[str, _Request] = {}  # by vLLM's names
        self._runner: Any = None
        self.step_tokens = self.fixed = 0

    def attach(self, runner: Any, step_tokens: int | None) -> None:
        """Draft for ``runner``'s requests up to steps of ``step_tokens`` tokens; None: the default."""
        on_cpu = runner.device.type == "cpu"
        self._runner, self.step_tokens = runner, step_tokens or (MOST_ON_CPU if on_cpu else MOST_ON_GPU)
        self.fixed = FIXED_ON_CPU if on_cpu else FIXED_ON_GPU
        # It fills all drafts with zeros as long as one sequence is near the context's end; `propose` ends drafts there.
        runner.effective_drafter_max_model_len = sys.maxsize

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Drafts of each row of the batch, behind what a step has just sampled; empty where there is none."""
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._runner is None:
            return nothing
        self.follow_requests()
        room = self.step_tokens - len(nothing)
        if room < len(nothing):  # less than a draft of each would not be worth looking all of them up
            return nothing
        names = self._runner.input_batch.req_ids
        # With n sequences a step takes the time of n + fixed tokens. A right draft saves its sequence a step, which is
        # 1 / n of that, and costs one token.
        least = len(nothing) / (len(nothing) + self.fixed)
        drafts = [
            self._draft(self._running[names[row]], int(num_tokens_no_spec[row]), least) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)  # nothing is sampled while a prompt is read
        ]
        return likeliest(drafts, room)

    def _draft(self, request: _Request, length: int, least: float) -> list[tuple[int, float]]:
        written = request.state.output_token_ids
        left = min(request.state.sampling_params.max_tokens - len(written), self._context - length)
        most = min(DRAFT_TOKENS, left - 1)  # one more is sampled behind the drafts
        if most < 1:
            return []
        text = written[-REACH:] if len(written) >= REACH else [START, *request.before, *written][-REACH:]
        return propose(self.memory.of(request.key), text, most, least)

    def follow_requests(self) -> None:
        """Remember completions that have ended since the last step, and take up new requests."""
        now = self._runner.requests
        if now.keys() == self._running.keys():
            return
        for name in [name for name in self._running if name not in now]:
            ended = self._running.pop(name)
            if ended.state.output_token_ids:
                self.memory.add(ended.key, ended.completion(), len(ended.before))
        self._running |= {name: _Request.of(now[name]) for name in now.keys() - self._running.keys()}
        if not now:
            self.memory.end_tail()


def sibling_drafts_config() -> dict[str, Any]:
    """vLLM's ``speculative_config`` for `SiblingDrafts`.

    Raises:
        RuntimeError: this vLLM takes no proposer of ours.
    """
    if importlib.util.find_spec(HOOK) is None:
        from vllm import __version__ as found

        raise RuntimeError(
            f"drafts is 'siblings', but vLLM {found} takes no drafts from outside: install 0.31, or set drafts: none."
        )
    path = f"{__name__}.{SiblingDrafts.__name__}"
    return {"method": "custom_class", "model": path, "num_speculative_tokens": DRAFT_TOKENS}
