"""Mixtures of experts, with the real vLLM: where their weights are stored, equal results of engine and trainer,
adapters on experts, and refusals before anything is loaded."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import peft
import plain_vllm
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, JetMoeConfig, MixtralConfig

from colograd import GRPOTrainer
from colograd.batch import Prompt
from colograd.engine.sampling import Sampling
from colograd.engine.tensors import VLLMTensors
from colograd.engine.vllm_engine import VLLMEngine
from colograd.extensions.experts.engine import kernels
from colograd.extensions.quantized.layers import packed_weights
from colograd.policy.loading import load_policy
from colograd.policy.supported import check_supported
from colograd.sharding.weight_files import float32_weights, load_renamed
from colograd.weights import check_choice, proof
from colograd.weights.mapping import UnmappedParameter, map_parameters
from colograd.weights.sync import MergedWeights, SharedWeights

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")
FURTHER = ("qwen2_moe", "olmoe")
ALL = (*FAMILIES, *FURTHER)
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    return {family: tiny.make_model(folder / family, family, tied=False) for family in ALL}


def but_slowly(families: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Test parameters. Families outside ``quick`` run only in `pytest -m slow`."""
    return [family if family in quick else pytest.param(family, marks=pytest.mark.slow) for family in families]


def build(model: Path, tmp_path: Path, peft_config: Any = None, **changes: Any) -> GRPOTrainer:
    args = tiny.config(tmp_path / "run", **({"max_steps": 3} | changes))
    return GRPOTrainer(str(model), tiny.vowels, args, tiny.prompts(), peft_config=peft_config)


