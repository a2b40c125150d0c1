"""The user's program: its forms, its return values, and its end."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from colograd.batch import FinishReason, Group, Logged, Rollout
from colograd.extensions.agents.feature import AgentFeature
from colograd.extensions.agents.programs import CommandProgram, FunctionProgram
from colograd.extensions.agents.sessions import Agent, returned
from colograd.rollout.group_records import RewardedGroup
from colograd.training.recorded_settings import run_settings, store_of
from colograd.usercode.calls import Outcome


def run(base_url: str, api_key: str) -> float:
    return 1.0


def another(base_url: str, api_key: str) -> float:
    return 2.0


@pytest.mark.parametrize(
    ("agent", "tools", "replay", "said"),
    [
        (lambda base_url, question: 1.0, None, False, "has a parameter 'question', but is called only with base_url"),
        ("", None, False, "`agent` is empty"),
        (3, None, False, "must be a function, its import path, or a command line"),
        ("tests_that_are_not:there", None, False, "tests_that_are_not"),
        (run, object(), False, "`agent` and `tools` are both set"),
        (run, None, True, "router_replay is true"),
    ],
)
def test_what_can_t_be_an_agent_is_refused_at_the_start(agent: Any, tools: Any, replay: bool, said: str) -> None:
    args: Any = SimpleNamespace(router_replay=replay, replays_truncation=False)
    with pytest.raises(ValueError, match=said):
        AgentFeature.of(tiny.trainer_arguments(agent=agent, tools=tools), args)


@pytest.mark.parametrize("command", ["node agent.js", "./agent.sh", "python -m my.agent", "agent.sh"])
def test_command_lines_and_programs_on_path_are_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.sh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    args: Any = SimpleNamespace(router_replay=False, replays_truncation=False)
    feature = AgentFeature.of(tiny.trainer_arguments(agent=command), args)
    assert feature is not None and feature.agent.function is None and feature.agent.command == tuple(command.split())


def test_a_model_that_reads_images_is_refused_at_the_start() -> None:
    policy: Any = SimpleNamespace(path="a-model", processor=object())
    settings: Any = SimpleNamespace(router_replay=False, replays_truncation=False)
    feature = AgentFeature.of(tiny.trainer_arguments(agent=run), settings)
    assert feature is not None
    with pytest.raises(ValueError, match="a-model reads images: agents need a text-only model"):
        feature.check_policy(policy, settings)


def test_a_program_that_has_changed_is_told_from_the_old_one(tmp_path: Path) -> None:
    script = tmp_path / "agent.js"
    script.write_text("one")
    command = Agent.of(f"node {script}")
    before = command.digest()
    assert Agent.of(f"node {script}").digest() == before != Agent.of(f"node {script} --fast").digest()
    script.chmod(0o755)
    itself = Agent.of(str(script)).digest()
    script.write_text("two")
    assert command.digest() != before and Agent.of(str(script)).digest() != itself
    assert Agent.of(run).digest() == Agent.of(run).digest() != Agent.of(another).digest()
    config = tiny.config(tmp_path, journal="keep")
    old = store_of(config, [], AgentFeature(Agent.of(run)))
    assert old is not None and "agent_code" in old.of_samples and "agent_code" not in run_settings(config, [], {})
    old.begin(0, "weights")
    rollout = Rollout((1,), (2,), torch.zeros(1), torch.zeros(1, dtype=torch.bool), FinishReason.ABORT, 0)
    group = Group({}, (rollout,), 0)
    old.add(RewardedGroup(group, torch.zeros(1, 1), Logged({}, {})))
    old.close()
    new = store_of(config, [], AgentFeature(command))
    assert new is not None
    (line,) = new.start(0, is_writer=True)
    assert "agent_code" in line and "are sampled anew" in line


@pytest.mark.parametrize(
    ("value", "columns", "failure"),
    [
        (0.5, {"agent_reward": 0.5}, ""),
        (True, {"agent_reward": 1.0}, ""),
        (None, {"agent_reward": None}, ""),
        ({"reward": 2, "steps": 3}, {"agent_reward": 2.0, "steps": 3}, ""),
        ({"steps": 3}, {"agent_reward": None, "steps": 3}, ""),
        ("well", {"agent_reward": None}, "it returned 'well'"),
        (math.nan, {"agent_reward": None}, "it returned nan"),
        ({"session": 1}, {"agent_reward": None}, "the trainer's own name"),
    ],
)
def test_what_it_returns_is_the_reward_or_a_failure(value: Any, columns: dict[str, Any], failure: str) -> None:
    found, failed = returned(Outcome("value", value, 0.0))
    assert found == columns and (failure in failed if failure else not failed)


def test_a_stopped_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10000)'])\n"
        f"open({str(written)!r} + '.part', 'w').write(str(child.pid))\n"
        f"os.rename({str(written)!r} + '.part', {str(written)!r})\n"
        "time.sleep(10000)\n"
    )
    program = CommandProgram((sys.executable, "-c", script), {}, {"row": 1})
    while not written.exists():
        time.sleep(0.05)
    program.stop()
    assert program.future.result(tiny.PATIENCE).kind == "died"
    child = Path(f"/proc/{written.read_text()}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":  # killed, and perhaps not reaped yet
        time.sleep(0.05)


def test_a_command_that_ends_leaves_no_child_that_keeps_its_output_open() -> None:
    script = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10000)']); print(1)"
    )
    program = CommandProgram((sys.executable, "-c", script), {}, {"row": 1})
    assert program.future.result(tiny.PATIENCE).value == 1


def test_a_stopped_async_function_is_cancelled() -> None:
    """A function that blocks delays no other."""
    begun, gate = threading.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        await asyncio.sleep(10_000)

    async def blocks() -> None:
        gate.wait(tiny.PATIENCE)  # a mistake that would stop a shared event loop

    blocked, waiting = FunctionProgram(blocks, {}), FunctionProgram(waits, {})
    assert begun.wait(tiny.PATIENCE)
    waiting.stop()
    assert "CancelledError" in waiting.future.result(tiny.PATIENCE).value[0]
    assert not blocked.future.done()
    gate.set()
    assert blocked.future.result(tiny.PATIENCE).kind == "value"


def test_a_command_that_prints_without_end_fills_no_memory() -> None:
    code = "import sys\nfor _ in range(64): sys.stdout.write('x' * 2**20)\nprint()\nprint(0.25)"
    outcome = CommandProgram((sys.executable, "-c", code), dict(os.environ), {}).future.result(tiny.PATIENCE)
    assert outcome.value == 0.25


def test_an_agent_changes_no_data_of_the_trainer() -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "tests": [{"left": 3}]}

    def agent(row: dict[str, Any]) -> int:
        row["tests"][0]["left"] -= 1
        row["prompt"].clear()
        return row["tests"][0]["left"]

    programs = [Agent.of(agent).start("http://localhost", "key", "model", row) for _ in range(2)]
    assert [program.future.result(tiny.PATIENCE).value for program in programs] == [2, 2]
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "tests": [{"left": 3}]}
