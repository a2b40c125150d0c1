"""The token budget is measured by a line, halved when memory runs out, and has no effect on the update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup, StepBatch
from colograd.config import GRPOConfig
from colograd.losses.objective import Objective
from colograd.memory import token_budget
from colograd.parallel import ranks
from colograd.policy import attention
from colograd.policy.logprobs import with_old_logprobs
from colograd.policy.packing import PackingRules, collate, pack_step
from colograd.policy.padded import sequences
from colograd.training.learner import packing_rules

CPU = torch.device("cpu")
RULES = PackingRules(1000, False, True, True, False, False, 0.0, CPU)


def make_step(*lengths: tuple[int, ...], rules: PackingRules = RULES) -> StepBatch:
    """Make a step from groups of (prompt, completions ...) tokens."""
    draw = torch.Generator().manual_seed(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(128, (length,), generator=draw).tolist())

    groups = []
    for position, (prompt, *completions) in enumerate(lengths):
        prompt_ids = tokens(prompt)
        rollouts = tuple(
            Rollout(prompt_ids, tokens(n), torch.zeros(n), torch.ones(n).bool(), FinishReason.STOP, 0)
            for n in completions
        )
        groups.append(
            ScoredGroup(Group({}, rollouts, position), torch.zeros(len(rollouts), 1), torch.ones(len(rollouts)))
        )
    return StepBatch(pack_step(groups, rules), 10, 3, {}, tuple(groups))  # fmt: skip


# -- Measuring


def memory(base: int, per_token: int, largest: int = 10**9) -> tuple[Callable[[int], float], list[int]]:
    """Fake a model's peak: ``base + per_token * tokens`` bytes, infinite above ``largest``; and the tried sizes."""
    tried: list[int] = []

    def peak(tokens: int) -> float:
        tried.append(tokens)
        return math.inf if tokens > largest else base + per_token * tokens

    return peak, tried


def test_the_budget_fills_the_limit_and_the_measuring_stays_below_it() -> None:
    peak, tried = memory(base=10_000_000, per_token=1000)
    tokens = 20_000 // 256 * 256
    assert token_budget.fill(peak, 30_000_000) == (tokens, 10_000_000 + 1000 * tokens)
    assert tried == [1024, 2048, 4096, 8192, 16384], "32768 tokens would have needed more than the limit"


def test_one_size_gives_a_careful_estimate() -> None:
    peak, tried = memory(base=1_000_000, per_token=1000)
    found, size = token_budget.fill(peak, 3_000_000)
    assert tried == [1024] and found == 1280 and 1_000_000 + 1000 * found <= size <= 3_000_000


def test_what_ran_out_of_memory_is_not_offered() -> None:
    peak, _ = memory(base=0, per_token=1, largest=5000)
    assert token_budget.fill(peak, 10**9) == (8192 - 256, 8192 - 256), (
        "between what fitted and what didn't; the rest is for back-off"
    )
    peak, _ = memory(base=0, per_token=1, largest=10)
    assert token_budget.fill(peak, 10**9) == (512, 0)


def test_a_budget_has_bounds() -> None:
    assert token_budget.fill(memory(0, 1)[0], 10**12)[0] == token_budget.LARGEST
    peak, tried = memory(0, 1)
    assert token_budget.fill(peak, 10**12, 2048 + 2**17) == (2048 + 2**17,) * 2, "one sequence of 131,072 tokens"
    assert tried[-1] == 2**17
    assert token_budget.fill(memory(10**9, 0)[0], 10**8)[0] == token_budget.STEP, "not even the smallest row fits"


