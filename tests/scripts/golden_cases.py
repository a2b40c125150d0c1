"""Tiny runs with the real engine, one per optional feature, for tests/benchmarks/checkouts.py.

Like checkout_run.py, this file takes nothing from the package: it must describe runs of any version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

SHORT: dict[str, Any] = {
    "num_generations": 4,
    "prompts_per_step": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "gradient_checkpointing": False,
    "seed": 7,
}
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'
TALKING = {
    "max_completion_length": 160,
    "prompts_per_step": 2,
    "max_steps": 2,
    "vllm_structured_outputs_regex": CALL,
    "vllm_importance_sampling_correction": False,
}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0}
CURRICULUM = {
    "pass_threshold": 0.5,
    "solved_at": 0.5,
    "revisit_after": 1,
    "shares": {"new": 0.5, "hard": {0: 1, 6: 0.1}},
}

# name -> settings, and in addition `model` (a key of `MODELS` in checkouts.py), `peft`, `data`, `tools`, `agent`.
ONE_RANK: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"model": "untied"},
    "bfloat16": {"dtype": "bfloat16", "bf16": True},
    "muon": {"dtype": "bfloat16", "bf16": True, "optim": "muon"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "data": "evaluated"},
    "reference": {"beta": 0.05},
    "dynamic sampling": {"dynamic_sampling": True},
    "LoRA, served": {"peft": LORA},
    "LoRA, merged": {"peft": LORA, "weights": "copied"},
    "DoRA": {"peft": LORA | {"use_dora": True}},
    "quantized": {"peft": LORA, "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    "experts": {"model": "experts"},
    "experts, replayed": {"model": "experts", "router_replay": True},
    "hybrid": {"model": "hybrid"},
    "images": {"model": "images", "data": "images", "max_completion_length": 8, "prompts_per_step": 2},
    "teacher": {"teacher_model_name_or_path": "TEACHER"},
    "teacher, top_k": {"teacher_model_name_or_path": "TEACHER", "distillation_kl": "top_k", "distillation_top_k": 8},
    "kept tokens": {"top_k": 8, "top_p": 0.9},
    "curriculum": {"curriculum": CURRICULUM, "prompts_per_step": 2, "max_steps": 6},
    "carried over": {
        "carry_over": 0.6,
        "generation_kwargs": {"stop_token_ids": [*range(3, 256, 8)]},
        "max_completion_length": 48,
        "max_steps": 4,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "tools": {"tools": True, "model": "talker", "data": "questions", **TALKING, "max_completion_length": 340},
    "agent": {"agent": True, "model": "talker", "data": "questions", **TALKING},
    "checkpointing": {"gradient_checkpointing": True},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "ranks": {},
    "ranks, optimizer": {"sharding": "optimizer"},
    "ranks, gradients": {"sharding": "gradients"},
    "ranks, fsdp": {"sharding": "fsdp"},
    "ranks, tensor": {"sharding": "tensor", "vllm_tensor_parallel_size": 2, "model": "two key heads"},
    "ranks, sequence": {"sequence_parallel_size": 2, "model": "two key heads"},
    "ranks, LoRA": {"peft": LORA},
    "ranks, teacher": {"teacher_model_name_or_path": "TEACHER"},
}
NOT_SETTINGS = ("model", "peft", "data", "tools", "agent", "dtype", "quantization")


def settings_of(case: dict[str, Any], models: dict[str, str]) -> dict[str, Any]:
    """The arguments of `GRPOConfig` for a case."""
    given = SHORT | {name: value for name, value in case.items() if name not in NOT_SETTINGS}
    if given.get("teacher_model_name_or_path") == "TEACHER":
        given["teacher_model_name_or_path"] = models["teacher"]
    loading: dict[str, Any] = {"dtype": case.get("dtype", "float32")}
    if "quantization" in case:
        loading["quantization_config"] = case["quantization"]
    if "tools" in case or "agent" in case:
        given["chat_template_path"] = models["tool template"]
    if "tools" in case:
        # Between two engine steps: an answer's timing would decide which turns share a forward, and so its rounding.
        given |= {"tool_workers": 0, "main_thread_tools": ["add"], "max_tool_calling_iterations": 2}
    if "agent" in case:
        # One sequence at a time: when a request comes would decide which others it shares a forward with.
        given["vllm_engine_kwargs"] = {"max_num_seqs": 1}
    return {"bf16": False} | given | {"model_init_kwargs": loading}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def agent(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Ask two questions, the second behind the first one's answer; the reward is of the answers' bytes."""
    from openai import OpenAI

    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    text = ""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(2):
            reply = client.chat.completions.create(model=model, messages=messages, max_tokens=70)
            text += reply.choices[0].message.content or ""
            messages += [reply.choices[0].message, {"role": "user", "content": "and then?"}]
    return sum(map(ord, text)) % 7 / 6


def data_of(kind: str) -> Dataset:
    """The prompts of a case."""
    if kind == "questions":
        rows = [
            {"prompt": [{"role": "user", "content": f"what is {i}?"}], "question": f"what is {i}?"} for i in range(8)
        ]
        return Dataset.from_list(rows)
    rows = [{"prompt": [{"role": "user", "content": f"{'count ' * (i % 3)}{i}"}]} for i in range(16)]
    if kind == "images":
        rows = [row | {"images": [picture(i)]} for i, row in enumerate(rows)]
    return Dataset.from_list(rows)


def picture(seed: int) -> Any:
    """Make a picture with random pixels of a seed."""
    from PIL import Image

    return Image.frombytes("RGB", (32, 32), bytes((seed * 37 + place * 11) % 256 for place in range(3 * 32 * 32)))


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs between random completions."""
    texts = [json.dumps(completion) for completion in completions]
    return [sum(ord(char) % 7 for char in text) / (6 * max(len(text), 1)) for text in texts]


def make_models(folder: Path) -> dict[str, str]:
    """Save the models of all cases; run with the helpers of tests/ and their package on the path."""
    import tiny
    import tiny_images

    template = folder / "tools.jinja"
    template.write_text(tiny.TOOL_TEMPLATE)
    made = {
        "plain": tiny.make_model(folder / "plain"),
        "untied": tiny.make_model(folder / "untied", tied=False),
        "experts": tiny.make_model(folder / "experts", "qwen3_moe"),
        "hybrid": tiny.make_model(folder / "hybrid", "lfm2"),
        "two key heads": tiny.make_model(folder / "heads", heads=4, keys=2, width=128),
        "teacher": tiny.make_model(folder / "teacher", layers=4),
        "images": tiny_images.make_model(folder / "images", "idefics3"),
        "talker": tiny.make_model(folder / "talker", context=1024),
    }
    return {name: str(path) for name, path in made.items()} | {"tool template": str(template)}
