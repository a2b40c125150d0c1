"""The examples of TRL's documentation for its GRPOTrainer (docs/source/grpo_trainer.md and the README), with the import
changed, and model and dataset replaced by local ones. Then parts of TRL's interface that need no run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from datasets import Dataset, IterableDataset

from colograd import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer
from colograd import train as script
from colograd.batch import Prompt
from colograd.engine.sampling import Sampling
from colograd.rewards import accuracy_reward  # was: from trl.rewards import accuracy_reward

engine = pytest.mark.engine
PROMPTS = Dataset.from_dict({"prompt": [f"The number {n} is" for n in range(8)]})


def settings(folder: Path, **changes: Any) -> GRPOConfig:
    """Small settings with TRL's names, without Colograd's own."""
    given: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "use_vllm": True,
        "vllm_mode": "colocate",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
        "max_steps": 2,
        "model_init_kwargs": {"dtype": "float32"},  # processors without bfloat16 are slow at it
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**(given | changes))


def steps(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Return the logged metrics of all steps."""
    found = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert found and all(entry["grad_norm"] >= 0 for entry in found)
    return found


def test_none_means_the_default(tmp_path: Path) -> None:
    """TRL's sudoku.py and browsergym_llm.py set ``top_p=None``, their command line's default."""
    names = ["top_p", "temperature", "top_k", "repetition_penalty", "top_entropy_quantile", "epsilon", "beta"]
    names += ["learning_rate", "num_iterations", "report_groups", "loss_type", "vllm_mode", "weight_decay"]
    config, usual = settings(tmp_path, **dict.fromkeys(names)), settings(tmp_path)
    assert [getattr(config, name) for name in names] == [getattr(usual, name) for name in names]
    assert sorted(config.notes) == sorted(
        f"config: `{name}` is None, which means its default, {getattr(usual, name)!r}" for name in names
    )
    numbers = [f.name for f in dataclasses.fields(GRPOConfig) if f.init and isinstance(f.default, int | float)]
    needed = ("num_generations", "max_completion_length")
    for name in needed:
        with pytest.raises(ValueError, match=f"{name} is None, but"):
            settings(tmp_path, **{name: None})
    settings(tmp_path, **dict.fromkeys(name for name in numbers if name not in needed))
    given = {"top_p": None, "min_tokens": 2}
    assert Sampling.for_training(settings(tmp_path, generation_kwargs=given)).options["top_p"] == 1.0


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for TRL's default of 512 new tokens. Every eighth token ends a completion."""
    folder = tiny.make_model(tmp_path_factory.mktemp("models") / "tiny-long", layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, *range(3, 256, 8)]}))
    return folder


@engine
def test_quickstart(long_model, tmp_path, monkeypatch, closing) -> None:
    """No configuration is passed, so TRL's defaults hold."""
    monkeypatch.chdir(tmp_path)
    dataset = Dataset.from_dict({"prompt": ["What is 1/3 + 1/3?"], "solution": [r"$\frac{2}{3}$"]})

    trainer = GRPOTrainer(
        model=str(long_model),
        reward_funcs=accuracy_reward,
        train_dataset=dataset,
    )
    trainer.train()

    closing(trainer)
    assert trainer.state.global_step == 3 and Path(trainer.args.output_dir).name == "tiny-long-GRPO"
    assert (trainer.args.num_generations, trainer.args.max_completion_length) == (8, 512)
    assert trainer.state.num_input_tokens_seen > 8 * 3


