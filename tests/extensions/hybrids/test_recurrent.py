"""Layers with a state in packed rows: a prompt goes through them once, and its state begins its completions.

That loss and gradients are the model's own of each sequence is in test_padded.py.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import decoder_families
import image_cases
import pytest
import tiny
import torch
import transformers as hf
from row_cases import RECURRENT, make, make_groups

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, Rollout, RolloutId, ScoredGroup, SegmentLayout
from colograd.extensions.hybrids.recurrent import keep_uncompiled, mixers_of
from colograd.policy import attention
from colograd.policy.layers import compile_layers, decoder_layers
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.policy.row_proof import choose_rows

CPU = torch.device("cpu")
BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_split"}


def packed_model(kind: str) -> Any:
    model = make(RECURRENT[kind])
    assert choose_rows(model) == ""
    return model


def logprobs_of(model: Any, groups: list[ScoredGroup]) -> dict[Any, torch.Tensor]:
    (row,) = pack(groups, 1000, False, CPU)
    found = policy_logprobs(model, row, 1.0)[0].detach()
    return {rollout: found[row.sequence == index] for index, rollout in enumerate(row.rollouts)}


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_completions_tokens_change_nothing_in_the_others(kind: str) -> None:
    model, groups = packed_model(kind), make_groups()
    before = logprobs_of(model, groups)
    group = groups[1].group
    changed = dataclasses.replace(group.rollouts[1], completion_ids=tuple(range(5, 14)))
    others = (group.rollouts[0], changed, *group.rollouts[2:])
    groups[1] = dataclasses.replace(groups[1], group=dataclasses.replace(group, rollouts=others))
    after = logprobs_of(model, groups)
    assert [each for each in before if not torch.equal(before[each], after[each])] == [RolloutId(1, 1)]


def test_a_prompt_goes_through_its_layers_once() -> None:
    """A prompt of 40 tokens and 8 completions of 10: 120 tokens through each layer, 400 in padded rows."""
    ids = tuple(range(3, 43))
    written = torch.ones(10, dtype=torch.bool)
    rollouts = tuple(
        Rollout(ids, tuple(range(3 + n, 13 + n)), torch.zeros(10), written, FinishReason.STOP, 0) for n in range(8)
    )
    group = ScoredGroup(Group({}, rollouts, 0), torch.zeros(8, 1), torch.ones(8))
    model, seen = packed_model("qwen3_5"), []
    (mixer,) = mixers_of(model)
    for linear in (mixer.in_proj_qkv, decoder_layers(model)[0].mlp.down_proj):
        linear.register_forward_pre_hook(lambda module, args: seen.append((module, args[0].flatten(0, -2).shape[0])))
    logprobs_of(model, [group])
    assert [sum(n for m, n in seen if m is kind) for kind in dict.fromkeys(m for m, _ in seen)] == [120, 120]


@pytest.mark.parametrize("kind", ["qwen3_5", "granitemoehybrid"])
def test_a_checkpoint_computes_them_again_with_their_row(kind: str) -> None:
    """Checkpointed layers are computed again with their own row, although a later row came; also in a copy."""
    plain, gradients = packed_model(kind), []
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        rows = pack(make_groups(), 40, False, CPU)
        losses = [policy_logprobs(model, row, 1.0)[0].sum() for row in rows]
        assert len(losses) > 1
        torch.stack(losses).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)


class LaterConvolution(hf.models.lfm2.modeling_lfm2.Lfm2ShortConv):
    """LFM2's, by the names that transformers has for its state since 5.24."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **others: Any) -> torch.Tensor:
        before, after, inputs = self.in_proj(hidden_states).mT.chunk(3, dim=1)
        inputs, length = before * inputs, inputs.shape[-1]
        if cache is not None:
            assert (cache.get_conv_state(0) is None) == (not cache.has_previous_state(0)) and cache.is_recording_past(0)
            inputs = cache.update_conv_state(inputs, 0, conv_kernel_size=self.conv_kernel_size)
        convolved = self.conv(inputs)[..., : inputs.shape[-1]][..., -length:]
        mixed: torch.Tensor = self.out_proj((after * convolved).mT)
        return mixed


