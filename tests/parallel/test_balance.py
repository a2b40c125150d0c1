"""Balancing changes which rank trains a group. It changes a step's time and nothing else."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import torch
from paths import SCRIPTS
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.config import GRPOConfig
from colograd.losses.objective import Objective
from colograd.parallel.balance import MIN_GAIN, balance, cost, pair_cost, plan, share_out
from colograd.policy import attention, packing
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import PackingRules, collate, dummy, pack, pack_step

CPU = torch.device("cpu")
SCRIPT = SCRIPTS / "uneven_ranks.py"


def make_group(position: int, prompt: int, *completions: int) -> ScoredGroup:
    draw = torch.Generator().manual_seed(position)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(128, (length,), generator=draw).tolist())

    prompt_ids = tokens(prompt)
    rollouts = tuple(
        Rollout(prompt_ids, tokens(n), -torch.rand(n, generator=draw), torch.ones(n).bool(), FinishReason.STOP, 2)
        for n in completions
    )
    advantages = torch.randn(len(rollouts), generator=draw)
    return ScoredGroup(Group({"row": position}, rollouts, position), torch.zeros(len(rollouts), 1), advantages)


def loads(costs: Sequence[Sequence[float]], assignment: list[list[tuple[int, int]]]) -> list[float]:
    return [sum(costs[owner][index] for owner, index in row) for row in assignment]


# -- The plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_plan_trains_every_group_once_and_never_slower(ranks: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    costs = [(torch.rand(6, generator=draw) ** 3 * 1000 * (1 + row)).tolist() for row in range(ranks)]
    assignment = plan(costs)
    assert sorted(place for row in assignment for place in row) == [(r, i) for r in range(ranks) for i in range(6)]
    own = [[(r, i) for i in range(6)] for r in range(ranks)]
    before, after = max(sum(row) for row in costs), max(loads(costs, assignment))
    assert assignment == own or after < (1 - MIN_GAIN) * before
    largest, mean = max(max(row) for row in costs), sum(map(sum, costs)) / ranks
    assert assignment == own or after <= max(1.2 * mean, largest), "near the best that whole groups allow"


def test_the_plan_of_two_ranks() -> None:
    swapped = plan([[10.0, 10.0], [1.0, 1.0]])
    assert swapped == [[(0, 1), (1, 0)], [(0, 0), (1, 1)]], "11 and 11: a swap is better than a move to 10 and 12"


def test_little_to_gain_moves_nothing() -> None:
    assert plan([[10.0, 2.0], [10.0]]) == [[(0, 0), (0, 1)], [(1, 0)]], "11 instead of 12 is less than a tenth"
    assert plan([[30.0], [1.0, 1.0]]) == [[(0, 0)], [(1, 0), (1, 1)]], "a group is whole"
    assert plan([[], []]) == [[], []] and plan([[5.0]]) == [[(0, 0)]]


def test_a_rank_without_groups_gets_some() -> None:
    assert sorted(loads([[3.0, 3.0, 3.0], []], plan([[3.0, 3.0, 3.0], []]))) == [3.0, 6.0]


def test_ranks_of_an_engine_divide_its_groups() -> None:
    costs = [[5.0, 4.0, 3.0, 3.0], [], [1.0, 2.0], []]
    shared = share_out(costs, ranks_per_engine=2)
    assert shared == [[(0, 0), (0, 3)], [(0, 1), (0, 2)], [(2, 1)], [(2, 0)]]
    assert share_out([[1.0], [2.0, 1.0]]) == [[(0, 0)], [(1, 0), (1, 1)]], "an engine per rank: everybody's own"
    between = plan(costs, ranks_per_engine=2)
    assert sorted(place for row in between for place in row) == sorted(place for row in shared for place in row)
    assert max(loads(costs, between)) < max(loads(costs, shared)), "and engines help each other"


def test_cost_counts_tokens_and_query_key_pairs() -> None:
    """Prompt 4, completions 2 and 3. Causal: 4*4/2; each completion sees the prompt and half of itself."""
    group = make_group(0, 4, 2, 3)
    assert cost(group, 0.0, True) == 4 + 2 + 3 and cost(group, 0.0, False) == 6 + 7
    assert cost(group, 0.1, True) == pytest.approx(9 + 0.1 * (8 + 2 * 4 + 2 + 3 * 4 + 4.5))
    assert cost(group, 0.1, False) == pytest.approx(13 + 0.1 * (18 + 24.5))


def test_a_pair_costs_what_the_model_says() -> None:
    config = SimpleNamespace(num_hidden_layers=30, num_attention_heads=9, head_dim=64)
    config.get_text_config = lambda: config
    # 4 * 30 * 9 * 64 FLOPs against 2 * 135e6.
    assert pair_cost(config, 135_000_000) == pytest.approx(69_120 / 270e6)


# -- Moving


def test_moved_group_keeps_what_training_reads() -> None:
    group = make_group(3, 5, 4, 1, 7)
    unpicklable = {"environments": lambda: 0}
    rollouts = tuple(dataclasses.replace(rollout, columns=unpicklable) for rollout in group.group.rollouts)
    told = dataclasses.replace(group, group=dataclasses.replace(group.group, example=unpicklable, rollouts=rollouts))
    there = pickle.loads(pickle.dumps(told.for_training()))
    assert there.group.rollout_ids == group.group.rollout_ids and there.group.example == {}
    assert torch.equal(there.advantages, group.advantages)
    for ours, theirs in zip(group.group.rollouts, there.group.rollouts, strict=True):
        assert (ours.input, ours.completion_ids) == (theirs.input, theirs.completion_ids)
        assert (ours.finish_reason, ours.policy_version) == (theirs.finish_reason, theirs.policy_version)
        assert torch.equal(ours.sampler_logprobs, theirs.sampler_logprobs) and torch.equal(ours.sampled, theirs.sampled)


def test_one_rank_keeps_its_groups() -> None:
    groups = [make_group(0, 3, 2, 2), make_group(1, 50, 40, 30)]
    kept, moved = balance(groups, 1e-3, True)
    assert all(a is b for a, b in zip(kept, groups, strict=True)) and moved == 0


# -- The update


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, attn_implementation=attention.NAME,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gradient(model: Any, ranks: list[list[ScoredGroup]], budget: int, share_prompts: bool = True) -> torch.Tensor:
    """(1 + parameters,) the step's loss and gradient, summed over ranks and divided by the step's tokens."""
    tokens = sum(len(r.completion_ids) for groups in ranks for g in groups for r in g.group.rollouts)
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for groups in ranks:
        for row in pack(groups, budget, False, CPU, share_prompts):
            logprobs, _ = policy_logprobs(model, row, 1.0)
            loss = -(row.advantages * row.loss_mask * logprobs).sum().double() / tokens
            loss.backward()
            total += loss.detach()
    return torch.cat([total[None], *(p.grad.flatten() for p in model.parameters())])


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_loss_is_independent_of_budget_order_and_ranks(model: Any, ranks: int) -> None:
    lengths = [(60, 50, 40, 9), (40, 60, 12, 50), (50, 3, 30, 60), (5, 3, 2, 1), (4, 1, 6, 2), (6, 2, 2, 2)]
    groups = [make_group(i, *each) for i, each in enumerate(lengths)]
    expected = gradient(model, [groups], 10_000)
    share = len(groups) // ranks
    own = [groups[i * share : (i + 1) * share] for i in range(ranks)]
    assignment = plan([[cost(g, 1e-3, True) for g in row] for row in own])
    balanced = [[own[owner][index] for owner, index in row] for row in assignment]
    assert (ranks in (1, 6)) == (balanced == own), "long groups first: two and three ranks differ, six can't be mended"
    for split in (own, balanced, [row[::-1] for row in balanced[::-1]]):
        for budget in (1, 70, 150, 10_000):
            found = gradient(model, split, budget)
            assert (found - expected).norm() < 1e-6 * expected.norm(), (ranks, budget)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "luspo", "cispo", "sapo"])
def test_dummy_row_has_zero_gradients_and_counts_nowhere(model: Any, loss_type: str) -> None:
    args = GRPOConfig(output_dir="unused", report_to="none", loss_type=loss_type, use_cpu=True)
    model.zero_grad()
    row = collate(dummy(CPU, [(3, (2, 4)), (1, (1,))]))
    output = Objective.from_config(args)(*policy_logprobs(model, row, 1.0), row)
    output.loss.backward()
    assert output.loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert not output.minima and not output.maxima
    assert all(float(count) == 0 and float(total) == 0 for total, count in output.sums.values())


def test_dummies_are_added_only_for_joint_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "gather", lambda count: [count, 3])
    groups = [make_group(0, 3, 2, 2)]
    for equal_counts, expected in ((True, 3), (False, 1)):
        rules = PackingRules(100, False, True, True, False, equal_counts, 0.0, CPU)
        rows = pack_step(groups, rules)
        assert len(rows) == expected and len(pack_step([], rules)) == expected - (not equal_counts)
        assert all(collate(row).loss_mask.sum() == 0 and row.num_tokens == 2 for row in rows[1:])


# -- Real ranks


def run(ranks: int, folder: Path) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """[rank]: the cases unbalanced, balanced, balanced in small rows with equal counts; and with entropy terms, in
    large and in small rows."""
    done = launcher.run(SCRIPT, folder, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def real_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run(2, folder), run(1, folder)


def test_the_entropy_s_terms_are_of_all_ranks(real_ranks: Any) -> None:
    """One rank's completions are long and the other's short, so the ranks' own thresholds and means would differ."""
    two, ((_, alone),) = real_ranks
    wanted = torch.tensor(alone[0]["gradient"])
    for case in [*alone, *(case for _, cases in two for case in cases)]:
        assert case["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6)
        assert (torch.tensor(case["gradient"]) - wanted).norm() < 1e-6 * wanted.norm()
    assert alone[0]["tokens"] is None or alone[0]["tokens"] == alone[1]["tokens"] == two[0][1][0]["tokens"]


def test_balancing_two_ranks_keeps_the_update(real_ranks: Any) -> None:
    ((first, _), (second, _)), ((one, _),) = real_ranks
    two = (first, second)
    assert first[0]["moved"] == 0 and first[0]["tokens"] > 10 * second[0]["tokens"]
    for case in (1, 2):
        assert first[case]["moved"] == second[case]["moved"] > 0
        slow, fast = sorted((first[case]["tokens"], second[case]["tokens"]))
        assert fast < 2 * slow, "a whole group is the least that moves"
        assert first[case]["own_groups"] == [0, 1, 2] and second[case]["own_groups"] == [3, 4, 5]
    assert first[2]["micro_batches"] == second[2]["micro_batches"] > 1
    wanted = torch.tensor(one[0]["gradient"])
    for rank in two:
        for case in rank:
            assert case["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
            assert (torch.tensor(case["gradient"]) - wanted).norm() < 1e-6 * wanted.norm()
    shown = [{k: v for k, v in case["metrics"].items() if k != "train/packed_tokens"} for case in (*first, *one)]
    assert all(metrics == pytest.approx(shown[0], rel=1e-6) for metrics in shown), "what is logged is what was sampled"
