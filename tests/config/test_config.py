"""The knobs: batch arithmetic, recipes and the command line, TRL's names and defaults."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from needs import needs
from transformers import TrainingArguments

from colograd.config import GRPOConfig, ModelConfig, ScriptArguments, parse_arguments
from colograd.config.knob import INERT, REFUSED, RENAMED, UNUSED, names_checked
from colograd.config.parse import flags_help
from colograd.data import StepOrder
from colograd.data.loading import MIXTURE_KEYS
from colograd.parallel.layout import RankLayout


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**({"output_dir": "unused", "report_to": "none"} | changes))


def on_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Pretend that a launcher has started ``ranks`` ranks and that the ranks are connected."""
    monkeypatch.setattr("colograd.config.engine.os", SimpleNamespace(environ={"WORLD_SIZE": str(ranks)}))
    monkeypatch.setattr(GRPOConfig, "world_size", ranks)


# -- Batch arithmetic


@pytest.mark.parametrize(("per_device", "accumulation", "group", "ranks"), [(8, 1, 8, 1), (8, 4, 8, 2), (6, 2, 4, 4)])
def test_trl_s_product_is_folded_into_whole_groups(
    monkeypatch: pytest.MonkeyPatch, per_device: int, accumulation: int, group: int, ranks: int
) -> None:
    on_ranks(monkeypatch, ranks)
    made = config(
        per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation, num_generations=group
    )
    completions = per_device * accumulation
    assert made.per_device_train_batch_size == completions and made.gradient_accumulation_steps == 1
    assert made.prompts_per_step == completions * ranks // group
    assert made.steps_per_generation == made.round_length == 1


def test_prompts_per_step_counts_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(monkeypatch, 2)
    made = config(prompts_per_step=6, num_generations=4)
    assert made.per_device_train_batch_size == 12
    # TRL's two factors may say the same, and at their defaults say nothing.
    same = config(prompts_per_step=6, num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert same == made == config(prompts_per_step=6, num_generations=4, per_device_train_batch_size=8)


def test_steps_per_generation_counts_trl_s_micro_batches() -> None:
    shape = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 8}
    assert config(**shape, steps_per_generation=6).steps_per_generation == 3  # optimizer steps
    assert config(**shape, steps_per_generation=6, num_iterations=2).round_length == 6
    assert config(prompts_per_step=2, steps_per_generation=3).steps_per_generation == 3  # nothing accumulates
    assert config(**shape, steps_per_generation=1).steps_per_generation == 1  # two generations by the same weights
    with pytest.raises(ValueError, match=r"steps_per_generation is 1, but must be a positive multiple of .*\(2\)"):
        config(**shape, steps_per_generation=1, num_iterations=2)


def test_several_generations_of_one_step_are_sampled_together() -> None:
    """One step may need several generations in TRL, all with the same weights. Ours samples them together."""
    shape = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    for given in ({"steps_per_generation": 2}, {"steps_per_generation": 1}, {"generation_batch_size": 8}):
        made = config(**shape, **given)
        assert (made.steps_per_generation, made.prompts_per_step) == (1, 4)


