"""Two nodes: network namespaces joined by a virtual link, each with its own host name and folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_ranks
import pytest
import tiny
from needs import case
from paths import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ADDRESSES = ("10.213.77.1", "10.213.77.2")


class Node:
    """A node: a network namespace with one end of the link."""

    def __init__(self, index: int, tag: str) -> None:
        self.index, self.name, self.link = index, f"{tag}-{index}", f"{tag}v{index}"

    def command(self, *command: str) -> list[str]:
        """A command line that runs in the namespace, under a host name that nobody can resolve."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *command]
        return ["ip", "netns", "exec", self.name, *named]

    def kill(self) -> None:
        """Kill torchrun and its ranks, although ranks have sessions of their own."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for process in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def start(
        self, log: Path, script: str, *arguments: str, launcher: list[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start torchrun, with two ranks or the options ``launcher``."""
        of_two = ["--nnodes", "2", "--node-rank", str(self.index), "--nproc-per-node", "2"]
        launcher = launcher or [*of_two, "--master-addr", ADDRESSES[0], "--master-port", "29511"]
        environment = tiny.clean_environment() | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a node that returns doesn't get the address
        return subprocess.Popen(
            self.command(sys.executable, "-m", "torch.distributed.run", *launcher, str(SCRIPTS / script), *arguments),
            stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, `ip` and `unshare`")
    tag = f"cg{os.getpid() % 100_000}"
    made = [Node(index, tag) for index in range(2)]
    try:
        try:
            for node in made:
                ip("netns", "add", node.name)
            ip("link", "add", made[0].link, "netns", made[0].name, "type", "veth", "peer", "name", made[1].link,
               "netns", made[1].name)  # fmt: skip
            for node, address in zip(made, ADDRESSES, strict=True):
                ip("-n", node.name, "addr", "add", f"{address}/24", "dev", node.link)
                for link in ("lo", node.link):
                    ip("-n", node.name, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
        yield made
    finally:
        for node in made:
            node.kill()
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)


class Launch:
    """A script that runs on both nodes."""

    def __init__(self, nodes: list[Node], folder: Path, script: str, arguments: list[list[str]]) -> None:
        folder.mkdir()
        self.logs = [folder / f"node{node.index}.log" for node in nodes]
        self.nodes = [
            node.start(log, script, *given) for node, log, given in zip(nodes, self.logs, arguments, strict=True)
        ]

    def wait(self, seconds: float = 600) -> list[int]:
        end = time.monotonic() + seconds
        return [node.wait(max(0.1, end - time.monotonic())) for node in self.nodes]

    def said(self, node: int) -> str:
        return self.logs[node].read_text()


def wait_for(*files: Path, launch: Launch, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < end and all(node.poll() is None for node in launch.nodes), launch.said(0)[-3000:]
        time.sleep(0.5)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.engine
def test_two_nodes_resume_exactly_after_one_is_killed(nodes, tiny_model, tmp_path) -> None:
    folders = [tmp_path / node.name / "run" for node in nodes]

    def arguments(stop_at: int, runs: list[Path]) -> list[list[str]]:
        return [[str(tiny_model), str(run), str(tmp_path), str(stop_at)] for run in runs]

    launch = Launch(nodes, tmp_path / "killed", "node_ranks.py", arguments(4, folders))
    wait_for(tmp_path / "waits-2", tmp_path / "waits-3", launch=launch)
    nodes[1].kill()
    killed = time.monotonic()
    assert launch.wait() == [1, -signal.SIGKILL], launch.said(0)[-3000:]
    assert time.monotonic() - killed < 240, "before a collective's time-out"
    assert "ended without a word: it was killed" in launch.said(0), launch.said(0)[-3000:]
    assert "the 2 nodes share no file system" in launch.said(0)
    for node, folder in enumerate(folders):
        saved = {path.name for path in (folder / "checkpoint-2").iterdir()}
        assert {"model.safetensors", "trainer_state.json", "scheduler.pt"} <= saved
        parts = {name for name in saved if name.startswith(("optimizer", "rng_state"))}
        own = (2 * node, 2 * node + 1)
        assert parts == {f"optimizer-{r:05d}-of-00004.safetensors" for r in own} | {f"rng_state_{r}.pth" for r in own}
    shutil.copytree(folders[0] / "checkpoint-2", folders[0] / "checkpoint-9")  # whole on one node only

    launch = Launch(nodes, tmp_path / "resumed", "node_ranks.py", arguments(0, folders))
    assert launch.wait() == [0, 0], launch.said(0)[-3000:] + launch.said(1)[-3000:]
    resumed = results(tmp_path)
    assert [rank["host"] for rank in resumed] == [nodes[0].name] * 2 + [nodes[1].name] * 2
    assert [rank["node"] for rank in resumed] == [0, 0, 1, 1]
    assert [rank["limits"] for rank in resumed] == [[240, 240]] * 4, "ddp_timeout, in vLLM's groups too"
    assert all((folder / "checkpoint-4").is_dir() and (folder / "model.safetensors").is_file() for folder in folders)
    assert all(not (folder / f"checkpoint-{step}").exists() for folder in folders for step in (2, 9))

    fresh = [tmp_path / f"fresh{node.index}" for node in nodes]
    launch = Launch(nodes, tmp_path / "uninterrupted", "node_ranks.py", arguments(0, fresh))
    assert launch.wait() == [0, 0], launch.said(0)[-3000:]
    for rank, expected in zip(resumed, results(tmp_path), strict=True):
        assert rank["weights"] == expected["weights"] == resumed[0]["weights"]
        assert rank["rewards"] == expected["rewards"] and rank["steps"] == [1, 2, 3, 4]


@pytest.mark.engine
@pytest.mark.parametrize(
    "changes",
    [
        case({"sharding": "tensor+gradients", "vllm_tensor_parallel_size": 2}, "tensor_parallel"),
        case({"sharding": "gradients", "sequence_parallel_size": 2}, "sequence_parallel"),
    ],
)
def test_the_ranks_of_each_node_share_an_engine_or_rows(
    nodes: list[Node], tiny_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """One engine per node, or rows divided over a node's ranks, leave the weights of one rank."""
    engine_ranks.run(tiny_model, tmp_path, 1, **engine_ranks.SETTINGS)
    given = [str(tiny_model), str(tmp_path), json.dumps(engine_ranks.SETTINGS | changes)]
    launch = Launch(nodes, tmp_path / "nodes", "same_rollouts.py", [given] * 2)
    assert launch.wait() == [0, 0], launch.said(0)[-3000:] + launch.said(1)[-3000:]
    engine_ranks.check_ends_alike(tiny_model, tmp_path, 4)
    found = engine_ranks.results(tmp_path, 4)
    assert [rank["node"] for rank in found] == [0, 0, 1, 1]
    assert found[0]["trained"] == found[1]["trained"] and found[2]["trained"] == found[3]["trained"]
    for rank in found:
        assert rank["shared"] == rank["parameters"] > 0, "every parameter is the engine's tensor"
        assert 0 < rank["parity"] < 1e-5
        assert all(log["sync/published_bytes"] == 0 for log in rank["logs"])


def test_both_nodes_end_when_the_link_between_them_is_cut(nodes, tmp_path) -> None:
    launch = Launch(nodes, tmp_path / "cut", "faulty_ranks.py", [["cut", str(tmp_path)]] * 2)
    wait_for(*(tmp_path / f"waits-{rank}" for rank in range(4)), launch=launch)
    ip("-n", nodes[1].name, "link", "set", nodes[1].link, "down")
    assert launch.wait() == [1, 1]
    assert "Rank 2 ended without a word" in launch.said(0) or "Rank 3 ended without a word" in launch.said(0)
    assert "Rank 0 ended without a word" in launch.said(1)


@pytest.mark.engine
def test_elastic_run_loses_and_regains_a_node(nodes: list[Node], tiny_model: Path, tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 40
    settings = json.dumps({"max_steps": steps, "report": False})

    def start(node: Node, attempt: int) -> subprocess.Popen[bytes]:
        launcher = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29512", "--rdzv-id", "elastic"]
        launcher += ["--local-addr", ADDRESSES[node.index], "--rdzv-conf"]
        launcher.append(f"last_call_timeout=5,is_host={int(node.index == 0)}")
        log = tmp_path / f"node{node.index}-{attempt}.log"
        return node.start(log, "../soak/run.py", str(tiny_model), str(run), "null", settings, launcher=launcher)

    def lines() -> list[dict[str, Any]]:
        files = sorted(run.glob("told-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def wait_until_scored(ranks: int, step: int) -> int:
        """Wait until ``ranks`` ranks have scored a round after ``step``. Return the newest step."""
        end = time.monotonic() + 600
        while True:
            newest = max((line["step"] for line in lines() if line["ranks"] == ranks), default=-1)
            if newest > step:
                return int(newest)
            said = "".join(log.read_text()[-3000:] for log in sorted(tmp_path.glob("node*.log")))
            assert time.monotonic() < end and first.poll() is None, said
            time.sleep(0.5)

    first, second = start(nodes[0], 0), start(nodes[1], 0)
    lost_at = wait_until_scored(2, 3)
    nodes[1].kill()
    second.wait()
    alone_at = wait_until_scored(1, lost_at)
    second = start(nodes[1], 1)
    together_at = wait_until_scored(2, alone_at)
    assert lost_at < alone_at < together_at < steps
    assert [first.wait(600), second.wait(600)] == [0, 0], (tmp_path / "node0-0.log").read_text()[-3000:]
    assert (run / "model.safetensors").is_file()
    scored = [(line["step"], line["position"]) for line in lines() if line["what"] == "scored"]
    assert len(set(scored)) == 4 * steps, "each group of each step"
    assert len(scored) - len(set(scored)) <= 4, "at most the groups of the round that the kill interrupted"