def steps(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def train_and_compare(trainer: GRPOTrainer) -> list[int]:
    """Train, compare engine and policy after each publish and in log-probabilities, return the published bytes."""
    publish, moved = trainer.weights.publish, []

    def publish_and_compare(version: int) -> int:
        moved.append(publish(version))
        assert trainer.weights.differing() == []
        return moved[-1]

    trainer.weights.publish = publish_and_compare
    trainer.train()
    trainer.publish()
    assert len(steps(trainer)) == 3 and len(moved) == 4
    assert all(step["sampling/sampling_logp_difference/mean"] < 1e-5 for step in steps(trainer))
    return moved


@pytest.mark.engine
@pytest.mark.parametrize("family", but_slowly(ALL, ["qwen3_moe"]))
def test_a_mixture_trains_in_the_engines_memory(family: str, models, tmp_path: Path, closing, tried) -> None:
    """A saved mixture has the engine's log-probabilities, in plain transformers and in plain vLLM."""
    trainer = closing(build(models[family], tmp_path))
    assert isinstance(trainer.weights, SharedWeights)
    apart = {part.name.rpartition(".")[2] for part, _ in trainer.weights.copied}
    assert apart == ({"gate_up_proj", "down_proj"} if family == "gpt_oss" else set())  # which has them transposed
    assert trainer.policy.why_padded == ""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    moved = train_and_compare(trainer)
    assert (set(moved) == {0}) == (family != "gpt_oss")
    assert not any(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
    for step in steps(trainer) if family != "glm4_moe" else ():  # which balances by other means
        assert step["aux_loss"] > 1 and 1 <= step["router/load_max"] <= 2 and 0 < step["router/entropy"] < 1.39

    probe = proof.probe_ids(trainer.engine, 40)
    logprobs = trainer.engine.prompt_logprobs(probe)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters()) and len(trained) > 20
    with torch.no_grad():
        rows = loaded(torch.tensor([probe])).logits[0, :-1].log_softmax(-1)
    theirs = rows.gather(1, torch.tensor(probe[1:])[:, None])[:, 0]
    torch.testing.assert_close(theirs, logprobs, rtol=0, atol=1e-4)
    plain = plain_vllm.prompt_logprobs(tmp_path / "saved", probe, tmp_path)  # vLLM's own kernel for experts
    torch.testing.assert_close(plain, logprobs, rtol=0, atol=1e-4)
    tried(family, "packed", "shared", "saved")
    if apart:
        tried(family, copied="experts, which are transposed")


def as_saved(trainer: GRPOTrainer, folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return peft's merge of a saved adapter, and log-probabilities of the same tokens by the merged model and the
    engine."""
    trainer.save_model(str(folder))
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).merge_and_unload()
    probe = torch.tensor(proof.probe_ids(trainer.engine, 40))
    with torch.no_grad():
        rows = merged(probe[None]).logits[0, :-1].log_softmax(-1)
    return merged, rows.gather(1, probe[1:, None])[:, 0], trainer.engine.prompt_logprobs(probe.tolist())


@pytest.mark.engine
@pytest.mark.parametrize("family", but_slowly(ALL, ["mixtral"]))
def test_an_adapter_on_experts_is_merged_on_its_way(family: str, models, tmp_path: Path, closing, tried) -> None:
    """An adapter on experts trains, and the engine's weights equal peft's merge of the saved adapter."""
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=ON_EXPERTS, task_type="CAUSAL_LM")
    trainer = closing(build(models[family], tmp_path, adapter, gradient_checkpointing=True, learning_rate=1e-2))
    assert isinstance(trainer.weights, MergedWeights)
    assert "doesn't serve a LoRA on experts" in trainer.weights.describe()
    train_and_compare(trainer)
    merged, theirs, ours = as_saved(trainer, tmp_path / "saved")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    for name in ON_EXPERTS:
        name = f"model.layers.1.{name}"
        assert (merged.get_parameter(name) - base.get_parameter(name)).abs().amax((1, 2)).min() > 1e-3, "of each expert"
    tried(family, lora_merged="on experts too")


@pytest.mark.engine
@pytest.mark.parametrize("family", but_slowly(ALL, ["qwen3_moe"]))
def test_an_attention_adapter_is_merged_on_a_cpu(family: str, models, tmp_path: Path, closing, tried) -> None:
    """The base below the adapter is the reference model."""
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = closing(build(models[family], tmp_path, adapter, beta=0.1, learning_rate=1e-2))
    assert "on a CPU vLLM has no experts beside a LoRA" in trainer.weights.describe()
    train_and_compare(trainer)
    assert [step["kl"] > 0 for step in steps(trainer)] == [False, True, True]
    _, theirs, ours = as_saved(trainer, tmp_path / "saved")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    tried(family, lora_merged="on a CPU")


def test_an_adapter_is_merged_where_vllm_permutes_experts_beside_slots(models, tmp_path, monkeypatch, capsys) -> None:
    """On a B200 experts' adapters are merged, with one warning. Other GPUs and older vLLM have adapter slots."""
    permuting = "vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe"
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = tiny.config(tmp_path)
    policy = load_policy(str(models["qwen3_moe"]), None, args, adapter)
    monkeypatch.setattr(type(args), "on_cpu", False)
    for runs in (True, False, None):
        kernel = SimpleNamespace(__name__="Kernel", _supports_current_device=lambda runs=runs: runs)
        module = None if runs is None else SimpleNamespace(TrtLlmBf16LoRAExperts=kernel)
        monkeypatch.setitem(sys.modules, permuting, module)
        found = kernels.merged_beside_experts(policy, args).adapter
        assert found.why_merged == (
            "beside a LoRA vLLM permutes the experts' weights on this GPU (Kernel)" * bool(runs)
        )
        assert capsys.readouterr().out.count("merged copies") == bool(runs)
    with pytest.raises(ValueError, match=r"`weights` is 'adapter', but beside a LoRA .* `weights: auto` to merge"):
        monkeypatch.setattr(kernels, "why_no_slots", lambda on_cpu: "beside a LoRA no")
        check_choice("adapter", kernels.merged_beside_experts(policy, args).adapter)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ALL)
def test_a_quantised_mixture_below_an_adapter_is_what_the_engine_has(
    family: str, models, tmp_path: Path, closing, tried
) -> None:
    """The linear layers are quantised. The experts aren't."""
    pytest.importorskip("bitsandbytes")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    asked = {"dtype": "float32", "quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    trainer = closing(build(models[family], tmp_path, adapter, model_init_kwargs=asked))
    assert not any(".experts." in name for name in packed_weights(trainer.model))
    assert packed_weights(trainer.model) and isinstance(trainer.weights, MergedWeights)
    train_and_compare(trainer)
    tried(family, qlora="all but the experts")


@pytest.mark.slow  # test_resume.py has it without experts
@pytest.mark.engine
@pytest.mark.parametrize("family", but_slowly(ALL, ["mixtral"]))
def test_a_resumed_mixture_goes_on_bit_for_bit(family: str, models, tmp_path: Path, tried) -> None:
    """gpt-oss needs full_determinism: several threads sum the gradients of its experts' biases in any order."""
    found = []
    for resumes in (False, True):
        changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "full_determinism": family == "gpt_oss"}
        trainer = build(models[family], tmp_path, **changes)
        try:
            trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2") if resumes else None)
            found.append([p.detach().clone() for p in trainer.model.parameters()])
        finally:
            trainer.close()
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))
    tried(family, resumed="with full_determinism" if family == "gpt_oss" else "")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_saved_by_experts_is_read_into_one_parameter(family: str, models) -> None:
    """Weights are merged into one parameter. transformers' Trainer leaves a resumed run's experts unchanged."""
    saved = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(saved.config, dtype=torch.bfloat16)
    assert load_renamed(model, models[family])
    expected = dict(saved.named_parameters())
    assert all(torch.equal(p, expected[name].bfloat16()) for name, p in model.named_parameters())
    masters = dict(float32_weights(models[family], expected))
    assert masters.keys() >= {name for name in expected if ".experts." in name}
    assert all(torch.equal(masters[name], value) for name, value in expected.items() if name in masters)
    model.config.num_experts = model.config.num_local_experts = model.config.n_routed_experts = 3
    with pytest.raises(ValueError, match=r"has shape \(4, .*\) .* and \(3, .*\) in the policy, so the file is"):
        load_renamed(AutoModelForCausalLM.from_config(model.config), models[family])