def test_generation_batch_size_is_the_same_in_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(monkeypatch, 2)
    made = config(gradient_accumulation_steps=2, generation_batch_size=96)  # a step: 8 * 2 on each of 2 ranks
    assert (made.steps_per_generation, made.generation_batch_size) == (96 // 32, None)
    assert config(gradient_accumulation_steps=2, generation_batch_size=16).steps_per_generation == 1
    with pytest.raises(ValueError, match="generation_batch_size is 0"):
        config(generation_batch_size=0)


def test_the_output_folder_is_the_first_argument() -> None:
    assert GRPOConfig("runs/x", report_to="none").output_dir == "runs/x"


def test_ranks_of_one_engine_take_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is divided among the engines, and the layout knows their number."""
    monkeypatch.setattr(GRPOConfig, "layout", RankLayout(3, 4, ranks_per_engine=2))
    made = config(prompts_per_step=6, num_generations=4)
    assert made.prompts_per_step == 6
    order = StepOrder.of(made, 12)
    assert (order.data_rank, order.data_size) == (1, 2)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"prompts_per_step": 4, "num_generations": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 6, "num_iterations": 2},
        {"generation_batch_size": 32},
        {"optim": "adamw_torch", "bf16": True, "epsilon_high": 0.28, "scale_rewards": False},
    ],
)
def test_a_copy_is_the_same(given: dict[str, Any]) -> None:
    once = config(**given)
    twice = dataclasses.replace(once)
    assert twice == once and dataclasses.replace(once, seed=5).prompts_per_step == once.prompts_per_step


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts_per_step": 3}, "prompts_per_step is 3, .* multiple of the number of engines, 2, .*2 or 4 would do"),
        ({"prompts_per_step": 1}, "prompts_per_step is 1, .* 2 or 4 would do"),
        ({"steps_per_generation": 2, "generation_batch_size": 32}, "determines steps_per_generation: set only one"),
        ({"generation_batch_size": 24}, r"is 24, but must be a positive multiple of .* \(16\), or a divisor"),
        ({"generation_batch_size": 8, "num_iterations": 2}, r"is 8, but must be .* multiple of .* \(16\): set"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, r"is 3, but must be .* multiple of .*\(2\)"),
        ({"steps_per_generation": 0}, "steps_per_generation is 0"),
        (
            {"prompts_per_step": 4, "gradient_accumulation_steps": 3},
            r"4, which is 32 completions per step, but .* = 8 \* 3 \* 2 = 48: remove .* or gradient_accumulation_steps",
        ),
        ({"per_device_train_batch_size": 4}, r"4 \* 1 = 4 completions .* multiple of 8 \(8 would do\)"),
    ],
)
def test_a_batch_that_cuts_groups_or_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    on_ranks(monkeypatch, 2)
    with pytest.raises(ValueError, match=message):
        config(**given)


# -- Values


def test_values_are_normalised_once() -> None:
    made = config(scale_rewards=True, epsilon=0.1)
    assert (made.scale_rewards, made.epsilon_high, made.logging_nan_inf_filter) == ("group", 0.1, False)
    assert config(scale_rewards=False).scale_rewards == "none"
    assert made.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert config(max_tokens_per_microbatch=100).max_tokens_per_microbatch == 100


def test_the_policy_is_bfloat16_unless_the_user_says_otherwise() -> None:
    assert config().torch_dtype() is torch.bfloat16
    assert config(model_init_kwargs={"dtype": "float32"}).torch_dtype() is torch.float32
    assert config(model_init_kwargs={"dtype": "auto"}).torch_dtype() == "auto"


def test_checkpointing_is_resolved_where_nothing_is_said() -> None:
    for every, on, layers in ((0, False, None), (1, True, None), (4, True, 4)):
        made = config()
        assert made.gradient_checkpointing is None and made.checkpointing == 1
        made.resolve_checkpointing(every)
        assert made.gradient_checkpointing is on and made.gradient_checkpointing_kwargs.get("every_n_layers") == layers
        assert made.checkpointing == every
    assert config(gradient_checkpointing=False).checkpointing == 0
    assert not config(gradient_checkpointing="true").offloads_activations
    with pytest.raises(ValueError, match="gradient_checkpointing is 'host', but must be true, false or offload"):
        config(gradient_checkpointing="host")
    said = config(gradient_checkpointing_kwargs={"every_n_layers": 3})
    assert said.gradient_checkpointing is True and said.checkpointing == 3


@names_checked
@dataclasses.dataclass
class LaterConfig(GRPOConfig):
    """A configuration with the names that transformers' Trainer reads since 5.23."""

    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None


@needs("offload")
def test_a_later_trainer_reads_activation_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = TrainingArguments.__post_init__

    def later(self: Any) -> None:
        assert self.gradient_checkpointing == self.activation_checkpointing, "would warn of an old name"
        if self.activation_checkpointing is None:
            self.gradient_checkpointing = self.activation_checkpointing = False
        theirs(self)

    monkeypatch.setattr(TrainingArguments, "__post_init__", later)

    def checks(made: Any, on: bool | None, **more: Any) -> None:
        kwargs = {"use_reentrant": False, **more}
        assert (made.gradient_checkpointing, made.gradient_checkpointing_kwargs) == (on, kwargs)
        assert (made.activation_checkpointing, made.activation_checkpointing_kwargs) == (on, kwargs)

    folder: dict[str, Any] = {"output_dir": "unused", "report_to": "none"}
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        checks(LaterConfig(**folder | {name: "offload"}), True, offload=True)
        checks(LaterConfig(**folder | {f"{name}_kwargs": {"every_n_layers": 3}}), True, every_n_layers=3)
        checks(LaterConfig(**folder | {name: False}), False)
    made = LaterConfig(**folder)
    checks(made, None)
    made.resolve_checkpointing(4)
    checks(made, True, every_n_layers=4)


@dataclasses.dataclass
class OwnConfig(GRPOConfig):
    bonus: float = 0.5


def test_a_dataclass_may_derive_from_the_configuration() -> None:
    made = OwnConfig(output_dir="unused", report_to="none", vllm_importance_sampling_cap=3.0, bonus=0.25)
    assert made.bonus == 0.25 and made.vllm_importance_sampling_clip_max == 3.0
    assert [line for line in made.notes if "vllm_importance_sampling_cap" in line]


def test_the_optimizer_and_autocast_follow_the_policy_s_dtype() -> None:
    for dtype, optim, autocast in ((torch.bfloat16, "adamw_split", False), (torch.float32, "adamw_torch", True)):
        made = config(bf16=True)
        made.resolve_precision(dtype)
        assert (made.optim, made.bf16) == (optim, autocast)
    made = config(optim="sgd")
    made.resolve_precision(torch.bfloat16)
    assert made.optim == "sgd"


@pytest.mark.parametrize(("given", "autocast"), [({}, True), ({"bf16": True}, True), ({"bf16": False}, False)])
def test_float32_runs_under_autocast_unless_refused_as_in_trl(given, autocast) -> None:
    made = config(model_init_kwargs={"dtype": "float32"}, **given)
    made.resolve_precision(torch.float32)
    assert made.bf16 is autocast and made.mixed_precision == ("bf16" if autocast else "no")


def test_an_optimizer_that_is_named_has_trl_s_float32_weights() -> None:
    """With a named optimizer weights are float32 as in TRL, because bfloat16 weights would round each update."""
    assert config(optim="adamw_torch").torch_dtype() is torch.float32
    assert config(optim="adamw_split").torch_dtype() is torch.bfloat16
    assert config(optim="adamw_torch", model_init_kwargs={"dtype": "bfloat16"}).torch_dtype() is torch.bfloat16


def test_evaluation_falls_back_to_training_s_group_size() -> None:
    assert config(num_generations=4, per_device_train_batch_size=4).eval_generations() == 4
    assert config(num_generations_eval=1).eval_generations() == 1


# -- Recipes and the command line


def write(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


def test_a_recipe_s_texts_get_their_field_s_type(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        "model_name_or_path: some/model\n"
        "reward_funcs: [last_number, think_format_reward]\n"
        "learning_rate: 1e-5\n"  # YAML 1.1 reads this as text
        "log_completions: 'yes'\n"
        "max_steps: '7'\n"
        "epsilon_high: null\n"
        "scale_rewards: false\n"
        "vllm_engine_kwargs: {max_num_seqs: 4}\n",
    )
    script, made, model, path = parse_arguments(["--config", recipe])
    assert isinstance(script, ScriptArguments) and isinstance(model, ModelConfig) and path == Path(recipe)
    assert script.reward_funcs == ["last_number", "think_format_reward"]
    assert model.model_name_or_path == "some/model"
    assert (made.learning_rate, made.log_completions, made.max_steps) == (1e-5, True, 7)
    assert (made.epsilon_high, made.scale_rewards) == (made.epsilon, "none")
    assert made.vllm_engine_kwargs == {"max_num_seqs": 4}


def test_the_command_line_wins(tmp_path: Path) -> None:
    recipe = write(tmp_path, "learning_rate: 1e-5\nmax_steps: 7\nreward_funcs: [a, b]\nlog_completions: true\n")
    flags = ["--max_steps=9", "--learning_rate", "2e-6", "--reward_funcs", "c", "--log_completions", "false"]
    for argv in ([f"--config={recipe}", *flags], [*flags, "--config", recipe]):
        script, made, _, _ = parse_arguments(argv)
        assert (made.max_steps, made.learning_rate, made.log_completions) == (9, 2e-6, False)
        assert script.reward_funcs == ["c"]


def test_flags_work_without_a_recipe() -> None:
    script, made, model, recipe = parse_arguments(["--reward_funcs", "a", "b", "--model_name_or_path", "m"])
    assert (script.reward_funcs, model.model_name_or_path, recipe) == (["a", "b"], "m", None)
    assert made == GRPOConfig()


def test_booleans_are_flags_with_or_without_a_value() -> None:
    _, made, _, _ = parse_arguments(["--log_completions", "--gradient_checkpointing", "no", "--no_shuffle_dataset"])
    assert (made.log_completions, made.gradient_checkpointing, made.shuffle_dataset) == (True, False, False)


def test_an_entry_of_a_mapping_can_be_set_alone(tmp_path: Path) -> None:
    recipe = write(
        tmp_path, "vllm_engine_kwargs: {max_num_seqs: 4, dtype: float32}\ngeneration_kwargs: '{\"stop\": 1}'\n"
    )
    flags = ["--vllm_engine_kwargs.max_num_seqs", "8", "--vllm_engine_kwargs.enforce_eager=true"]
    _, made, _, _ = parse_arguments(["--config", recipe, *flags, "--generation_kwargs.ignore_eos=true"])
    assert made.vllm_engine_kwargs == {"max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}
    assert made.generation_kwargs == {"stop": 1, "ignore_eos": True}
    _, made, _, _ = parse_arguments(["--vllm_engine_kwargs", '{"max_num_seqs": 3}'])
    assert made.vllm_engine_kwargs == {"max_num_seqs": 3}
    recipe = write(tmp_path, "generation_kwargs: '{stop'\n")
    with pytest.raises(ValueError, match=r"generation_kwargs is .{stop. in the recipe: write a mapping there"):
        parse_arguments(["--config", recipe, "--generation_kwargs.ignore_eos=true"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "--config needs a value"),
        (["--config", "absent.yaml"], "'absent.yaml' doesn't exist: give the path"),
        (["--num_generations", "four"], "invalid int value: 'four'"),
        (["--max_steps"], "expected one argument"),
        (["--max_steps.a", "1"], "--max_steps.a sets an entry of a mapping, but max_steps isn't a mapping"),
        (["--vllm_engine_kwargs.a"], "--vllm_engine_kwargs.a needs a value"),
        (["--vllm_engine_kwarg.a", "1"], "Did you mean `vllm_engine_kwargs`"),
        (["--vllm_engine_kwargs.a", "1", "--vllm_engine_kwargs", '{"b": 2}'], "give one of the two"),
        (["stray"], "Unknown configuration key `stray`"),
        (["--use_vllm", "perhaps"], "perhaps"),
    ],
)
def test_a_command_line_that_says_nothing_clear_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: fast\n", "argument --learning_rate.* invalid float value: 'fast'"),
        ("- a\n- b\n", "must be a mapping, not a list"),
        ("a: [1\n", "isn't valid YAML"),
        ("epsilon_hi: 0.3\n", "Unknown configuration key `epsilon_hi`. Did you mean `epsilon_high`"),
        ("cache_implementation: static\n", "`cache_implementation` isn't supported: generation always runs in vLLM"),
        ("accelerate_config: fsdp2\n", "start with `accelerate launch"),
        ("env: 3\n", "env is 3, but must be a mapping"),
        ("vllm_importance_sampling_cap: 2\nvllm_importance_sampling_clip_max: 4\n", "the old name of"),
    ],
)
def test_a_recipe_that_says_nothing_clear_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--config", write(tmp_path, text)])


