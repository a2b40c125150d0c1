"""Bad input is one clear error at the start: the value, the rule and the remedy.

The whole list is here; each case is raised where it is checked, without an engine. The last tests go through the
command.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from scoring_cases import score_group
from transformers import LlamaConfig, Trainer, TrainingArguments

from colograd.batch import FinishReason, Group, Rollout
from colograd.config import GRPOConfig, ModelConfig, ScriptArguments, parse_arguments
from colograd.data import PromptRules, StepOrder, load_datasets, tokenize_prompts
from colograd.engine.arguments import check_parts, engine_kwargs
from colograd.engine.building import check_vllm, untested_vllm
from colograd.engine.sampling import check_sampling
from colograd.extensions.reference.model import check_reference
from colograd.extensions.tools.feature import ToolFeature
from colograd.extensions.tools.toolbox import Toolbox
from colograd.policy.loading import check_tokenizer, load_policy
from colograd.policy.lora import Adapter
from colograd.rewards import RewardError, resolve_rewards
from colograd.rollout.features import SourceFeature
from colograd.runtime import process
from colograd.sharding import check_sharding
from colograd.trainer import GRPOTrainer
from colograd.training.preparation import prepared_config, train_prompts_of
from colograd.weights import check_choice

ROW = {"prompt": "2 + 2 =", "answer": "4"}


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**({"output_dir": "unused", "report_to": "none"} | changes))


def on_ranks(ranks: int, **changes: Any) -> Callable[[pytest.MonkeyPatch], object]:
    """A configuration where a launcher has started ``ranks`` ranks that have found each other."""

    def make(monkeypatch: pytest.MonkeyPatch) -> object:
        monkeypatch.setattr("colograd.config.engine.os", SimpleNamespace(environ={"WORLD_SIZE": str(ranks)}))
        monkeypatch.setattr(GRPOConfig, "world_size", ranks)
        return config(**changes)

    return make


def launched_with(**variables: str) -> Callable[[pytest.MonkeyPatch], object]:
    """A configuration of one rank where a launcher has set ``variables``."""

    def make(monkeypatch: pytest.MonkeyPatch) -> object:
        monkeypatch.setattr("colograd.config.engine.os", SimpleNamespace(environ=variables))
        return config()

    return make


def split(ranks: int, sizes: dict[str, int] | None = None, **changes: Any) -> Callable[[pytest.MonkeyPatch], object]:
    """A Llama of ``sizes`` in one engine of ``ranks`` ranks."""

    def make(monkeypatch: pytest.MonkeyPatch) -> object:
        monkeypatch.setattr(process, "local_world_size", lambda: ranks)
        made: Any = on_ranks(ranks, vllm_tensor_parallel_size=ranks, **changes)(monkeypatch)
        return check_parts(LlamaConfig(**(sizes or {})), made.vllm_tensor_parallel_size, made.world_size)

    return make


class Words:
    """A tokenizer: one token per word."""

    chat_template = None
    name_or_path = "words"

    def __call__(self, texts: list[str]) -> Any:
        return SimpleNamespace(input_ids=[[len(word) for word in text.split()] for text in texts])


def tokenize(rows: Any, limit: int = 100, overlong: str = "drop") -> Any:
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return tokenize_prompts(dataset, PromptRules(Words(), limit, overlong, {}, "train"))


def score(returned: Any, size: int = 3) -> torch.Tensor:
    """Score a reward function's result, for the prompt at position 17. The function raises an exception it is given."""

    def my_reward(completions: list[str], **columns: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    rollout = Rollout((1, 2), (3,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0)
    group = Group(dict(ROW), (rollout,) * size, position=17)
    return score_group(resolve_rewards(my_reward, None), group, ["4"] * size)[0]


def vllm(version: str | None) -> Callable[[pytest.MonkeyPatch], None]:
    def check(monkeypatch: pytest.MonkeyPatch) -> None:
        module = None if version is None else ModuleType("vllm")
        if module is not None:
            module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", module)
        check_vllm()

    return check


class Game:
    """An environment."""

    def reset(self, **row: Any) -> str:
        return "Guess."


def without_dataset(factory: Any, **changes: Any) -> object:
    """Return the prompts of a run without a dataset, from its environments."""
    feature = SourceFeature() if factory is None else ToolFeature(Toolbox(None, factory))
    return train_prompts_of(
        None, SimpleNamespace(context=600, tokenizer=Words(), processor=None, rows=0), config(**changes), feature
    )  # type: ignore[arg-type]


# name -> (the mistake, and in the message: the value, the rule, the remedy)
CASES: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str, str, str]] = {
    "an unknown key of the configuration": (
        lambda _: config(num_generation=4),
        "`num_generation`",
        "Unknown configuration key",
        "Did you mean `num_generations`",
    ),
    "an unknown key of the model": (
        lambda _: ModelConfig(model_name="m"),
        "`model_name`",
        "Unknown",
        "Did you mean `model_name_or_path`",
    ),
    "an unknown key of the script": (
        lambda _: ScriptArguments(reward_func=["a"]),
        "`reward_func`",
        "Unknown",
        "Did you mean `reward_funcs`",
    ),
    "an unknown flag": (
        lambda _: parse_arguments(["--learning_rat", "1"]),
        "`learning_rat`",
        "Unknown",
        "Did you mean `learning_rate`",
    ),
    "a key like no other": (
        lambda _: parse_arguments(["--xyzzy.a", "1"]),
        "`xyzzy`",
        "Unknown",
        r"docs/configuration\.md lists",
    ),
    "a key of TRL that isn't taken": (
        lambda _: config(cache_implementation="static"),
        "`cache_implementation`",
        "isn't supported: generation always runs in vLLM",
        "remove it",
    ),
    "a group size that doesn't divide the batch": (
        lambda _: config(per_device_train_batch_size=10, num_generations=4),
        r"10 \* 1 = 10 completions per engine",
        "one engine samples a whole group of num_generations = 4",
        r"multiple of 4 \(8 or 12 would do",
    ),
    "a group larger than the batch": (
        lambda _: config(per_device_train_batch_size=3, num_generations=4),
        "= 3 completions",
        "multiple of 4",
        r"\(4 would do",
    ),
    "prompts that don't divide among the ranks": (
        on_ranks(4, prompts_per_step=6),
        "prompts_per_step is 6",
        "multiple of the number of engines, 4,",
        "4 or 8 would do",
    ),
    "num_generations 1": (
        lambda _: config(num_generations=1),
        "num_generations is 1",
        "at least 2 completions",
        "Set num_generations to 2",
    ),
    "no reward function": (
        lambda _: resolve_rewards([], None),
        "no reward function",
        "needs at least one",
        "set reward_funcs to",
    ),
    "a reward module that can't be imported": (
        lambda _: resolve_rewards(["no_such_module:f"], None),
        "'no_such_module:f'",
        "can't be imported .*No module named",
        "Modules are found in the current directory",
    ),
    "a reward function that isn't in its module": (
        lambda _: resolve_rewards(["colograd.rewards:last_nmber"], None),
        "'colograd.rewards:last_nmber'",
        "has no attribute 'last_nmber'",
        "Did you mean 'last_number'",
    ),
    "a built-in reward misspelt": (
        lambda _: resolve_rewards(["acuracy_reward"], None),
        "'acuracy_reward'",
        "isn't one of",
        "nearest is 'accuracy_reward'",
    ),
    "no dataset": (
        lambda _: load_datasets(ScriptArguments()),
        "neither was given",
        "dataset_name|datasets",
        "give|set",
    ),
    "no dataset in Python": (
        lambda _: without_dataset(None),
        "train_dataset is missing",
        "datasets.Dataset",
        "with a column `prompt`",
    ),
    "no dataset to choose among environments": (
        lambda _: without_dataset({"game": Game}, max_steps=2),
        "train_dataset is missing",
        "environment_factory is a dict",
        "pass a single factory",
    ),
    "no dataset and no end": (
        lambda _: without_dataset(Game),
        "max_steps is -1",
        "but a run without a dataset needs an end",
        "set max_steps",
    ),
    "another trainer's configuration": (
        lambda _: prepared_config(TrainingArguments(output_dir="unused", report_to="none"), "m"),  # type: ignore[arg-type]
        "`args` is a transformers.TrainingArguments",
        "must be Colograd's own",
        "from colograd import GRPOConfig",
    ),
    "a dataset without prompts": (
        lambda _: tokenize([{"question": "a", "answer": "b"}]),
        "it has 'question', 'answer'",
        "no column 'prompt'",
        r"rename .*dataset_prompt_column",
    ),
    "an empty dataset": (
        lambda _: tokenize(Dataset.from_dict({"prompt": []})),
        "train has no rows",
        "no prompts to sample from",
        "train",
    ),
    "an overlong prompt where that is an error": (
        lambda _: tokenize([ROW, {"prompt": "a b c d e f", "answer": ""}], limit=5, overlong="error"),
        "row 1: the prompt has 6 tokens",
        "over the limit of 5",
        "`overlong_prompts: drop`",
    ),
    "nothing but overlong prompts": (
        lambda _: tokenize([ROW], limit=3),
        "all 1 prompts",
        "over the limit of 3 tokens",
        "raise max_prompt_tokens",
    ),
    "a setting for overlong prompts that doesn't exist": (
        lambda _: config(overlong_prompts="cut"),
        "`overlong_prompts` 'cut'",
        "isn't supported",
        "choose one of drop, error",
    ),
    "a missing model folder": (
        lambda _: load_policy("no/such/model/folder", None, config()),
        "'no/such/model/folder'",
        "neither a folder with a model nor a Hub model",
        "Name a folder",
    ),
    "a vLLM that is too old": (vllm("0.24.9"), r"vLLM 0\.24\.9", r"0\.25 to 0\.32", "pip install"),
    "a vLLM that is too new": (vllm("0.34.0rc1"), r"vLLM 0\.34\.0rc1", r"0\.25 to 0\.32", "pip install"),
    "no vLLM": (vllm(None), "vLLM can't be imported", r"vllm>=0\.25,<0\.33", "make setup"),
    "a tensor-parallel size that doesn't divide the ranks": (
        on_ranks(4, vllm_tensor_parallel_size=3),
        "vllm_tensor_parallel_size is 3",
        r"divide .* ranks \(4\)",
        "one of 1",
    ),
    "a tensor-parallel size of no rank": (
        lambda _: config(vllm_tensor_parallel_size=0),
        "is 0",
        r"ranks \(1\)",
        "choose one of 1",
    ),
    "a tensor-parallel size over machines": (
        on_ranks(8, vllm_tensor_parallel_size=8),
        "vllm_tensor_parallel_size is 8",
        r"must divide the ranks per machine \(1, LOCAL_WORLD_SIZE\)",
        "choose one of 1",
    ),
    "a way of publishing whole weights to parts of them": (
        split(2, weights="shared"),
        "weights is 'shared'",
        "an engine over several ranks holds parts",
        "weights: auto, or vllm_tensor_parallel_size: 1",
    ),
    "heads that the ranks of an engine can't share": (
        split(4, {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2}),
        "vllm_tensor_parallel_size is 4",
        "divide the model's num_attention_heads, which is 6",
        "choose one of 1, 2",
    ),
    "key heads that are neither shared nor repeated": (
        split(4, {"hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 6}),
        "vllm_tensor_parallel_size is 4",
        "divide the model's num_key_value_heads, which is 6",
        "choose one of 1, 2",
    ),
    "a vocabulary that the ranks of an engine can't share": (
        split(3, {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 30}),
        "vllm_tensor_parallel_size is 3",
        r"divide the model's vocab_size \(filled up to a multiple of 64\), which is 32000",
        "choose one of 1",
    ),
    "ranks that don't find each other": (
        launched_with(WORLD_SIZE="2"),
        "2 ranks were launched",
        "only 1 would train together",
        "in a process that `torchrun`",
    ),
    "two sharding strategies at once": (
        lambda _: config(sharding="optimizer", deepspeed={"zero_optimization": {"stage": 2}}),
        "sharding is 'optimizer', but the launcher or `deepspeed` requests DeepSpeed's ZeRO-2",
        "is `sharding: gradients`",
        "remove one of the two",
    ),
    "a sharding strategy that isn't there": (
        lambda _: config(sharding="zero2"),
        "`sharding` 'zero2'",
        "isn't supported in this version",
        r"choose one of none, optimizer, gradients, fsdp, tensor, tensor\+optimizer, tensor\+gradients, auto",
    ),
    "the engine's layout of an engine that is a rank's alone": (
        lambda _: config(sharding="tensor"),
        "sharding is 'tensor' and vllm_tensor_parallel_size is 1",
        "divided among the ranks of an engine",
        "set vllm_tensor_parallel_size to 2 or more",
    ),
    "sharding an optimizer that needs whole parameters": (
        lambda _: config(sharding="optimizer", optim="adafactor"),
        "sharding is 'optimizer' and optim is 'adafactor'",
        "a rank updates slices of parameters, which that optimizer can't",
        "or set sharding: none",
    ),
    "sharding with gradients that come late": (
        lambda _: config(sharding="gradients", gradient_checkpointing_kwargs={"use_reentrant": True}),
        "gradient_checkpointing_kwargs has use_reentrant: true",
        "after its parameter was exchanged",
        "remove use_reentrant",
    ),
    "weights shared with an engine that a rank has only rows of": (
        lambda _: check_choice("shared", None, cut=True),
        "`weights` is 'shared' and `sharding` is 'fsdp'",
        "no rank holds whole weights",
        "set `weights: auto`.* or `sharding: gradients`",
    ),
    "weights to gather that nobody has cut": (
        lambda _: check_choice("gathered", None),
        "`weights` is 'gathered'",
        "each rank holds the whole policy",
        "set `weights: auto`, or `sharding: fsdp`",
    ),
    "a base to cut that the engine has anyway": (
        lambda _: check_choice("auto", Adapter("default", 8, ("q_proj",), ""), cut=True),
        "`sharding` is 'fsdp', but the policy trains a LoRA adapter",
        "fsdp doesn't divide a model with an adapter",
        "set `sharding: gradients`",
    ),
    "a reference to mix with a policy in parts": (
        lambda tmp: check_reference(SimpleNamespace(), SimpleNamespace(sync_ref_model=True, cuts_weights=True)),
        "sync_ref_model is true and sharding is 'fsdp'",
        "can't mix an FSDP-sharded policy into the reference",
        "set `sharding: gradients` or `sync_ref_model: false`",
    ),
    "sharding an optimizer of one's own": (
        lambda _: check_sharding(config(sharding="gradients"), torch.optim.SGD([torch.zeros(1)])),
        "`sharding` is 'gradients', which can't use the optimizer passed",
        "each rank's optimizer has slices of parameters",
        "set `optim`",
    ),
    "a share of the GPU that is none": (
        lambda _: config(vllm_gpu_memory_utilization=35),
        "`vllm_gpu_memory_utilization` is 35",
        r"must be in \(0, 1\]",
        "remove it to have the KV cache planned",
    ),
    "vLLM's own sleep mode": (
        lambda _: engine_kwargs("m", config(vllm_engine_kwargs={"enable_sleep_mode": True}), torch.float32, None, 1),
        "vllm_engine_kwargs sets",
        "'enable_sleep_mode'",
        "remove it, and set vllm_enable_sleep_mode",
    ),
    "a loss that doesn't exist": (
        lambda _: config(loss_type="gspo"),
        "`loss_type` 'gspo'",
        "isn't supported: choose one of dapo, ",
        "give the import path of your own class, package.module:Class",
    ),
    "greedy training": (lambda _: config(temperature=0), "temperature is 0", "must differ", "set it above 0"),
    "several greedy completions in evaluation": (
        lambda _: config(temperature_eval=0.0, num_generations_eval=4),
        "num_generations_eval is 4",
        "all completions of a prompt are equal",
        "set it to 1",
    ),
    "the best model by a loss that evaluation doesn't have": (
        lambda _: config(metric_for_best_model="eval_loss", loss_eval=False),
        "metric_for_best_model is 'eval_loss'",
        "computes no loss",
        "use `reward`",
    ),
    "a direction without the metric that it is of": (
        lambda _: config(load_best_model_at_end=True, save_strategy="no", greater_is_better=False),
        "greater_is_better is false, but metric_for_best_model isn't set",
        "the metric is `reward`, and a higher reward is better",
        "set metric_for_best_model",
    ),
    "the best model by an evaluation in the middle of a round": (
        lambda _: config(
            load_best_model_at_end=True,
            num_iterations=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=6,
        ).check_for_trainer(),
        "eval_steps is 3 and load_best_model_at_end is true",
        "ends of rounds of 2 optimizer steps",
        "multiple of 2",
    ),
    "the best model's checkpoint in the middle of a round": (
        lambda _: config(
            save_strategy="best",
            metric_for_best_model="reward",
            num_iterations=2,
            eval_strategy="steps",
            eval_steps=0.1,
        ).check_for_trainer(),
        "eval_steps is 0.1 and save_strategy is best",
        "ends of rounds of 2",
        "multiple of 2",
    ),
    "a sampling parameter that the trainer sets": (
        lambda _: check_sampling(config(generation_kwargs={"n": 4})),
        "generation_kwargs sets 'n'",
        "the trainer sets itself: remove it",
        "Set `num_generations` instead of `n`",
    ),
    "a way of generating that there isn't": (
        lambda _: config(generation_kwargs={"num_beams": 4}),
        "generation_kwargs sets 'num_beams' to 4",
        "training uses num_beams = 1",
        "remove the entry",
    ),
    "a sampling parameter that vLLM doesn't have": (
        lambda _: check_sampling(config(generation_kwargs={"stop_tokn_ids": [4]})),
        "generation_kwargs sets 'stop_tokn_ids'",
        "SamplingParams doesn't have",
        "Did you mean 'stop_token_ids'",
    ),
    "a policy in float16": (
        lambda _: config().resolve_precision(torch.float16),
        r"dtype is torch\.float16",
        "must be bfloat16 or float32",
        "set `dtype`",
    ),
    "fewer prompts than a step takes": (
        lambda _: StepOrder.of(config(prompts_per_step=4), 3),
        "has 3 prompts",
        "one generation takes 4",
        "lower one",
    ),
    "truncation without a bound": (
        lambda _: config(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=None),
        "'token_truncate'",
        "needs a bound",
        "set vllm_importance_sampling_clip_max",
    ),
    "a dtype that torch doesn't have": (
        lambda _: config(model_init_kwargs={"torch_dtype": "bf16"}).torch_dtype(),
        "dtype 'bf16'",
        "isn't a dtype of torch",
        "choose bfloat16",
    ),
    "a processor in the tokenizer's place": (
        lambda _: check_tokenizer(SimpleNamespace(tokenizer=None)),
        "processing_class is a SimpleNamespace",
        "the model reads only text",
        r"processing_class\.tokenizer",
    ),
    "no tokenizer in the tokenizer's place": (
        lambda _: check_tokenizer(Words()),
        "processing_class is a Words",
        "must be a tokenizer",
        "or None",
    ),
    "a dtype that doesn't exist": (
        lambda _: ModelConfig(dtype="int8"),
        "`dtype` 'int8'",
        "isn't supported",
        "choose one of auto, bfloat16, float32",
    ),
    "a reward function that raises": (
        lambda _: score(KeyError("answer")),
        "'my_reward', prompt 17",
        "raised KeyError: 'answer'",
        "traceback",
    ),
    "a reward function that returns too few": (
        lambda _: score([1.0, 2.0]),
        "'my_reward', prompt 17: it returned 2 rewards",
        "for 3 completions",
        "exactly one number per",
    ),
    "a reward function that returns no list": (
        lambda _: score(1.0),
        r"'my_reward', prompt 17: it returned 1\.0",
        "list of 3 numbers",
        "one per completion",
    ),
    "a reward function that returns a text": (
        lambda _: score([1.0, "good", 0.0]),
        "'my_reward', prompt 17, completion 1: its reward is 'good'",
        "finite float32 number",
        "or None",
    ),
    "a compute_loss as transformers has it": (
        lambda _: type("Mine", (GRPOTrainer,), {"compute_loss": Trainer.compute_loss}),
        r"Mine defines compute_loss\(self, model, inputs, return_outputs, num_items_in_batch\)",
        "This trainer passes one micro-batch",
        r"def compute_loss\(self, model, micro_batch",
    ),
    "a reward function that returns NaN": (
        lambda _: score([1.0, 0.0, float("nan")]),
        "'my_reward', prompt 17, completion 2",
        "nan",
        "To abstain, return None",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_an_error_with_value_rule_and_remedy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    go_wrong, value, rule, remedy = CASES[name]
    with pytest.raises((ValueError, RuntimeError)) as raised:
        go_wrong(monkeypatch)
    for part in (value, rule, remedy):
        assert re.search(part, str(raised.value), re.DOTALL), f"{part!r} isn't in: {raised.value}"
    assert isinstance(raised.value, RewardError) or "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.25.1", True), ("0.27.0", True), ("0.31.0+cpu", True), ("0.32.7", True), ("0.33.0.dev3", False)],
)
def test_untested_vllm_passes_with_a_line(monkeypatch: pytest.MonkeyPatch, version: str, tested: bool) -> None:
    vllm(version)(monkeypatch)
    assert [f"vLLM {version}" in line and "doctor" in line for line in untested_vllm()] == [True] * (not tested)


def test_tensor_parallel_size_must_divide_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "local_world_size", lambda: 4)
    made: Any = on_ranks(8, vllm_tensor_parallel_size=2, prompts_per_step=8)(monkeypatch)
    assert (made.layout.data_size, made.per_device_train_batch_size) == (4, 16)


