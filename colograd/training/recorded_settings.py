"""List the settings that recorded groups depend on, and make the run's rollout log (`RolloutStore`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import GRPOConfig
from ..config.objective import AdvantageKnobs, DistillationKnobs, ObjectiveKnobs, ReferenceKnobs, RewardPenaltyKnobs
from ..config.sampling import SamplingKnobs
from ..rewards.functions import RewardFunction, code_digest
from ..rollout.features import SourceFeature
from ..rollout.store import REWARD_CODE, REWARD_FUNCS, RolloutStore

AGENT_CODE = "agent_code"
# OF_ROUNDS: settings that decide which groups are sampled. OF_TRAINING: further settings that change a training.
OF_ROUNDS = (
    "seed", "data_seed", "num_generations", "prompts_per_step", "steps_per_generation", "num_iterations",
    "shuffle_dataset", "max_prompt_tokens", "overlong_prompts", "chat_template_path", "chat_template_kwargs",
    "max_tool_calling_iterations",
)  # fmt: skip
OF_TRAINING = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps", "num_train_epochs", "reward_weights", "reward_call",
    "disable_dropout", "cast_lm_head_to_fp32", "num_generations_eval", "temperature_eval",
    "max_completion_length_eval",
)  # fmt: skip
GROUPS = (AdvantageKnobs, ObjectiveKnobs, ReferenceKnobs, SamplingKnobs)
OF_CARRY_OVER = ("carry_over", "carry_over_max_age")
# Settings that decide how groups are sampled. A replay takes their values from the recorded run.
OF_GROUPS = frozenset(
    (*OF_ROUNDS, *OF_CARRY_OVER, "curriculum", *(each.name for each in dataclasses.fields(SamplingKnobs)), REWARD_FUNCS)
)


def store_of(
    args: GRPOConfig, rewards: Sequence[RewardFunction], feature: SourceFeature, reader: Any = None
) -> RolloutStore | None:
    """Return this rank's rollout log, or None if the log is off or this isn't the first rank of its vLLM engine."""
    if not args.keeps_journal or args.layout.engine_place:
        return None
    settings = run_settings(args, rewards, feature.digests())
    of_samples = (OF_GROUPS | {AGENT_CODE}) - {REWARD_FUNCS}
    return RolloutStore(str(args.output_dir), args.layout.rank, settings, reader, of_samples)


def run_settings(args: GRPOConfig, rewards: Sequence[RewardFunction], digests: Mapping[str, str]) -> dict[str, Any]:
    codes = {REWARD_CODE: {reward.name: code_digest(reward.function) for reward in rewards}}
    settings = settings_of(args, [reward.name for reward in rewards]) | codes | dict(digests)
    return dict(json.loads(json.dumps(settings, default=str)))


def settings_of(args: GRPOConfig, reward_names: Sequence[str]) -> dict[str, Any]:
    names = [*OF_ROUNDS, *OF_TRAINING, *(field.name for group in GROUPS for field in dataclasses.fields(group))]
    # Settings of a disabled feature aren't listed, so that logs of versions without the feature stay valid.
    names += [name for name in ("router_replay", "curriculum") if getattr(args, name)]
    names += OF_CARRY_OVER if args.carry_over is not None else ()
    for knobs, used in ((DistillationKnobs, args.distils), (RewardPenaltyKnobs, args.kl_in_reward)):
        names += [field.name for field in dataclasses.fields(knobs)] if used else ()
    return {name: getattr(args, name) for name in dict.fromkeys(names)} | {REWARD_FUNCS: list(reward_names)}