def test_lists_are_given_as_several_words(tmp_path: Path) -> None:
    recipe = write(tmp_path, "lora_target_modules: [q_proj, v_proj]\nreward_weights: [1, 0.5]\n")
    _, made, model, _ = parse_arguments(["--config", recipe, "--reward_weights", "2", "3"])
    assert (model.lora_target_modules, made.reward_weights) == (["q_proj", "v_proj"], [2.0, 3.0])
    _, _, model, _ = parse_arguments(["--lora_target_modules", "q_proj"])
    assert model.lora_target_modules == ["q_proj"] and ModelConfig().lora_target_modules is None


def test_an_empty_recipe_leaves_every_default(tmp_path: Path) -> None:
    assert parse_arguments(["--config", write(tmp_path, "# nothing\n")])[1] == GRPOConfig()


# -- TRL

# Where a default of ours is meant to differ.
DIFFERENT_DEFAULTS = {
    "optim": "adamw_split wherever the policy is bfloat16",
    "gradient_checkpointing": "the memory plan says which layers need it",
    "use_vllm": "there is no other way to generate",
    "vllm_model_impl": "`auto` also serves models that vLLM has no implementation of",
    "vllm_gpu_memory_utilization": "the KV cache is planned where nothing is said",
}
NEW = {
    "curriculum",
    "exit_status_after_stop",
    "stop_signals",
    "stop_within",
    "kl_in_reward",
    "kl_in_reward_estimator",
    "agent_on_error",
    "agent_parallel",
    "agent_reasoning_parser",
    "agent_requests",
    "agent_sampling",
    "agent_sessions",
    "agent_timeout",
    "agent_tool_parser",
    "chat_template_path",
    "freeze_vision_tower",
    "tool_workers",
    "tool_timeout",
    "prompts_per_step",
    "max_prompt_tokens",
    "offload_gradients",
    "sequence_parallel_size",
    "offload_optimizer",
    "overlap",
    "offload_reference",
    "offload_teacher",
    "teacher_model_name_or_path",
    "teacher_model_revision",
    "teacher_model_init_kwargs",
    "distillation_kl",
    "distillation_top_k",
    "distillation_weight",
    "router_replay",
    "overlong_prompts",
    "temperature_eval",
    "max_completion_length_eval",
    "pass_threshold_eval",
    "loss_eval",
    "vllm_engine_kwargs",
    "max_tokens_per_microbatch",
    "balance_ranks",
    "rank_timeout",
    "sharding",
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "weights",
    "reward_workers",
    "reward_timeout",
    "reward_on_error",
    "reward_call",
    "main_thread_tools",
    "carry_over",
    "carry_over_max_age",
    "dynamic_sampling",
    "dynamic_sampling_max_rounds",
    "advantage_baseline",
    "log_completions_steps",
    "report",
    "report_groups",
    "rescore",
    "verbose",
    "save_in_background",
    "save_failures",
    "journal",
}


