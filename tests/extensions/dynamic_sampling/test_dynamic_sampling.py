"""Dynamic sampling: every step trains its number of groups with a reward difference; a resumed run draws the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, Prompt, Rollout, SampledStep
from colograd.data import PromptRules, extra_prompts, tokenize_prompts
from colograd.extensions.dynamic_sampling.rounds import DynamicRound
from colograd.extensions.recording.completions import logged_steps, read_log
from colograd.policy.packing import has_signal
from colograd.reporting.metrics import PhaseTimes
from colograd.rewards import Ready
from colograd.rollout.rounds import PlainRound
from colograd.rollout.stages import Stages


class Made:
    """Groups of two that finish in a random order; those at ``flat`` positions have equal rewards.

    Rewards of every third group are known only when they are waited for, if some are ``slow``.
    """

    def __init__(self, flat: set[int], seed: int, slow: bool = True) -> None:
        self.flat, self.random, self.slow = flat, random.Random(seed), slow
        self.finished: list[int] = []
        self.asked: list[tuple[int, int]] = []

    def generate(self, prompts: Any) -> Any:
        order = [prompt.position for prompt in prompts]
        self.random.shuffle(order)
        for position in order:
            self.finished.append(position)
            rollout = Rollout((1,), (2,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0)
            yield Group({"prompt": ""}, (rollout, rollout), position)

    def begin_score(self, groups: Any) -> Any:
        (group,) = groups
        ready = Ready(torch.tensor([[0.0], [0.0 if group.position in self.flat else 1.0]]))
        if self.slow and group.position % 3 == 0:
            ready.done = lambda: False  # type: ignore[method-assign]
        return ready

    def more_prompts(self, drawn: int, count: int) -> list[Prompt]:
        self.asked.append((drawn, count))
        return [Prompt({}, (1,), 100 + drawn + i) for i in range(count)]

    def judge(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        return rewards[:, 0] - rewards[:, 0].mean()

    def draw(self, max_rounds: int = 10) -> list[SampledStep]:
        stages = Stages(self.generate, self.begin_score, self.judge)
        plain = PlainRound(PhaseTimes())
        own = DynamicRound(PhaseTimes(), False, max_rounds, self.more_prompts) if max_rounds else plain
        return own.draw(STEPS, stages)


STEPS = [[Prompt({}, (1,), p) for p in (0, 1, 2, 3)], [Prompt({}, (1,), p) for p in (4, 5, 6, 7)]]


def positions(groups: Any) -> list[int]:
    return [scored.group.position for scored in groups]


@pytest.mark.parametrize("seed", range(5))
def test_trained_groups_depend_on_drawing_order_alone(seed: int) -> None:
    flat = {1, 2, 5, 6, 101, 104, 106}
    stages = Made(flat, seed)
    drawn = stages.draw()
    assert [positions(step.kept) for step in drawn] == [[0, 3, 4, 7], [100, 102, 103, 105]]
    assert all(has_signal(scored) for step in drawn for scored in step.kept)
    assert sorted(p for step in drawn for p in positions(step.sampled)) == [*range(8), *range(100, 106)], (
        "up to the last that was needed"
    )
    assert stages.asked == [(0, 8)], "4 are missing, half of those so far had a signal"


def test_what_is_in_flight_and_not_needed_is_aborted() -> None:
    """Dynamic sampling draws more prompts than it needs, and closes the generation as soon as it has enough."""
    stages = Made({p for step in STEPS for p in positions_of(step)} - {1}, seed=0, slow=False)
    steps = stages.draw()
    (drawn, count) = stages.asked[0]
    assert (drawn, count) == (0, 56), "one of eight had a signal"
    assert [p for step in steps for p in positions(step.kept)] == [1, *range(100, 107)]
    assert len(stages.finished) < 8 + count


def test_rewards_that_turn_out_not_to_be_needed_are_not_waited_for() -> None:
    """Unneeded groups have finished after the last trained group. Their pending rewards are cancelled."""
    cancelled: list[int] = []

    class Unneeded(Ready):
        def __init__(self, position: int) -> None:
            self.position = position

        def done(self) -> bool:
            return False

        def result(self) -> torch.Tensor:
            raise AssertionError(f"waited for {self.position}")

        def cancel(self) -> None:
            cancelled.append(self.position)

    class Slow(Made):
        def begin_score(self, groups: Any) -> Any:
            return Unneeded(groups[0].position) if groups[0].position >= 104 else super().begin_score(groups)

    stages = Slow({0, 1, 2, 3}, seed=3, slow=False)
    stages.random.shuffle = lambda order: order.reverse()  # type: ignore[method-assign]
    kept = [p for step in stages.draw() for p in positions(step.kept)]
    assert stages.asked == [(0, 8)] and kept == [4, 5, 6, 7, *range(100, 104)]
    assert sorted(cancelled) == [104, 105, 106, 107]


def positions_of(prompts: list[Prompt]) -> list[int]:
    return [prompt.position for prompt in prompts]


def test_after_the_last_round_a_step_has_fewer() -> None:
    stages = Made(set(range(1000)) - {5}, seed=1)
    drawn = stages.draw(max_rounds=2)
    assert [positions(step.kept) for step in drawn] == [[5], []] and len(stages.asked) == 2
    assert sum(len(step.sampled) for step in drawn) == 8 + sum(count for _, count in stages.asked)


def test_extra_prompts_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    dataset = tokenize_prompts(tiny.prompts(10), PromptRules(tiny.make_tokenizer(), 100, "error", {}, "train"))
    config = tiny.config(tmp_path)
    first, again = (extra_prompts(dataset, config, 3, 0, 10) for _ in range(2))
    assert [p.position for p in first] == [p.position for p in again] and len({p.prompt_ids for p in first}) == 10
    assert [p.prompt_ids for p in extra_prompts(dataset, config, 3, 4, 6)] == [p.prompt_ids for p in first[4:]]
    other = extra_prompts(dataset, config, 4, 0, 10)
    assert [p.prompt_ids for p in other] != [p.prompt_ids for p in first]
    assert not {p.position for p in other} & {p.position for p in first}


def half(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Rewards that differ within a group for every second prompt only."""
    return [1.0] * len(completions) if ord(answer[0]) % 2 else tiny.vowels(completions)