@engine
def test_custom_reward_function(tiny_model, tmp_path, closing) -> None:
    """Rewards longer completions, by their tokens; with the trainer's state, as the documentation describes it."""
    seen = []

    def reward_func(completion_ids, trainer_state, **kwargs):
        seen.append(trainer_state.global_step)
        return [float(len(ids)) for ids in completion_ids]

    trainer = closing(
        GRPOTrainer(model=str(tiny_model), reward_funcs=reward_func, args=settings(tmp_path), train_dataset=PROMPTS)
    )
    trainer.train()
    for entry in steps(trainer):
        assert entry["reward"] == entry["rewards/reward_func/mean"] == pytest.approx(entry["completions/mean_length"])
    assert sorted(set(seen)) == [0, 1]
    assert trainer.reward_funcs == [reward_func] and trainer.num_generations == 4 and trainer.ref_model is None


@engine
def test_conversational_format_with_dataset_columns(tiny_model, tmp_path, closing) -> None:
    """Format and reference rewards: messages in and out, and a column of the dataset by its name."""
    told = []

    def format_reward_func(completions, **kwargs):
        pattern = r"^<think>.*?</think><answer>.*?</answer>$"
        completion_contents = [completion[0]["content"] for completion in completions]
        matches = [re.match(pattern, content) for content in completion_contents]
        return [1.0 if match else 0.0 for match in matches]

    def reference_reward_func(completions, ground_truth, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        told.extend(zip((prompt[0]["content"] for prompt in kwargs["prompts"]), ground_truth, strict=True))
        return [float(gt in c) for c, gt in zip(contents, ground_truth, strict=True)]

    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "ground_truth": chr(97 + n)} for n in range(8)]
    trainer = closing(
        GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=[format_reward_func, reference_reward_func],
            args=settings(tmp_path),
            train_dataset=Dataset.from_list(rows),
        )
    )
    trainer.train()
    assert len(told) == 16 and all(truth == chr(97 + int(said[0])) for said, truth in told)
    assert all("rewards/reference_reward_func/mean" in entry for entry in steps(trainer))
    assert all(entry["rewards/format_reward_func/mean"] == 0 for entry in steps(trainer))


@engine
def test_async_rewards_with_weights_on_a_streamed_dataset(tiny_model, tmp_path, closing) -> None:
    """Two functions wait at the same time; the reward is their weighted sum."""
    running = [0, 0]

    async def length_reward(completions, **kwargs):
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.05)
        running[0] -= 1
        return [float(len(completion)) for completion in completions]

    async def letters_reward(completions, **kwargs):
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.05)
        running[0] -= 1
        return [float(len(set(completion))) for completion in completions]

    trainer = closing(
        GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=[length_reward, letters_reward],
            args=settings(tmp_path, reward_weights=[0.1, 2.0]),
            train_dataset=IterableDataset.from_generator(lambda: iter(PROMPTS)),
        )
    )
    trainer.train()
    assert running[1] >= 2, "concurrently"
    for entry in steps(trainer):
        parts = 0.1 * entry["rewards/length_reward/mean"] + 2.0 * entry["rewards/letters_reward/mean"]
        assert entry["reward"] == pytest.approx(parts, rel=1e-5)


@engine
def test_multi_task_reward_functions(tiny_model, tmp_path, closing) -> None:
    """Each row is judged by its task's function; None leaves it to the others."""

    def math_reward_func(prompts, completions, task, **kwargs):
        return [float("1" in c) if t == "math" else None for c, t in zip(completions, task, strict=True)]

    def coding_reward_func(prompts, completions, task, **kwargs):
        return [float("(" in c) - 1.0 if t == "coding" else None for c, t in zip(completions, task, strict=True)]

    dataset = Dataset.from_list(
        [
            {"prompt": "What is 2+2?", "task": "math"},
            {"prompt": "Write a function that returns the sum of two numbers.", "task": "coding"},
            {"prompt": "What is 3*4?", "task": "math"},
            {"prompt": "Write a function that returns the product of two numbers.", "task": "coding"},
        ]
    )
    trainer = closing(
        GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=[math_reward_func, coding_reward_func],
            args=settings(tmp_path, shuffle_dataset=False),
            train_dataset=dataset,
        )
    )
    trainer.train()
    for entry in steps(trainer):
        maths, coding = (entry[f"rewards/{name}_reward_func/mean"] for name in ("math", "coding"))
        assert 0 <= maths <= 1 and -1 <= coding <= 0
        assert entry["reward"] == pytest.approx((maths + coding) / 2), "a group of each task in a step"


