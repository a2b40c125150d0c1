"""Sums of gradients in host memory have the same bits as on the device. Copies keep their order, memory is reused, and
the optimizer's state may be there too. Tests with several ranks: offloaded_ranks.py, test_sharding.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import tiny
import torch
from paths import SCRIPTS
from peft import LoraConfig, get_peft_model
from races import Races
from torch import distributed as dist
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from colograd.config import GRPOConfig
from colograd.extensions.offload import adamw, host_stream, on_host
from colograd.extensions.offload.adamw import HostAdamW
from colograd.extensions.offload.layer_inputs import LayerInputs, inputs_on_host
from colograd.extensions.offload.on_host import WholeOnHost
from colograd.policy.lora import unwrap
from colograd.sharding.zero import SharedGradients, WholeCopies
from colograd.training.adamw_split import accumulate_in_float32


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adamw, host_stream):
        monkeypatch.setattr(module, "ELEMENTS", 700)
    monkeypatch.setattr(host_stream, "LIMIT", 4 * 4000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny.make_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


def dense(folder: Callable[[str], Path], dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=dtype)


def mixture(folder: Callable[[str], Path], dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder("qwen3_moe"), dtype=dtype)


def adapter(folder: Callable[[str], Path], dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    return get_peft_model(dense(folder, dtype), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def packed(folder: Callable[[str], Path], dtype: torch.dtype) -> Any:
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=dtype, quantization_config=four_bits)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


STREAM, GRADIENTS, ACTIVATIONS = "stream", "gradients", "activations"
GRADIENTS_AND_ALL = ((GRADIENTS,), (STREAM, GRADIENTS, ACTIVATIONS))
OTHERS = ((STREAM,), (ACTIVATIONS,), (STREAM, GRADIENTS))


def trained(make: Callable[[], Any], *way: str) -> tuple[list[torch.Tensor], list[float]]:
    """Return the weights after three steps of two or three rows. The second step is clipped. The third is restarted,
    and one parameter has no gradient in it."""
    torch.manual_seed(0)
    model, on_host, streamed = make().train(), GRADIENTS in way, STREAM in way
    accumulate_in_float32(model.parameters())
    with inputs_on_host(unwrap(model), LayerInputs(torch.device("cpu")) if ACTIVATIONS in way else None):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return steps(model, on_host, streamed)


def steps(model: Any, on_host: bool, streamed: bool) -> tuple[list[torch.Tensor], list[float]]:
    sharding = (WholeOnHost if on_host else WholeCopies)(model)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, norms = HostAdamW(own, lr=1e-2, weight_decay=0.1, compiled=False, streamed=streamed), []
    sharding.share(optimizer)
    draw = torch.Generator().manual_seed(2)
    for step in range(3):
        for row in range(2 + step):
            ids = torch.randint(250, (1, 12), generator=draw)
            sharding.backward(model(input_ids=ids, labels=ids).loss)
            assert not on_host or all(parameter.grad is None for parameter in own)
            if step == 2 and row == 0:
                sharding.discard()
                model.zero_grad()
                own[-1].requires_grad_(False)  # it takes no part
        sharding.sum_gradients()
        norms.append(sharding.clip(1e-2 if step == 1 else 1e6))
        optimizer.step()
        model.zero_grad()
        own[-1].requires_grad_(True)
    state = [value for parameter in own for value in optimizer.state[parameter].values()]
    sharding.close()
    return [*(parameter.detach() for parameter in own), *state], norms


@pytest.mark.parametrize("ways", [GRADIENTS_AND_ALL, pytest.param(OTHERS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (dense, torch.bfloat16), (mixture, torch.float32), (adapter, torch.bfloat16), (packed, torch.float32),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (
            (dense, torch.float32), (mixture, torch.bfloat16), (adapter, torch.float32), (packed, torch.bfloat16),
        )),
    ],
)  # fmt: skip
def test_weights_have_the_same_bits(kind: Any, dtype: torch.dtype, ways: Any, folders: Callable[[str], Path]) -> None:
    expected, norms = trained(lambda: kind(folders, dtype))
    assert norms[1] > 1e-2, "it is clipped"
    for way in ways:
        found, of_host = trained(lambda: kind(folders, dtype), *way)
        assert of_host == pytest.approx(norms, rel=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), way


def test_additions_keep_their_order_and_reuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gradients are added three times in each of two steps. `settle` waits until all sums are on the host."""
    races = Races()
    monkeypatch.setattr(torch, "get_device_module", lambda device: races)
    shapes, draw = ((40, 50), (3000,), (7,)), torch.Generator().manual_seed(0)
    sums, taken = host_stream.HostSums(torch.device("cpu")), []
    made = host_stream.host_empty
    monkeypatch.setattr(host_stream, "host_empty", lambda *given: taken.append(given) or made(*given))
    for _ in range(2):
        expected: dict[int, torch.Tensor] = {}
        for key, shape in (item for _ in range(3) for item in enumerate(shapes)):
            with races:
                gradient = torch.empty(shape).normal_(generator=draw)
                sums.add(key, gradient)
                del gradient  # the next one may have its memory
            value = sums._on_way[-1][1].clone().view(shape)
            expected[key] = expected[key] + value if key in expected else value
            assert sum(tensor.nbytes for _, tensor in sums._on_way) <= host_stream.LIMIT
        with races:
            sums.settle()
        assert races.copied <= races.host
        assert all(torch.equal(sums.get(key), value) for key, value in expected.items())
        with races:
            sums.discard()
        assert sums.get(0) is None
    assert not races.races, races.races[:3]
    assert len(taken) == len(shapes), "the second step has the first one's memory"
    assert max(races.allocated) <= 700 * 4 + host_stream.ALIGNED
    monkeypatch.setattr(races, "Event", lambda: SimpleNamespace(record=id, wait=id, synchronize=lambda: None))
    with races:
        sums.add(0, torch.ones(shapes[0]))
        sums.add(0, torch.ones(shapes[0]))
    assert races.races, "without events there are some"


