"""Rewards in workers: every end of a function, and that no end delays or stops anything else."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from reward_cases import dying, hanging, leaving, lengths, loud, process_id, raising, when_told, with_alarm

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, ModelInput, Prompt, Rollout
from colograd.reporting.metrics import PhaseTimes
from colograd.rewards import RewardError, Scorer, resolve_rewards
from colograd.rewards import scoring as scoring_module
from colograd.rollout.rounds import PlainRound
from colograd.rollout.stages import Stages

NAN = math.nan


def make_group(size: int = 3, position: int = 17) -> Group:
    rollouts = tuple(
        Rollout(ModelInput((1, 2)), tuple(range(n)), torch.zeros(n), torch.ones(n).bool(), FinishReason.STOP, 0)
        for n in range(1, size + 1)
    )
    return Group({"prompt": "2 + 2 =", "answer": 4}, rollouts, position)


def texts(size: int = 3) -> list[str]:
    return [f"text {i}" for i in range(size)]


@pytest.fixture
def scorer_of():
    made: list[Scorer] = []

    def make(*functions: Any, workers: int = 1, **settings: Any) -> Scorer:
        made.append(Scorer(resolve_rewards(list(functions), None), workers, **settings))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def run(scorer: Scorer, state: Any = None) -> list[list[float]]:
    """Rewards by function."""
    return scorer.submit([make_group()], [texts()], state).result().T.tolist()


def test_gpu_runs_default_to_workers_for_module_functions(scorer_of, monkeypatch) -> None:
    """Closures and callables with a state stay in the process. On a CPU all functions stay in the process."""
    monkeypatch.setattr(scoring_module.process, "cpu_threads", lambda: 3)
    seen: list[int] = []

    def counting(completions, **kwargs):
        seen.append(os.getpid())
        return [0.0] * len(completions)

    scorer = scorer_of(process_id, counting, workers=None, on_gpu=True)
    assert run(scorer)[0][0] != os.getpid() and seen == [os.getpid()]
    assert "process_id in 2 worker process(es)" in scorer.notes[0]
    on_cpu = scorer_of(process_id, counting, workers=None)
    assert run(on_cpu)[0][0] == os.getpid() and not on_cpu.notes
    for cores, workers in ((1, 1), (2, 1), (64, 4)):
        monkeypatch.setattr(scoring_module.process, "cpu_threads", lambda cores=cores: cores)
        assert scoring_module.usual_workers(on_gpu=True) == workers


def test_a_function_runs_in_another_process_with_the_same_result(scorer_of) -> None:
    scorer = scorer_of(lengths, process_id)
    assert run(scorer)[0] == [10.0, 10.0, 10.0]
    (first, *_), (second, *_) = run(scorer)[1], run(scorer)[1]
    assert first == second != os.getpid(), "one process, kept"
    assert scorer.notes == ["rewards: lengths, process_id in 1 worker process(es)"]
    assert scorer.take_counts().keys() == {"rewards/lengths/seconds", "rewards/process_id/seconds"}


def test_two_workers_work_at_the_same_time(scorer_of) -> None:
    """Each of two calls waits until the other has begun."""

    def meeting(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
        folder, mine = os.environ["MEETING"], str(os.getpid())
        open(os.path.join(folder, mine), "w").close()
        deadline = time.monotonic() + 1000
        while len(os.listdir(folder)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return [float(len(os.listdir(folder)))] * len(completions)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEETING"] = folder
        scorer = scorer_of(meeting, workers=2)
        calls = [scorer.submit([make_group()], [texts()]) for _ in range(2)]
        assert [call.result().mean().item() for call in calls] == [2.0, 2.0]


def test_a_late_function_abstains_and_its_worker_is_replaced(scorer_of) -> None:
    scorer = scorer_of(hanging, process_id, timeout=2.0)
    with pytest.warns(UserWarning, match=r"'hanging' .*reward_timeout \(2 s\) on 3 completions. It abstains"):
        late, (first, *_) = run(scorer)
    assert all(map(math.isnan, late))
    assert scorer.take_counts()["rewards/hanging/timeouts"] == 1
    late, (second, *_) = run(scorer)
    assert first != second, "the process that hung is gone"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (dying, "the function's worker process ended with status 7"),
        (raising, "it raised KeyError: 'no such test case' .*, but must return one number per completion"),
        (leaving, "it raised SystemExit: enough"),
        (lambda **kwargs: None, r"it returned None \\(NoneType\\), but a reward function must return a list of 3"),
        (lambda **kwargs: [1.0], "it returned 1 rewards for 3 completions"),
        (lambda **kwargs: [1.0, NAN, 1.0], "completion 1: its reward is nan"),
        (lambda **kwargs: [1.0, 2.0, "3"], "completion 2: its reward is '3'"),
        (lambda **kwargs: [1.0, 2.0, threading.Lock()], "cannot pickle"),
    ],
)
def test_an_invalid_reward_names_its_function_or_abstains(scorer_of, function, said) -> None:
    with pytest.raises(RewardError, match=said.replace("\\\\", "\\")) as caught:
        run(scorer_of(function))
    assert repr(function.__name__) in str(caught.value) and "prompt 17" in str(caught.value)
    assert "colograd/rewards/" not in str(caught.value)
    forgiving = scorer_of(function, lengths, on_error="abstain")
    nothing, judged = run(forgiving)
    assert all(map(math.isnan, nothing)) and judged == [10.0] * 3
    assert forgiving.take_counts()[f"rewards/{function.__name__}/errors"] == 1
    assert run(forgiving)[1] == [10.0] * 3, "and goes on"


def test_an_async_object_stays_on_the_loop(scorer_of) -> None:
    class Judge:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [float(os.getpid())] * len(completions)

    assert run(scorer_of(Judge(), lengths)) == [[float(os.getpid())] * 3, [10.0] * 3]


def test_signals_work_and_a_megabyte_of_output_does_no_harm(scorer_of) -> None:
    assert run(scorer_of(with_alarm, loud, timeout=float(tiny.PATIENCE))) == [[0.5] * 3, [1.0] * 3]


def test_the_trainer_state_crosses_over_once_per_step(scorer_of) -> None:
    class State:
        pickled = 0

        def __init__(self, step: int) -> None:
            self.global_step = step

        def __reduce__(self) -> Any:
            State.pickled += 1
            return SimpleNamespace, (), {"global_step": self.global_step}

    def step(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        return [float(trainer_state.global_step)] * len(completions)

    scorer, state = scorer_of(step), State(3)
    assert [run(scorer, state)[0][0] for _ in range(3)] == [3.0] * 3
    state.global_step = 4
    assert [run(scorer, state)[0][0] for _ in range(2)] == [4.0] * 2
    assert State.pickled == 2


def test_what_cannot_travel_stays_and_a_line_says_so(scorer_of) -> None:
    lock = threading.Lock()

    def guarded(completions: list[str], **kwargs: Any) -> list[float]:
        with lock:
            return [float(os.getpid())] * len(completions)

    scorer = scorer_of(guarded, lengths)
    assert run(scorer) == [[float(os.getpid())] * 3, [10.0] * 3]
    assert scorer.notes[0] == "rewards: lengths in 1 worker process(es)"
    assert scorer.notes[1].startswith("rewards: guarded runs in the trainer's process (TypeError: cannot pickle")


@pytest.mark.parametrize("stuck", [hanging, lambda **kwargs: time.sleep(60)])
def test_a_function_that_hangs_in_this_process_ends_with_its_name(scorer_of, stuck, monkeypatch) -> None:
    """An endless loop is interrupted. A call that can't be interrupted ends the process (faked: `os._exit`)."""
    left: list[int] = []
    monkeypatch.setattr("colograd.usercode.calls.GRACE", 0.5)
    monkeypatch.setattr("colograd.usercode.calls.os._exit", left.append)
    if stuck is not hanging:
        monkeypatch.setattr(time, "sleep", lambda seconds, wait=time.sleep: wait(1.5))
    scorer = scorer_of(stuck, workers=0, timeout=0.3)
    with pytest.raises(RewardError, match=r"prompt 17: .*reward_timeout \(0\.3 s\) on 3 completions.*so the run ends"):
        run(scorer)
    assert left == ([] if stuck is hanging else [1])
    scorer.on_error = "abstain"
    with pytest.warns(UserWarning, match="It abstains"):
        assert all(map(math.isnan, run(scorer)[0]))
    assert list(scorer.take_counts()) == [
        f"rewards/{scorer.rewards[0].name}/{what}" for what in ("seconds", "timeouts")
    ]


