"""Speculative decoding that samples the same tokens as decoding without drafts.

vLLM draws additional random numbers to decide whether it accepts a draft (arXiv 2211.17192). So a completion would
depend on the drafts, and through the drafts on other sequences of the batch. Here each position's token is sampled
with the random numbers of its request, as without drafts. A draft is accepted if it equals the sampled token, so the
tokens have the target model's distribution.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from ....config import GRPOConfig
from ....engine.protocol import EngineFeature, EngineUse


class SeededSpeculation(RejectionSampler):
    """vLLM's `RejectionSampler` (Model Runner V1), but each position is sampled with its request's random numbers."""

    drafted = accepted = 0  # Numbers of drafted tokens, and of accepted ones, since the last `take_counts`.

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Check drafts and sample. ``logits`` (T, V) has one row per drafted token, and one more per request."""
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        last, drafted = metadata.bonus_logits_indices, metadata.target_logits_indices
        constrained = torch.empty_like(logits, dtype=torch.float32)
        constrained[last] = self.sampler.apply_logits_processors(logits[last].float(), sampling_metadata, True)
        constrained[drafted] = self.apply_logits_processors(logits[drafted].float(), sampling_metadata, metadata)
        if not sampling_metadata.all_greedy:
            counts = torch.tensor(metadata.num_draft_tokens, device=logits.device) + 1
            # Instead of vLLM's kernel for repeating values, which was seen to leave wrong temperatures on a CPU.
            temperature, top_k, top_p = (
                None if value is None else value.repeat_interleave(counts)
                for value in (sampling_metadata.temperature, sampling_metadata.top_k, sampling_metadata.top_p)
            )
            constrained = self.sampler.apply_temperature(constrained, temperature, sampling_metadata.all_random)
            constrained = apply_top_k_top_p(constrained, top_k, top_p)
        tokens = self._sample(metadata, constrained, sampling_metadata)
        sampled = tokens.to(logits.device)
        if (count := sampling_metadata.max_num_logprobs) is None:
            return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)
        # Positions behind a rejected draft get an arbitrary row, because vLLM drops their log-probabilities.
        first = torch.tensor(_first_rows(metadata.num_draft_tokens))
        rows = (first[:, None] + torch.arange(tokens.shape[1])).clamp(max=len(logits) - 1).flatten().to(logits.device)
        logprobs = (constrained if self.is_processed_logprobs_mode else logits)[rows].float()
        if not self.is_logits_logprobs_mode:
            logprobs = self.sampler.compute_logprobs(logprobs)
        of_sampled = self.sampler.gather_logprobs(logprobs, count, sampled.flatten().long().clamp(min=0))[:3]
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=LogprobsTensors(*of_sampled))

    def _sample(self, metadata: Any, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        """Return tokens (requests, max drafts + 1) on the CPU, with placeholders behind a request's last token.

        Positions are sampled in order, because positions behind a rejected draft must not draw random numbers."""
        counts = metadata.num_draft_tokens
        drafts = [part.tolist() for part in metadata.draft_token_ids.split(counts)]
        first = _first_rows(counts)
        tokens = torch.full((len(counts), metadata.max_spec_len + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        greedy: Any = None if sampling_metadata.all_random else logits.argmax(dim=-1).tolist()
        alive, place = [*range(len(counts))], 0
        while alive:
            rows = [first[request] + place for request in alive]
            if sampling_metadata.all_greedy:
                sampled = [greedy[row] for row in rows]
            else:
                own = sampling_metadata.generators  # index of the request -> its random number generator
                generators = {row: own[request] for row, request in enumerate(alive) if request in own}
                sampled = self.sampler.topk_topp_sampler(logits[rows], generators, None, None)[0].tolist()
                if greedy is not None:
                    cold = (sampling_metadata.temperature[alive] == 0).tolist()
                    sampled = [greedy[r] if is_cold else s for r, is_cold, s in zip(rows, cold, sampled, strict=True)]
            tokens[alive, place] = torch.tensor(sampled, dtype=torch.int32)
            alive = [
                request
                for request, token in zip(alive, sampled, strict=True)
                if place < counts[request] and token == drafts[request][place]
            ]
            self.accepted += len(alive)
            place += 1
        self.drafted += sum(token >= 0 for draft in drafts for token in draft)  # vLLM pads some drafts with -1
        return tokens


def _first_rows(counts: list[int]) -> list[int]:
    return [drafts + request for request, drafts in enumerate(itertools.accumulate(counts[:-1], initial=0))]


class Drafts(EngineFeature):
    _sampler: SeededSpeculation | None = None

    def built(self, engine: Any) -> None:
        runner = engine.runner
        rejection_sampler = getattr(runner, "rejection_sampler", None)
        if rejection_sampler is None:
            return
        if not isinstance(rejection_sampler, RejectionSampler):
            raise ValueError(
                "vLLM checks drafts (speculative_config in vllm_engine_kwargs) by Model Runner V2, where tokens depend "
                "on the drafts: set the environment variable VLLM_USE_V2_MODEL_RUNNER=0, or remove speculative_config."
            )
        if runner.device.type == "cpu" and runner.model_config.is_hybrid:
            raise ValueError(
                "This model has layers with a recurrent state. vLLM restores the state after a rejected draft only "
                "with a kernel for GPUs: on a CPU remove speculative_config from vllm_engine_kwargs."
            )
        self._sampler = SeededSpeculation(runner.sampler, runner.speculative_config, runner.device)
        runner.rejection_sampler = self._sampler

    def take_counts(self) -> dict[str, float]:
        if (sampler := self._sampler) is None:
            return {}
        counts = {"drafts/tokens": float(sampler.drafted), "drafts/accepted": float(sampler.accepted)}
        sampler.drafted = sampler.accepted = 0
        return counts


def drafts_of(config: GRPOConfig, use: EngineUse) -> Drafts | None:
    return Drafts() if dict(config.vllm_engine_kwargs or {}).get("speculative_config") else None  # type: ignore[arg-type]