def test_later_transformers_name_a_state_cache() -> None:
    model = make(RECURRENT["lfm2"])
    (mixer,) = mixers_of(model)
    mixer.__class__ = LaterConvolution
    assert choose_rows(model) == ""


def test_a_later_checkpoint_keeps_its_row() -> None:
    """Since transformers 5.23 a checkpoint doesn't run a layer's hooks again. It repeats the keyword arguments."""
    model = packed_model("lfm2")
    (mixer,), inputs = mixers_of(model), torch.randn(1, 9, 64)
    layouts = [SegmentLayout((4, 2, 3), ((), (0,), (0,))), SegmentLayout((5, 4), ((), (0,)))]
    mixer.layout = layouts[0]
    first = mixer.forward(hidden_states=inputs)
    mixer.layout = layouts[1]
    assert torch.equal(mixer.forward(hidden_states=inputs, layout=layouts[0]), first)
    assert not torch.equal(mixer.forward(hidden_states=inputs), first)


@pytest.mark.slow
def test_compiled_layers_leave_them_as_they_are() -> None:
    model = packed_model("qwen3_5")
    rows = pack(make_groups(), 40, False, CPU)
    plain = [policy_logprobs(model, row, 1.0)[0].detach() for row in rows]
    keep_uncompiled(model)
    compile_layers(model, backend="eager")
    compiled = [policy_logprobs(model, row, 1.0)[0].detach() for row in rows]
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


@pytest.mark.parametrize("kind", RECURRENT)
def test_turns_go_on_from_one_another(kind: str) -> None:
    """A segment of a conversation sees all segments before it. The second turn has one token."""
    model = packed_model(kind)
    layout = SegmentLayout((6, 1, 4, 3), ((), (0,), (0, 1), (0, 1)))
    ids = torch.arange(3, 17)[None]
    with attention.packed_rows(), torch.no_grad():
        places = torch.tensor([[*range(6), 6, 7, 8, 9, 10, 7, 8, 9]])
        packed = model.base_model(input_ids=ids, position_ids=places, layout=layout, use_cache=False)
    model.set_attn_implementation("eager")
    for sequence in ([*range(11)], [*range(7), 11, 12, 13]):
        with torch.no_grad():
            alone = model.base_model(input_ids=ids[:, sequence], use_cache=False).last_hidden_state
        assert (packed.last_hidden_state[:, sequence] - alone).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("lfm2", "lfm2"),
        ("granitemoehybrid", "granitemoehybrid"),
        pytest.param("qwen3_5_text", "qwen3_5", marks=image_cases.needs("torchvision")),
        pytest.param("qwen3_5_moe_text", "qwen3_5_moe", marks=image_cases.needs("torchvision")),
    ],
)
def test_a_hybrid_learns(model_type: str, family: str, tmp_path: Any, closing: Any, tried: Any) -> None:
    """A random hybrid learns to write small letters in packed rows. vLLM's Gated DeltaNet on a CPU is bfloat16 only."""
    changes = {
        "max_steps": 80, "learning_rate": 3e-3, "num_generations": 8, "prompts_per_step": 8, "disable_dropout": True,
        "max_completion_length": 16, "lr_scheduler_type": "constant",
    } | (BFLOAT16 if "qwen" in family else {})  # fmt: skip
    model = decoder_families.make_model(tmp_path / "model", model_type)
    trainer = closing(
        GRPOTrainer(str(model), tiny.small_letters, tiny.config(tmp_path / "run", **changes), tiny.prompts())
    )
    trainer.train()
    rewards = [step["reward"] for step in trainer.state.log_history if "reward" in step]
    first, last = (sum(part) / 5 for part in (rewards[:5], rewards[-5:]))
    print(f"{family}: {first:.2f} -> {last:.2f}")
    assert trainer.policy.why_padded == "" and first < 0.3 and last > 0.7
    tried(family, "learns")
