"""The built-in reward functions, by the names that `reward_funcs` in a recipe uses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from ..runtime import registry
from .answers import gsm8k_reward, has_thought_apart, last_number, text_of, thought_begun

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: list[Any], prompt_texts: list[str] | None = None, **kwargs: Any) -> list[float]:
    """Return 1.0 if the completion starts with exactly one ``<think>...</think>`` block, else 0.0, as in TRL.

    The block may begin in the prompt, if the chat template ends with ``<think>``. A thought that the tokenizer's parser
    has moved to a separate key of the message counts as such a block."""
    begun = thought_begun(prompt_texts, len(completions))
    return [
        float(has_thought_apart(completion) or _THINK.match("<think>" * within + text_of(completion)) is not None)
        for completion, within in zip(completions, begun, strict=True)
    ]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make DAPO's soft punishment of long completions (https://arxiv.org/abs/2503.14476, equation 13), as in TRL.

    With L = ``max_completion_len``, K = ``soft_punish_cache`` and n tokens in the completion, the reward is

        0                  for n <= L - K
        (L - K - n) / K    for L - K < n <= L
        -1                 for n > L

    n counts only the tokens that the model wrote. TRL also counts tokens of tools, which the model can't shorten.

    Args:
        max_completion_len: L in tokens, usually the run's ``max_completion_length``.
        soft_punish_cache: K, the length in tokens of the range below L where the reward falls from 0 to -1.

    Raises:
        ValueError: ``soft_punish_cache`` isn't between 1 and ``max_completion_len``.
    """
    if not 1 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache is {soft_punish_cache}, but soft_punish_cache must be from 1 to max_completion_len "
            f"({max_completion_len})."
        )

    def soft_overlong_punishment_reward(
        completion_ids: list[list[int]], completion_mask: list[list[int]] | None = None, **kwargs: Any
    ) -> list[float]:
        lengths = map(len, completion_ids) if completion_mask is None else map(sum, completion_mask)
        free = max_completion_len - soft_punish_cache
        return [min(0.0, max(-1.0, (free - length) / soft_punish_cache)) for length in lengths]

    return soft_overlong_punishment_reward


@functools.cache
def builtin_rewards() -> dict[str, Callable[..., Any]]:
    """Return all named reward functions, name -> function: built-in ones and functions that extensions offer."""
    return {
        "last_number": last_number,
        "gsm8k_reward": gsm8k_reward,
        "think_format_reward": think_format_reward,
        # Name and values are TRL's. For different values, a user's module calls `get_soft_overlong_punishment`.
        "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
        **{function.__name__: function for function in registry.hooks("rewards")},
    }