@pytest.mark.engine
def test_every_step_trains_all_of_its_groups(tiny_model: Path, tmp_path) -> None:
    """A resumed run draws the same prompts and ends with the same weights."""
    runs = []
    for resumed in (False, True):
        folder = tmp_path / str(resumed)
        if resumed:
            shutil.copytree(tmp_path / "False" / "checkpoint-2", folder / "checkpoint-2")
        config = tiny.config(
            folder, dynamic_sampling=True, log_completions=True, log_completions_steps=100, save_strategy="steps",
            save_steps=2,
        )  # fmt: skip
        trainer = GRPOTrainer(str(tiny_model), half, config, tiny.prompts(32))
        trained: list[list[int]] = []
        step = trainer.training_step
        trainer.training_step = lambda model, batch, *a, step=step, trained=trained: (  # type: ignore[method-assign]
            trained.append([group.group.position for group in batch.groups]) or step(model, batch, *a)
        )
        try:
            trainer.train(resume_from_checkpoint="auto")
        finally:
            trainer.close()
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        drawn = {n: [row.position for row in read_log(path)[0]] for n, path in logged_steps(folder).items() if n > 2}
        runs.append((trained[-2:], drawn, weights))
        assert all(len(groups) == 4 for groups in trained)
        assert all(entry["dynamic_sampling/groups"] == 4 < entry["dynamic_sampling/prompts"] for entry in logs)
        assert all(entry["frac_reward_zero_std"] > 0 for entry in logs), "metrics are of all that was sampled"
    (trained, drawn, weights), (trained_again, drawn_again, weights_again) = runs
    assert trained == trained_again and drawn == drawn_again and sorted(drawn) == [3, 4]
    assert torch.equal(weights, weights_again)