@engine
def test_an_environment_may_bring_all_prompts(tmp_path, closing) -> None:
    """Without a dataset `reset` returns the whole user message, and `max_steps` ends the training."""
    made = []

    class Game:
        def reset(self, **row):
            made.append(row)
            return f"game {len(made)}"

        def move(self, to: str) -> str:
            """Moves.

            Args:
                to: where
            """
            return to

        def get_reward(self) -> float:
            return float(len(made) % 3)

    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = tiny.TOOL_TEMPLATE
    trainer = closing(
        GRPOTrainer(
            model=str(tiny.make_model(tmp_path / "model")),
            args=settings(tmp_path, max_steps=3),
            processing_class=tokenizer,
            environment_factory=Game,
        )
    )
    trainer.train()
    assert len(steps(trainer)) == 3 and len(made) == 3 * 8 and not any(made) and len(trainer.train_dataset) == 2


@engine
def test_lora_with_evaluation(tiny_model, tmp_path, closing) -> None:
    from peft import LoraConfig

    before = PROMPTS.select(range(2))
    trainer = closing(
        GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=tiny.vowels,
            args=settings(
                tmp_path, eval_strategy="steps", eval_steps=1, num_generations_eval=2, per_device_eval_batch_size=4
            ),
            train_dataset=PROMPTS,
            eval_dataset={"some": before, "streamed": IterableDataset.from_generator(lambda: iter(before))},
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=4),
        )
    )
    trainer.train()
    assert steps(trainer)
    found = [entry for entry in trainer.state.log_history if "eval_some_reward" in entry]
    assert len(found) == 2
    for entry in found:
        assert entry["eval_some_reward"] == entry["eval_streamed_reward"]
        assert entry["eval_some_rewards/vowels/mean"] == pytest.approx(entry["eval_some_reward"])
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@engine
def test_a_rollout_function_samples_with_the_engine(tiny_model, tmp_path, closing) -> None:
    """TRL's examples ask `trainer.vllm_generation`, which is absent here: docs/guide/tools.md names the replacement."""

    def rollout(prompts, trainer):
        tokenizer, step = trainer.processing_class, trainer.state.global_step
        asked = [Prompt({"prompt": p}, tuple(tokenizer(p).input_ids), i) for i, p in enumerate(prompts)]
        sampling = dataclasses.replace(Sampling.for_training(trainer.args), n=1)
        groups = trainer.engine.generate(asked, sampling, version=step, seed=step)
        written = [group.rollouts[0] for group in sorted(groups, key=lambda group: group.position)]
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in written],
            "completion_ids": [rollout.completion_ids for rollout in written],
            "logprobs": [rollout.sampler_logprobs.tolist() for rollout in written],
        }

    trainer = closing(
        GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=tiny.vowels,
            args=settings(tmp_path),
            train_dataset=PROMPTS,
            rollout_func=rollout,
        )
    )
    trainer.train()
    assert all(entry["reward_std"] > 0 for entry in steps(trainer))
    assert all(entry["sampling/sampling_logp_difference/mean"] < 0.1 for entry in steps(trainer))


