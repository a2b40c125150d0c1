"""Check `metric_for_best_model`. After an evaluation choose the best model and step a schedule by that metric."""

from __future__ import annotations

import difflib
import dis
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers.trainer_utils import SaveStrategy

from ...config import GRPOConfig
from ...config.conflicts import OF_LOSS
from ...config.objective import LOSSES
from ...rewards import RewardFunction
from ...rewards.calling import parameters_of
from ...training.transformers_seam import DRIVEN_BY_METRICS

# Names of an evaluation's metrics, without the prefix `eval_`. OF_LOSS matches further metrics of the loss.
NAMES = ("reward", "reward_std", "frac_reward_zero_std", "completions", "runtime", "samples_per_second", "num_tokens")
NAMES_OF_LOSS = ("loss", "policy_loss", "entropy_coef", "aux_loss", "teacher_kl")
OF_REWARD = ("mean", "std", "abstained", "seconds", "timeouts", "errors")


def check_best_metric(
    args: GRPOConfig, rewards: Sequence[RewardFunction], eval_prompts: Any, user_adds_metrics: bool = False
) -> None:
    best = args.metric_for_best_model
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" and eval_prompts is not None
    if best is None or not evaluates or user_adds_metrics or args.loss_type not in LOSSES:
        return
    if any(_may_log(reward.function) for reward in rewards):
        return
    name, names = best.removeprefix("eval_"), list[str]()
    for part, prompts in (eval_prompts if isinstance(eval_prompts, dict) else {"": eval_prompts}).items():
        prefix = f"{part}_" if part else ""
        if name.startswith(prefix) and _is_possible(name.removeprefix(prefix), args, rewards, prompts):
            return
        names += [prefix + each for each in _names(args, rewards, prompts)]
    raise _unknown(best, "no evaluation of this run has a metric of that name (they have", name, names)


def after_evaluation(trainer: Any, metrics: Mapping[str, float], at_start: bool) -> None:
    args = trainer.args
    if args.metric_for_best_model is None:
        return
    if line := lacks_best(args, metrics, trainer.state.best_metric is not None):
        trainer.console.warn(line)
    if at_start:
        return
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    if name in metrics and isinstance(trainer.lr_scheduler, DRIVEN_BY_METRICS):
        trainer.lr_scheduler.step(metrics[name])
    is_best = name in metrics and trainer._determine_best_metric(metrics, None)
    if args.save_strategy == SaveStrategy.BEST:
        trainer.control.should_save = is_best


def lacks_best(args: GRPOConfig, metrics: Mapping[str, float], earlier: bool) -> str:
    """Return a warning if ``metrics`` lack ``metric_for_best_model``, else "". Raise if this name seems misspelt."""
    if (name := f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}") in metrics:
        return ""
    if earlier or "/" in name or re.search(r"_(reward|reward_std|pass@\d+)$", name):
        return (
            f"evaluation: it has no {name} (no reward function judged a completion, say), so the best model stays the "
            "one before"
        )
    best = args.metric_for_best_model
    raise _unknown(best, "the evaluation has no metric of that name (it has", name, [*metrics])


def _unknown(best: str | None, problem: str, name: str, names: Sequence[str]) -> ValueError:
    near = [*difflib.get_close_matches(name, names, n=1, cutoff=0.0), "none"][0]
    return ValueError(f"metric_for_best_model is {best!r}, but {problem} {', '.join(names)}): the nearest is {near!r}.")


def _is_possible(name: str, args: GRPOConfig, rewards: Sequence[RewardFunction], prompts: Any) -> bool:
    if match := re.fullmatch(r"rewards/(.+)/(\w+)", name):
        return match[1] in [reward.name for reward in rewards] and match[2] in OF_REWARD
    if hasattr(prompts, "metric_names") and re.search(r"(^|_)pass@\d+$", name):
        return True
    return "/" in name or bool(OF_LOSS.search(name)) or name in [*_names(args, rewards, prompts), *NAMES_OF_LOSS]


def _names(args: GRPOConfig, rewards: Sequence[RewardFunction], prompts: Any) -> Iterator[str]:
    if hasattr(prompts, "metric_names"):  # only a benchmark's prompts have `metric_names`
        yield from prompts.metric_names()
        return
    yield from NAMES if rewards else NAMES[3:]
    yield from (f"rewards/{reward.name}/mean" for reward in rewards)
    yield from (f"pass@{2**power}" for power in range(args.eval_generations().bit_length()) if rewards)
    yield from ("loss", "entropy", *(["teacher_kl"] if args.distils else [])) if args.loss_eval else ()


def _may_log(function: Callable[..., Any]) -> bool:
    parameters = parameters_of(function)
    further = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    if "log_metric" in parameters or not further:
        return "log_metric" in parameters
    while isinstance(function, functools.partial):
        function = function.func
    # A reward function that never reads its `**kwargs` can't call `log_metric`, which is passed in them.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is None or any(each.argval == further[0] for each in dis.get_instructions(code))