def test_overlong_prompts_are_dropped_and_counted() -> None:
    prompts = tokenize([ROW, {"prompt": "a b c d e f", "answer": ""}, ROW], limit=5)
    assert (len(prompts), prompts.dropped, prompts.longest) == (2, {1: 6}, 4)


def test_none_abstains() -> None:
    assert score([1.0, None, 0.5]).squeeze(1).nan_to_num(-1).tolist() == [1.0, -1.0, 0.5]


# -- Through the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Runs the command, which must fail before an engine is built, and returns its output."""
    from colograd import train, trainer
    from colograd.training import preparation

    def build(*args: Any) -> None:
        raise AssertionError("an engine would have been built")

    monkeypatch.setattr(process, "prepare_ranks", list)
    monkeypatch.setattr(preparation, "check_vllm", lambda: None)
    monkeypatch.setattr(trainer, "assemble", build)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    (tmp_path / "no_prompt.jsonl").write_text('{"question": "2 + 2 =", "answer": "4"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl").write_text('{"prompt": "2\u2028+ 2 =", "answer": "4"}\n{"prompt": "2 +')
    monkeypatch.setattr("transformers.utils.hub._hf_api", HfApi(endpoint="http://127.0.0.1:9"))  # as without a network

    def run(*flags: str, **settings: str) -> str:
        import tiny

        given = {"reward_funcs": "last_number", "dataset_name": "rows.jsonl", "report_to": "none", "output_dir": "out"}
        given |= {"model_name_or_path": str(tmp_path / "model"), "dtype": "float32"} | settings
        if not (tmp_path / "model").exists():
            tiny.make_model(tmp_path / "model")
            (tmp_path / "bare").mkdir()
            shutil.copy(tmp_path / "model" / "config.json", tmp_path / "bare")
        argv = [word for name, text in given.items() if text for word in (f"--{name}", text)]
        assert train.main([*argv, *flags]) == 2
        said = capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        return str(said)

    return run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generation": "4"}, "Unknown configuration key `num_generation`. Did you mean `num_generations`?"),
        ({"num_generations": "1"}, "num_generations is 1"),
        ({"num_generations": "3"}, "make the product a multiple of 3 (6 or 9 would do)"),
        ({"config": "absent.yaml"}, "The recipe 'absent.yaml' doesn't exist"),
        ({"reward_funcs": ""}, "reward_funcs is missing"),
        ({"reward_funcs": "no_such_module:f"}, "module 'no_such_module' can't be imported"),
        ({"model_name_or_path": ""}, "model_name_or_path is missing"),
        ({"model_name_or_path": "./no/such/folder"}, "neither a folder with a model nor a Hub model"),
        ({"model_name_or_path": "bare"}, "(Error no file named model.safetensors"),
        ({"dataset_name": ""}, "neither was given"),
        ({"dataset_name": "absent.jsonl"}, "no such file"),
        ({"dataset_name": "no_prompt.jsonl"}, "no column 'prompt'"),
        ({"dataset_name": "empty.jsonl"}, "the file has no rows: write some into it"),
        ({"dataset_name": "cut.jsonl"}, "line 2 isn't JSON"),
        (
            {"push_to_hub": "true", "max_completion_length": "8"},
            "`push_to_hub: true` needs a repository on the Hub, but creating 'out' failed (ConnectError",
        ),
        ({"max_completion_length": "300"}, "`max_completion_length_eval` is 300, but the context has 256 tokens"),
        ({"max_prompt_tokens": "3", "max_completion_length": "8"}, "all 1 prompts are over the limit of 3 tokens"),
    ],
)
def test_command_error_is_one_line_and_status_2(
    command: Callable[..., str], settings: dict[str, str], message: str
) -> None:
    said = command(**settings)
    ours = [line for line in said.splitlines() if line.startswith("colograd: error: ")]
    assert len(ours) == 1 and message in ours[0], said
    assert "Traceback" not in said
