"""`colograd plan`: a model's needs in each strategy of sharding, from its configuration alone."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any

import large
import pytest
import tiny
import torch
from paths import DOCS, RECIPES
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from colograd.apps import cli
from colograd.apps import plan as command
from colograd.apps.plan import recipe_options
from colograd.config.sharding import TENSOR
from colograd.memory.choice import auto, best_plan, fits
from colograd.memory.description import ORDER, STRATEGIES
from colograd.memory.estimate import ALIVE
from colograd.memory.table import GIB, MARGIN
from colograd.sharding.zero import ELEMENTS

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large.folder(tmp_path_factory.mktemp("Qwen2.5-7B"))


def planned(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> tuple[str, dict[str, list[str]], str]:
    """Run `colograd plan` and return the text before the table, the rows by name, and the text after the table."""
    status = cli.main(["plan", "--model", str(model), *flags])
    said = capsys.readouterr()
    assert status in (0, 1), said.err
    before, table, after, *_ = said.out.split("\n\n")
    lines = [line.rsplit(None, 11) for line in table.splitlines()[1:]]
    assert len({len(line) for line in table.splitlines()}) == 1, "aligned"
    assert status == all(cells[-1] == "no" for _, *cells in lines), "1 if nothing fits"
    return before, {name.strip(): cells for name, *cells in lines}, after.strip()


def test_a_7b_model_on_8_gpus(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes per parameter as docs/guide/out-of-memory.md has them: 6 + 10/N, 2 + 14/N and 2 + 16/N."""
    before, strategies, after = planned(capsys, qwen, "--gpus", "8", "--gpu-memory", "80")
    assert "7.62 billion parameters, bfloat16, adamw_split; on 8 GPU(s) of 80 GiB, an engine each" in before
    assert tuple(strategies) == STRATEGIES
    embedding = large.VOCABULARY * large.HIDDEN
    buckets = (ALIVE * ELEMENTS + embedding) * 4 * 9 / 8
    gathered = (4 * 2 + 2 * 4) * embedding
    parts = {  # engine, policy, gradients, optimizer: bytes per parameter; exchange: bytes
        "none": (2, 0, 4, 10, 0),
        "optimizer": (2, 0, 4, 10 / 8, buckets),
        "gradients": (2, 0, 4 / 8, 10 / 8, buckets),
        "fsdp": (2, 2 / 8, 4 / 8, 10 / 8, gathered),
    }
    per_token = 2 * large.LAYERS * large.KEYS * large.HEAD * 2
    for strategy, (*per_parameter, exchange) in parts.items():
        *found, activations, tokens, free, room, cache_tokens, fits = strategies[strategy]
        state = [count * large.PARAMETERS / GIB for count in per_parameter] + [exchange / GIB]
        assert [float(cell) for cell in found] == pytest.approx(state, abs=0.06), strategy
        assert float(free) == pytest.approx(80 * MARGIN, abs=0.06)
        left = 80 * (1 - MARGIN) - sum(state) - float(activations)
        assert float(room) == pytest.approx(left, abs=0.15), strategy
        assert int(cache_tokens.replace(",", "")) == pytest.approx(max(left, 0) * GIB / per_token, rel=0.02)
        assert fits == ("no" if strategy == "none" else "yes")
        assert tokens == ("8,192" if strategy == "none" else "16,384")
    assert after == "sharding: auto takes 'optimizer'"


