"""Train with the package on PYTHONPATH and write its results. Started by tests/benchmarks/checkouts.py.

    python checkout_run.py JOB.json ANSWER.json        (under torchrun, each rank writes ANSWER.json.RANK)

It must run with any version of the package, so it takes nothing but `GRPOTrainer` and `GRPOConfig` from it, nor
anything from tests/helpers/tiny.py, which follows the package: the tiny model and its task are made here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import colograd  # before torch, which reads the number of threads that it sets

JOB = json.loads(Path(sys.argv[1]).read_text())
if not Path(colograd.__file__).is_relative_to(JOB["checkout"]):
    sys.exit(f"colograd was imported from {colograd.__file__}, but must come from {JOB['checkout']}.")

import golden_cases  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402

from colograd import GRPOConfig, GRPOTrainer  # noqa: E402

RANK = os.environ.get("RANK")  # of torchrun
ADAPTER = {  # names in recipes, and peft's
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
}
LONGEST = 12  # tokens of a recorded completion
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TINY: dict[str, Any] = {
    "model_init_kwargs": {"dtype": "float32"},
    "bf16": False,
    "num_generations": 4,
    "prompts_per_step": 4,
    "max_completion_length": LONGEST,
    "vllm_max_model_length": 64,
    "learning_rate": 1e-3,
    "max_steps": 4,
    "gradient_checkpointing": False,
    "seed": 7,
}
SEVERAL = {"max_tokens_per_microbatch": 64}  # so that a step has several micro-batches
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "iterations": {"num_iterations": 2},
    "reference": {"beta": 0.04, "loss_type": "grpo", "scale_rewards": "batch"},
    "sequences": {
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "entropy": {"steps_per_generation": 2, "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "entropy, micro-batches": {"steps_per_generation": 2, "top_entropy_quantile": 0.5, "entropy_coef": 0.01, **SEVERAL},
    "micro-batches": SEVERAL,
    "LoRA": {"peft_config": {"r": 4, "target_modules": "all-linear"}},
}


class Recording(GRPOTrainer):
    """Keeps each step's loss."""

    def __init__(self, **given: Any) -> None:
        self.losses: list[str] = []
        self.completions: list[dict[int, list[list[int]]]] = []  # of each round, by the position of the prompt
        super().__init__(**given)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.double().item().hex())
        return loss

    def numbers(self) -> dict[str, Any]:
        """Return losses and SHA-256 of each round's completions and of the weights. Equal seeds must repeat them."""
        weights = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            if parameter.requires_grad:
                weights.update(name.encode())
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # FSDP's
                weights.update(whole.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        rounds = [json.dumps(sorted(round_.items())).encode() for round_ in self.completions]
        return {
            "losses": self.losses,
            "completions": [hashlib.sha256(round_).hexdigest() for round_ in rounds],
            "weights": weights.hexdigest(),
        }


class RecordingRounds(Recording):
    """Keeps each round's completions too. `carry_over` allows no `generate` of a subclass."""

    def generate(self, prompts: Any) -> Iterator[Any]:
        round_: dict[int, list[list[int]]] = {}
        self.completions.append(round_)
        for group in super().generate(prompts):
            round_[group.position] = [[int(token) for token in rollout.completion_ids] for rollout in group.rollouts]
            yield group


class Clock(TrainerCallback):
    """Seconds of each step, from the end of the one before: transformers samples before it calls on_step_begin."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float]] = []  # processor and wall-clock seconds

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.readings = [(time.process_time(), time.perf_counter())]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.readings.append((time.process_time(), time.perf_counter()))

    def steps(self) -> list[dict[str, float]]:
        pairs = zip(self.readings, self.readings[1:], strict=False)
        return [{"processor": end[0] - start[0], "wall": end[1] - start[1]} for start, end in pairs]


def trained(trainer: Recording) -> dict[str, Any]:
    """The numbers of a whole run."""
    trainer.train()
    found = trainer.numbers()
    trainer.close()
    return found


def settings(folder: str, **changes: Any) -> GRPOConfig:
    """Return the settings of a run that writes only into ``folder``, if it writes at all."""
    quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    return GRPOConfig(**({"output_dir": folder, "log_completions": False, "save_strategy": "no"} | changes | quiet))


def make_model(folder: Path) -> str:
    """Save a random Llama of two layers with a tokenizer of bytes; as tests/helpers/tiny.py does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "<pad>"]
    plain = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends, max_position_embeddings=256))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() == 2 else parameter.add_(torch.rand_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout_func. Its completions depend only on the prompt, its occurrence and the step."""
    step, tokenizer = trainer.state.global_step, trainer.processing_class
    answer: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    seen: dict[str, int] = {}
    for prompt in prompts:
        text = prompt[0]["content"]
        seen[text] = seen.get(text, 0) + 1
        draw = random.Random(f"{text} {seen[text]} {step}")
        ids = [draw.randrange(256) for _ in range(draw.randint(1, LONGEST))]
        if len(ids) < LONGEST:
            ids[-1] = tokenizer.eos_token_id
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        answer["prompt_ids"].append(tokenizer(rendered)["input_ids"])
        answer["completion_ids"].append(ids)
        answer["logprobs"].append([-5.5 + 0.2 * draw.random() for _ in ids])
    return answer


def bytes_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs between random completions."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(ord(char) % 7 for char in text) / (6 * max(len(text), 1)) for text in texts]


def recorded(folder: Path) -> dict[str, Any]:
    """Every case on made-up rollouts."""
    model = make_model(folder / "tiny")
    asked = [[{"role": "user", "content": f"{'count ' * (i % 3)}{i}"}] for i in range(16)]
    found = {}
    for name, changes in CASES.items():
        adapter = changes.get("peft_config")
        given = TINY | {key: value for key, value in changes.items() if key != "peft_config"}
        found[name] = trained(
            RecordingRounds(
                model=model,
                reward_funcs=[bytes_reward],
                args=settings(str(folder / "run"), **given),
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in asked]),
                peft_config=peft.LoraConfig(**adapter) if adapter else None,
                rollout_func=rollouts,
            )
        )
    return {"runs": found}


def from_recipe(folder: Path) -> dict[str, Any]:
    """A recipe's first steps through the engine, and their seconds."""
    recipe = yaml.safe_load(Path(JOB["recipe"]).read_text())
    # The task is code of the package, and the package's own recipe knows where in it.
    checkout = Path(JOB["checkout"])
    own = yaml.safe_load((checkout / "recipes" / Path(JOB["recipe"]).name).read_text())
    module, _, function = own["dataset_name"].partition(":")
    elsewhere = ("model_name_or_path", "dataset_name", "reward_funcs", "tools", "output_dir", "resume_from_checkpoint")
    given = {name: value for name, value in recipe.items() if name not in (*elsewhere, "use_peft", *ADAPTER)}
    given |= {
        "max_steps": JOB["steps"],
        "log_completions": False,
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "float32"},
    }
    if "chat_template_path" in own:
        given["chat_template_path"] = str(checkout / own["chat_template_path"])
    if tools := own.get("tools"):
        # Between two engine steps: an answer's timing would decide which turns share a forward, and so its rounding.
        given |= {"tool_workers": 0, "main_thread_tools": [tool.rpartition(":")[2] for tool in tools]}
    if adapter := {ADAPTER[name]: value for name, value in recipe.items() if name in ADAPTER}:
        targets = adapter["target_modules"]
        adapter["target_modules"] = targets[0] if targets == ["all-linear"] else targets
    trainer = RecordingRounds(
        model=JOB["model"],
        reward_funcs=own["reward_funcs"],
        args=settings(str(folder / "run"), **(given | {"bf16": False})),
        train_dataset=getattr(importlib.import_module(module), function)(),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **adapter) if adapter else None,
        tools=tools,
    )
    start = {"processor": time.process_time(), "wall": time.time() - JOB["started"]}
    clock = Clock()
    trainer.add_callback(clock)
    name = JOB["part"] if RANK is None else f"{JOB['part']}, rank {RANK}"
    return {"runs": {name: trained(trainer)}, "start": start, "steps": clock.steps()}


