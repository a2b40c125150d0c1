"""Reward functions: given by name, by import path or as callables; each has a name and a weight."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import inspect
import itertools
import os
import reprlib
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import registry
from ..runtime.importing import find_object, is_import_path
from .builtin import builtin_rewards


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, with its name in metrics and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls return awaitables: an async function, its partial, or an object with async `__call__`."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_of_module(function: Callable[..., Any]) -> bool:
    """Return whether another process can import the function: a plain function that its module has under its name."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    return (
        inspect.isfunction(function)
        and function.__module__ != "__main__"
        and getattr(module, function.__qualname__, None) is function
    )


class ModelReward(ABC):
    """Base class of reward functions that run a model in this process, on all completions after the generation."""

    tokenizer: Any

    @abstractmethod
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return the rewards of any number of completions."""


class RewardError(RuntimeError):
    """The error of a reward function that raised, or returned a value that can't be a reward.

    Attributes:
        function: the function's name.
        position: the prompt's place in the stream of prompts.
        completion: the completion's index in its group, 0 ... G-1; None: the problem concerns the whole group.
        problem: the value, the rule and the remedy; if the function raised, its traceback.
    """

    says_all = True  # see `process.tell_briefly`

    def __init__(self, function: str, position: int, completion: int | None, problem: str) -> None:
        # All arguments go into `args`, so that the error can be pickled and sent to other ranks.
        super().__init__(function, position, completion, problem)
        self.function, self.position, self.completion, self.problem = function, position, completion, problem

    def __str__(self) -> str:
        where = f"prompt {self.position}" + ("" if self.completion is None else f", completion {self.completion}")
        return f"reward function {self.function!r}, {where}: {self.problem}"


def as_list(reward_funcs: Any) -> list[Any]:
    """Return the user's reward function or functions as a list."""
    single = isinstance(reward_funcs, str) or callable(reward_funcs)
    return [reward_funcs] if single else list(reward_funcs or ())


def resolve_rewards(
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]], weights: list[float] | None
) -> list[RewardFunction]:
    """Turn names, import paths and callables into functions with unique names and weights.

    Args:
        reward_funcs: one or several of: a key of `builtin_rewards`, an import path (``package.module:function`` or
            ``package.module.function``; modules in the current directory are found), a callable. `with_models` turns
            models into callables first.
        weights: one per function; None: 1 for each.
    """
    given = as_list(reward_funcs)
    if not given:
        raise ValueError(
            "there is no reward function, but GRPO needs at least one: set reward_funcs to a built-in "
            f"({', '.join(builtin_rewards())}), an import path (package.module:function) or a callable."
        )
    if weights is not None and len(weights) != len(given):
        raise ValueError(
            f"reward_weights has {len(weights)} weights {list(weights)} for {len(given)} reward functions: give "
            "exactly one weight per function, or none for 1 each."
        )
    resolved: list[RewardFunction] = []
    for item, weight in zip(given, weights or [1.0] * len(given), strict=True):
        function = _found(item) if isinstance(item, str) else item
        if problem := _problem(function):
            raise ValueError(f"reward function {item if isinstance(item, str) else reprlib.repr(item)!r} {problem}")
        if check := getattr(function, "check_settings", None):  # of a judge
            check()
        name, taken = function_name(function), {reward.name for reward in resolved}
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        unique = next(each for each in names if each not in taken)
        resolved.append(RewardFunction(unique, function, float(weight)))
    return resolved


def _found(spec: str) -> Any:
    if spec in builtin_rewards():
        return builtin_rewards()[spec]
    if "/" in spec or os.path.isdir(spec):
        registry.require("graders", f"reward_funcs: {spec}")
    if not is_import_path(spec):
        near = difflib.get_close_matches(spec, builtin_rewards(), n=1, cutoff=0.0)[0]
        raise ValueError(
            f"reward function {spec!r} isn't one of the built-in ones ({', '.join(builtin_rewards())}): the nearest is "
            f"{near!r}. For a function of your own give its import path (package.module:function), for a reward model "
            "its folder or Hub id."
        )
    return find_object(spec, "reward function", inspect.isroutine)


def _problem(function: Any) -> str:
    if isinstance(function, torch.nn.Module) or (inspect.isclass(function) and issubclass(function, torch.nn.Module)):
        return (
            "is a model, but an import path must lead to a function: give the model's folder or Hub id, or the model "
            "itself."
        )
    if inspect.isclass(function):
        return "is a class, but must be a function: give an instance of it."
    if not callable(function):
        return (
            f"is of type {type(function).__name__}, but must be callable: give a function "
            "f(prompts, completions, **kwargs) -> list[float]."
        )
    return ""


def function_name(function: Any) -> str:
    """Return a function's name. A partial has its function's name, an object its class's name."""
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def code_digest(function: Any) -> str:
    """Return a digest of a function's source, and of its module's statements that define the names it uses. Comments,
    formatting and values that a module computes don't count. Without sources it is an empty module's digest."""
    function = _unwrapped(function)
    function = function if inspect.isroutine(function) else type(function)
    found, defined = hashlib.blake2b(digest_size=8), dict[str, list[ast.stmt]]()
    for statement in _parsed(sys.modules.get(function.__module__)).body:
        names: set[str] = set()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {statement.name}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        for name in names:
            defined.setdefault(name, []).append(statement)
    todo: list[ast.AST] = [_parsed(function)]
    for node in todo:  # the loop appends to `todo`
        found.update(ast.dump(node).encode())
        for name in sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)}):
            todo += defined.pop(name, [])
    return found.hexdigest()


def _parsed(thing: Any) -> ast.Module:
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    return ast.Module([], [])