def defaults(cls: type) -> dict[str, Any]:
    """Field -> default, before any normalisation."""
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(cls)
    }


@pytest.fixture(scope="module")
def trl_defaults() -> dict[str, Any]:
    trl = pytest.importorskip("trl")
    return defaults(trl.GRPOConfig)


def test_defaults_are_trl_s(trl_defaults: dict[str, Any]) -> None:
    ours = defaults(GRPOConfig)
    shared = ours.keys() & trl_defaults.keys()
    different = {name for name in shared if ours[name] != trl_defaults[name]}
    assert len(shared) > 100 and different == set(DIFFERENT_DEFAULTS)


def test_every_field_of_trl_is_a_field(trl_defaults: dict[str, Any]) -> None:
    """Scripts and callbacks read TRL's fields, including fields without an effect."""
    ours = defaults(GRPOConfig)
    others = [REFUSED.keys(), UNUSED.keys(), RENAMED.keys()]
    assert trl_defaults.keys() <= ours.keys()
    assert sum(map(len, others)) == len(set().union(*others))
    assert all(reason and not reason.endswith(".") for reason in (REFUSED | UNUSED).values())
    assert {name for name, _ in INERT} <= REFUSED.keys()
    assert (UNUSED.keys() - defaults(ScriptArguments).keys()) | RENAMED.keys() | set(RENAMED.values()) <= ours.keys()
    made = config(vllm_server_host="there", pad_to_multiple_of=8)
    assert (made.vllm_server_host, made.pad_to_multiple_of, made.vllm_group_port) == ("there", 8, 51216)