RECIPE = """
env:
  COLOGRAD_TEST_OF_TRL: "1"
# Model arguments
model_name_or_path: MODEL
model_revision: main
dtype: float32
attn_implementation: sdpa
use_peft: false
lora_r: 16
load_in_4bit: false
bnb_4bit_quant_type: nf4
# Data
dataset_name: FOLDER
dataset_config: null
dataset_train_split: train
dataset_test_split: test
dataset_streaming: true
ignore_bias_buffers: false
# Rewards
reward_funcs:
  - MODULE.letters
  - think_format_reward
  - get_soft_overlong_punishment
reward_weights: [1.0, 0.5, 0.1]
# GRPO
bf16: true
use_vllm: true
vllm_mode: colocate
vllm_model_impl: vllm
vllm_gpu_memory_utilization: 0.3
vllm_tensor_parallel_size: 1
vllm_server_port: 8001
vllm_importance_sampling_correction: true
vllm_importance_sampling_mode: token_truncate
vllm_importance_sampling_cap: 2.0
num_generations: 4
max_completion_length: 12
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
beta: 0.0
loss_type: dapo
scale_rewards: group
epsilon: 0.2
epsilon_high: 0.28
mask_truncated_completions: false
temperature: 1.0
top_p: 1.0
top_k: 0
cache_implementation: null
cast_lm_head_to_fp32: false
log_completions: true
num_completions_to_print: 1
# Training
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_steps: 0.1
max_steps: 2
eval_strategy: steps
eval_steps: 2
logging_steps: 1
save_strategy: "no"
report_to: none
disable_tqdm: true
seed: 3
output_dir: OUT
push_to_hub: false
"""


def test_the_recipe_has_trls_keys_only() -> None:
    trl = pytest.importorskip("trl")
    of_script = importlib.import_module("trl.scripts.grpo").GRPOScriptArguments
    groups = (of_script, trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    theirs = {name for group in groups for name in group.__dataclass_fields__}
    assert yaml.safe_load(RECIPE).keys() - theirs == {"env"}, "which its parser takes by itself"


@engine
def test_a_recipe_of_trls_script_trains(tiny_model, tmp_path, monkeypatch, capfd) -> None:
    """`trl grpo --config recipe.yaml` is `colograd train --config recipe.yaml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLOGRAD_TEST_OF_TRL", raising=False)
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def letters(completions, **kwargs):\n    return [float(len(set(c))) for c in completions]\n"
    )
    (tmp_path / "data").mkdir()
    PROMPTS.to_json(tmp_path / "data" / "train.jsonl")
    PROMPTS.select([0]).to_json(tmp_path / "data" / "test.jsonl")
    text = RECIPE.replace("MODEL", str(tiny_model)).replace("MODULE", name)
    (tmp_path / "recipe.yaml").write_text(text.replace("FOLDER", str(tmp_path / "data")).replace("OUT", "run"))
    assert script.main(["--config", "recipe.yaml", "--seed", "4"]) == 0
    said = capfd.readouterr().out
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "reward" in entry]
    assert len(logs) == 2 and all(entry["rewards/letters/mean"] > 0 for entry in logs)
    assert any("eval_reward" in entry for entry in state["log_history"])
    assert (
        "config: `vllm_server_port` has no effect" in said and "`vllm_importance_sampling_cap` is the old name" in said
    )
    assert (tmp_path / "run" / "completions" / "completions_00002.parquet").is_file()
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_constructor_begins_with_trl_arguments() -> None:
    theirs = inspect.signature(pytest.importorskip("trl").GRPOTrainer.__init__).parameters
    ours = inspect.signature(GRPOTrainer.__init__).parameters
    assert list(ours) == [*theirs, "agent"]


def test_trl_scripts_import_helpers_and_pass_bare_flags() -> None:
    """The scripts gspo.py and grpo_vlm.py run with `trl` replaced by `colograd` in their imports."""
    from colograd import (
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )

    flags = [
        "--gradient_checkpointing",
        "--bf16",
        "--use_vllm",
        "--use_peft",
        "--lora_target_modules",
        "q_proj",
        "v_proj",
    ]
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    _, config, model = parser.parse_args_and_config(args=[*flags, "--output_dir", "unused"])
    assert config.gradient_checkpointing is True and config.bf16 is True and not get_kbit_device_map()[""]
    assert get_peft_config(model).target_modules == {"q_proj", "v_proj"} and get_quantization_config(model) is None