def with_engine(folder: Path) -> dict[str, Any]:
    """Each of the job's cases of `golden_cases`, sampled by the real engine."""
    cases = golden_cases.ONE_RANK | golden_cases.TWO_RANKS
    suffix = "" if RANK is None else f", rank {RANK}"
    return {"runs": {name + suffix: trained(of_case(cases[name], folder / f"run-{name}")) for name in JOB["cases"]}}


def of_case(case: dict[str, Any], run: Path, **changes: Any) -> Recording:
    """The trainer of a case of `golden_cases`."""
    models, data = JOB["models"], golden_cases.data_of(case.get("data", "plain"))
    evaluated = {"eval_dataset": data.select(range(4))} if case.get("data") == "evaluated" else {}
    adapter = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **case["peft"])} if "peft" in case else {}
    given = golden_cases.settings_of(case, models) | changes
    kind = Recording if "carry_over" in case else RecordingRounds
    return kind(
        model=models[case.get("model", "plain")],
        reward_funcs=None if "agent" in case else [golden_cases.reward],
        args=settings(str(run), **given),
        train_dataset=data,
        **({"tools": [golden_cases.add]} if "tools" in case else {}),
        **({"agent": golden_cases.agent} if "agent" in case else {}),
        **adapter,
        **evaluated,
    )


def history(folder: Path) -> dict[str, Any]:
    """Record a run of four steps into the job's folder; if it is there, resume its copy at the second step, where the
    last two steps are trained from its rollout log."""
    past = Path(JOB["history"])
    resumes = past.exists()
    run = folder / "run" if resumes else past
    if resumes:
        shutil.copytree(past, run)
        shutil.rmtree(run / "checkpoint-4")
    keeping = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "journal": "keep"}
    trainer = of_case(golden_cases.ONE_RANK["plain"], run, **keeping)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2") if resumes else None)
    found = trainer.numbers()
    trainer.close()
    return {"runs": {"history": found if resumes else {}}}


PARTS = {"recorded": recorded, "engine": with_engine, "engine, ranks": with_engine, "history": history}

if __name__ == "__main__":
    answer = PARTS.get(JOB["part"], from_recipe)(Path(sys.argv[1]).parent)
    Path(sys.argv[2] + ("" if RANK is None else f".{RANK}")).write_text(json.dumps(answer))
