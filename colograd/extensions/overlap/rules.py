"""Rules of `overlap`: which settings prevent training before all groups are sampled, and a log line at start."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ...config import GRPOConfig
from ...losses.advantages import AdvantageEstimator
from ...losses.objective import Objective
from ...losses.token_losses import LOSSES
from ...sharding import ShardingStrategy, strategy_of


def why_not(
    config: GRPOConfig,
    objective: Objective,
    estimator: AdvantageEstimator,
    sharding: type[ShardingStrategy],
    replaced: Container[str],
) -> str:
    """Return the reason why no group of a step can be trained before all are sampled. Empty: groups can be trained
    early. ``replaced``: stages that a subclass of the trainer overrides."""
    reasons: list[tuple[Any, str]] = [
        (config.sequence_parallel_size > 1, "with sequence_parallel_size ranks exchange in each forward"),
        (sharding.meets_in_backward, f"with sharding: {config.sharding} ranks exchange in each backward"),
        (config.dynamic_sampling, "dynamic_sampling chooses the step's groups among all that were sampled"),
        (estimator.step_scores is not None, "advantages are divided by a deviation over the step"),
        (objective.top_entropy_quantile < 1, "top_entropy_quantile is of all the step's tokens"),
        (objective.entropy_bonus, "the entropy's bonus is a mean over the step"),
        *((term.waits, term.waits) for term in objective.terms),
        (type(objective.loss) not in LOSSES.values(), "a loss of your own may read the step's constants"),
        ("compute_loss" in replaced, "a compute_loss of your own may read the step's constants"),
        ("compute_advantages" in replaced, "a compute_advantages of your own is called in the order of the prompts"),
        (config.offload_reference and not config.on_cpu, "offload_reference has no room beside gradients"),
        (config.full_determinism, "full_determinism forbids sums whose order depends on clocks"),
    ]
    return next((reason for applies, reason in reasons if applies), "")


def why_no_overlap(trainer: Any) -> str:
    if trainer.args.world_size == 1:
        return "there is no other rank"
    sharding = strategy_of(trainer.args)
    return why_not(trainer.args, trainer.learner.objective, trainer.estimator, sharding, trainer.replaced)


def note(trainer: Any) -> str:
    config: GRPOConfig = trainer.args
    if config.overlap == "off":
        return ""
    if why := why_no_overlap(trainer):
        return f"overlap: nothing is trained before all ranks have sampled, as {why}"
    others = ", and finished ones of other ranks," if config.balance_ranks else ""
    later = "; only for the first optimizer step of each round" if config.round_length > 1 else ""
    return f"overlap: a rank that has sampled trains its groups{others} while others sample{later}"
