"""Find reward functions by name or import path, describe their errors, check logged values, and sum rewards."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import math
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..batch import Group, Logged, Rollout
from ..runtime import registry
from ..runtime.importing import find_object, is_import_path
from ..usercode.calls import Outcome, place_in, unwrapped
from .answers import builtin_rewards

TAKEN_FOR_TEXT = re.compile(r"AttributeError: '(list|dict)' object|TypeError: .*\blist\b")
ROUNDING = 4 * torch.finfo(torch.float32).eps  # Sums of rewards with at most this relative difference count as equal.
# Reward functions may log none of these metrics, and none with a prefix (before a slash) in `OWN_FAMILIES`.
OWN_METRICS = (
    "loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "step_time", "entropy", "kl", "reward",
    "reward_std", "frac_reward_zero_std",
)  # fmt: skip
OWN_FAMILIES = (
    "carry_over", "clip_ratio", "completions", "curriculum", "dynamic_sampling", "sampling", "time", "tools", "train",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    name: str
    function: Callable[..., Any]
    weight: float


def is_async(function: Callable[..., Any]) -> bool:
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_of_module(function: Callable[..., Any]) -> bool:
    module = sys.modules.get(getattr(function, "__module__", ""))
    return (
        inspect.isfunction(function)
        and function.__module__ != "__main__"
        and getattr(module, function.__qualname__, None) is function
    )


class ModelReward:
    """Base class of reward models. One call scores the completions of all waiting groups."""

    tokenizer: Any
    __call__: Callable[..., list[float]]


class RewardError(RuntimeError):
    """A reward function raised, crashed, took too long, or returned or logged a wrong value.

    Attributes:
        function: the reward function's name.
        position: position of the group's prompt in the run's stream of prompts. If the call scored several groups, it
            is the first group's.
        completion: index among the call's completions, from 0. None: the error concerns the whole call.
        problem: the text of the error."""

    says_all = True  # `process.tell_briefly` prints the error without a traceback.

    def __init__(self, function: str, position: int, completion: int | None, problem: str) -> None:
        # Pickling needs all arguments in `Exception.args`.
        super().__init__(function, position, completion, problem)
        self.function, self.position, self.completion, self.problem = function, position, completion, problem

    def __str__(self) -> str:
        where = f"prompt {self.position}" + ("" if self.completion is None else f", completion {self.completion}")
        return f"reward function {self.function!r}, {where}: {self.problem}"


def as_list(reward_funcs: Any) -> list[Any]:
    return [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs or ())


def resolve_rewards(
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]], weights: list[float] | None
) -> list[RewardFunction]:
    """Convert names, import paths and callables to `RewardFunction`s with unique names and weights.

    Args:
        reward_funcs: one or several names of built-in functions, import paths (``package.module:function``, also of a
            module in the current directory) or callables. Reward models must be converted by `with_models` before.
        weights: one per function. None means 1 each.

    Raises:
        ValueError: there is no function, a function can't be imported or called, or the number of weights is wrong."""
    given = as_list(reward_funcs)
    if not given:
        known = ", ".join(builtin_rewards())
        choices = f"a built-in one ({known}), an import path (package.module:function) or a callable"
        raise ValueError(f"there is no reward function, but GRPO needs at least one: set reward_funcs to {choices}.")
    if weights is not None and len(weights) != len(given):
        rule = "give one weight per function, or leave reward_weights out to weigh each by 1"
        numbers = f"{len(weights)} weights {list(weights)} for {len(given)} reward functions"
        raise ValueError(f"reward_weights has {numbers}: {rule}.")
    resolved: dict[str, RewardFunction] = {}
    for item, weight in zip(given, weights or [1.0] * len(given), strict=True):
        function = _found(item) if isinstance(item, str) else item
        problem, shown = "", item if isinstance(item, str) else reprlib.repr(item)
        if issubclass(function if inspect.isclass(function) else type(function), torch.nn.Module):
            problem = "a model, but an import path must lead to a function: give the model, or its folder or Hub id"
        elif inspect.isclass(function):
            problem = "a class, but must be a function: give an instance of it"
        elif not callable(function):
            problem = (
                f"of type {type(function).__name__}, but must be callable: give a function "
                "f(prompts, completions, **kwargs) -> list[float]"
            )
        if problem:
            raise ValueError(f"reward function {shown!r} is {problem}.")
        if check := getattr(function, "check_settings", None):
            check()
        name = function_name(function)
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        unique = next(each for each in names if each not in resolved)
        resolved[unique] = RewardFunction(unique, function, float(weight))
    return list(resolved.values())


