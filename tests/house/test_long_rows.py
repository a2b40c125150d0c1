"""Sequences of 131,072 tokens: bytes of host memory at each stage. tests/policy/test_fake_gpu.py has the bytes on the
device, tests/memory/test_token_budget.py the number of sequences in a budget."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from colograd.batch import FinishReason, Group, Logged, MicroBatch, ModelInput, Prompt, Rollout, ScoredGroup
from colograd.extensions.recording.group_views import STEP_TOKENS, shown_completions
from colograd.policy import padded
from colograd.policy.merged_attention import Call, calls_at_once, calls_one_by_one
from colograd.policy.packing import collate, plan_rows
from colograd.rollout.group_records import RewardedGroup, group_bytes, group_of

LONG, PROMPT, COUNT = 2**17, 2048, 4
TOKENS = PROMPT + COUNT * (LONG - PROMPT)
META = torch.device("meta")


@pytest.fixture(scope="module")
def group() -> ScoredGroup:
    """Four completions that fill a context of 131,072 tokens with their prompt."""
    asked, size = ModelInput(tuple(range(PROMPT))), LONG - PROMPT
    rollouts = tuple(
        Rollout(
            asked, array("i", range(index, index + size)), torch.full((size,), -0.5), torch.ones(size).bool(),
            FinishReason.LENGTH, 0,
        )
        for index in range(COUNT)
    )  # fmt: skip
    return ScoredGroup(Group({"prompt": "?"}, rollouts, 0), torch.zeros(COUNT, 1), torch.arange(COUNT).float())


def rows_of(group: ScoredGroup, budget: int, share_prompts: bool = True) -> tuple[Any, ...]:
    return plan_rows([group], budget, False, META, share_prompts)


def test_a_budget_below_a_sequence_is_a_row_for_each(group: ScoredGroup) -> None:
    assert [row.num_tokens for row in rows_of(group, 16384)] == [LONG] * COUNT
    assert [row.num_tokens for row in rows_of(group, TOKENS)] == [TOKENS]
    assert [row.num_tokens for row in rows_of(group, 16384, share_prompts=False)] == [LONG] * COUNT


def test_row_transfer_takes_52_bytes_per_token(group: ScoredGroup) -> None:
    (row,) = rows_of(group, TOKENS)
    batch = collate(row)
    names = (field.name for field in dataclasses.fields(MicroBatch) if field.name != "host_positions")
    tensors = (getattr(batch, name) for name in names)
    assert sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor)) <= 52 * TOKENS
    assert batch.layout.num_tokens == TOKENS and batch.layout.longest_sequence == LONG


def bytes_of(calls: Sequence[Call]) -> int:
    parts = (part for call in calls for part in (call.queries, call.keys, *(call.sequences or ())))
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def test_attention_plan_grows_with_segments_only(group: ScoredGroup) -> None:
    """The plan grows with the number of segments, except for windows, where it lists each segment's visible keys."""
    (row,) = rows_of(group, TOKENS)
    layout = collate(row).layout
    assert bytes_of(calls_at_once(layout, None, META)) < 100 and bytes_of(calls_one_by_one(layout)) == 0
    assert bytes_of(calls_at_once(layout, 4096, META)) < 8.2 * TOKENS


def test_padded_rows_are_planned_with_eight_bytes_per_token(group: ScoredGroup) -> None:
    """Each token of the padded rows and of the packed row takes eight bytes."""
    (row,) = rows_of(group, TOKENS)
    rows = padded.rows_of(collate(row).layout)
    assert rows.tokens.shape == (COUNT, LONG) and rows.tokens.nbytes + rows.places.nbytes == 8 * (COUNT * LONG + TOKENS)


def test_the_rollout_log_has_a_group_in_nine_bytes_per_token(group: ScoredGroup) -> None:
    """Written and read without a Python object per token of a completion."""
    recorded = RewardedGroup(group.group, torch.zeros(COUNT, 1), Logged({}, {}))
    tracemalloc.start()
    try:
        content = group_bytes(recorded)
        assert len(content) < 9 * TOKENS
        again = group_of(content, Prompt(group.group.example, group.group.rollouts[0].input, 0))
        assert tracemalloc.get_traced_memory()[1] < 30 * TOKENS
    finally:
        tracemalloc.stop()
    assert [r.completion_ids for r in again.group.rollouts] == [r.completion_ids for r in group.group.rollouts]


def test_samples_of_a_step_have_a_bound(group: ScoredGroup) -> None:
    trainer = {identity: torch.zeros(LONG - PROMPT) for identity in group.group.rollout_ids}
    words: Any = lambda ids: [f" {token}" for token in ids]  # noqa: E731
    shown = shown_completions([(group, [0.0] * COUNT)], "train", ["right"], trainer, words, False)
    assert all(len(each["trainer"]) == 4096 and each["cut"] for each in shown)
    assert len(json.dumps(shown)) < 40 * STEP_TOKENS
