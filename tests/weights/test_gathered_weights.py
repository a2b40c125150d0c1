"""A user's weight publisher, written in this file: weights in two shards, gathered block by block."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import tiny
import torch
from needs import has
from paths import DOCS

from colograd import GRPOTrainer
from colograd.engine.vllm_engine import VLLMEngine
from colograd.weights import Slice, check_choice
from colograd.weights.selection import expects_sharing, find_weight_sync

GATHERED = f"{__name__}:GatheredWeights"


def block_of(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``model.layers.3``; what is outside of the layers is one block."""
    head, layers, rest = name.partition(".layers.")
    return f"{head}{layers}{rest.partition('.')[0]}" if layers else ""


def split(flat: torch.Tensor, parts: Sequence[Slice]) -> list[tuple[Slice, torch.Tensor]]:
    """Each parameter of a block with its piece of the block's flat tensor."""
    pieces = flat.split([part.source.numel() for part in parts])
    return [(part, piece.view(part.source.shape)) for part, piece in zip(parts, pieces, strict=True)]


class GatheredWeights:
    """A policy as under ZeRO-3, with both ranks in one process: a block's parameters are halves of a flat tensor."""

    def __init__(self, policy: torch.nn.Module, engine: VLLMEngine, slices: Sequence[Slice]) -> None:
        self.engine = engine
        self.blocks: dict[str, list[Slice]] = defaultdict(list)
        for part in slices:
            self.blocks[block_of(part.name)].append(part)
        self.shards: dict[str, tuple[torch.Tensor, ...]] = {}
        for block, parts in self.blocks.items():
            flat = torch.cat([part.source.detach().reshape(-1) for part in parts])
            for part, values in split(flat, parts):
                part.source.data = values  # the optimizer writes into the shards
            self.shards[block] = flat.chunk(2)
        self.gathered: list[str] = []  # by the last publish, in their order

    def publish(self, version: int) -> int:
        self.engine.invalidate()
        self.gathered, written = [], 0
        for block, parts in self.blocks.items():
            whole = torch.cat(self.shards[block])  # no other block is whole at this moment
            for part, values in split(whole, parts):
                part.destination.copy_(values)
                written += part.destination.nbytes
            self.gathered.append(block)
        self.engine.stamp(version)
        return written

    def describe(self) -> str:
        return f"weights: gathered, {len(self.blocks)} blocks of 2 shards"

    def differing(self) -> list[str]:
        return [part.name for parts in self.blocks.values() for part in parts if not part.equal()]


class Incomplete:
    """A publisher that doesn't report its parameters."""

    def publish(self, version: int) -> int:
        raise AssertionError


class Watching(GRPOTrainer):
    """A publisher that looks at the engine after each publish."""

    def publish(self) -> None:
        super().publish()
        assert self.engine.version == self.state.global_step and self.weights.differing() == []


def losses(tiny_model: Path, folder: Path, weights: str, look: Any = None) -> list[float]:
    config = tiny.config(folder, weights=weights, max_steps=3)
    trainer = Watching(str(tiny_model), tiny.vowels, config, tiny.prompts())
    try:
        trainer.train()
        if look is not None:
            look(trainer)
    finally:
        trainer.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.engine
def test_users_weight_sync_trains_to_equal_losses(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def look(trainer: GRPOTrainer) -> None:
        weights = trainer.weights
        assert type(weights).__name__ == "GatheredWeights"
        assert weights.gathered == ["", "model.layers.0", "model.layers.1"]
        assert all(first.numel() == second.numel() for first, second in weights.shards.values())
        trainer.publish()
        with torch.no_grad():
            trainer.model.model.layers[1].mlp.up_proj.weight.add_(1)
        assert weights.differing() == ["model.layers.1.mlp.up_proj.weight"]
        assert weights.publish(3) == sum(p.nbytes for p in trainer.model.parameters())
        assert weights.differing() == []

    gathered = losses(tiny_model, tmp_path / "gathered", GATHERED, look)
    assert "weights: gathered, 3 blocks of 2 shards" in capfd.readouterr().out
    assert gathered == losses(tiny_model, tmp_path / "copied", "copied") and len(gathered) == 3


@pytest.mark.engine
def test_its_slices_are_proved_to_be_read(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colograd.weights import proof

    monkeypatch.setattr(proof, "unread", lambda slices, engine, probe=None: slices[:1])
    with pytest.raises(RuntimeError, match=r"engine's output doesn't depend on 1 of 20 parameters"):
        losses(tiny_model, tmp_path, GATHERED)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"{__name__}:GatherdWeights", r"has no attribute 'GatherdWeights'. Did you mean 'GatheredWeights'\?"),
        ("no.such.module:Way", r"weights 'no.such.module:Way': module 'no.such.module' can't be imported"),
        (f"{__name__}:Incomplete", r"without the method `describe`: a weight sync must have the methods `publish`"),
    ],
)
def test_wrong_class_path_fails_before_the_build(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_choice(path, None)


def test_the_way_in_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "design.md").read_text(), re.S)
    (written,) = (block for block in blocks if "class OneByOne" in block)
    (tmp_path / "my_ways.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[Any] = []
    engine = SimpleNamespace(invalidate=lambda: calls.append("invalidate"), stamp=calls.append)
    part = Slice("weight", torch.nn.Parameter(torch.ones(2, 3)), torch.zeros(2, 3, dtype=torch.bfloat16))
    way = find_weight_sync("my_ways:OneByOne")(torch.nn.Module(), engine, [part])  # type: ignore[arg-type]
    assert way.differing() == ["weight"] and way.publish(7) == 12 and calls == ["invalidate", 7]
    assert way.differing() == [] and way.describe() == "weights: copied one by one"


def test_it_gets_whole_weights_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """Gathered weights don't serve an adapter, and the memory plan counts a second copy."""
    from colograd.policy.loading import load_policy

    config = tiny.config(tmp_path, weights=GATHERED)
    assert not expects_sharing(config, load_policy(str(tiny_model), None, config))
    if not has("lora"):
        return
    adapted = load_policy(str(tiny_model), None, config, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match=r"GatheredWeights', but the policy trains a LoRA adapter.*use_peft: false"):
        check_choice(GATHERED, adapted.adapter)
