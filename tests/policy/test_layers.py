"""Compiled decoder layers: the same losses and gradients, one compilation for rows of any length, the same tensors."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from layer_cases import ROWS, make_rows, trained
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.policy import attention, layers
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.row_proof import choose_rows
from colograd.training.adamw_split import accumulate_in_float32

COMPILER = os.environ.get("CXX", "g++")
COMPILED = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler: {COMPILER}")
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
# Before and after attention, each with what surrounds it in the layer.
GRAPHS = 4


def make_model(dtype: torch.dtype = torch.float32, **shape: int) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | shape)).to(dtype)
    assert choose_rows(model) == ""
    return model.train()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Reset torch's compile caches and counters."""
    torch._dynamo.reset()
    layers._compiled.cache_clear()
    counters.clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[COMPILED, pytest.mark.slow])])
def test_rows_of_any_length_train_as_before_and_are_compiled_once(backend: str) -> None:
    """All layers share one compiled code. Weights may move to the engine's memory meanwhile."""
    model, rows = make_model(), make_rows()
    expected = [trained(model, row) for row in rows]
    places = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    model.zero_grad()
    layers.compile_layers(model, backend)
    for row, own in zip(rows, expected, strict=True):
        assert_same(trained(model, row), own)
        assert graphs() == GRAPHS, "after the first row nothing is compiled again"
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == places
    for parameter in model.parameters():
        parameter.data = torch.cat([parameter.data, parameter.data])[: len(parameter)]
    assert_same(trained(model, rows[0]), expected[0])
    assert graphs() == GRAPHS


@pytest.mark.slow
def test_more_images_compile_nothing_again() -> None:
    """Rows with different numbers of images whose tokens attend to each other in both directions."""
    model, seen = make_model(), []
    layers.compile_layers(model, "eager")
    for row, images in zip(
        make_rows(), ([(0, 7)], [(0, 2), (3, 5)], [(1, 3)], [(0, 2), (5, 9), (30, 32)]), strict=False
    ):
        own = {"layout": row.layout, "both_ways": attention.ImageRuns(images), "use_cache": False}
        with attention.packed_rows():
            model.base_model(row.input_ids, torch.ones_like(row.input_ids).bool(), row.position_ids, **own)
        seen.append(graphs())
    assert seen[0] > 0 and seen == [seen[0]] * 4


@pytest.mark.gpu
def test_a_gpu_compiles_once_too() -> None:
    """bfloat16 with flash attention, on the training device. For the last row inductor would fuse other reductions: it
    has more than 4096 tokens, more than two per column, and more than 5 * 2**20 elements."""
    device = torch.device("cuda")
    model = make_model(torch.bfloat16, hidden_size=1024, max_position_embeddings=8192).to(device)
    rows = make_rows(device, (*ROWS, [[1000, 2500, 2000]]))
    accumulate_in_float32(model.parameters())
    expected = [trained(model, row) for row in rows]
    model.zero_grad()
    layers.compile_layers(model)
    assert choose_rows(model) == "" and graphs() == GRAPHS
    for row, own in zip(rows, expected, strict=True):
        found = trained(model, row)
        assert float((found - own).norm() / own.norm()) < 0.05
    assert graphs() == GRAPHS


@pytest.mark.slow  # the test above counts the graphs of training
def test_what_was_proved_is_what_trains() -> None:
    """The proof's forward makes the graphs of training; an evaluation makes different graphs. Gradients of bfloat16
    weights are float32, which torch can't trace, from the first micro-batch on."""
    model, rows = make_model(torch.bfloat16), make_rows()
    accumulate_in_float32(model.parameters())
    layers.compile_layers(model, "eager")
    assert choose_rows(model) == "" and graphs() == GRAPHS and model.training
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for row in rows:
        policy_logprobs(model, row, 1.0)[0].sum().backward()
    assert graphs() == GRAPHS
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    model.zero_grad()
    with torch.no_grad():
        for row in rows:
            policy_logprobs(model.eval(), row, 1.0)
    evaluated = graphs()
    assert evaluated > GRAPHS
    with torch.no_grad():
        policy_logprobs(model, rows[0], 1.0)
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, eos_token_id=None)
    assert graphs() == evaluated, "calls that aren't packed rows run as they are"


