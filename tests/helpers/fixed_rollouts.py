"""Rollouts that depend on the prompt and the step only."""

from __future__ import annotations

import random
from typing import Any

STEPS = 6


class Rollouts:
    """A rollout_func whose completions depend on the prompt, its occurrence and the step."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[str]]] = []  # step and prompts of each call

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        step, tokenizer = trainer.state.global_step, trainer.processing_class
        texts = [prompt[0]["content"] for prompt in prompts]
        self.asked.append((step, texts))
        seen: dict[str, int] = {}
        answer: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt, text in zip(prompts, texts, strict=True):
            seen[text] = seen.get(text, 0) + 1
            draw = random.Random(f"{text} {seen[text]} {step}")
            length = draw.randint(1, 12)
            ids = [draw.randrange(256) for _ in range(length)]
            if length < 12:
                ids[-1] = tokenizer.eos_token_id
            rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            answer["prompt_ids"].append(tokenizer(rendered)["input_ids"])
            answer["completion_ids"].append(ids)
            answer["logprobs"].append([-5.5 + 0.2 * draw.random() for _ in ids])
        return answer
