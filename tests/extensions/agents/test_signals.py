"""Signals to a whole job: processes of user code go on until the trainer ends them, and die with the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from reward_cases import terminated

from colograd.extensions.agents.programs import CommandProgram
from colograd.usercode.worker_pool import WorkerPool

PATIENCE = 1000  # seconds
JOB = """
import signal, subprocess, sys
from colograd.usercode.worker_pool import WorkerPool

def helped():
    return subprocess.run(["sleep", "3"]).returncode

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, lambda *_: None)
pool = WorkerPool("rewards", {"helped": helped}, 1, None)
call = pool.submit("helped", {})
print("ready", flush=True)
print(call.result().value, flush=True)
pool.close()
"""
PARENT = """
import sys, time
from colograd.extensions.agents.programs import CommandProgram
CommandProgram(["sh", "-c", 'echo $$ > "$0"; sleep 10000', sys.argv[1]], {}, {})
time.sleep(10000)
"""


def test_workers_outlive_sigterm_and_terminate_their_programs() -> None:
    pool = WorkerPool("rewards", {"terminated": terminated}, 1, None)
    try:
        outcome = pool.submit("terminated", {}).result(PATIENCE)
        assert (outcome.kind, outcome.value) == ("value", [-signal.SIGTERM, -signal.SIGTERM])
    finally:
        pool.close()


def test_workers_outlive_sigterm_while_they_start() -> None:
    pool = WorkerPool("rewards", {"process": os.getpid}, 1, None)
    try:
        call = pool.submit("process", {})
        worker = pool._workers[0]
        while worker._process is None:
            time.sleep(0.001)
        worker._process.terminate()
        assert call.result(PATIENCE).kind == "value"
    finally:
        pool.close()


def test_signals_to_the_group_spare_rewards_programs() -> None:
    job = subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2) * 2:
        time.sleep(0.2)
        os.killpg(job.pid, number)
    assert job.communicate(timeout=PATIENCE)[0] == "0\n" and job.returncode == 0


def test_agents_commands_die_with_the_trainer(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(written)])
    while not written.exists() or not written.read_text().strip():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    state = Path(f"/proc/{written.read_text().strip()}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # killed, and perhaps not reaped yet
        time.sleep(0.05)


def test_commands_get_the_usual_signals() -> None:
    """Python ignores SIGPIPE, and a program started by exec would inherit this."""
    shell = CommandProgram(("sh", "-c", "grep SigIgn /proc/self/status | cut -f2 | sed 's/.*/\"&\"/'"), {}, {})
    assert int(shell.future.result(PATIENCE).value, 16) & 1 << (signal.SIGPIPE - 1) == 0
