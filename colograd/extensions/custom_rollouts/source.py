"""Rollouts from the user's code: a function (TRL's ``rollout_func``), or a class that is a rollout source."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ...batch import FinishReason, Group, ModelInput, Prompt, Rollout
from ...config import GRPOConfig
from ...engine.protocol import Engine
from ...engine.sampling import Sampling
from ...policy.loading import Policy
from ...rewards.calling import RESERVED
from ...rollout.features import TRUNCATED, UNCORRECTED, SourceFeature, TrainerArguments
from ...runtime import registry
from ...runtime.importing import find_object
from ...usercode.untrusted import own_copy

SEQUENCES = (list, tuple, np.ndarray, torch.Tensor)
NEEDED = ("prompt_ids", "completion_ids", "logprobs")


class UserFeature(SourceFeature):
    adds_columns = True

    def __init__(self, write: Any) -> None:
        self.write = write
        self.adds_metrics = isinstance(write, type)
        self.add_advantages = next(iter(registry.hooks("add_advantages")), None) if hasattr(write, "generate") else None
        self.trl_attributes = {"rollout_func": lambda: write}

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        write, others = arguments.sources["rollout_func"], arguments.sources
        if write is None:
            return None
        if others["tools"] or others["environment_factory"] is not None:
            remedy = "remove rollout_func, or remove `tools` and `environment_factory`"
            raise ValueError(f"The trainer can't use `tools` or `environment_factory` with rollout_func: {remedy}.")
        if isinstance(write, str):
            write = find_object(write, "rollout_func", callable)
        if hasattr(write, "generate"):
            return cls(write)
        if isinstance(write, type):
            remedy = "add `generate` (docs/architecture.md, Add a rollout source), or give a function"
            raise ValueError(f"rollout_func is the class {write.__name__}, which has no method `generate`: {remedy}.")
        if config.router_replay:
            raise ValueError(
                "router_replay is true, but rollout_func is a function, which can't return the experts that the engine "
                "chose: set router_replay: false, or set rollout_func to a class with a method `generate` "
                "(docs/architecture.md, Add a rollout source)."
            )
        if config.replays_truncation:
            raise ValueError(f"{TRUNCATED} a rollout_func doesn't return the truncated distribution: {UNCORRECTED}")
        return cls(write)

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> Any:
        write = self.write
        if hasattr(write, "generate"):
            return write(engine) if isinstance(write, type) else write
        return CustomRollouts(engine, lambda prompts: write(prompts, trainer), policy.end_tokens)


@dataclass(eq=False)
class CustomRollouts:
    """A rollout source that calls a user's function in place of the engine.

    The function is ``f(prompts) -> dict``. ``prompts`` has each prompt once per completion (repetitions adjacent).
    The dict holds ``prompt_ids``, ``completion_ids`` and ``logprobs`` (in nats), one list per completion. ``env_mask``
    is optional (1: the model wrote the token, 0: the environment did). Reward functions get all other entries:
    sequences with a value per completion, or single values that apply to all completions."""

    engine: Engine
    function: Callable[[list[Any]], dict[str, Any]]
    end_tokens: Collection[int | None]  # A completion that ends with none of these tokens counts as truncated.

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        self.engine.require(version)
        if not prompts:
            return
        if any(prompt.input.media is not None for prompt in prompts):
            remedy = "set it to a class with `generate` (docs/architecture.md, Add a rollout source), or remove it"
            raise ValueError(f"rollout_func is a function, which is called without the prompts' images: {remedy}.")
        asked = [own_copy(prompt.example["prompt"]) for prompt in prompts for _ in range(sampling.n)]
        rollouts = iter(self._rollouts(self.function(asked), len(asked), version))
        for prompt in prompts:
            yield Group(prompt.example, tuple(itertools.islice(rollouts, sampling.n)), prompt.position)

    def _rollouts(self, answer: dict[str, Any], size: int, version: int) -> list[Rollout]:
        if not isinstance(answer, dict) or any(answer.get(name) is None for name in NEEDED):
            held = repr(answer)
            if isinstance(answer, dict):
                held = ", ".join(name for name, values in answer.items() if values is not None) or "an empty dict"
            raise ValueError(f"rollout_func returned {held}, but must return a dict with {', '.join(NEEDED)}.")
        answer = {name: values for name, values in answer.items() if values is not None}
        if reserved := {*answer} & {*RESERVED, "environments"} - {*NEEDED}:
            names = ", ".join(sorted(reserved))
            raise ValueError(f"rollout_func returned entries with reserved names ({names}): rename these entries.")
        for name, values in answer.items():
            if name not in (*NEEDED, "env_mask") and not isinstance(values, SEQUENCES):
                answer[name] = [values] * size
            elif not hasattr(values, "__len__") or len(values) != size:
                number = len(values) if hasattr(values, "__len__") else "a single"
                rule = "return one per item of `prompts` (an item per completion), in the same order"
                raise ValueError(f"rollout_func returned {number} `{name}` for {size} completions: {rule}.")
        masks = answer.pop("env_mask", [[1] * len(ids) for ids in answer["completion_ids"]])
        needed, rollouts = [answer.pop(name) for name in NEEDED], []
        for index, (prompt, ids, logprobs, mask) in enumerate(zip(*needed, masks, strict=True)):
            where = f"rollout_func: completion {index} has"
            if not len(ids) == len(logprobs) == len(mask) or not len(ids):
                counts = f"{len(ids)} completion_ids, {len(logprobs)} logprobs and {len(mask)} values in env_mask"
                raise ValueError(f"{where} {counts}, but the three numbers must be equal, and at least 1.")
            prompt_ids, tokens = tuple(map(int, prompt)), [*map(int, ids)]
            if wrong := [each for each in (*prompt_ids, *tokens) if not 0 <= each < self.engine.vocab_size]:
                rule = f"must be in [0, {self.engine.vocab_size:,}) (the model's vocabulary): use the model's tokenizer"
                raise ValueError(f"{where} the token id {wrong[0]}, but token ids {rule}.")
            first = [value[0] if isinstance(value, (list, tuple)) else value for value in logprobs]
            flat = torch.tensor([math.nan if value is None else float(value) for value in first], dtype=torch.float32)
            end = FinishReason.STOP if tokens[-1] in self.end_tokens else FinishReason.LENGTH
            sampled, columns = torch.tensor([*map(bool, mask)]), {name: of[index] for name, of in answer.items()}
            read, written = ModelInput(prompt_ids), array("i", tokens)
            rollouts.append(Rollout(read, written, flat, sampled, end, version, columns=columns))
        return rollouts
