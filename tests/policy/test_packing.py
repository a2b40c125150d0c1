"""Packing: groups -> micro-batches, token by token."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch

from colograd.batch import FinishReason, Group, MicroBatch, Rollout, ScoredGroup
from colograd.policy.packing import collate, has_signal, loss_tokens, pack, plan_rows

CPU = torch.device("cpu")


def rollout(prompt: tuple[int, ...], completion: tuple[int, ...], **changes: Any) -> Rollout:
    given = {
        "sampler_logprobs": -torch.tensor(completion, dtype=torch.float32) / 100,
        "sampled": torch.ones(len(completion), dtype=torch.bool),
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(prompt, completion, policy_version=0, **(given | changes))


def scored(*rollouts: Rollout, advantages: list[float] | None = None, position: int = 0) -> ScoredGroup:
    values = torch.arange(1.0, len(rollouts) + 1) if advantages is None else torch.tensor(advantages)
    return ScoredGroup(Group({}, rollouts, position), torch.zeros(len(rollouts), 1), values)


def group_of(prompt: int, *completions: int, start: int = 0, position: int = 0) -> ScoredGroup:
    """A group of the given lengths; its tokens count on from ``start``, so each completion token is unique."""
    tokens = itertools.count(start)
    prompt_ids = tuple(next(tokens) for _ in range(prompt))
    rollouts = [rollout(prompt_ids, tuple(next(tokens) for _ in range(length))) for length in completions]
    return scored(*rollouts, position=position)


def labels(rows: tuple[MicroBatch, ...]) -> list[int]:
    return [token for row in rows for token in row.labels.tolist()]


def test_a_group_is_one_row_token_by_token() -> None:
    group = scored(rollout((1, 2, 3), (10, 11)), rollout((1, 2, 3), (20, 21, 22, 23)), advantages=[0.5, -0.5])
    (row,) = pack([group], 100, False, CPU)
    #                                prompt   |  first |     second
    assert row.input_ids.tolist() == [[1, 2, 3, 10, 11, 20, 21, 22, 23]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 6]]
    assert row.layout.lengths == (3, 2, 4) and row.layout.attends_to == ((), (0,), (0,))
    assert row.layout.starts == (0, 3, 5) and row.layout.num_tokens == 9
    # Token 0 of a completion is predicted at the prompt's end (2), every other one at its predecessor.
    assert row.labels.tolist() == [10, 11, 20, 21, 22, 23]
    assert row.logit_positions.tolist() == [2, 3, 2, 5, 6, 7]
    assert row.sequence.tolist() == [0, 0, 1, 1, 1, 1] and row.num_sequences == 2
    assert row.loss_mask.tolist() == [1.0] * 6
    assert row.advantages.tolist() == [0.5] * 2 + [-0.5] * 4
    torch.testing.assert_close(row.sampler_logprobs, -row.labels / 100)
    assert row.old_logprobs is None and not row.scores
    assert row.input_ids.dtype == row.position_ids.dtype == row.labels.dtype == row.logit_positions.dtype == torch.int64
    assert row.advantages.dtype == row.loss_mask.dtype == row.sampler_logprobs.dtype == torch.float32


def test_groups_share_a_row_and_see_only_their_own_prompt() -> None:
    (row,) = pack([group_of(3, 2, 1), group_of(2, 4, start=50)], 100, False, CPU)
    # Equal sizes keep their order: 3 + 2 + 1 = 2 + 4.
    assert row.layout.lengths == (3, 2, 1, 2, 4)
    assert row.layout.attends_to == ((), (0,), (0,), (), (3,))
    assert row.input_ids.tolist() == [[0, 1, 2, 3, 4, 5, 50, 51, 52, 53, 54, 55]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 4, 5]]
    assert row.logit_positions.tolist() == [2, 3, 2, 7, 8, 9, 10]
    assert row.sequence.tolist() == [0, 0, 1, 2, 2, 2, 2]


def test_a_group_over_the_budget_is_split_and_its_prompt_repeated() -> None:
    rows = pack([group_of(3, 4, 4, 4)], 11, False, CPU)  # 3 + 4 + 4 = 11 fits, a third completion doesn't
    assert sorted(row.layout.lengths for row in rows) == [(3, 4), (3, 4, 4)]
    assert all(row.input_ids[0, :3].tolist() == [0, 1, 2] for row in rows)
    assert sorted(labels(rows)) == list(range(3, 15))
    assert [row.sequence.unique().tolist() for row in rows] == [[0, 1], [0]]


def test_a_sequence_over_the_budget_gets_a_row_of_its_own() -> None:
    rows = pack([group_of(3, 9, 2, 2)], 8, False, CPU)
    assert sorted(row.layout.lengths for row in rows) == [(3, 2, 2), (3, 9)]


def test_rows_are_filled_largest_first() -> None:
    """First-fit decreasing: 6, 5, 4, 3 into rows of 9 is two rows, in the order given it would be three."""
    groups = [group_of(1, size - 1, start=100 * size) for size in (4, 6, 3, 5)]
    assert [row.layout.num_tokens for row in pack(groups, 9, False, CPU)] == [9, 9]


@pytest.mark.parametrize("budget", [1, 13, 20, 40, 1000])
def test_every_completion_token_appears_exactly_once(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    lengths = torch.randint(1, 9, (6, 5), generator=generator).tolist()
    groups = [group_of(*row, start=1000 * i, position=i) for i, row in enumerate(lengths)]
    rows = pack(groups, budget, False, CPU)
    rollouts = [r for g in groups for r in g.group.rollouts]
    assert sorted(labels(rows)) == sorted(token for r in rollouts for token in r.completion_ids)
    assert sum(row.num_sequences for row in rows) == len(rollouts)
    longest = max(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    previous = {
        t: p for r in rollouts for p, t in itertools.pairwise((*r.prompt_ids[-1:], *r.completion_ids))
    }  # fmt: skip
    for row in rows:
        assert row.layout.num_tokens == row.input_ids.numel() <= max(budget, longest)
        # The label shift: the input at a logit's position is the token before the label.
        assert row.input_ids[0, row.logit_positions].tolist() == [previous[token] for token in row.labels.tolist()]
        ends = itertools.accumulate(row.layout.lengths)
        assert row.position_ids[0, [end - 1 for end in ends]].tolist() == [
            sum(row.layout.lengths[s] for s in (*seen, index)) - 1 for index, seen in enumerate(row.layout.attends_to)
        ]


def test_totals_do_not_depend_on_the_order_of_groups() -> None:
    groups = [group_of(2 + i % 3, 3, 1 + i, start=1000 * i, position=i) for i in range(7)]

    def totals(order: list[ScoredGroup]) -> list[tuple[int, float, float]]:
        rows = pack(order, 17, False, CPU)
        columns = (torch.cat([getattr(row, name) for row in rows]) for name in ("labels", "advantages", "loss_mask"))
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    assert totals(groups) == totals(groups[::-1]) == totals(groups[3:] + groups[:3])


def test_advantages_may_be_given_per_token() -> None:
    plain = group_of(2, 2, 3, 1)
    per_token = ScoredGroup(plain.group, plain.rewards, torch.arange(6.0))
    for budget in (100, 5):
        rows = pack([per_token], budget, False, CPU)
        found = dict(zip(labels(rows), torch.cat([row.advantages for row in rows]).tolist(), strict=True))
        assert found == {token: token - 2.0 for token in range(2, 8)}  # the prompt is tokens 0 and 1


def test_tokens_of_tools_are_packed_and_not_in_the_loss() -> None:
    mixed = rollout((1,), (5, 6, 7), sampled=torch.tensor([True, False, True]))
    (row,) = pack([scored(mixed, rollout((1,), (8,)))], 100, False, CPU)
    assert row.labels.tolist() == [5, 6, 7, 8] and row.loss_mask.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_truncated_completions_leave_the_loss_only_where_asked() -> None:
    cut, whole = rollout((1,), (5, 6), finish_reason=FinishReason.LENGTH), rollout((1,), (7, 8))
    for mask_truncated, expected in ((True, [0.0, 0.0, 1.0, 1.0]), (False, [1.0] * 4)):
        (row,) = pack([scored(cut, whole)], 100, mask_truncated, CPU)
        assert row.labels.tolist() == [5, 6, 7, 8] and row.loss_mask.tolist() == expected
    assert loss_tokens(cut, True).tolist() == [False, False] and loss_tokens(cut, False).all()


def test_a_group_has_signal_where_any_advantage_is_not_zero() -> None:
    two = (rollout((1,), (2,)), rollout((1,), (3,)))
    assert not has_signal(scored(*two, advantages=[0.0, 0.0])) and has_signal(scored(*two, advantages=[0.0, -1e-9]))


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 100, False, CPU) == () == pack([], 100, False, CPU, share_prompts=False)


@pytest.mark.parametrize("budget", [1, 12, 20, 1000])
def test_without_shared_prompts_a_row_padded_to_its_longest_fits_the_budget(budget: int) -> None:
    groups = [group_of(2 + i % 3, 3, 1 + i, 7 - i, start=1000 * i, position=i) for i in range(4)]
    rows = pack(groups, budget, False, CPU, share_prompts=False)
    assert sorted(labels(rows)) == sorted(labels(pack(groups, 1000, False, CPU)))
    for row in rows:
        sequences = [row.layout.lengths[i] + row.layout.lengths[i + 1] for i in range(0, len(row.layout.lengths), 2)]
        assert row.layout.attends_to == tuple(() if i % 2 == 0 else (i - 1,) for i in range(2 * len(sequences)))
        assert len(sequences) * max(sequences) <= budget or len(sequences) == 1


def test_a_token_takes_nine_bytes_until_its_forward() -> None:
    """A token has its id, its log-probability, and whether it was sampled. Rows hold the rollouts without copies."""
    group = group_of(3, 40, 50)
    (row,) = plan_rows([group], 1000, False, CPU)
    rollouts = [rollout for part in row.parts for rollout in part.rollouts]
    assert all(ours is theirs for ours, theirs in zip(rollouts, group.group.rollouts, strict=True))
    for rollout in rollouts:
        ids = rollout.completion_ids
        assert (ids.itemsize, rollout.sampler_logprobs.itemsize, rollout.sampled.itemsize) == (4, 4, 1)
    assert pickle.loads(pickle.dumps(rollouts[0])).completion_ids == rollouts[0].completion_ids
    first, again = collate(row), collate(row)
    assert first.labels.data_ptr() != again.labels.data_ptr() and torch.equal(first.labels, again.labels)