def test_budget_leaves_room_for_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's second micro-batch has activations and gradients at once. Stand-ins for the GPU's counters: 100 bytes a
    token in the forward, 50,000 of gradients, 1 MB free, half of it wanted later."""
    weight, gradients = torch.nn.Linear(4, 4), 50_000
    sizes: list[int] = []
    held: list[bool] = []

    def train(row: Any) -> None:
        assert collate(row).loss_mask.sum() == 0
        sizes.append(row.num_tokens)
        held.append(weight.weight.grad is not None)
        if sizes[-1] > 3000:
            raise torch.OutOfMemoryError("the counters know better than the line")
        (weight(torch.ones(4)).sum() * 0.0).backward()

    def clean() -> None:
        token_budget.free_memory(weight)

    counters = {
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 1000,
        "max_memory_allocated": lambda device: 1000 + 100 * sizes[-1] + gradients * held[-1],
        "memory_reserved": lambda device: 1000,
        "mem_get_info": lambda device: (1_000_000, 8_000_000),
    }
    for name, stand_in in counters.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    tokens = (400_000 - gradients) // 100 // 256 * 256
    assert token_budget.measure(train, clean, (30, 20, 4), RULES, 500_000) == (tokens, gradients + 100 * tokens)
    assert sizes == [256, 1024] * 2 + [256, 2048] * 2, "with long completions and with short ones"
    assert held == [False, True] * 4
    assert weight.weight.grad is None
    assert token_budget.measure(train, clean, (30, 20, 4), RULES, 0)[0] == 4096 - 256, "4096 ran out of memory"


def test_bytes_are_read_off_the_line_through_the_last_sizes() -> None:
    sizes = {1024: 2000, 2048: 3000, 4096: math.inf}
    assert token_budget.fill(sizes.__getitem__, 10**9) == (3840, 3000 + (3840 - 2048) * 1000 // 1024)
    assert token_budget.fill(sizes.__getitem__, 1500) == (768, 1500), "through the origin and one size"


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 2), (300, 40, 8)])
@pytest.mark.parametrize("tokens", [2, 3, 50, 1024])
def test_a_dummy_row_has_the_tokens_it_should(tokens: int, shape: tuple[int, int, int]) -> None:
    row = collate(token_budget.dummy_row(tokens, shape, CPU))
    assert row.input_ids.numel() == row.layout.num_tokens == tokens
    assert max(row.layout.lengths) <= max(shape[:2]) + 1 and row.loss_mask.sum() == 0


@pytest.mark.parametrize("given", ["auto", None])
def test_auto_is_a_number_on_a_cpu_and_measured_on_a_gpu(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**changes: Any) -> GRPOConfig:
        return GRPOConfig(output_dir="unused", report_to="none", max_tokens_per_microbatch=given, **changes)

    assert made(use_cpu=True).max_tokens_per_microbatch == 4096
    monkeypatch.setattr(GRPOConfig, "on_cpu", False)
    config = made()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    rules = packing_rules(config, SimpleNamespace(model=model, why_padded=""), Objective.from_config(config), False)  # type: ignore[arg-type]
    assert config.max_tokens_per_microbatch == "auto" and rules.max_tokens == 0


def test_a_number_may_be_text_and_nonsense_is_refused() -> None:
    assert GRPOConfig("unused", report_to="none", max_tokens_per_microbatch="512").max_tokens_per_microbatch == 512
    for wrong in ("many", 0, -1):
        with pytest.raises(ValueError, match=r"`max_tokens_per_microbatch` is '?(many|0|-1)'?, but must be"):
            GRPOConfig("unused", report_to="none", max_tokens_per_microbatch=wrong)


# -- Backing off


def test_the_budget_is_halved_below_the_largest_row() -> None:
    step = make_step((10, 20, 30), (5, 4, 4))  # one row of 73 tokens, far below the budget
    rules, (again,) = token_budget.back_off(RULES, [step], "out")
    assert rules.max_tokens == 36 and dataclasses.replace(rules, max_tokens=1000) == RULES
    assert [row.num_tokens for row in again.rows] == [40, 30, 13]
    assert again.groups == step.groups and again.num_loss_tokens == step.num_loss_tokens


def test_the_rest_of_the_round_is_packed_again_too() -> None:
    steps = [make_step((10, 20, 30)), make_step((8, 40, 40, 3))]
    _, again = token_budget.back_off(RULES, steps, "out")
    assert [len(step.rows) for step in again] == [2, 3]


def test_a_completion_that_does_not_fit_alone_is_the_end() -> None:
    step = make_step((10, 20, 30), rules=dataclasses.replace(RULES, max_tokens=1))
    with pytest.raises(torch.OutOfMemoryError, match=r"fit in memory \(40 tokens; the reason\): set gradient_check"):
        token_budget.back_off(RULES, [step], "the reason")


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention.NAME,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_old_log_probabilities_have_no_dropout_and_draw_nothing() -> None:
    """A resumed run, with a model not yet in training mode, computes the same old log-probabilities."""
    model, step = make_llama().train(), make_step((10, 20, 30), (5, 4, 4, 1))
    drop = torch.nn.functional.dropout
    model.get_input_embeddings().register_forward_hook(lambda layer, _, out: drop(out, 0.5, layer.training))
    before = torch.get_rng_state()
    trained = with_old_logprobs(model, step, 1.0)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    for one, other in zip(trained.rows, with_old_logprobs(model.eval(), step, 1.0).rows, strict=True):
        assert torch.equal(one.scores["old_logprobs"], other.scores["old_logprobs"])


def test_old_log_probabilities_go_with_their_completions() -> None:
    """This holds for ranks with dummy rows too. Nobody reads a dummy row's values."""
    step = with_old_logprobs(make_llama(), make_step((10, 20, 30), (5, 4, 4, 1)), 1.0)
    known = {part.rollout: row.old_logprobs[part.place] for row in map(collate, step.rows) for part in sequences(row)}
    again = token_budget.repack(step, dataclasses.replace(RULES, max_tokens=40))
    assert len(again.rows) > len(step.rows)
    for row in map(collate, again.rows):
        assert not row.scores and row.old_logprobs.shape == row.labels.shape
        for part in sequences(row):
            assert torch.equal(row.old_logprobs[part.place], known[part.rollout])
            assert torch.equal(row.labels[part.place], part.completion_ids)


