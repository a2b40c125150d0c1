"""The SLURM scripts: the program of each task, and the ends after which a job is queued again.

Stand-ins for srun, scancel and scontrol start the tasks, and send the signals in SLURM's order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import RECIPES

SLURM = RECIPES / "slurm"
TORCHRUN, TASK_PER_GPU = "colograd.slurm", "colograd-task-per-gpu.slurm"
JOB, NODES, GPUS = "4010007", 2, 2
# A step's tasks run at the same time, each in a process group, and srun returns their largest status. At SIGTERM it
# kills them ("forcing job termination").
SRUN = """
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
per_node, tasks = int(os.environ["SLURM_NTASKS_PER_NODE"]), []
for task in range(int(os.environ["SLURM_NTASKS"])):
    own = {"SLURM_PROCID": task, "SLURM_LOCALID": task % per_node, "SLURM_NODEID": task // per_node}
    variables = os.environ | {name: str(value) for name, value in own.items()}
    tasks.append(subprocess.Popen(command, env=variables, start_new_session=True))
with open(os.environ["TASKS"], "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
signal.signal(signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGKILL) for task in tasks])
found = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in found))
"""
# Without --full, only the steps' processes get the signal.
SCANCEL = """
import os, signal, sys
assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], sys.argv
for task in open(os.environ["TASKS"]).read().split():
    os.killpg(int(task), signal.SIGTERM)
"""
SCONTROL = """
import os, sys
if sys.argv[1] == "show":
    print("node-a", "node-b", sep="\\n")
else:
    with open(os.environ["REQUEUED"], "a") as file:
        print(*sys.argv[1:], file=file)
"""
# After SIGTERM torchrun returns 1, and a rank 143.
START = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({"torchrun": 1, "python": 143}[os.path.basename(sys.argv[0])]))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
         "SLURM_PROCID")
line = json.dumps([sys.argv[1:], {name: os.environ[name] for name in names if name in os.environ}]) + "\\n"
with open(os.environ["STARTED"], "a") as file:
    file.write(line)
time.sleep(float(os.environ["SECONDS_TO_RUN"]))
sys.exit(int(os.environ["STATUS"]))
"""


@dataclass
class Job:
    """A running batch script and the notes of its stand-ins."""

    script: subprocess.Popen[bytes]
    notes: Path

    def started(self) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and variables of each program, by the task that started it."""
        lines = (self.notes / "started").read_text().splitlines() if (self.notes / "started").exists() else []
        return sorted((tuple(json.loads(line)) for line in lines), key=lambda start: int(start[1].pop("SLURM_PROCID")))

    def signal_tasks(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            for task in (self.notes / "tasks").read_text().split():
                os.killpg(int(task), number)

    def end(self) -> tuple[int, str]:
        """Exit status of the script, and its request to scontrol."""
        status = self.script.wait(timeout=60)
        requeued = self.notes / "requeued"
        return status, requeued.read_text().strip() if requeued.exists() else ""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    programs = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "torchrun": START, "python": START}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!{sys.executable} -S\n{body}")
        (tmp_path / name).chmod(0o755)
    jobs = []

    def run(script: str, seconds: float = 0, status: int = 0, **variables: str) -> Job:
        per_node = 1 if script == TORCHRUN else GPUS
        job = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_JOB_ID": JOB,
            "SLURM_NNODES": str(NODES),
            "SLURM_NTASKS": str(NODES * per_node),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_GPUS_ON_NODE": str(GPUS),
            "SLURM_CPUS_PER_TASK": "8",
            "SECONDS_TO_RUN": str(seconds),
            "STATUS": str(status),
            **{name.upper(): str(tmp_path / name) for name in ("tasks", "started", "requeued")},
        }
        command = ["bash", str(SLURM / script), "--config", "my recipe.yaml"]
        jobs.append(Job(subprocess.Popen(command, env=job | variables), tmp_path))
        deadline = time.monotonic() + 60
        while len(jobs[-1].started()) < NODES * per_node and time.monotonic() < deadline:
            time.sleep(0.05)
        return jobs[-1]

    yield run
    for job in jobs:
        job.script.kill()
        job.script.wait()


def test_one_task_per_node_starts_torchrun_with_its_gpus(submit) -> None:
    job = submit(TORCHRUN)
    assert job.end() == (0, "")
    for node, (arguments, _) in enumerate(job.started()):
        options = dict(zip(arguments[:10:2], arguments[1:10:2], strict=True))
        assert options == {
            "--nnodes": "2", "--node-rank": str(node), "--nproc-per-node": "2", "--master-addr": "node-a",
            "--master-port": "20007",
        }  # fmt: skip
        assert arguments[10:] == [
            "-m", "colograd.train", "--resume_from_checkpoint", "auto", "--config", "my recipe.yaml"
        ]  # fmt: skip
    assert len(job.started()) == NODES


def test_one_task_per_gpu_is_a_rank(submit) -> None:
    job = submit(TASK_PER_GPU)
    assert job.end() == (0, "")
    for rank, (arguments, variables) in enumerate(job.started()):
        assert arguments == ["-m", "colograd.train", "--resume_from_checkpoint", "auto", "--config", "my recipe.yaml"]
        assert variables == {
            "RANK": str(rank), "LOCAL_RANK": str(rank % GPUS), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "node-a", "MASTER_PORT": "20007", "OMP_NUM_THREADS": "8",
        }  # fmt: skip
    assert len(job.started()) == NODES * GPUS


@pytest.mark.parametrize("script", [TORCHRUN, TASK_PER_GPU])
def test_script_without_recipe_shows_its_usage(script: str) -> None:
    done = subprocess.run(["bash", str(SLURM / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"sbatch recipes/slurm/{script} --config RECIPE" in done.stderr


@pytest.mark.parametrize("script", [TORCHRUN, TASK_PER_GPU])
def test_time_limit_stops_ranks_and_queues_again(script: str, submit) -> None:
    job = submit(script, seconds=60)
    job.script.send_signal(signal.SIGUSR1)  # B: means the batch script alone
    assert job.end() == (143, f"requeue {JOB}")


@pytest.mark.parametrize("script", [TORCHRUN, TASK_PER_GPU])
def test_preempted_job_is_queued_again(script: str, submit) -> None:
    job = submit(script, seconds=60)
    job.signal_tasks(signal.SIGCONT, signal.SIGTERM)  # the batch script gets them only at the end of GraceTime
    assert job.end() == (143, f"requeue {JOB}")


def test_array_leaves_the_rest_to_its_next_job(submit) -> None:
    job = submit(TORCHRUN, seconds=60, SLURM_ARRAY_JOB_ID="4010000")
    job.script.send_signal(signal.SIGUSR1)
    assert job.end() == (143, "")


@pytest.mark.parametrize("script", [TORCHRUN, TASK_PER_GPU])
def test_cancelled_job_is_not_queued_again(script: str, submit) -> None:
    job = submit(script, seconds=60)
    job.script.send_signal(signal.SIGTERM)  # scancel: all processes of the job
    job.signal_tasks(signal.SIGCONT, signal.SIGTERM)
    assert job.end() == (-signal.SIGTERM, "")


@pytest.mark.parametrize("script", [TORCHRUN, TASK_PER_GPU])
def test_failed_job_is_not_queued_again(script: str, submit) -> None:
    assert submit(script, status=7).end() == (7, "")


@pytest.mark.parametrize("script", [TORCHRUN, TASK_PER_GPU])
def test_script_requests_its_signal_and_requeue(script: str) -> None:
    lines = (SLURM / script).read_text().splitlines()
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@120", "#SBATCH --open-mode=append"} <= set(lines)