@pytest.mark.parametrize(("way", "name"), [(WholeCopies, "none"), (SharedGradients, "gradients")])
def test_reserved_host_memory_is_what_training_takes(
    way: type[Any], name: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_mine = not dist.is_initialized()  # A test before this one may have left its group.
    if is_mine:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check_reserved(way, name, folders, monkeypatch)
    finally:
        if is_mine:
            dist.destroy_process_group()


def check_reserved(way: type[Any], name: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, taken, made = Counter[int](), Counter[int](), host_stream.host_empty

    def take(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken[shape.numel() * dtype.itemsize] += 1
        return made(shape, dtype, device)

    for module in (adamw, on_host):
        monkeypatch.setattr(module, "reserve", lambda sizes, device: reserved.update(sizes))
    for module in (adamw, host_stream):
        monkeypatch.setattr(module, "host_empty", take)
    model = dense(folders, torch.bfloat16).train()
    accumulate_in_float32(model.parameters())
    settings: Any = SimpleNamespace(offloads_gradients=True, streams_optimizer=True, sharding=name, world_size=2)
    sharding = on_host.on_host(way, settings)(model)
    optimizer = HostAdamW([*model.parameters()], compiled=False, streamed=True)
    sharding.share(optimizer)
    assert reserved and not taken
    for _ in range(2):
        sharding.backward(model(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss)
        sharding.sum_gradients()
        sharding.clip(1.0)
        optimizer.step()
    assert reserved == taken
    sharding.close()


def test_what_the_device_holds_is_counted() -> None:
    assert host_stream.on_way(1000, 10) == host_stream.device_bytes(1000, 4) == 1000, (
        "both are smaller than their limits"
    )
    assert host_stream.on_way(10**12, 10**9) == host_stream.LIMIT + 10**9
    assert host_stream.device_bytes(10**12, 4) == 2 * 700 * 4


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"offload_gradients is true and sharding is 'fsdp'.*fsdp_offload_params"):
        tiny.config(tmp_path, offload_gradients=True, sharding="fsdp")
    monkeypatch.setattr(GRPOConfig, "offloads_gradients", property(lambda self: self.offload_gradients))
    said = r"offload_gradients is true and optim is 'adamw_torch'.*adamw_split"
    with pytest.raises(ValueError, match=said):
        tiny.config(tmp_path, offload_gradients=True, optim="adamw_torch")
    config = tiny.config(tmp_path, offload_gradients=True, optim="auto")
    with pytest.raises(ValueError, match=said):  # `auto` for a float32 policy
        config.resolve_precision(torch.float32)


@pytest.mark.slow
def test_two_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    """Each kind of offloading and all together, with each strategy, after one rank ran out of memory in a backward."""
    done = launcher.run(SCRIPTS / "offloaded_ranks.py", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for name, runs in first.items():
        expected = runs[""]
        assert expected["norms"][0] > 1e-3, "it is clipped"
        assert second[name][""]["said"] == ["OutOfMemoryError"]
        for way, found in [*runs.items(), *second[name].items()]:
            assert found["weights"] == expected["weights"], (name, way)
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)
