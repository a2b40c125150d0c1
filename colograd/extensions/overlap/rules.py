"""Rules of `overlap`: whether a run trains groups before all are sampled, and its line about that at start."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from ...batch import ScoredGroup
from ...config import GRPOConfig
from ...losses.advantages import AdvantageEstimator
from ...losses.objective import Objective
from ...losses.token_losses import LOSSES
from ...sharding import ShardingStrategy, strategy_of
from .beside_decoding import TAIL
from .finished_groups import FinishedGroups, OwnGroups


def why_not(
    config: GRPOConfig,
    objective: Objective,
    estimator: AdvantageEstimator,
    sharding: type[ShardingStrategy],
    replaced: Container[str],
) -> str:
    """Return why all groups of a step wait for the last one; empty: they don't.

    Args:
        replaced: stages that a subclass of the trainer overrides.
    """
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
    """Return why a run's groups all wait for the last one; empty: they don't."""
    sharding = strategy_of(trainer.args)
    return why_not(trainer.args, trainer.learner.objective, trainer.estimator, sharding, trainer.replaced)


def submits_later(source: Any, engine: Any) -> bool:
    """Return whether more sequences may come when the engine's queue is empty."""
    return bool(getattr(source, "submits_later", source is not engine))


def note(trainer: Any) -> str:
    """Return the run's line about `overlap` at start; empty: none."""
    later = submits_later(trainer.sampler.source, trainer.engine)
    return describe(trainer.args, why_no_overlap(trainer), later)


def finished_groups(config: GRPOConfig, why: str, accepts: Callable[[ScoredGroup], bool]) -> OwnGroups | None:
    """Return the container of finished groups to train early; None: no group is."""
    if config.overlap == "off" or why:
        return None
    if config.world_size == 1:
        return None if config.why_not_between_steps else OwnGroups(accepts)
    return FinishedGroups(config.layout, config.balance_ranks and config.layout.data_size > 1, accepts)


def describe(config: GRPOConfig, why: str, submits_later: bool = False) -> str:
    """Return a line that describes the early training, or why there is none; empty with `overlap: off`.

    Args:
        submits_later: see `submits_later`.
    """
    alone, not_between = config.world_size == 1, config.why_not_between_steps
    if submits_later:
        not_between = not_between or "with tools, an agent or a rollout_func more sequences may come at any time"
    if config.overlap == "off":
        return ""
    if why:
        until = "all groups are sampled" if alone else "all ranks have sampled"
        return f"overlap: nothing is trained before {until}, as {why}"
    later = "; only for the first optimizer step of each round" if config.round_length > 1 else ""
    tail = f"when at most 1/{TAIL} of its sequences are left"
    if alone:
        if not_between:
            return f"overlap: nothing is trained between the engine's steps, as {not_between}"
        return f"overlap: finished groups are trained between the engine's steps {tail}{later}"
    return (
        "overlap: a rank that has sampled trains its groups"
        + (", and finished ones of other ranks," if config.balance_ranks else "")
        + " while others sample; between its own engine's steps "
        + (f"nothing, as {not_between}" if not_between else f"finished ones {tail}")
        + later
    )