def _found(spec: str) -> Any:
    builtin = builtin_rewards()
    if spec in builtin:
        return builtin[spec]
    if "/" in spec or os.path.isdir(spec):
        registry.require("graders", f"`reward_funcs: {spec}`")
    if not is_import_path(spec):
        raise ValueError(
            f"reward function {spec!r} isn't one of the built-in ones ({', '.join(builtin)}): the nearest is "
            f"{difflib.get_close_matches(spec, builtin, n=1, cutoff=0.0)[0]!r}. For a function of your own give its "
            "import path (package.module:function). For a reward model give its folder or Hub id."
        )
    return find_object(spec, "reward function", inspect.isroutine)


def function_name(function: Any) -> str:
    """Return a function's name for metrics. A `functools.partial` has the name of the function inside, and an object
    without `__name__` has the name of its class."""
    function = unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def code_digest(function: Any) -> str:
    """Return a digest of a function's source code, and of the definitions in its module that the function uses."""
    function = unwrapped(function)
    function = function if inspect.isroutine(function) else type(function)
    found, defined = hashlib.blake2b(digest_size=8), dict[str, list[ast.stmt]]()
    for statement in _parsed(sys.modules.get(function.__module__)).body:
        assigned = ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ()
        names = {node.id for node in assigned if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {statement.name}
        for name in names:
            defined.setdefault(name, []).append(statement)
    todo: list[ast.AST] = [_parsed(function)]
    for node in todo:
        found.update(ast.dump(node).encode())
        for name in sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)}):
            todo += defined.pop(name, [])
    return found.hexdigest()


def _parsed(thing: Any) -> ast.Module:
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    return ast.Module([], [])


def raised_error(reward: RewardFunction, group: Group, outcome: Outcome) -> RewardError:
    line, traceback = outcome.value[0].removesuffix("."), outcome.value[1]
    where = f" ({place})" if (place := place_in(traceback)) else ""
    of_messages = isinstance(group.example["prompt"], list) and TAKEN_FOR_TEXT.match(line)
    hint = (
        "Completions are lists of messages here, because the prompts are (a conversational dataset, or system_prompt): "
        'the text is `completion[0]["content"]`. '
    )
    problem = (
        f"it raised {line}{where}, but must return one number per completion. {hint if of_messages else ''}"
        f"Mend it, or set `reward_on_error: abstain` to go on wherever it fails. Its traceback:\n{traceback}"
    )
    return RewardError(reward.name, group.position, None, problem)


def check_log(
    reward: RewardFunction, position: int, rollouts: Sequence[Rollout], columns: dict[str, Any], metrics: dict[str, Any]
) -> None:
    fail = functools.partial(RewardError, reward.name, position)
    for name, values in columns.items():
        if len(values) != len(rollouts):
            problem = f"the function logged {len(values)} values in the column {name!r} for {len(rollouts)} completions"
            rule = "Pass exactly one value per completion to log_extra, with None for a completion without a value."
            raise fail(None, f"{problem}. {rule}")
    for name in metrics:
        if name in OWN_METRICS or name.partition("/")[0] in OWN_FAMILIES:
            raise fail(None, f"the function logged the metric {name!r}, a name of the trainer's metrics: rename it.")
    if "token_weights" in columns:
        registry.require("token_weights", f"the column token_weights, which {reward.name} logs,", "log no such column")
    for kind in (kind for kind in registry.hooks("riders") if kind.COLUMN in columns):
        for index, (rollout, value) in enumerate(zip(rollouts, columns[kind.COLUMN], strict=True)):
            try:
                _ = None if value is None else kind.from_json(value, rollout)
            except ValueError as error:
                raise fail(index, f"it logged {kind.COLUMN} of {error}") from None


def with_logged_riders(group: Group, logged: Logged) -> Group:
    """Return the group with the riders (extension data, e.g. token weights) that reward functions logged."""
    for kind in (kind for kind in registry.hooks("riders") if kind.COLUMN in logged.columns):
        pairs = zip(group.rollouts, logged.columns[kind.COLUMN], strict=True)
        rollouts = (one if value is None else one.carrying(kind.from_json(value, one)) for one, value in pairs)
        group = dataclasses.replace(group, rollouts=tuple(rollouts))
    return group


def weighted_sum(rewards: torch.Tensor, weights: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """Sum rewards [G, R], weighted by R weights, over the functions that didn't abstain (NaN).

    With several functions, if all sums differ only by float32 rounding (0.6 + 0.1 and 0.7), replace each by their mean.
    Advantages that divide by the standard deviation would enlarge rounding errors.

    Returns:
        Sums [G] float32. NaN: all functions abstained."""
    weights_R = torch.as_tensor(weights, dtype=torch.float32, device=rewards.device)
    terms = rewards.double() * weights_R.double()
    total = terms.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)
    judged = total[~total.isnan()]
    if terms.shape[1] > 1 and len(judged):
        rounding = ROUNDING * terms.abs().nansum(dim=1).max()
        if judged.max() - judged.min() <= rounding:
            total = torch.where(total.isnan(), total, judged.mean())
    return total.float()
