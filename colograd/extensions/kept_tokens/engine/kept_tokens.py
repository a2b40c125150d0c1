"""Record of the tokens that top-k, top-p and min-p kept for each sampled token.

vLLM's Model Runner V2 returns the kept tokens (``return_sampling_mask``). Model Runner V1 doesn't, so this module reads
the kept tokens from V1's log-probabilities, and adds them to V1's output in V2's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....batch import ModelInput
from ....config import GRPOConfig
from ....engine.arguments import accepted, runs_v2
from ....engine.protocol import EngineFeature, EngineUse, Sampled
from ..rider import KeptTokens

TELLS_KEPT = "return_sampling_mask"  # An argument of vLLM's engine. Only Model Runner V2 obeys it.


class KeptTokensRecord(EngineFeature):
    """Engine feature that adds `KeptTokens` to each completion whose sampling was truncated."""

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        self._left: torch.Tensor | None = None  # Mask of the tokens that the sampler kept, (requests, V) bool.

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        truncates = "top_k truncates the sampler's distribution"
        self.on_v2 = runs_v2(self._config, truncates, "vllm_importance_sampling_correction: false")
        if not accepted(TELLS_KEPT):
            raise RuntimeError(
                f"{truncates}, but only vLLM 0.31 and later report the kept tokens: install vLLM 0.31, or set "
                "vllm_importance_sampling_correction: false."
            )
        return {TELLS_KEPT: True} if self.on_v2 else {}

    def built(self, engine: Any) -> None:
        self._vocabulary = engine.vocab_size
        if self.on_v2:
            # With `return_sampling_mask` here vLLM would refuse requests without a top_k, such as greedy evaluations.
            engine.core.input_processor.model_config.return_sampling_mask = False
            return
        engine.scheduler.return_sampling_mask = True
        runner = engine.runner
        self._sample, self._step = runner.sampler.sample, runner.sample_tokens
        runner.sampler.sample, runner.sample_tokens = self._watched_sample, self._watched_step

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        outputs = sorted(output.outputs, key=lambda completion: int(completion.index))
        for index, completion in enumerate(outputs):
            mask = getattr(completion, "sampling_mask", None)
            told = mask.token_ids[: len(completion.token_ids)] if mask is not None else ()
            lists = [[] if len(ids) >= self._vocabulary else ids for ids in told]  # []: all tokens were kept
            if any(lists):
                assert len(lists) == len(completion.token_ids), "vLLM tells of each token what it was drawn from"
                ids = torch.tensor([token for tokens in lists for token in tokens], dtype=torch.int32)
                kept = KeptTokens(ids, torch.tensor([len(tokens) for tokens in lists], dtype=torch.int32))
                sampled[index] = replace(sampled[index], riders=(*sampled[index].riders, kept))
        return sampled

    def _watched_sample(self, *args: Any, **kwargs: Any) -> Any:
        tokens, logprobs = self._sample(*args, **kwargs)
        self._left = None if logprobs is None else logprobs != -torch.inf
        return tokens, logprobs

    def _watched_step(self, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.outputs import SamplingMaskLists

        self._left = None
        output = self._step(*args, **kwargs)
        if self._left is not None:
            told = getattr(output, "_model_runner_output", output)  # Asynchronous scheduling wraps the output.
            self._left &= ~self._left.all(1, keepdim=True)  # The whole vocabulary is recorded as an empty list.
            rows, ids = self._left.nonzero(as_tuple=True)
            offsets = np.searchsorted(rows.numpy(), np.arange(len(self._left) + 1))
            told.sampling_masks = SamplingMaskLists(ids.int().numpy(), offsets)
        return output


def kept_tokens_record(config: GRPOConfig, use: EngineUse) -> KeptTokensRecord | None:
    return KeptTokensRecord(config) if config.replays_truncation else None