def test_on_policy_rows_stay_on_policy() -> None:
    again = token_budget.repack(make_step((10, 20, 30)), dataclasses.replace(RULES, max_tokens=1))
    assert len(again.rows) == 2 and not any(row.scores for row in again.rows)


OOM, FAULT = torch.OutOfMemoryError("no room"), ValueError("wrong")


@pytest.mark.parametrize(
    ("mine", "theirs", "raised", "said"),
    [
        (None, None, None, ""),
        (OOM, None, torch.OutOfMemoryError, "no room"),
        (None, OOM, torch.OutOfMemoryError, "Rank 1 failed in training: OutOfMemoryError: no room"),
        (OOM, OOM, torch.OutOfMemoryError, "no room"),
        (OOM, FAULT, ranks.RankError, "Rank 1 failed in training: ValueError: wrong"),
        (FAULT, OOM, ValueError, "wrong"),
        (None, FAULT, ranks.RankError, "Rank 1 failed in training: ValueError: wrong"),
    ],
)
def test_all_ranks_back_off_or_all_end(
    mine: Exception | None, theirs: Exception | None, raised: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either all ranks see a lack of memory or none does, whatever happened on each rank."""
    shared = torch.OutOfMemoryError if isinstance(theirs, torch.OutOfMemoryError) else None
    other = theirs and (shared, f"{type(theirs).__name__}: {theirs}")
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather", lambda report: [report, other])
    with pytest.raises(raised, match=said) if raised else nullcontext(), ranks.on_all_ranks("training"):
        if mine is not None:
            raise mine


# -- In the trainer


def train(model: Path, folder: Path, dies_above: int | None, **changes: Any) -> dict[str, Any]:
    """Train with a forward that runs out of memory above ``dies_above`` tokens. Returns gradients, rows and losses."""
    from colograd import GRPOTrainer

    seen: dict[str, Any] = {"gradients": [], "rows": []}

    class Small(GRPOTrainer):
        def compute_loss(self, model: Any, micro_batch: Any, **kwargs: Any) -> Any:
            output = super().compute_loss(model, micro_batch)
            seen["rows"].append(micro_batch.input_ids.numel())
            if dies_above is not None and seen["rows"][-1] > dies_above:
                raise torch.OutOfMemoryError("no room")
            return output

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen["gradients"].append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
            return loss

    trainer = Small(
        model=str(model), reward_funcs=tiny.vowels, args=tiny.config(folder, **changes), train_dataset=tiny.prompts()
    )
    trainer.train()
    trainer.close()
    return seen | {"loss": [entry["loss"] for entry in trainer.state.log_history if "reward" in entry]}


@pytest.mark.engine
@pytest.mark.parametrize("round_of", [1, 2], ids=["on-policy", "rounds of several steps"])
def test_step_out_of_memory_repeats_with_same_result(
    tiny_model: Path, tmp_path: Path, round_of: int, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"steps_per_generation": round_of, "num_iterations": round_of, "max_steps": round_of**2}
    expected = train(tiny_model, tmp_path / "small", None, max_tokens_per_microbatch=90, **changes)
    capfd.readouterr()
    found = train(tiny_model, tmp_path / "large", 100, max_tokens_per_microbatch=100_000, **changes)
    said = [line for line in capfd.readouterr().out.splitlines() if "memory: step" in line]
    assert said and all("step 1 ran out of memory and is repeated" in line for line in said), (
        "later steps are small at once"
    )
    assert max(expected["rows"]) <= 90 and max(found["rows"]) > 100
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)


@pytest.mark.engine
def test_a_completion_that_never_fits_ends_the_run_with_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="A single completion with its prompt doesn't fit"):
        train(tiny_model, tmp_path, 1, max_steps=1)
