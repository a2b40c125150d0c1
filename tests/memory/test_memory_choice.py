"""The choice of a sharding strategy, and the report of a run that doesn't fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import large
import pytest
import tiny
from needs import needs

from colograd.memory.choice import (
    AMPLE,
    auto,
    best_plan,
    fits,
    least_checkpointing,
    too_large,
)
from colograd.memory.description import PLANNED_TOKENS, STRATEGIES
from colograd.memory.estimate import estimate
from colograd.memory.shape import Lengths
from colograd.memory.table import GIB, PHASES


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large.folder(tmp_path_factory.mktemp("qwen"))


# -- the plan of a strategy


def test_a_7b_policy_that_sleeps_and_offloads_does_not_fit_one_gpu(qwen: Path) -> None:
    """Sampling would fit, but training doesn't."""
    run = large.run(qwen, ranks=1, sleeps=True, offloads=True)
    plan = best_plan(run, "none")
    assert plan.room > 40 * GIB and plan.remains("sampling") > 0
    assert plan.remains("training") < -43 * GIB and not fits(run, "none")


def test_every_way_fits_as_much_as_the_next_or_less(qwen: Path) -> None:
    run = large.run(qwen)
    assert [fits(run, strategy) for strategy in STRATEGIES] == [False, True, True, True]
    rooms = [best_plan(run, strategy).room for strategy in STRATEGIES]
    assert rooms[0] < 0 < rooms[1] < min(rooms[2:])
    for strategy in STRATEGIES:
        plan = best_plan(run, strategy).with_cache(run.need)
        assert (plan.strategy, plan.run.devices.ranks) == (strategy, 8)
        assert fits(run, strategy) == (min(plan.remains(phase) for phase in PHASES) >= 0)