def test_every_field_at_its_default_in_trl_is_taken(trl_defaults: dict[str, Any]) -> None:
    """A configuration file may set every TRL field to its default."""
    trl = pytest.importorskip("trl")
    declared = {f.name for f in dataclasses.fields(trl.GRPOConfig)} - {
        f.name for f in dataclasses.fields(trl.GRPOConfig.__mro__[2])
    }
    refused = set()
    for name in declared:
        try:
            config(**{name: trl_defaults[name]})
        except ValueError:
            refused.add(name)
    assert refused == set()


def test_what_has_no_effect_is_taken_and_said(tmp_path: Path) -> None:
    made = config(vllm_server_host="there", pad_to_multiple_of=8, use_vllm=False, cast_lm_head_to_fp32=False)
    lines = [line.split("`")[1] for line in (*made.notes, *made.advice()) if "has no effect" in line]
    assert lines == ["use_vllm", "pad_to_multiple_of", "vllm_server_host"]
    recipe = write(tmp_path, "vllm_server_port: 1\nuse_transformers_paged: false\nvllm_importance_sampling_cap: 2.5\n")
    script, parsed, _, _ = parse_arguments(["--config", recipe, "--ignore_bias_buffers", "--vllm_group_port=4"])
    assert parsed.vllm_importance_sampling_clip_max == 2.5 and script.ignore_bias_buffers
    assert (parsed.vllm_server_port, parsed.vllm_group_port) == (1, 4)
    lines = [line.split("`")[1] for line in (*parsed.notes, *parsed.advice())]
    assert lines == ["ignore_bias_buffers", "vllm_importance_sampling_cap", "vllm_server_port", "vllm_group_port"]
    assert config(vllm_importance_sampling_cap=1.5).vllm_importance_sampling_clip_max == 1.5
    assert config(vllm_importance_sampling_cap=None) == config()
    assert parse_arguments(["--config", write(tmp_path, "max_prompt_length: null\n")])
    with pytest.raises(ValueError, match="`use_transformers_paged` isn't supported"):
        parse_arguments(["--use_transformers_paged", "true"])