def test_an_async_function_that_is_late_abstains(scorer_of) -> None:
    async def slow(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(30)
        return [1.0] * len(completions)

    scorer = scorer_of(slow, workers=0, timeout=0.2)
    with pytest.warns(UserWarning, match="It abstains"):
        assert all(map(math.isnan, run(scorer)[0]))
    assert scorer.take_counts()["rewards/slow/timeouts"] == 1


def test_a_call_that_nobody_needs_any_more_gives_its_worker_back(scorer_of) -> None:
    """An abandoned call may end by itself. Its worker is replaced if another call has waited for it."""
    scorer = scorer_of(process_id, when_told)
    quick, slow = scorer.rewards
    scorer.rewards = [quick]
    (first, *_) = run(scorer)[0]
    scorer.rewards = [slow]
    running, queued = (scorer.submit([make_group()], [texts()]) for _ in range(2))
    while not running.calls[0].running():
        time.sleep(0.01)
    queued.cancel()
    running.cancel()
    assert queued.calls[0].cancelled() and not running.calls[0].done(), "nobody else waits"
    scorer.rewards = [quick]
    started = time.monotonic()
    ((second, *_),) = run(scorer)
    assert second != first and time.monotonic() - started < 600, "it wasn't waited for"
    assert running.calls[0].result().kind == "dropped"
    assert not [name for name in scorer.take_counts() if "timeouts" in name or "errors" in name]


def test_an_async_call_that_nobody_needs_any_more_is_cancelled(scorer_of) -> None:
    ended = threading.Event()

    async def slow(completions: list[str], **kwargs: Any) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return [1.0] * len(completions)

    scoring = scorer_of(slow, workers=0).submit([make_group()], [texts()])
    time.sleep(0.1)
    scoring.cancel()
    assert ended.wait(tiny.PATIENCE)


def test_closing_leaves_no_process_even_of_a_function_that_never_returns(scorer_of) -> None:
    scorer = scorer_of(process_id, hanging, workers=2)
    (pid, *_) = scorer.submit([make_group()], [texts()]).calls[0].result().value
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def stages_of(scorer: Scorer) -> Stages:
    """Stages with three groups and no engine. The groups leave in a different order than their prompts."""
    return Stages(
        generate=lambda prompts: (make_group(size, position) for position, size in ((2, 1), (0, 2), (1, 3))),
        begin_score=lambda groups: scorer.submit(groups, [texts(len(group.rollouts)) for group in groups]),
        compute_advantages=lambda group, rewards: torch.zeros(len(group.rollouts)),
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_may_get_all_completions_at_once(scorer_of, workers: int) -> None:
    def ranked(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i) for i in range(len(completions))]

    stages = stages_of(scorer_of(ranked, workers=workers))
    for one_call, expected in ((True, [[0, 1], [2, 3, 4], [5]]), (False, [[0, 1], [0, 1, 2], [0]])):
        prompts = [Prompt({}, ModelInput((1, 2)), position) for position in range(3)]
        done = PlainRound(PhaseTimes(), one_call).draw([prompts], stages)[0].sampled
        assert [scored.group.position for scored in done] == [0, 1, 2]
        assert [scored.rewards[:, 0].tolist() for scored in done] == expected


@pytest.mark.engine
def test_groups_are_scored_as_they_finish_while_others_decode(tiny_model, tmp_path) -> None:
    """The real engine: events in order. Scoring a group begins before later ones have left, and not in prompt order."""
    events: list[tuple[str, int]] = []

    class Watching(GRPOTrainer):
        def generate(self, prompts: Any) -> Any:
            for group in super().generate(prompts):
                events.append(("left", group.position))
                yield group

    config = tiny.config(
        tmp_path, max_steps=1, prompts_per_step=8, num_generations=2, max_completion_length=60, reward_workers=1,
        reward_timeout=60.0, generation_kwargs={"stop_token_ids": list(range(0, 256, 8))},
    )  # fmt: skip
    trainer = Watching(str(tiny_model), tiny.vowels, config, tiny.prompts())
    begin = trainer.sampler.begin_scoring

    def begin_scoring(groups: Any) -> Any:
        events.append(("begun", groups[0].position))
        return begin(groups)

    trainer.sampler.begin_scoring = begin_scoring
    try:
        trainer.train()
    finally:
        trainer.close()
    assert [kind for kind, _ in events] == ["left", "begun"] * 8
    order = [position for kind, position in events if kind == "left"]
    assert sorted(order) != order, "some completions end early"
    (entry,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    assert entry["rewards/vowels/seconds"] > 0


def test_a_blocked_event_loop_names_the_function(scorer_of, monkeypatch) -> None:
    monkeypatch.setattr(scoring_module, "GRACE", 0.3)

    told = threading.Event()

    async def blocks(completions: list[str], **kwargs: Any) -> list[float]:
        told.wait()
        return [1.0] * len(completions)

    scoring = scorer_of(blocks, workers=0, timeout=0.2).submit([make_group()], [texts()])
    with pytest.raises(RewardError, match=r"'blocks'.*the function or another one blocks the event loop"):
        scoring.result()
    told.set()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_system_exit_in_a_reward_raises_reward_error(scorer_of, kind: str) -> None:
    def leaves(completions: list[str], **kwargs: Any) -> list[float]:
        raise SystemExit(0)

    async def leaves_later(completions: list[str], **kwargs: Any) -> list[float]:
        raise SystemExit(0)

    with pytest.raises(RewardError, match="SystemExit"):
        scorer_of(leaves if kind == "sync" else leaves_later, workers=0).submit([make_group()], [texts()]).result()
