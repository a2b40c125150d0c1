"""Models with images: groups of prompts, their losses, and log-probabilities by transformers alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plain_vllm
import pytest
import tiny_images
import torch
from paths import SCRIPTS

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, ModelInput, Rollout, ScoredGroup
from colograd.extensions.images.data import ImageReader
from colograd.extensions.images.rider import PER_TOKEN, Images
from colograd.policy import towers
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack

RANKS = SCRIPTS / "two_ranks.py"
PACKED = (
    "gemma3_vl", "gemma4_vl", "gemma4_both_ways", "gemma4_experts", "idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl",
    "qwen3_5_vl", "mistral3_vl", "internvl_vl",
)  # fmt: skip


def needs(*libraries: str) -> Any:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"it needs {' and '.join(missing)}")


def groups_of(model: Any, family: str, completions: int = 3) -> list[ScoredGroup]:
    """Make two prompts with images and one without. One completion has a sampled image token."""
    asked = [tiny_images.made_up(model, family, 1, 1), tiny_images.made_up(model, family, 2, 2), ModelInput((3, 4, 5))]
    draw, found = torch.Generator().manual_seed(0), []
    for position, prompt in enumerate(asked):
        rollouts = []
        for index in range(completions):
            ids = torch.randint(5, 250, (3 + index + position,), generator=draw).tolist()
            ids[1] = model.config.image_token_id if index == 1 and position == 0 else ids[1]
            rollouts.append(
                Rollout(prompt, ids, torch.zeros(len(ids)), torch.ones(len(ids)).bool(), FinishReason.STOP, 0)
            )
        advantages = torch.tensor([1.0, -0.5, 0.25][:completions])
        found.append(ScoredGroup(Group({}, tuple(rollouts), position), torch.zeros(completions, 1), advantages))
    return found


def loss_and_gradients(model: Any, groups: list[ScoredGroup], share: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for row in pack(groups, 400, False, torch.device("cpu"), share_prompts=share):
        logprobs, _ = policy_logprobs(model, row, 1.0)
        loss = (logprobs * row.advantages).sum()
        loss.backward()
        total += float(loss)
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exact_model(family: str) -> Any:
    """Build a random model. Gemma 4 is in float64, because its scaled embeddings have gradients of up to 50."""
    model, _ = tiny_images.random_model(family)
    return model.double() if family in ("gemma4_vl", "gemma4_both_ways") else model


def check_alike(
    one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]], by_size: float = 0.0
) -> None:
    """Check that losses and gradients of one model agree in two kinds of rows.

    Args:
        by_size: tolerance as a share of a parameter's largest gradient, if above 1.
    """
    assert one[0] == pytest.approx(other[0], abs=1e-4)
    assert one[1].keys() == other[1].keys() and any(towers.sees(name) for name in one[1])
    for name, gradient in one[1].items():
        apart, largest = float((gradient - other[1][name]).abs().max()), float(gradient.abs().max())
        most = by_size * max(largest, 1.0) or 1e-4
        assert apart < most, (name, apart, largest)


# Processors that also read videos need more packages.
OTHERS = [
    pytest.param("smolvlm", marks=[needs("torchvision", "num2words"), pytest.mark.slow]),
    *(pytest.param(family, marks=[needs("torchvision"), pytest.mark.slow]) for family in ("qwen2_5_vl", "qwen3_vl")),
]
GEMMA3 = pytest.param("gemma3_vl", marks=pytest.mark.slow)


def but_slowly(families: Iterable[str]) -> list[Any]:
    """Return parameters for a test's variants. One family of each kind runs by default, the others with `pytest -m
    slow`."""
    quick = ("idefics3", "gemma4_vl", "qwen3_5_vl", "mistral3_vl")
    return [family if family in quick else pytest.param(family, marks=pytest.mark.slow) for family in families]


def own_inputs(seen: Images, completion: int) -> dict[str, torch.Tensor]:
    """Return the processor's inputs of a prompt for it and ``completion`` tokens."""
    return {
        name: torch.nn.functional.pad(value, (0, completion)) if name in PER_TOKEN else value
        for name, value in seen.inputs.items()
    }


@torch.no_grad()
def logprobs_of_transformers(model: Any, asked: ModelInput, completion: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*asked.ids, *completion]])
    seen = own_inputs(asked.images, len(completion))
    rows = model(input_ids=ids, attention_mask=torch.ones_like(ids), **seen).logits[0, len(asked.ids) - 1 : -1]
    return rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def weights_after(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def compare_with_what_was_saved(trainer: GRPOTrainer, saved: Path, scratch: Path) -> None:
    """Check that the trainer, and transformers and vLLM on a checkpoint, give equal probabilities to a completion."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor, loaded = AutoProcessor.from_pretrained(saved), AutoModelForImageTextToText.from_pretrained(saved)
    again = loaded.state_dict()
    assert all(torch.equal(again[name], p) for name, p in trainer.model.named_parameters())
    row = tiny_images.prompts(2, images=2)[1]
    reader, completion = ImageReader(processor, loaded.config.image_token_id), list(range(40, 52))
    asked, turned = (
        reader.read(row | {"images": pictures}, {"add_generation_prompt": True}, "row 1")
        for pictures in (row["images"], row["images"][::-1])
    )
    theirs = logprobs_of_transformers(loaded, asked, completion)
    assert float((theirs - logprobs_of_transformers(loaded, turned, completion)).abs().max()) > 0.01

    rollout = Rollout(asked, completion, torch.zeros(12), torch.ones(12).bool(), FinishReason.STOP, 0)
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.ones(1))
    (packed,) = pack([group], 400, False, torch.device("cpu"), share_prompts=True)
    with torch.no_grad():
        ours = policy_logprobs(trainer.model, packed, 1.0)[0]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    given = asked.followed_by(completion).images
    plain = plain_vllm.prompt_logprobs(saved, given.engine_ids, scratch, pictures=row["images"])
    assert len(plain) == len(asked.ids) + len(completion) - 1
    torch.testing.assert_close(plain[-12:], ours, rtol=0, atol=1e-4)