def test_micro_batch_before_measuring_is_planned_to_fit(qwen: Path) -> None:
    run = large.run(qwen)
    assert run.longest_rows == [PLANNED_TOKENS, 8192]
    assert large.run(qwen, length=3000).longest_rows == [PLANNED_TOKENS, 8192, 4096, 3000]
    assert large.run(qwen, length=50_000).longest_rows == [50_000]
    assert large.run(qwen, tokens=2048).longest_rows == [8192], "a sequence is never cut"
    assert best_plan(run, "gradients").tokens == PLANNED_TOKENS
    state = estimate(run, "gradients", PLANNED_TOKENS)
    tight = large.changed(run, available=run.devices.total - state.room + run.need.least // 2)
    assert best_plan(tight, "gradients").tokens == 8192 and fits(tight, "gradients")


def test_the_keys_of_short_completions_are_counted_where_they_are_copied(qwen: Path) -> None:
    """Groups of 8 on prompts of 8,000 tokens: completions of 16 tokens join each prompt's keys once more."""
    run = large.run(qwen)
    capped = dataclasses.replace(run.shape, copies=True)
    alone, in_place, joined = (
        estimate(dataclasses.replace(run, shape=shape, lengths=Lengths(8000, 128, group)), "gradients", PLANNED_TOKENS)
        for group, shape in ((1, run.shape), (8, run.shape), (8, capped))
    )
    extra = PLANNED_TOKENS * 2 * 2 * large.KEYS * large.HEAD * 8
    assert 0.9 * extra < joined.activations - alone.activations < 5 * GIB
    assert in_place.activations == alone.activations


# -- auto


@needs("fsdp")
def test_what_is_taken_is_what_the_configuration_lets_in(tmp_path: Path) -> None:
    assert [tiny.config(tmp_path, sharding=strategy).sharding for strategy in STRATEGIES] == [*STRATEGIES]


def test_auto_takes_the_least_sharded_way_that_leaves_room(qwen: Path) -> None:
    assert auto(large.run(qwen)) == "optimizer"
    assert auto(large.run(qwen, total=180 * GIB, available=180 * GIB)) == "none"
    assert auto(large.run(qwen, total=64 * GIB, available=64 * GIB)) == "gradients"
    assert auto(large.run(qwen, ranks=64)) == "optimizer"
    assert auto(large.run(qwen, ranks=1)) == "none", "there is nobody to share with"


@needs("lora")
def test_auto_shards_no_adapter(qwen: Path) -> None:
    assert auto(large.run(qwen, rank=16)) == "none"


def test_auto_wants_generation_cache_or_tenth_of_gpu(qwen: Path) -> None:
    run = large.run(qwen)
    room = best_plan(run, "optimizer").room
    need = run.need
    assert need.least < AMPLE * run.devices.total < room < need.wanted
    less = large.changed(run, available=run.devices.available - room + int(AMPLE * run.devices.total) - 1)
    assert fits(less, "optimizer") and auto(less) == "gradients"
    few = large.changed(less, running=1, sequences=1)
    assert few.need.wanted < AMPLE * run.devices.total and auto(few) == "optimizer"


def test_where_nothing_is_ample_it_takes_what_leaves_most(qwen: Path) -> None:
    small = large.run(qwen, total=24 * GIB, available=24 * GIB)
    assert not any(fits(small, strategy) for strategy in STRATEGIES)
    assert auto(small) == max(STRATEGIES, key=lambda strategy: estimate(small, strategy, 8192).remains("training"))
    assert auto(large.changed(small, strategies=STRATEGIES[:2])) == "optimizer", "of those that can be had"


def test_on_a_cpu_nothing_is_sharded_unless_the_memory_says_so(qwen: Path) -> None:
    run = large.run(qwen, on_gpu=False, ranks=4, total=200 * GIB, available=200 * GIB, tokens=4096)
    assert auto(run) == "none"
    assert auto(large.changed(run, available=100 * GIB)) == "optimizer"
    assert auto(large.changed(run, available=60 * GIB)) == "gradients"


# -- gradient checkpointing


def test_as_few_layers_are_computed_twice_as_leave_room(qwen: Path) -> None:
    """7B over 8 ranks: activations of 8,192 tokens take tens of gigabytes."""
    able, found = (0, 4, 2, 1), {}
    for gib in (40, 60, 80, 100, 120, 160, 240):
        run = large.run(qwen, total=gib * GIB, available=gib * GIB, strategies=STRATEGIES)
        found[gib] = every = least_checkpointing(run, "fsdp", able)
        plan = estimate(large.changed(run, checkpointing=every), "fsdp", 8192)
        assert plan.takes(run.need.least) or every == 1
    order = [able.index(every) for every in found.values()]
    assert order == sorted(order, reverse=True) and found[240] == 0 and len(set(order)) > 2, found


def test_checkpointing_knows_what_the_model_can_and_what_the_run_asks(qwen: Path) -> None:
    small = large.run(qwen, total=60 * GIB, available=60 * GIB)
    assert least_checkpointing(small, "fsdp", (0,)) == 0, "it can't"
    assert least_checkpointing(small, "fsdp", (0, 1)) == 1
    large_gpu = large.run(qwen, total=240 * GIB, available=240 * GIB)
    assert least_checkpointing(large_gpu, "fsdp", (0, 1)) == 0
    greedy = large.changed(large_gpu, overruled=True, share=0.8)
    assert least_checkpointing(greedy, "fsdp", (0, 1)) == 1, "the engine takes what training would"
    assert least_checkpointing(large.changed(greedy, share=0.1), "fsdp", (0, 1)) == 0
    assert least_checkpointing(large.changed(greedy, share=0.0), "fsdp", (0, 1)) == 1, "nobody knows how much"
    longer = large.changed(large_gpu, tokens=2**18)
    assert least_checkpointing(longer, "fsdp", (0, 1)) == 1, "a micro-batch of its own"


# -- remedies


def test_row_ranks_count_copied_and_filler_heads(qwen: Path) -> None:
    shape = large.run(qwen).shape  # 28 heads, 4 of keys and values
    heads = {ranks: shape.on_row_ranks(ranks) for ranks in (1, 2, 4, 8, 14, 28)}
    of_keys = {ranks: found.keys // shape.head for ranks, found in heads.items()}
    assert of_keys == {1: 4, 2: 4, 4: 4, 8: 32, 14: 28, 28: 28}
    assert heads[8].queries // shape.head == 32 and heads[28].queries == shape.queries


def test_cache_without_room_is_reported_beside_fitting_training(qwen: Path) -> None:
    run = large.run(qwen)
    plan = best_plan(run, "gradients")
    full = large.changed(run, length=1_000_000)
    said = too_large(full, plan)
    assert (
        said.startswith("The KV cache of one full sequence takes 53.42 GiB, but ") and "at least one must fit" in said
    )


def test_a_share_for_the_engine_leaves_the_rest_for_training(qwen: Path) -> None:
    """The engine's share overrules estimates, but not weights, gradients and state, because their sizes are exact."""
    run = large.run(qwen, overruled=True)
    assert [fits(run, strategy) for strategy in STRATEGIES] == [False, True, True, True], (
        "of an unknown share the weights count"
    )
    large_share = large.changed(run, share=0.6)
    assert [fits(large_share, strategy) for strategy in STRATEGIES] == [False, False, True, True]
    assert fits(large.changed(large_share, sleeps=True), "optimizer"), "gradients take the sleeping cache's place"
    assert not fits(large.changed(run, share=0.9), "gradients")
    assert [fits(large.run(qwen, kv_bytes=size * GIB), "gradients") for size in (1, 60)] == [True, False]
