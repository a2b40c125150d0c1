"""Reward functions: resolve, call, time, isolate, check.

A reward function has TRL's signature, called with keywords only and for one group at a time:

    f(prompts, completions, completion_ids, trainer_state, **columns) -> list[float | None]    # G numbers

``columns`` are the dataset's other columns, each repeated G times; ``None`` means that the function abstains. A
function without ``**kwargs`` gets only what it names. ``async def`` functions of a group run concurrently.

The built-in functions are at the end, in `BUILTIN_REWARDS`.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import importlib
import inspect
import logging
import math
import numbers
import os
import re
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from .batch import Group

RESERVED = ("prompt", "prompts", "completions", "completion_ids", "trainer_state")
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with the name its metrics carry and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float


class RewardError(RuntimeError):
    """A reward function raised, or returned what can't be a reward.

    Attributes:
        function: the function's name.
        position: the prompt's place in the stream of prompts.
        completion: the completion's index in its group, 0 ... G-1; None where the whole group is concerned.
        problem: the value, the rule and the remedy, with the traceback's text when the function raised.
    """

    def __init__(self, function: str, position: int, completion: int | None, problem: str) -> None:
        # All of them in `args`, so that the error can be pickled and sent to other ranks.
        super().__init__(function, position, completion, problem)
        self.function, self.position, self.completion, self.problem = function, position, completion, problem

    def __str__(self) -> str:
        where = f"prompt {self.position}" + ("" if self.completion is None else f", completion {self.completion}")
        return f"reward function {self.function!r}, {where}: {self.problem}"


# -- resolve


def resolve_rewards(
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]], weights: list[float] | None
) -> list[RewardFunction]:
    """Turn names, import paths and callables into functions with unique names and weights.

    Args:
        reward_funcs: one or several of: a key of `BUILTIN_REWARDS`, an import path (``package.module:function`` or
            ``package.module.function``; modules in the current directory are found), a callable.
        weights: one per function; None is 1 for each.

    Raises:
        ValueError: there is no function, one can't be found or isn't a function, or the number of weights differs.
    """
    single = isinstance(reward_funcs, str) or callable(reward_funcs)
    given: list[Any] = [reward_funcs] if single else list(reward_funcs or ())  # type: ignore[arg-type]
    if not given:
        raise ValueError(
            "there is no reward function, but GRPO needs at least one: set reward_funcs to a built-in "
            f"({', '.join(BUILTIN_REWARDS)}), an import path (package.module:function) or a callable."
        )
    if weights is not None and len(weights) != len(given):
        raise ValueError(
            f"reward_weights has {len(weights)} weights {list(weights)} for {len(given)} reward functions: give "
            "exactly one weight per function, or none for 1 each."
        )
    functions = [_find(item) if isinstance(item, str) else item for item in given]
    resolved: list[RewardFunction] = []
    for item, function, weight in zip(given, functions, weights or [1.0] * len(given), strict=True):
        _check_function(item, function)
        name = _unique(_name_of(function), [r.name for r in resolved])
        resolved.append(RewardFunction(name, function, float(weight)))
    return resolved


def _find(spec: str) -> Any:
    """The built-in or the object at the import path ``spec``."""
    if spec in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[spec]
    if "/" in spec and ":" not in spec:
        raise ValueError(
            f"reward function {spec!r} looks like a model id, but reward models aren't available in this version: "
            "wrap it in a function and give its import path (package.module:function)."
        )
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        module_name, _, attribute = spec.rpartition(".")
    if not module_name or not attribute:
        near = difflib.get_close_matches(spec, BUILTIN_REWARDS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"reward function {spec!r} isn't one of the built-in ones ({', '.join(BUILTIN_REWARDS)}): the nearest is "
            f"{near!r}. For a function of your own give its import path: package.module:function."
        )
    module = _import(spec, module_name)
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        names = [n for n, value in vars(module).items() if inspect.isroutine(value)]
        near_names = difflib.get_close_matches(attribute, names, n=1)
        hint = f" Did you mean {near_names[0]!r}?" if near_names else ""
        raise ValueError(
            f"reward function {spec!r}: module {module_name!r} ({getattr(module, '__file__', 'no file')}) has no "
            f"attribute {attribute!r}.{hint}"
        ) from None


def _import(spec: str, module_name: str) -> Any:
    # Scripts that are installed (`colograd`, `torchrun`) don't have the current directory on the path, `python -m` has.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # the file may be younger than the directory listing Python keeps
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does while it is imported
        raise ValueError(
            f"reward function {spec!r}: module {module_name!r} can't be imported ({type(error).__name__}: {error}). "
            f"It is looked for in the current directory ({os.getcwd()}) and among the installed packages."
        ) from error


def _check_function(item: Any, function: Any) -> None:
    shown = item if isinstance(item, str) else reprlib.repr(item)
    if isinstance(function, torch.nn.Module) or (inspect.isclass(function) and issubclass(function, torch.nn.Module)):
        raise ValueError(
            f"reward function {shown!r} is a model ({_name_of(function)}), but reward models aren't available in "
            "this version: wrap it in a function."
        )
    if inspect.isclass(function):
        raise ValueError(f"reward function {shown!r} is a class, but must be a function: give an instance of it.")
    if not callable(function):
        raise ValueError(
            f"reward function {shown!r} is of type {type(function).__name__}, but must be callable: give a function "
            "f(prompts, completions, **kwargs) -> list[float]."
        )


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _unique(name: str, taken: Sequence[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


# -- call, time, isolate


def score_group(
    functions: Sequence[RewardFunction], group: Group, completions: Sequence[str], trainer_state: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Call every function on one group.

    Args:
        functions: R of them.
        group: G rollouts of one prompt. Where ``group.example["prompt"]`` is a list of messages, functions get each
            completion as ``[{"role": "assistant", "content": text}]``, otherwise as text.
        completions: [G] decoded texts.
        trainer_state: the Trainer's state, for rewards that follow the training's progress.

    Returns:
        Rewards [G, R] float32, NaN where a function abstained, and each function's seconds by name.

    Raises:
        RewardError: a function raised, or didn't return G numbers.
    """
    assert len(completions) == len(group.rollouts), (len(completions), len(group.rollouts))
    values: list[Any] = []
    seconds: dict[str, float] = {}
    for reward in functions:
        start = time.perf_counter()
        try:
            keywords = _keywords(reward, group, completions, trainer_state)
            values.append(reward.function(**keywords))
        except Exception as error:
            _close(values)
            raise _raised(reward, group, error) from None
        seconds[reward.name] = time.perf_counter() - start
    pending = {index: value for index, value in enumerate(values) if inspect.isawaitable(value)}
    for index, (outcome, elapsed) in _gather(pending).items():
        if isinstance(outcome, BaseException):
            raise _raised(functions[index], group, outcome) from None
        values[index] = outcome
        seconds[functions[index].name] += elapsed
    columns = [_checked(reward, group, value) for reward, value in zip(functions, values, strict=True)]
    return torch.tensor(columns, dtype=torch.float32).reshape(len(functions), -1).T.contiguous(), seconds