def test_one_gpu_plan_names_remedies(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, strategies, after = planned(capsys, qwen, "--gpus", "1", "--gpu-memory", "80")
    assert [*strategies] == ["none"] and strategies["none"][-1] == "no"
    assert after.startswith(
        "sharding: auto finds none that fits; what would fit: offload_optimizer: stream (70.93 GiB each way over the "
        "bus per step); or use_peft: true (LoRA, rank 16); or "
    )
    _, strategies, _ = planned(capsys, qwen, "--gpus", "1", "--gpu-memory", "80", "--offload-optimizer", "stream")
    assert strategies["none"][-1] == "yes" and strategies["none"][3] == "0.2"
    _, strategies, after = planned(capsys, qwen, "--gpus", "1", "--gpu-memory", "80", "--lora-rank", "16")
    assert strategies["none"][-1] == "yes" and after == "sharding: auto takes 'none'"


def ways_of(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> tuple[dict[str, list[str]], str]:
    """Rows of the table of host memory for one GPU, and the sentence below the table."""
    cli.main(["plan", "--model", str(model), "--gpus", "1", *flags])
    *lines, last = capsys.readouterr().out.split("\n\n")[3].strip().splitlines()
    return {name.strip(): cells for name, *cells in (line.rsplit(None, 9) for line in lines[1:])}, last


@pytest.mark.parametrize(
    ("name", "memory", "fitting"),
    [
        ("Qwen2.5-7B", 80, "stream"),
        ("Qwen2.5-14B", 80, "stream, gradients"),
        ("Qwen2.5-32B", 141, "stream, gradients"),
    ],
)
def test_the_host_lets_one_gpu_train_larger_models(
    name: str, memory: int, fitting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, flags = large.folder_of(name, tmp_path), ("--gpu-memory", str(memory))
    ways, last = ways_of(capsys, model, *flags)
    assert next(way for way, cells in ways.items() if cells[-1] == "yes") == fitting
    assert last.startswith(f"the fastest way that fits is: {fitting}. ")
    assert (
        "offload_optimizer: auto keeps on the host: " + fitting
        in planned(capsys, model, "--gpus", "1", *flags, "--offload-optimizer", "auto")[0]
    )


def test_what_goes_over_the_bus_is_counted(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 completions and 8 prompts of 4,096 tokens each make 18 micro-batches of 16,384 tokens."""
    ways, _ = ways_of(capsys, qwen, "--gpu-memory", "80", "--bus", "25")
    state, gradients = (count * large.PARAMETERS / GIB for count in (10, 4))
    inputs = 72 * 4096 * large.HIDDEN * 2 / GIB  # of a layer; two layers' don't come back
    for way, into, out in (
        ("stream", state, state),
        ("stream, gradients", state + 19 * gradients, state + 18 * gradients),
        ("stream, activations", state + (large.LAYERS - 2) * inputs, state + large.LAYERS * inputs),
    ):
        found = [float(cell) for cell in ways[way][5:8]]
        assert found == pytest.approx([into, out, max(into, out) * GIB / 25e9], rel=0.01, abs=0.06), way


def test_long_rows_of_an_8b_on_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64k tokens in full precision fit on 141 GiB, and 128k tokens of a QLoRA on 80 GiB."""
    LlamaConfig(**LLAMA_8B).save_pretrained(tmp_path)
    long = ("--context", "67584", "--completion", "65536", "--max-tokens", "67584")
    ways, _ = ways_of(capsys, tmp_path, "--gpu-memory", "141", *long)
    assert [ways[way][-1] for way in ("as it is", "stream", "stream, activations")] == ["no", "yes", "yes"]
    recipe = ("--config", str(RECIPES / "grpo_qlora_8b_128k.yaml"), "--gpu-memory", "80")
    ways, _ = ways_of(capsys, tmp_path, *recipe)
    assert ways["as it is"][-1] == "yes" and ways["as it is"][3] == "131,072"


@pytest.mark.parametrize(
    ("recipe", "name", "memory"),
    [
        ("grpo_qwen_7b_80gb", "Qwen2.5-7B", "80"),
        ("grpo_qwen_14b_80gb", "Qwen2.5-14B", "80"),
        ("grpo_qwen_32b_h200", "Qwen2.5-32B", "141"),
    ],
)
def test_recipes_of_one_gpu_fit_it(
    recipe: str, name: str, memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--config", str(RECIPES / f"{recipe}.yaml"), "--gpus", "1", "--gpu-memory", memory)
    _, strategies, _ = planned(capsys, large.folder_of(name, tmp_path), *flags)
    assert strategies["none"][-1] == "yes" and float(strategies["none"][8]) > 20, "GiB for the KV cache"


@pytest.mark.parametrize(
    ("recipe", "kind", "shape"),  # hidden, MLP, layers, heads, key-value heads
    [
        ("grpo_gsm8k_lora_0.5b", Qwen2Config, (896, 4864, 24, 14, 2)),
        ("grpo_gsm8k_lora_1.5b", Qwen2Config, (1536, 8960, 28, 12, 2)),
        ("grpo_gsm8k_lora_3b", Qwen2Config, (2048, 11008, 36, 16, 2)),
        ("distil_qwen", Qwen3Config, (4096, 12288, 36, 32, 8)),
    ],
)
def test_recipes_say_what_the_plan_leaves(recipe: str, kind: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = RECIPES / f"{recipe}.yaml"
    said = re.search(r"fits (?:a|one) GPU of (\d+) GB\b.*?([\d.]+) GiB", path.read_text().replace("\n# ", " "))
    assert said is not None
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = kind(**dict(zip(names, shape, strict=True)), vocab_size=151936, max_position_embeddings=32768)
    config.tie_word_embeddings = kind is Qwen2Config
    config.save_pretrained(tmp_path)
    flags = ["--config", str(path), "--model", str(tmp_path), "--gpus", "1", "--gpu-memory", said.group(1)]
    run = command.described(command.parse([*flags, *(["--teacher", str(tmp_path)] if "distil" in recipe else [])]))
    assert fits(run, "none") and f"{best_plan(run, 'none').room / GIB:.1f}" == said.group(2)


def test_engines_over_several_gpus(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, strategies, after = planned(capsys, qwen, "--gpus", "8", "--gpu-memory", "80", "--tensor-parallel", "2")
    assert "an engine for 2 of them" in before
    assert [*strategies] == [*ORDER] and strategies["gradients"][:2] == ["7.1", "14.2"]
    in_parts = {name: [float(cell) for cell in strategies[name][:4]] for name in TENSOR}
    part = large.PARAMETERS / GIB
    assert in_parts == {
        "tensor": pytest.approx([2 / 2 * part, 0, 4 / 2 * part, 10 / 2 * part], abs=0.06),
        "tensor+optimizer": pytest.approx([2 / 2 * part, 0, 4 / 2 * part, 10 / 8 * part], abs=0.06),
        "tensor+gradients": pytest.approx([2 / 2 * part, 0, 4 / 8 * part, 10 / 8 * part], abs=0.06),
    }
    assert float(strategies["tensor"][5]) < float(strategies["fsdp"][5]), "activations of heads and MLPs are cut"
    assert after == "sharding: auto takes 'gradients'"


@pytest.mark.parametrize(
    "name, gpus, remedy",
    [
        ("Qwen2.5-32B", 8, "vllm_tensor_parallel_size: 8 and sharding: tensor"),
        ("Llama-3.1-70B", 8, "32 ranks with vllm_tensor_parallel_size: 8 and sharding: tensor+gradients"),
    ],
)
def test_larger_engines_are_a_remedy(
    name: str, gpus: int, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = large.folder_of(name, tmp_path)
    assert remedy in planned(capsys, model, "--gpus", str(gpus), "--gpu-memory", "80")[2]
    gpus = int(remedy.split()[0]) if " ranks with " in remedy else gpus
    ranks = remedy.partition("vllm_tensor_parallel_size: ")[2].split()[0]
    flags = ("--gpus", str(gpus), "--gpu-memory", "80", "--tensor-parallel", ranks)
    assert planned(capsys, model, *flags)[1][remedy.split()[-1]][-1] == "yes"


def test_settings_without_larger_engines_get_no_such_remedy(tmp_path: Path) -> None:
    model = str(large.folder_of("Qwen2.5-7B", tmp_path))  # 28 heads: engines of 2 and 4
    flags = ["--model", model, "--gpus", "8", "--gpu-memory", "80"]
    assert list(command.described(command.parse(flags)).larger_engines) == [2, 4]
    assert command.described(command.parse([*flags, "--lora-rank", "16"])).larger_engines == {}


def test_ranks_that_share_out_rows(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU has no room for the activations of a row of 32k tokens; 8 ranks that share each row's tokens have."""
    flags = ("--gpus", "8", "--gpu-memory", "80", "--context", "32768", "--no-checkpointing")
    _, whole, none_fits = planned(capsys, qwen, *flags)
    before, shared, after = planned(capsys, qwen, *flags, "--sequence-parallel", "8", "--max-tokens", "32768")
    assert before.endswith("8 GPUs share out the tokens of each row; activations are those of one GPU's part")
    assert "fsdp" not in shared and float(shared["gradients"][5]) < float(whole["gradients"][5]) / 6
    assert "finds none that fits" in none_fits and after == "sharding: auto takes 'gradients'"
    assert [shared[name][:5] for name in shared] == [whole[name][:5] for name in shared], "of weights each has as much"


def test_a_tiny_model_as_a_run_would_plan_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.make_model(tmp_path / "tiny")
    (model / "model.safetensors").unlink()  # only its configuration is read
    _, strategies, after = planned(capsys, model, "--gpus", "2", "--gpu-memory", "16", "--context", "256", "--sleep")
    assert all(cells[-1] == "yes" for cells in strategies.values()) and after == "sharding: auto takes 'none'"
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


def test_the_context_is_at_most_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, gpus = tiny.make_model(tmp_path / "tiny", context=256), ("--gpus", "1", "--gpu-memory", "16")
    before, _, _ = planned(capsys, model, *gpus)
    assert "sequences of up to 256 tokens" in before and "the context is the model's, 256 tokens, not 8,192" in before
    assert "the context is" not in planned(capsys, model, *gpus, "--context", "128")[0]
    assert cli.main(["plan", "--model", str(model), *gpus, "--completion", "256"]) == 2
    assert "--completion is 256, but must be from 1 to 255, because the context (256 tokens)" in capsys.readouterr().err


def test_figures_are_those_of_a_run(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpus", "8", "--gpu-memory", "80", "--completion", "7168")
    _, strategies, _ = planned(capsys, qwen, *flags)
    for strategy in STRATEGIES:
        plan = best_plan(large.run(qwen), strategy)
        assert strategies[strategy][8] == f"{plan.room / GIB:.1f}" and strategies[strategy][6] == f"{plan.tokens:,}"


def test_an_adapter_on_experts_leaves_the_policy_unshared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM serves no adapter on experts: the engine gets merged copies, and the policy has weights of its own."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "hidden_size": 1024}
    Qwen3MoeConfig(num_hidden_layers=8, vocab_size=4096, **experts).save_pretrained(tmp_path)
    rank = ("--gpus", "1", "--gpu-memory", "16", "--context", "1024", "--lora-rank", "16")
    _, merged, _ = planned(capsys, tmp_path, *rank)
    assert float(merged["none"][1]) >= float(merged["none"][0]) > 0


def test_a_class_of_the_users_is_planned_like_none(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=qwen) + "sharding: mine.strategies:Mine\n")
    for memory, ends in (
        ("80", "sharding: mine.strategies:Mine, planned like none, doesn't fit; "),
        ("200", "sharding: mine.strategies:Mine fits, planned like none"),
    ):
        flags = ("--gpus", "8", "--gpu-memory", memory)
        _, rows, after = planned(capsys, qwen, "--config", str(recipe), *flags)
        _, plain, _ = planned(capsys, qwen, "--config", str(recipe), *flags, "--sharding", "none")
        assert rows == {"mine.strategies:Mine": plain["none"]} and after.startswith(ends)


def test_each_teacher_of_a_recipe_counts(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=qwen) + f"teacher_model_name_or_path: {{one: {qwen}, two: {qwen}}}\n")
    _, rows, _ = planned(capsys, qwen, "--config", str(recipe), "--gpus", "8", "--gpu-memory", "200")
    assert float(rows["none"][1]) == pytest.approx(2 * 2 * large.PARAMETERS / GIB, abs=0.06)


# -- recipes


RECIPE = """
model_name_or_path: {model}
reward_funcs: [last_number]
prompts_per_step: 64
num_generations: 8
max_completion_length: 1024
"""


def test_a_recipe_says_what_options_say(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=qwen) + "max_prompt_tokens: 512\nbeta: 0.1\nvllm_enable_sleep_mode: true\n")
    gpus = ["--gpus", "8", "--gpu-memory", "80"]
    shape = ["--context", "1536", "--completion", "1024", "--sequences", "512"]
    assert cli.main(["plan", "--config", str(recipe), *gpus]) == 0
    by_recipe = capsys.readouterr().out
    assert cli.main(["plan", "--model", str(qwen), *gpus, *shape, "--reference", "--sleep"]) == 0
    assert by_recipe == capsys.readouterr().out
    flags = ["--max_prompt_tokens", "64", "--use_peft", "true", "--lora_r", "8"]  # as of training
    assert cli.main(["plan", "--config", str(recipe), *gpus, *flags, "--completion", "256"]) == 0
    said = capsys.readouterr().out
    assert "sequences of up to 1,088 tokens, 64 per engine" in said and "(LoRA)" in said
    parts = [float(re.search(r"([\d.]+) M of them trained", said).group(1))]
    for targets in (["q_proj", "v_proj"], ["q_proj"]):
        assert cli.main(["plan", "--config", str(recipe), *gpus, *flags, "--lora_target_modules", *targets]) == 0
        parts.append(float(re.search(r"([\d.]+) M of them trained", capsys.readouterr().out).group(1)))
    assert parts[0] == parts[1] > parts[2], "peft's default for the architecture: queries and values"


def test_recipe_without_prompt_limit_names_the_default(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=qwen))
    asked = ["plan", "--config", str(recipe), "--gpus", "8", "--gpu-memory", "80"]
    line = "prompts are planned with up to 1,024 tokens, as no limit is given (--context)"
    assert cli.main(asked) == 0 and line in capsys.readouterr().out
    assert cli.main([*asked, "--context", "4096"]) == 0 and "prompts are planned" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts_per_step": 6},
        {"prompts_per_step": 6, "steps_per_generation": 3},
        {"prompts_per_step": 6, "generation_batch_size": 48},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {"per_device_train_batch_size": 8, "generation_batch_size": 32},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "generation_batch_size": 8},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": None},  # its default, as in TRL's files
    ],
)
def test_a_recipes_generation_is_that_of_its_run(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model_name_or_path": "m", "num_generations": 4} | changes))
    found, _ = recipe_options(["--config", str(recipe)])
    config = tiny.config(tmp_path, **({"prompts_per_step": None} | changes))
    sampled = config.per_device_train_batch_size * config.steps_per_generation
    assert (found.get("sequences") or found["sequences_per_engine"]) == sampled


@pytest.mark.parametrize(
    "settings, found",
    [
        ({}, ("bfloat16", "adamw_split")),
        ({"optim": "adamw_torch"}, ("float32", "adamw_torch")),
        ({"dtype": "float32"}, ("float32", "adamw_torch")),
        ({"dtype": "auto"}, ("bfloat16", "adamw_split")),
        ({"model_init_kwargs": {"dtype": "float32"}, "optim": "sgd"}, ("float32", "sgd")),
    ],
)
def test_a_recipes_precision_is_that_of_its_run(
    settings: dict[str, Any], found: tuple[str, str], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(settings))
    options, _ = recipe_options(["--config", str(recipe)])
    assert (options["dtype"], options["optim"]) == found


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_recipe_can_be_planned(path: Path) -> None:
    options = command.parse(["--config", str(path), "--gpus", "1", "--gpu-memory", "80"])
    assert options.model_name_or_path and options.num_generations > 1
    assert 0 < options.max_completion_length < options.vllm_max_model_length


def test_machine_without_gpus_needs_their_number(
    qwen: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["plan", "--model", str(qwen), "--gpus", "1"]) == 2
    assert "this machine has no GPU, so --gpu-memory can't be read from it: set --gpus" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = [types.SimpleNamespace(total_memory=size * GIB) for size in (80, 79)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    assert cli.main(["plan", "--model", str(qwen), "--context", "4096"]) == 0
    assert "on 2 GPU(s) of 79 GiB" in capsys.readouterr().out


# -- the page


PAGE = (DOCS / "guide" / "out-of-memory.md").read_text()


def test_the_page_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = large.folder(tmp_path / "Qwen2.5-7B-Instruct")
    assert cli.main(["plan", "--model", str(model), "--gpus", "8", "--gpu-memory", "80"]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in PAGE


@pytest.mark.parametrize("name", large.SHAPES)
def test_the_page_says_which_way_each_model_takes(name: str, tmp_path: Path) -> None:
    header = next(line for line in PAGE.splitlines() if line.startswith("| | 1 GPU"))
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    gpus = [int(re.sub(r"\D", "", cell)) for cell in header.split("|")[2:-1]]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    model = str(large.folder_of(name, tmp_path))
    for count, cell in zip(gpus, cells, strict=True):
        told = re.fullmatch(r"(\w+), (\d+)(?: \(T=(\d)\))?", cell)
        per_engine = told.group(3) if told and told.group(3) else "1"
        flags = ["--model", model, "--gpus", str(count), "--gpu-memory", "80", "--tensor-parallel", per_engine]
        run = command.described(command.parse(flags))
        strategy = auto(run)
        found = f"{strategy}, {best_plan(run, strategy).room / GIB:.0f}" if fits(run, strategy) else "-"
        assert found == (f"{told.group(1)}, {told.group(2)}" if told else "-"), count
        if told and told.group(3):  # the engines that leave most, where none fits with an engine on each GPU
            other = {size: room_of(model, count, size) for size in (1, 2, 4, 8) if size != int(per_engine)}
            assert other[1] < 0 and max(other.values()) < best_plan(run, strategy).room


def room_of(model: str, gpus: int, per_engine: int) -> int:
    """Bytes that the best strategy leaves for the KV cache; -1: none fits."""
    flags = ["--model", model, "--gpus", str(gpus), "--gpu-memory", "80", "--tensor-parallel", str(per_engine)]
    if gpus % per_engine:
        return -1
    run = command.described(command.parse(flags))
    return best_plan(run, auto(run)).room if fits(run, auto(run)) else -1


def test_page_has_the_plan_s_one_gpu_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**LLAMA_8B).save_pretrained(tmp_path / "Llama-3.1-8B")
    header = next(line for line in PAGE.splitlines() if line.startswith("|  | GPU | kept on the host |"))
    lines = PAGE.partition(header)[2].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == 6
    for line in lines:
        name, memory, kept, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        model, _, more = name.partition(", ")
        folder = tmp_path / model if model.startswith("Llama") else large.folder_of(model, tmp_path)
        flags = ("--config", str(RECIPES / "grpo_qlora_8b_128k.yaml")) if more.startswith("QLoRA") else ()
        flags = ("--context", "65536") if more.startswith("64k") else flags
        way = "as it is" if flags and flags[0] == "--config" else kept
        ways, _ = ways_of(capsys, folder, "--gpu-memory", memory, *flags)
        *_, activations, tokens, left, into, out, seconds, fitting = ways[way]
        assert fitting == "yes", name
        assert cells[0].split()[0] == activations
        assert int(cells[0].split()[1][1:-2]) == int(tokens.replace(",", "")) // 1000
        assert cells[1].split(",")[0] == left
        assert [cell.replace(",", "") for cell in cells[2:4]] == [f"{float(each):.0f}" for each in (into, out)]
        assert float(cells[4]) == pytest.approx(float(seconds), abs=0.5)


# -- bad input


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gpus", "0"], "--gpus is 0, but must be above 0"),
        (["--gpu-memory", "-1"], "--gpu-memory is -1, but must be above 0"),
        (
            ["--sequence-parallel", "3"],
            "--sequence-parallel is 3, but must divide --gpus (8): choose one of 1, 2, 4, 8.",
        ),
        (
            ["--sequence-parallel", "2", "--offload-gradients"],
            "sequence_parallel_size is 2 and offload_gradients is true, but this version doesn't support both",
        ),
        (["--tensor-parallel", "3"], "--tensor-parallel is 3, but must divide --gpus (8): choose one of 1, 2, 4, 8."),
        (
            ["--tensor-parallel", "8"],
            "vllm_tensor_parallel_size is 8, but must divide the model's num_attention_heads, which is 28",
        ),
        (["--completion", "9000"], "--completion is 9000, but must be from 1 to 8191, because the context (8192"),
        (["--config", "no.yaml"], "The recipe 'no.yaml' doesn't exist"),
        (["--model", "./no/such/folder"], "The model './no/such/folder' is neither a folder with a model nor"),
    ],
)
def test_bad_input_is_one_line(qwen: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert cli.main(["plan", "--model", str(qwen), "--gpus", "8", "--gpu-memory", "80", *flags]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and said.err.startswith(f"colograd plan: error: {message}")


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert cli.main(["plan", "--model", str(tmp_path), "--gpus", "1", "--gpu-memory", "80"]) == 2
    assert "has no configuration of a causal language model" in capsys.readouterr().err
