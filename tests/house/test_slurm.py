"""The SLURM scripts: what each task starts. A fake srun starts the tasks; fake programs say how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import RECIPES

SLURM = RECIPES / "slurm"
NODES, GPUS = 2, 2
SRUN = """
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
for task in range(int(os.environ["SLURM_NTASKS"])):
    local, node = str(task % per_node), str(task // per_node)
    own = {"SLURM_PROCID": str(task), "SLURM_LOCALID": local, "SLURM_NODEID": node}
    subprocess.run(command, env=os.environ | own, check=True)
"""
START = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names if name in os.environ}]))
"""


@pytest.fixture
def submit(tmp_path: Path):
    for name, body in {"srun": SRUN, "torchrun": START, "python": START}.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{body}")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n")
    for fake in tmp_path.iterdir():
        fake.chmod(0o755)

    def run(script: str, tasks_per_node: int) -> list[tuple[list[str], dict[str, str]]]:
        job = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_JOB_ID": "4010007",
            "SLURM_NNODES": str(NODES),
            "SLURM_NTASKS": str(NODES * tasks_per_node),
            "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
            "SLURM_GPUS_ON_NODE": str(GPUS),
            "SLURM_CPUS_PER_TASK": "8",
        }
        command = ["bash", str(SLURM / script), "--config", "my recipe.yaml"]
        done = subprocess.run(command, env=job, capture_output=True, text=True, check=True)
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    return run


def test_one_task_per_node_starts_torchrun_with_its_gpus(submit) -> None:
    started = submit("colograd.slurm", tasks_per_node=1)
    for node, (arguments, _) in enumerate(started):
        options = dict(zip(arguments[:10:2], arguments[1:10:2], strict=True))
        assert options == {
            "--nnodes": "2", "--node-rank": str(node), "--nproc-per-node": "2", "--master-addr": "node-a",
            "--master-port": "20007",
        }  # fmt: skip
        assert arguments[10:] == ["-m", "colograd.train", "--config", "my recipe.yaml"]
    assert len(started) == NODES


@pytest.mark.parametrize("script", ["colograd.slurm", "colograd-task-per-gpu.slurm"])
def test_script_without_recipe_shows_its_usage(script: str) -> None:
    done = subprocess.run(["bash", str(SLURM / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"sbatch recipes/slurm/{script} --config RECIPE" in done.stderr


def test_one_task_per_gpu_is_a_rank(submit) -> None:
    started = submit("colograd-task-per-gpu.slurm", tasks_per_node=GPUS)
    for rank, (arguments, variables) in enumerate(started):
        assert arguments == ["-m", "colograd.train", "--config", "my recipe.yaml"]
        assert variables == {
            "RANK": str(rank), "LOCAL_RANK": str(rank % GPUS), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "node-a", "MASTER_PORT": "20007", "OMP_NUM_THREADS": "8",
        }  # fmt: skip
    assert len(started) == NODES * GPUS