def test_a_dense_model_is_loaded_as_ever(tiny_model: Path) -> None:
    assert not load_renamed(AutoModelForCausalLM.from_pretrained(tiny_model), tiny_model)


@pytest.mark.slow  # test_ranks.py and test_fsdp.py have a dense model
@pytest.mark.engine
@pytest.mark.parametrize("sharding", ["none", "gradients", "fsdp"])
@pytest.mark.parametrize("family", ALL)
def test_two_ranks_train_a_mixture_to_the_same_weights_however_they_share(
    family: str, sharding: str, models, tmp_path: Path, two_whole, tried
) -> None:
    last = two_whole(family) if sharding == "none" else launcher.on_two_ranks(models[family], tmp_path, sharding)
    assert last[0] == last[1] == two_whole(family)[0]
    tried(family, two_ranks="each sharding strategy")


@pytest.fixture(scope="module")
def two_whole(models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Final weights of two ranks without sharding, by family."""
    return functools.cache(lambda family: launcher.on_two_ranks(models[family], tmp_path_factory.mktemp("two"), "none"))


@pytest.mark.engine
def test_experts_that_the_engine_packed_away_are_an_error_with_the_reason(models, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "live_experts", contextlib.nullcontext)
        with pytest.raises((UnmappedParameter, RuntimeError), match=r"layout of weights|another layout"):
            build(models["mixtral"], tmp_path)
    monkeypatch.delattr("vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts")
    with pytest.raises(RuntimeError, match=r"whose weights vLLM [\d.]+ repacks on a CPU"):
        kernels.check_experts(8, on_cpu=True)
    kernels.check_experts(0, on_cpu=True)
    kernels.check_experts(8, on_cpu=False)


@pytest.mark.engine
def test_mixture_is_built_beside_a_dense_model(models, tiny_model: Path, tmp_path: Path) -> None:
    """vLLM creates process groups once per process, and a dense model's have none for experts."""
    from colograd.runtime import process

    process.prepare_ranks()
    config, sampling = tiny.config(tmp_path), Sampling(n=2, max_tokens=4, temperature=1.0, options={})
    with contextlib.ExitStack() as closing:
        engines = [
            closing.enter_context(contextlib.closing(VLLMEngine(str(model), config, torch.float32, 64, 2**22)))
            for model in (tiny_model, models["mixtral"])
        ]
        for engine in engines:
            engine.stamp(0)
            (group,) = engine.generate([Prompt({}, (5, 6, 7), 0)], sampling, version=0, seed=0)
            assert len(group.rollouts) == 2


def test_a_kernel_with_a_layout_of_its_own_is_refused() -> None:
    """If policy and engine have different dtypes, equal values can't prove the layout."""
    policy, engine = torch.nn.Module(), torch.nn.Module()
    for owner, name in ((policy, "gate_up_proj"), (engine, "w13_weight")):
        owner.mlp, owner.mlp.experts = torch.nn.Module(), torch.nn.Module()
        owner.mlp.experts.register_parameter(name, torch.nn.Parameter(torch.randn(4, 6, 8)))
        owner.model, owner.mlp = torch.nn.ModuleDict({"mlp": owner.mlp}), None
    for backend in ("TRITON", "CPU"):
        engine.model.mlp.experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
        assert [part.name for part in map_parameters(policy, VLLMTensors(engine))] == ["model.mlp.experts.gate_up_proj"]
    engine.model.mlp.experts.quant_method.unquantized_backend.name = "FLASHINFER_CUTLASS"
    with pytest.raises(UnmappedParameter, match=r"\(FLASHINFER_CUTLASS\) has .* in another layout"):
        map_parameters(policy, VLLMTensors(engine))


@pytest.mark.parametrize(
    ("model_config", "ranks", "said"),
    [
        (GptOssConfig(), 2, r"vllm_tensor_parallel_size is 2, but gpt_oss is a mixture .*parallel_size: 1 "),
        (MixtralConfig(intermediate_size=99), 2, r"for mixtral it must divide .* which is 99: choose"),
        (MixtralConfig(router_jitter_noise=0.1), 1, r"router_jitter_noise 0.1: .* model_init_kwargs: {router_jitter"),
        (JetMoeConfig(), 2, r"vllm_tensor_parallel_size is 2, but jetmoe is a mixture .*parallel_size: 1 "),
    ],
    ids=["tensor parallel", "a size", "noise", "another family in parts"],
)
def test_what_a_mixture_cant_do_is_said_from_its_configuration_alone(model_config, ranks, said, tmp_path) -> None:
    """The folder has a 47B model's configuration and no weights."""
    model_config.save_pretrained(tmp_path)
    args = tiny.config(tmp_path / "run")
    args.vllm_tensor_parallel_size = ranks
    with pytest.raises(ValueError, match=said):
        check_supported(str(tmp_path), args)


def test_what_isnt_a_mixture_or_can_be_trained_passes(tiny_model: Path, tmp_path: Path) -> None:
    for model in (str(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)):
        check_supported(model, tiny.config(tmp_path / "run", model_init_kwargs=None))
    MixtralConfig(router_jitter_noise=0.1).save_pretrained(tmp_path)
    still = {"router_jitter_noise": 0.0, "dtype": "float32"}
    check_supported(str(tmp_path), tiny.config(tmp_path / "run", model_init_kwargs=still))
    assert AutoConfig.from_pretrained(tmp_path).router_jitter_noise == 0.1


def test_dropout_before_experts_is_refused_with_the_remedy(models, tmp_path: Path) -> None:
    adapter = peft.LoraConfig(target_parameters=ON_EXPERTS, lora_dropout=0.05, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=re.escape("lora_dropout is 0.05") + r".*set lora_dropout: 0"):
        build(models["mixtral"], tmp_path, adapter)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("replay", [False, True], ids=["", "router replay"])
@pytest.mark.parametrize("family", ALL)
def test_a_mixture_learns(family: str, replay: bool, models, tmp_path: Path, closing, tried) -> None:
    """A random mixture learns to write small letters, with the routers' load-balancing loss."""
    changes = {
        "max_steps": 80, "learning_rate": 3e-3, "num_generations": 8, "prompts_per_step": 8, "router_replay": replay,
        "max_completion_length": 16, "lr_scheduler_type": "constant", "router_aux_loss_coef": None,
    }  # fmt: skip
    args = tiny.config(tmp_path / "run", **changes)
    trainer = closing(GRPOTrainer(str(models[family]), tiny.small_letters, args, tiny.prompts()))
    started = time.process_time()
    trainer.train()
    rewards = [step["reward"] for step in steps(trainer)]
    first, last = (sum(part) / 5 for part in (rewards[:5], rewards[-5:]))
    seconds = time.process_time() - started
    print(f"{family}, replay {replay}: {first:.2f} -> {last:.2f} in {seconds:.0f} processor seconds")
    assert first < 0.3 and last > 0.9
    assert any("router/replayed" in step for step in steps(trainer)) == replay
    tried(family, "learns")
