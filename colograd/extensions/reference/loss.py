"""The KL term of the loss (setting `beta`), which penalises a policy that diverges from the reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...config import GRPOConfig
from ...losses.objective import LossTerm
from ...losses.tokens import MOST_LOG_RATIO, Means, Tokens, summed


@dataclass(frozen=True, slots=True)
class KLTerm(LossTerm):
    """`beta` times an estimate of KL(policy, reference model) at each token."""

    beta: float
    unbiased: bool = True  # Whether the estimate is multiplied by the token's importance ratio, as in DeepSeek-V3.2.

    needs = ("ref_logprobs",)

    def of_tokens(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.beta * self.divergence(tokens)

    @torch.no_grad()
    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        return {"kl": summed(self.divergence(tokens), tokens.batch.loss_mask)}

    def divergence(self, tokens: Tokens) -> torch.Tensor:
        """Compute the differentiable estimator k3 (N,) of KL(pi, reference), http://joschu.net/blog/kl-approx.html.

        log(reference / pi) is clamped to at most 20, else k3 could overflow. A clamped token has no gradient. With
        `use_bias_correction_kl` k3 is multiplied by pi / pi_old."""
        difference = (tokens.batch.scores["ref_logprobs"] - tokens.logprobs).where(tokens.batch.loss_mask > 0, 0.0)
        bounded = difference.clamp(max=MOST_LOG_RATIO)
        kl = bounded.exp() - bounded - 1
        if not self.unbiased:
            return kl
        return kl * tokens.token_ratio.where(difference <= MOST_LOG_RATIO, tokens.token_ratio.detach())


def kl_term(config: GRPOConfig, policy: Any) -> LossTerm | None:
    return KLTerm(config.beta, config.use_bias_correction_kl) if config.beta != 0 else None
