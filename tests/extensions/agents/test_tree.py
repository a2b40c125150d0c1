"""A session's tokens as a tree: each sampled token appears once, and trained values equal separate rows'."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import row_cases
import torch
from tree_cases import sequences

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.extensions.agents.branches import Branch, TokenTree, branches_of
from colograd.extensions.agents.turn_rewards import problem_with, with_turn_rewards
from colograd.losses.advantages import AdvantageEstimator
from colograd.policy.attention import keys_in_place_from
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.policy.row_proof import choose_rows

CPU = torch.device("cpu")


def made(*requests: tuple[list[int], list[int]], **columns: Any) -> Rollout:
    tree = TokenTree(requests[0][0])
    for number, (read, wrote) in enumerate(requests):
        tree.add(read, wrote, [-0.5] * len(wrote), number=number)
    rollout = tree.rollout(0, FinishReason.STOP)
    assert rollout is not None
    for number, (_, wrote) in enumerate(requests):
        at = tree.places[number]
        assert list(rollout.completion_ids[at : at + len(wrote)]) == wrote
    session = [{"at": at, "tokens": len(requests[number][1])} for number, at in sorted(tree.places.items())]
    return dataclasses.replace(rollout, columns={"session": session, **columns})


def test_the_example_of_the_types_token_by_token() -> None:
    rollout = made(([11, 12, 13], [21, 22]), ([11, 12, 13, 21, 22, 31], [32]), ([11, 12, 41], [42]))
    assert rollout.prompt_ids == (11, 12, 13)
    assert list(rollout.completion_ids) == [21, 22, 31, 32, 41, 42]
    assert rollout.sampled.tolist() == [True, True, False, True, False, True]
    assert branches_of(rollout) == (Branch(4, None, 3), Branch(2, None, 2))
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.ones(1))
    (row,) = pack([group], 100, False, CPU)
    assert row.input_ids.tolist() == [[11, 12, 13, 21, 22, 31, 32, 41, 42]]
    assert row.layout.lengths == (2, 1, 4, 2) and row.layout.attends_to == ((), (0,), (0, 1), (0,))
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 2, 3]]
    assert row.logit_positions.tolist() == [2, 3, 4, 5, 1, 7] and row.labels.tolist() == [21, 22, 31, 32, 41, 42]


def test_a_conversation_without_branches_is_none() -> None:
    rollout = made(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]))
    assert branches_of(rollout) == () and list(rollout.completion_ids) == [3, 4, 5, 6]
    assert rollout.sampled.tolist() == [True, False, True, True]


def test_equal_samples_are_two_and_a_context_that_shares_nothing_sees_nothing() -> None:
    rollout = made(([1, 2], [3, 4]), ([1, 2], [3, 4]), ([9, 8], [7]))
    assert list(rollout.completion_ids) == [3, 4, 3, 4, 9, 8, 7] and int(rollout.sampled.sum()) == 5
    assert branches_of(rollout) == (Branch(2, None, 2), Branch(2, None, 2), Branch(3, None, 0))


def test_rewards_of_answers_add_to_the_advantages_of_their_tokens() -> None:
    # The second context goes on from the middle of the first answer, so that the answer is cut in two.
    one = made(([1], [2, 3]), ([1, 2, 9], [4]), turn_rewards=[1.0, 0.0])
    other = made(([1], [5]), ([1, 5, 6], [7, 8]), turn_rewards=[0.0, 1.0])
    rewards = torch.tensor([[1.0], [0.0]])
    estimator = AdvantageEstimator("none", "sum_then_normalize", "mean", (1.0,))
    found = with_turn_rewards(estimator.of_group(rewards), Group({}, (one, other), 0), estimator, {})
    assert list(one.completion_ids) == [2, 3, 9, 4] and list(other.completion_ids) == [5, 6, 7, 8]
    assert found.tolist() == [1.0, 1.0, 0.5, 0.0, -1.0, -0.5, 0.0, 0.0]
    (row,) = pack([ScoredGroup(Group({}, (one, other), 0), rewards, found)], 100, False, CPU)
    of_token = dict(zip(row.labels.tolist(), row.advantages.tolist(), strict=True))
    assert of_token == {2: 1.0, 3: 1.0, 9: 0.5, 4: 0.0, 5: -1.0, 6: -0.5, 7: 0.0, 8: 0.0}
    failed = made(([1], [5]), agent_failure="it fell")
    plain = estimator.of_group(rewards)
    assert with_turn_rewards(plain, Group({}, (one, failed), 0), estimator, {}) is plain
    assert with_turn_rewards(plain, Group({}, (made(([1], [5])), made(([1], [6]))), 0), estimator, {}) is plain


@pytest.mark.parametrize("given", [[1.0], "ab", [1.0, math.nan], 3, [1.0, None]])
def test_turn_rewards_that_are_none_fail_the_session(given: Any) -> None:
    assert "one for each of the 2 answers" in problem_with({"turn_rewards": given}, 2)
    assert problem_with({"turn_rewards": [1, 0.5]}, 2) == problem_with({}, 2) == ""


def a_tree(draw: random.Random, vocabulary: int, prompt: list[int]) -> tuple[Rollout, list[list[int]]]:
    """Make a random session with the shapes of agents: turns, compactions into the prompt, branches, sub-agents.
    Returns it with the sampled completions."""
    contexts, requests, wrote_all = [prompt], [], []

    def tokens(most: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(draw.randint(1, most))]

    for turn in range(draw.randint(2, 7)):
        kind = draw.random() if turn else 1.0
        if kind < 0.15:  # a sub-agent
            read = tokens(5)
        elif kind < 0.4:  # a compaction
            before = draw.choice(contexts)
            read = [*before[: draw.randrange(len(before))], *tokens(4)]
        else:
            read = draw.choice(contexts)
        wrote = tokens(5)
        requests.append((read, wrote))
        wrote_all.append(wrote)
        contexts.append([*read, *wrote, *(tokens(3) if draw.random() < 0.8 else [])])
    requests = [requests[0], *sorted(requests[1:], key=lambda r: len(r[0]))]
    return made(*requests), wrote_all


def test_each_sampled_token_of_random_sessions_is_there_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rollout, wrote = a_tree(draw, 50, [draw.randrange(3, 50) for _ in range(draw.randint(1, 8))])
        trained = rollout.completion_ids[:0]
        trained.extend(t for t, s in zip(rollout.completion_ids, rollout.sampled.tolist(), strict=True) if s)
        assert sorted(trained) == sorted(token for one in wrote for token in one)
        apart = [*sequences(rollout)]
        assert sum(int(one.sampled.sum()) for one in apart) == len(trained)
        assert rollout.sequence_tokens == sum(len(one.input) + len(one.completion_ids) for one in apart)


@pytest.mark.parametrize("in_place", [False, True], ids=["copied keys", "keys in place"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "gemma2", "qwen3_5", "granitemoehybrid", "lfm2"])
def test_packed_tree_has_the_gradients_of_separate_branches(family: str, in_place: bool) -> None:
    if in_place and family not in ("llama", "qwen3_moe", "qwen3_5"):
        pytest.skip("windows, sinks and caps copy keys, and layers without attention have none")
    model = row_cases.make((row_cases.PACKED | row_cases.RECURRENT)[family])
    assert choose_rows(model) == "", "its rows are packed"
    draw, groups, apart = random.Random(1), [], []
    for position in range(2):
        prompt = [draw.randrange(3, row_cases.VOCABULARY) for _ in range(6)]
        rollouts = tuple(a_tree(draw, row_cases.VOCABULARY, prompt)[0] for _ in range(2))
        advantages = torch.randn(2, generator=torch.Generator().manual_seed(position))
        groups.append(ScoredGroup(Group({}, rollouts, position), torch.zeros(2, 1), advantages))
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            for one in sequences(rollout):
                apart.append(ScoredGroup(Group({}, (one,), len(apart)), torch.zeros(1, 1), advantage[None]))
    assert any(branches_of(rollout) for group in groups for rollout in group.group.rollouts)

    def gradients(rows: Any) -> list[torch.Tensor]:
        model.zero_grad()
        for row in rows:
            logprobs, _ = policy_logprobs(model, row, 1.0)
            (logprobs * row.loss_mask * row.advantages).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    packed = pack(groups, 10_000, False, CPU)
    separate = pack(apart, 1, False, CPU)
    assert sum(row.input_ids.numel() for row in packed) < sum(row.input_ids.numel() for row in separate)
    with keys_in_place_from(1 if in_place else 10_000):
        ours, theirs = gradients(packed), gradients(separate)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 1e-5 * max(1.0, float(other.abs().max()))