@pytest.mark.parametrize(("name", "value"), [("use_transformers_paged", True), ("vllm_mode", "server")])
def test_a_refused_value_set_later_is_refused(name: str, value: Any) -> None:
    made = config()
    setattr(made, name, value)
    with pytest.raises(ValueError, match=f"{name}.* isn't supported"):
        made.check_for_trainer()


def test_a_recipe_sets_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOGRAD_TEST_VARIABLE", "0")
    parse_arguments(["--config", write(tmp_path, "env:\n  COLOGRAD_TEST_VARIABLE: 3\n")])
    assert os.environ["COLOGRAD_TEST_VARIABLE"] == "3"


def test_fields_that_trl_lacks_are_few_and_known(trl_defaults: dict[str, Any]) -> None:
    assert defaults(GRPOConfig).keys() - trl_defaults.keys() == NEW


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("trl.scripts.grpo:GRPOScriptArguments", ScriptArguments),
        ("trl:DatasetMixtureConfig", ScriptArguments),
        ("trl:ModelConfig", ModelConfig),
    ],
)
def test_script_and_model_arguments_keep_trl_s_names(theirs: str, ours: type) -> None:
    pytest.importorskip("trl")
    module, _, name = theirs.partition(":")
    fields = defaults(getattr(importlib.import_module(module), name)).keys()
    assert fields - defaults(ours).keys() - UNUSED.keys() == set()


