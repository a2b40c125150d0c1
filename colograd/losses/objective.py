"""The complete loss of a micro-batch: a `TokenLoss` with sampler correction, masks, entropy bonus and further terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import LossOutput, MicroBatch, StepBatch
from ..config import GRPOConfig
from ..policy.logprobs import ForwardStep
from ..runtime import registry
from .advantages import AdvantageEstimator
from .correction import DIFFERENCE, SamplerCorrection, known, log_ratio_of, sampling_metrics
from .token_losses import LOSSES, find_loss
from .tokens import (
    Extremes,
    Means,
    TokenLoss,
    Tokens,
    bounded_exp,
    completion_mean,
    per_sequence_sum,
    sequence_mean_weights,
    summed,
)

QUANTILE_LIMIT = 2**24  # torch.quantile fails for more elements.
BONUS_ENTROPY = "entropy/bonus"  # Metric, not logged: mean entropy of the tokens with the entropy bonus.


class LossTerm:
    """A term that an extension adds to the loss. A subclass overrides the methods that its term needs.

    `Objective.with_terms` calls each hook ``loss_term`` with (configuration, policy), and gets a term or None."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the row's values that a reference or teacher model must compute for this term."""
        return ()

    @property
    def every_group(self) -> bool:
        """Whether the term has a gradient in a group with equal rewards, so that such groups must be trained."""
        return False

    @property
    def waits(self) -> str:
        """The reason why no group may be trained before its whole step is sampled, or ""."""
        return ""

    def steps(self, second_models: Mapping[str, Any]) -> tuple[ForwardStep, ...]:
        """Return wrappers of the policy's forward that compute this term's ``values``."""
        return ()

    def with_scores(self, step: StepBatch, estimator: AdvantageEstimator) -> StepBatch:
        """Return the step with advantages changed by this term. ``step`` has the reference's and teachers' values."""
        return step

    def with_constants(self, step: StepBatch) -> StepBatch:
        """Add to each row the values of the whole step that this term needs. Return the step. A collective call."""
        return step

    def before(self, old: torch.Tensor, batch: MicroBatch) -> MicroBatch:
        """Change the micro-batch before its loss is computed. ``old``: log-probabilities (N,) of the old policy."""
        return batch

    def of_tokens(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return values (N,) to add to the tokens' losses, before the average. ``values`` come from `steps`."""
        return None

    def of_row(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return a () tensor to add to the micro-batch's loss."""
        return None

    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        """Return the term's metrics of a micro-batch as name -> (sum, count)."""
        return {}

    def in_loss(self, metrics: Mapping[str, float]) -> float:
        """Compute this term's share of a step's loss from the metrics. The metric `policy_loss` excludes the share."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """The complete loss: a `TokenLoss` with masks, corrections and further terms."""

    loss: TokenLoss
    level: str = "token"  # Level of the importance ratio: "token", or "sequence" (GSPO, arXiv 2507.18071).
    correction: SamplerCorrection | None = None
    off_policy_threshold: float | None = None  # Off-policy mask's threshold (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).
    top_entropy_quantile: float = 1.0  # Share of tokens, of highest entropy, to train (arXiv 2506.01939).
    entropy_bonus: bool = False
    terms: tuple[LossTerm, ...] = ()  # Terms that extensions add to the loss.

    @classmethod
    def from_config(cls, config: GRPOConfig) -> Objective:
        """Build the objective from the run's settings, without the terms of extensions."""
        bounds = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        correction = SamplerCorrection(config.vllm_importance_sampling_mode, *bounds)
        return cls(
            loss=find_loss(config.loss_type).from_config(config), level=config.importance_sampling_level,
            correction=correction if config.vllm_importance_sampling_correction else None,
            off_policy_threshold=config.off_policy_mask_threshold, top_entropy_quantile=config.top_entropy_quantile,
            entropy_bonus=config.entropy_coef != 0 or config.use_adaptive_entropy,
        )  # fmt: skip

    def with_terms(self, config: GRPOConfig, policy: Any) -> Objective:
        terms = (make(config, policy) for make in registry.hooks("loss_term"))
        return dataclasses.replace(self, terms=tuple(term for term in terms if term is not None))

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(field for term in self.terms for field in term.needs))

    @property
    def every_group(self) -> bool:
        """Whether groups with equal rewards must be trained: they have a gradient, or count in the entropy quantile."""
        terms = bool(self.needs) or self.entropy_bonus or any(term.every_group for term in self.terms)
        return self.loss.every_group or terms or self.top_entropy_quantile < 1

    @property
    def needs_constants(self) -> bool:
        """Whether the loss may read `StepConstants`. A user's own loss may."""
        own = type(self.loss) not in LOSSES.values()
        return own or self.entropy_bonus or self.top_entropy_quantile < 1 or bool(self.terms)

    def in_loss(self, metrics: Mapping[str, float]) -> float:
        return sum(term.in_loss(metrics) for term in self.terms)

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch,
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> LossOutput:  # fmt: skip
        """Compute the metrics of a micro-batch, and its loss, which is a sum over tokens.

        Args:
            logprobs: the policy's log-probabilities, (N,) in nats. In an on-policy step they are also the old policy's.
            entropy: the policy's entropies, (N,) in nats.
            values: values for the terms, from `LossTerm.steps`.
        """
        values = {} if values is None else values
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        for term in self.terms:
            batch = term.before(old, batch)
        # Tokens outside the loss get 0: the ratio of a token that wasn't sampled could be extreme and change a mean.
        log_ratio = (logprobs - old).where(batch.loss_mask > 0, 0.0)
        of_token, whole = bounded_exp(log_ratio), self.level == "sequence"
        of_level = bounded_exp(completion_mean(log_ratio, batch)) if whole else of_token
        difference = known(old - batch.sampler_logprobs, batch.loss_mask)
        to_sampler = log_ratio_of(difference, "" if self.correction is None else self.correction.mode, batch)
        correction = None if self.correction is None else self.correction.weights(to_sampler)
        tokens = Tokens(logprobs, log_ratio, of_token, of_level, batch.advantages, correction, whole, batch)
        per_token = self.loss(tokens)
        if per_token.shape != logprobs.shape:
            raise ValueError(
                f"{type(self.loss).__name__} returned a loss of shape {list(per_token.shape)}, but must return one "
                f"value for each of the {len(logprobs)} tokens."
            )
        if self.off_policy_threshold is not None:
            per_token = per_token * self._on_policy(logprobs.detach(), batch)
        chosen = batch.loss_mask
        if self.top_entropy_quantile < 1:
            threshold: float | torch.Tensor | None = batch.step_constants.threshold
            if threshold is None:  # No threshold: this row is the whole step.
                counted = entropy.detach().float().where(batch.loss_mask > 0, torch.nan)
                threshold = counted.nanquantile(1 - self.top_entropy_quantile)
            chosen = chosen * (entropy.detach() >= threshold).to(batch.loss_mask.dtype)
            per_token = per_token * chosen
        if tokens.correction is not None and not self.loss.corrects:
            per_token = per_token * tokens.correction
        for term in self.terms:
            if (of_tokens := term.of_tokens(tokens, values)) is not None:
                per_token = per_token + of_tokens
        loss = (per_token * self.loss.token_weights(batch)).sum()
        if self.entropy_bonus and batch.step_constants.coefficient != 0:
            of_step = batch.step_constants
            count = chosen.sum().clamp(min=1) if of_step.tokens is None else of_step.tokens
            loss = loss - (of_step.coefficient * of_step.denominator / count) * (entropy * chosen).sum()
        sums, minima, maxima = self._observe(tokens, entropy.detach(), old, difference, to_sampler, chosen)
        for term in self.terms:
            if (of_row := term.of_row(batch, values)) is not None:
                loss = loss + of_row
            sums = sums | term.observe(old, tokens, values)
        return LossOutput(loss, sums, minima, maxima)

    def _on_policy(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the off-policy mask (N,) of 0 and 1. A token gets 0 if its advantage is negative, and its completion's
        mean of (log sampler - log pi) is above `off_policy_threshold`."""
        drift = known(batch.sampler_logprobs - logprobs, batch.loss_mask) * sequence_mean_weights(batch)
        mean = per_sequence_sum(drift, batch)[batch.sequence]
        return ((batch.advantages >= 0) | (mean <= self.off_policy_threshold)).to(logprobs.dtype)

    @torch.no_grad()
    def _observe(
        self, tokens: Tokens, entropy: torch.Tensor, old: torch.Tensor, difference: torch.Tensor,
        to_sampler: torch.Tensor, chosen: torch.Tensor,
    ) -> tuple[Means, Extremes, Extremes]:  # fmt: skip
        """Compute the metrics of a micro-batch. For ``difference`` and ``to_sampler`` see `sampling_metrics`."""
        batch, mask = tokens.batch, tokens.batch.loss_mask
        apart = (old - batch.sampler_logprobs).abs()
        scored = mask * ~apart.isnan()
        apart = apart.where(scored > 0, 0.0)
        sums: Means = {"entropy": summed(entropy, mask), f"{DIFFERENCE}/mean": (apart.sum(), scored.sum())}
        for rider in batch.riders:
            sums |= rider.metrics(apart, scored)
        if self.entropy_bonus:
            sums[BONUS_ENTROPY] = summed(entropy, chosen)
        if not batch.in_loss:
            return sums, {}, {}
        of_loss, minima, maxima = self.loss.observe(tokens)
        of_sampling, least, most = sampling_metrics(tokens, self.correction, difference, to_sampler)
        maxima = {**maxima, **most, f"{DIFFERENCE}/max": apart.max()}
        return sums | of_sampling | of_loss, {**minima, **least}, maxima


def top_threshold(entropies: torch.Tensor, share: float) -> float:
    """Return the (1 - ``share``) quantile of entropies (n,), or infinity if there are none."""
    if not entropies.numel():
        return float("inf")
    values = entropies.float()
    if len(values) < QUANTILE_LIMIT:
        return float(torch.quantile(values, 1 - share))
    place = (1 - share) * (len(values) - 1)
    ordered = values.sort().values
    below, above = ordered[int(place)], ordered[min(int(place) + 1, len(values) - 1)]
    return float(torch.lerp(below, above, place - int(place)))