def _keywords(reward: RewardFunction, group: Group, completions: Sequence[str], trainer_state: Any) -> dict[str, Any]:
    """The keywords of one call, made of copies: a function that changes its arguments changes nobody else's."""
    size = len(completions)
    prompt = group.example["prompt"]
    conversational = isinstance(prompt, list)
    keywords: dict[str, Any] = {
        "prompts": [[dict(message) for message in prompt] if conversational else prompt for _ in range(size)],
        "completions": [[{"role": "assistant", "content": c}] if conversational else c for c in completions],
        "completion_ids": [list(rollout.completion_ids) for rollout in group.rollouts],
        "trainer_state": trainer_state,
    }
    for column, value in group.example.items():
        if column not in RESERVED:
            keywords[column] = [copy.copy(value) for _ in range(size)]
    try:
        parameters = inspect.signature(reward.function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C don't tell
        return keywords
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
    missing = [
        p.name
        for p in parameters
        if p.name not in keywords and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise RewardError(
            reward.name,
            group.position,
            None,
            f"it needs {', '.join(map(repr, missing))}, but the example has the columns "
            f"{', '.join(map(repr, group.example))}: add the column to the dataset, or give the parameter a default.",
        )
    return keywords


def _raised(reward: RewardFunction, group: Group, error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return error
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # the user's own frames are what helps
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return RewardError(
        reward.name, group.position, None, f"it raised {type(error).__name__}: {error}. Its traceback:\n{text}"
    )


def _close(values: Sequence[Any]) -> None:
    for value in values:
        if inspect.iscoroutine(value):
            value.close()


def _gather(pending: Mapping[int, Awaitable[Any]]) -> dict[int, tuple[Any, float]]:
    """Await all concurrently: {index: (value or exception, seconds)}. The caller may be in a loop (a notebook)."""

    async def timed(awaitable: Awaitable[Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        try:
            outcome: Any = await awaitable
        except (Exception, asyncio.CancelledError) as error:
            outcome = error
        return outcome, time.perf_counter() - start

    async def together() -> list[tuple[Any, float]]:
        return await asyncio.gather(*(timed(awaitable) for awaitable in pending.values()))

    if not pending:
        return {}
    outcomes = asyncio.run_coroutine_threadsafe(together(), _event_loop()).result()
    return dict(zip(pending, outcomes, strict=True))


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # One loop for the whole run, not one per group: HTTP clients that users keep between calls are bound to their loop.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="colograd-rewards", daemon=True).start()
    return loop


# -- check


def _checked(reward: RewardFunction, group: Group, values: Any) -> list[float]:
    """The [G] numbers a function returned, NaN for None."""
    size = len(group.rollouts)
    fail = functools.partial(RewardError, reward.name, group.position)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    if not isinstance(values, (list, tuple, np.ndarray)) or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise fail(None, f"it returned {_shown(values)}, but must return a list of {size} numbers, one per completion.")
    if len(values) != size:
        raise fail(
            None,
            f"it returned {len(values)} rewards for {size} completions: return exactly one per completion, and None "
            "where it has no opinion.",
        )
    numbers_G = []
    for index, value in enumerate(values):
        number = _number(value)
        if number is None:
            hint = " To abstain, return None." if _is_nan(value) else ""
            raise fail(index, f"its reward is {_shown(value)}, but must be a finite float32 number or None.{hint}")
        numbers_G.append(number)
    return numbers_G


def _number(value: Any) -> float | None:
    """The value as a finite number, NaN for None (an abstention), None for what can't be a reward."""
    if value is None:
        return math.nan
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= FLOAT32_MAX else None  # false for NaN too


def _is_nan(value: Any) -> bool:
    try:
        return bool(value != value)
    except (TypeError, ValueError, RuntimeError):
        return False


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def weighted_sum(rewards: torch.Tensor, weights: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """[G, R] rewards and R weights -> [G] float32: the sum over the functions that didn't abstain, NaN if all did."""
    weights_R = torch.as_tensor(weights, dtype=torch.float32, device=rewards.device)
    total = (rewards * weights_R).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.full_like(total, math.nan), total)


# -- built-in functions

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-\$?)?"  # a sign, unless it follows a digit or a word: 10-5 ends in 5
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.5 or 1234.5
    r"|(?<![0-9.])\.[0-9]+)"  # .5
)
_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def _text(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\u2212", "-"))  # the typographic minus sign
    return Decimal(re.sub(r"[,$]", "", found[-1])) if found else None


def last_number(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where the last number of the completion equals the last number of the column ``answer``, else 0.0.

    Numbers are integers or decimals, with or without commas: ``#### 42`` (GSM8K), ``-5``, ``$1,234.50``, ``42.``. They
    are compared exactly, as decimals. None where ``answer`` holds no number.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        gold = _last_number(str(expected))
        rewards.append(None if gold is None else float(_last_number(_text(completion)) == gold))
    return rewards


def accuracy_reward(completions: list[Any], solution: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where math-verify finds the completion's LaTeX answer equal to the column ``solution``, else 0.0 (as TRL).

    None where the solution can't be parsed. A boxed answer is tried first; text outside LaTeX isn't an answer.

    Raises:
        ImportError: math-verify isn't installed.
    """
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ImportError(f"accuracy_reward needs math-verify ({error}): pip install math-verify") from error
    # math-verify's timeouts are SIGALRM, which only the main thread may use; elsewhere it warns that there are none.
    alarm = threading.current_thread() is threading.main_thread()
    if not alarm:
        for module in ("parser", "grader"):
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    rewards: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        gold = parse(str(expected), parsing_timeout=10 if alarm else None)
        if not gold:
            rewards.append(None)
            continue
        given = parse(
            _text(completion),
            extraction_config=[extraction],
            extraction_mode="first_match",
            parsing_timeout=10 if alarm else None,
        )
        rewards.append(float(verify(gold, given, timeout_seconds=5 if alarm else None)))
    return rewards


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 where the completion starts with one ``<think>...</think>`` block, else 0.0 (TRL's rule)."""
    return [float(_THINK.match(_text(completion)) is not None) for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make DAPO's soft punishment of long completions (https://arxiv.org/abs/2503.14476, equation 13; as in TRL).

    With L = ``max_completion_len``, K = ``soft_punish_cache`` and n tokens in the completion, the reward is

        0                  for n <= L - K
        (L - K - n) / K    for L - K < n <= L
        -1                 for n > L

    Args:
        max_completion_len: tokens; usually the run's ``max_completion_length``.
        soft_punish_cache: tokens below it in which the punishment grows from 0 to -1.

    Raises:
        ValueError: ``soft_punish_cache`` isn't between 1 and ``max_completion_len``.
    """
    if not 1 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache is {soft_punish_cache}, but must be in 1 ... {max_completion_len} (max_completion_len)."
        )

    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        return [min(0.0, max(-1.0, (free - len(ids)) / soft_punish_cache)) for ids in completion_ids]

    return soft_overlong_punishment_reward


BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {
    "last_number": last_number,
    "accuracy_reward": accuracy_reward,
    "think_format_reward": think_format_reward,
    # TRL's name and values for its command line; other values: a function of your own made by the factory.
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