def test_the_parts_of_a_mixture_have_trl_s_keys() -> None:
    pytest.importorskip("trl")
    assert set(MIXTURE_KEYS) - {"source"} == defaults(importlib.import_module("trl.scripts.utils").DatasetConfig).keys()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("reward_workers", -1, "reward_workers"),
        ("reward_timeout", 0, "must be above 0: leave it out"),
        ("reward_on_error", "ignore", "raise, abstain"),
        ("reward_call", "row", "group, all"),
        ("dynamic_sampling_max_rounds", 0, "dynamic_sampling_max_rounds"),
        ("scale_rewards", "rank", "group, batch, batch_centered, mean, none"),
        ("multi_objective_aggregation", "sum", "sum_then_normalize, normalize_then_sum"),
        ("advantage_baseline", "median", "mean, leave_one_out"),
    ],
)
def test_settings_of_rewards_are_checked(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GRPOConfig(output_dir=str(tmp_path), **{name: value})


def test_a_class_of_the_user_s_own_publishes_weights() -> None:
    assert config(weights="my.module:WeightSync").weights == "my.module:WeightSync"
    with pytest.raises(ValueError, match="`weights` 'moved' isn't supported in this version: choose one of auto, "):
        config(weights="moved")


def test_normalising_each_reward_has_no_other_baseline() -> None:
    with pytest.raises(ValueError, match="compares with the mean"):
        config(multi_objective_aggregation="normalize_then_sum", advantage_baseline="leave_one_out")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metric_for_best_model": "eval_loss", "loss_eval": False}, "computes no loss"),
        (
            {"loss_eval": True, "temperature_eval": 0.5, "num_generations_eval": 2},
            "temperature_eval is 0.5 and loss_eval is true, but",
        ),
        ({"temperature_eval": 0.0, "num_generations_eval": 2}, "all completions of a prompt are equal"),
        ({"max_completion_length": None}, "max_completion_length is None"),
    ],
)
def test_settings_of_evaluation_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**given)


def test_a_metric_that_needs_the_loss_asks_for_it() -> None:
    for name in (
        "loss",
        "eval_loss",
        "eval_some_loss",
        "eval_kl",
        "entropy",
        "eval_sampling/sampling_logp_difference/mean",
    ):
        assert config(metric_for_best_model=name).loss_eval is True, name
    for name in (None, "reward", "eval_rewards/skill/mean", "pass@4", "eval_completions/mean_length"):
        assert config(metric_for_best_model=name).loss_eval is True, "as in TRL"
    assert config(temperature_eval=0.5).loss_eval is False, "its ratios would be of two temperatures"
    with pytest.raises(ValueError, match=r"temperature_eval is 0\.5 and loss_eval is true, but"):
        config(temperature_eval=0.5, metric_for_best_model="eval_loss")


def test_generation_kwargs_may_ask_for_what_is_done_anyway() -> None:
    given = {"do_sample": True, "num_beams": 1, "max_new_tokens": 512, "temperature": 1.0, "n": 1, "stop": ["."]}
    made = config(generation_kwargs=given)
    assert made.generation_kwargs == {"stop": ["."]}
    assert [line.split("`")[1] for line in made.notes] == [name for name in given if name != "stop"]
    assert config(generation_kwargs={"do_sample": True}).generation_kwargs is None
    assert config(generation_kwargs={"n": 4}).generation_kwargs == {"n": 4}, "which the engine refuses"
    with pytest.raises(ValueError, match="sets 'do_sample' to False, but training uses do_sample"):
        config(generation_kwargs={"do_sample": False})


