"""A vision-language model that calls tools, and tools and an environment that return images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_images
from datasets import Dataset

# As `tiny.TOOL_TEMPLATE`, with contents as parts.
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLACEHOLDERS = {
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "gemma3_vl": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
PLACEHOLDERS["qwen3_vl"] = PLACEHOLDERS["qwen2_5_vl"]
CALL = r'<tool_call>\{"name": "(look|add)", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'


def look(a: int, b: int) -> list[dict[str, Any]]:
    """Shows pictures.

    Args:
        a: which
        b: likewise
    """
    several = [{"type": "image", "image": tiny_images.picture(n, 32 + 16 * (n % 3))} for n in (a, b)[: 1 + a % 2]]
    return [*several, {"type": "text", "text": f"{a}{b}"}]


class Room:
    """Begins with a picture, and shows others."""

    def reset(self, start: int = 0, **row: Any) -> list[dict[str, Any]]:
        self.at = start
        return [{"type": "text", "text": "here "}, {"type": "image", "image": tiny_images.picture(start)}]

    def go(self, a: int, b: int) -> list[dict[str, Any]]:
        """Goes on.

        Args:
            a: how far
            b: no matter
        """
        self.at += a
        return [{"type": "image", "image": tiny_images.picture(self.at)}]


def processor_of(family: str) -> tuple[Any, Any]:
    model, tokenizer = tiny_images.random_model(family, max_position_embeddings=1024)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", PLACEHOLDERS[family])
    return model, tiny_images.PROCESSORS[family](tokenizer)


def make_model(folder: Path, family: str) -> Path:
    tiny_images.make_model(folder, family, max_position_embeddings=1024)
    processor_of(family)[1].save_pretrained(folder)
    return folder


SETTINGS: dict[str, Any] = {  # every turn is a call
    "max_completion_length": 340,
    "vllm_structured_outputs_regex": CALL,
    "vllm_importance_sampling_correction": False,
    "max_tool_calling_iterations": 2,
}


def rows(size: int = 8) -> Dataset:
    """The first without a picture."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"{'so ' * (i % 3)}{i}"}],
                "images": [tiny_images.picture(i)] if i else [],
                "start": i,
            }
            for i in range(size)
        ]
    )