@pytest.mark.slow
def test_an_adapter_and_the_model_below_it() -> None:
    peft = pytest.importorskip("peft")
    rows = make_rows()
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = [trained(model, row) for row in rows[:3]]
    with torch.no_grad(), model.disable_adapter():
        below = policy_logprobs(model, rows[0], 1.0)[0]
    model.zero_grad()
    layers.compile_layers(model.get_base_model(), "eager")
    assert choose_rows(model) == ""
    proved = graphs()
    for row, own in zip(rows, expected, strict=False):
        assert_same(trained(model, row), own)
    assert graphs() == proved
    with torch.no_grad(), model.disable_adapter():
        assert_same(policy_logprobs(model, rows[0], 1.0)[0], below)


def test_a_wrong_kernel_shows_in_the_proof_and_none_is_an_error() -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: [1.3 * x if torch.is_tensor(x) else x for x in graph.forward(*args)]

    def missing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    model = make_model()
    layers.compile_layers(model, wrong)  # type: ignore[arg-type]
    assert "packed log-probabilities differ" in choose_rows(model)
    layers.forget_compiled(model)
    assert choose_rows(model) == "" and not any(map(layers.is_compiled, layers.decoder_layers(model)))
    layers.compile_layers(model, missing)  # type: ignore[arg-type]
    with pytest.raises(
        layers.NotCompiled, match=r"a LlamaDecoderLayer \(.*no compiler.*\)\. Torch needs a C\+\+ compiler"
    ):
        choose_rows(model)


def test_a_copy_has_layers_of_its_own() -> None:
    model = make_model()
    layers.compile_layers(model, "eager")
    copied = copy.deepcopy(model)
    for layer, own in zip(copied.model.layers, model.model.layers, strict=True):
        assert layer.forward.__self__ is layer and own.forward.__self__ is own
    layers.forget_compiled(copied)
    assert any(map(layers.is_compiled, layers.decoder_layers(model))) and not any(
        map(layers.is_compiled, layers.decoder_layers(copied))
    )
    assert copied.state_dict().keys() == model.state_dict().keys()


def test_a_model_with_dropout_is_proved_without() -> None:
    model = make_model()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    layers.compile_layers(model, "eager")
    with layers.as_it_trains(model.eval()):
        assert not model.training
    model.model.layers[0].self_attn.attention_dropout = 0.0
    with torch.no_grad(), layers.as_it_trains(model):
        assert model.training and torch.is_grad_enabled()
    assert not model.training


@pytest.mark.slow
@pytest.mark.engine
def test_a_run(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The reference's layers are compiled too. Nothing is compiled after the first step."""
    from colograd import GRPOTrainer

    seen = []

    class Counting(GRPOTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            seen.append(graphs())
            return loss

    config = tiny.config(tmp_path, max_steps=3, beta=0.1, torch_compile=True, torch_compile_backend="eager")
    trainer = Counting(str(tiny_model), tiny.vowels, config, tiny.prompts())
    try:
        assert "torch compiles its layers" in capfd.readouterr().out
        assert any(map(layers.is_compiled, layers.decoder_layers(trainer.model))) and any(
            map(layers.is_compiled, layers.decoder_layers(trainer.ref_model))
        )
        assert trainer.weights.describe().startswith("weights: shared") and not trainer.weights.differing()
        trainer.train()
        assert seen[0] > GRAPHS and seen == [seen[0]] * 3
        assert abs(trainer.state.log_history[0]["kl"]) < 1e-6
    finally:
        trainer.close()
    assert not any(map(layers.is_compiled, layers.decoder_layers(trainer.model)))


def test_padded_rows_are_refused(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, torch_compile=True)
    layers.check_compiled(config, "")
    layers.check_compiled(tiny.config(tmp_path), "it mixes tokens")
    with pytest.raises(
        ValueError, match=r"compiled layers need .* padded \(it mixes tokens\): set torch_compile to false"
    ):
        layers.check_compiled(config, "it mixes tokens")