def test_settings_of_torchs_loader_are_said_to_have_no_effect() -> None:
    assert not [line for line in config().advice() if "loader" in line]
    made = config(dataloader_num_workers=2)
    assert [line.split("`")[1] for line in made.advice() if "loader" in line] == ["dataloader_num_workers"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode is 'sequence_mask' and loss_type is 'vespo'"),
        ({"importance_sampling_level": "sentence"}, "`importance_sampling_level` 'sentence' .*: choose one of token"),
        ({"top_entropy_quantile": 1.5}, r"`top_entropy_quantile` is 1.5, but must be in \[0, 1\]: 1.0"),
        (
            {"top_entropy_quantile": 0.5, "loss_type": "gmpo"},
            "is 'gmpo', but gmpo has one ratio per completion",
        ),
        (
            {"entropy_coef_min": 2.0},
            "entropy_coef_min is 2.0 and entropy_coef_max is 1.0, but",
        ),
        ({"sapo_temperature_neg": 0.0}, "`sapo_temperature_neg` is 0.0, but must be above 0"),
        ({"vespo_lambda_pos": -1.0}, "`vespo_lambda_pos` is -1.0, but must be at least 0"),
    ],
)
def test_settings_of_the_objective_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**given)


def test_what_is_said_of_compiling_is_the_layers() -> None:
    """A backend or a mode enables torch_compile. transformers' own field stays off, because it would enable TF32."""
    plain = config()
    assert (plain.torch_compile, plain.torch_compile_backend, plain.use_liger_kernel) == (False, None, False)
    assert config(torch_compile=True).torch_compile and config(torch_compile_mode="default").torch_compile
    made = config(torch_compile_backend="aot_eager")
    assert (made.torch_compile, made.torch_compile_backend) == (True, "aot_eager")
    assert dataclasses.replace(made).torch_compile_backend == "aot_eager"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"torch_compile_mode": "reduce-overhead"},
            "`torch_compile_mode` 'reduce-overhead' .* choose one of default, ",
        ),
    ],
)
def test_kernels_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, []),
        ({"importance_sampling_level": "sequence"}, ["GSPO is loss_type: grpo"]),
        ({"loss_type": "luspo"}, ["importance_sampling_level: sequence"]),
        ({"loss_type": "cispo"}, ["0.2 is below 1"]),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, []),
        ({"torch_empty_cache_steps": 4}, ["torch_empty_cache_steps` has no effect"]),
    ],
)
def test_what_trl_takes_and_is_rarely_meant_gets_a_line(given: dict[str, Any], said: list[str]) -> None:
    lines = list(config(**given).advice())
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))


def test_a_frozen_configuration_refuses_what_a_trainer_has_read(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    config.freeze()
    config.beta, config.num_train_epochs = config.beta, 7.0  # the same value; and one that each `train` reads
    with pytest.raises(
        AttributeError, match=r"beta is 0\.0 and can't become 0\.5: a trainer was made with the present value"
    ):
        config.beta = 0.5
    other = copy.deepcopy(config)
    other.beta = 0.5
    assert (config.beta, other.beta) == (0.0, 0.5)


def test_the_flags_of_all_groups_have_a_help() -> None:
    told = flags_help()
    assert all(f"--{name} " in told for name in ("num_generations", "dataset_name", "lora_r", "learning_rate"))
    assert "Completions per prompt" in " ".join(told.split())


@pytest.mark.parametrize("bent", [{"top_p": 0.9}, {"min_p": 0.1}, {"generation_kwargs": {"min_tokens": 4}}])
def test_changed_distribution_turns_correction_off(bent) -> None:
    """TRL's scripts set these sampling options. They change the distribution, so the correction is off."""
    found = config(**bent)
    assert not found.vllm_importance_sampling_correction
    assert any("vllm_importance_sampling_correction is off" in note for note in found.notes)
    Advisor = pytest.importorskip("colograd.extensions.recording.advisor").Advisor
    gap = {"reward": 0.5, "grad_norm": 0.5, "sampling/sampling_logp_difference/mean": 0.6}
    for settings, raised in ((vars(found), set()), (vars(config()), {"sampler-trainer-gap"})):
        advisor = Advisor(settings)
        rules = {alarm["rule"] for step in range(1, 9) for alarm in advisor.look(step, gap)[0]}
        assert rules & {"sampler-trainer-gap"} == raised
