"""The process: rank variables, threads and quiet logs, as launchers leave them."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import launcher
import pytest

from colograd.parallel.ranks import RankError
from colograd.runtime import process
from colograd.runtime.process import RANK_VARIABLES, prepare_ranks, prepare_threads

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1",
}  # fmt: skip
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty environment that only `process` sees, on a machine with 8 cores. The test fills it."""
    variables: dict[str, str] = {}
    machine = SimpleNamespace(environ=variables, getpid=os.getpid, sched_getaffinity=lambda pid: set(range(8)))
    monkeypatch.setattr(process, "os", machine)
    return variables


def test_an_error_that_says_all_is_told_without_frames(monkeypatch, capsys) -> None:
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: told.append(error))
    process.tell_briefly()
    sys.excepthook(RankError, RankError("Rank 1 failed"), None)
    said = capsys.readouterr().err
    assert said.startswith("colograd: error: Rank 1 failed\n(--verbose") and "Traceback" not in said and not told
    other = ValueError("of ours")
    sys.excepthook(ValueError, other, None)
    assert told == [(ValueError, other, None)]


def test_garbage_collection_pauses_during_sampling_and_is_restored() -> None:
    for was_on in (True, False):
        gc.enable() if was_on else gc.disable()
        try:
            with contextlib.suppress(KeyError), process.collector_at_rest():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


# -- Ranks


def test_no_launcher_means_rank_0_of_1(environment: dict[str, str]) -> None:
    prepare_ranks()
    assert {name: environment[name] for name in RANK_VARIABLES[:5]} == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(environment["MASTER_PORT"])))  # nobody listens there


def test_preparing_twice_in_a_kernel_changes_nothing(environment: dict[str, str]) -> None:
    prepare_ranks()
    first = dict(environment)
    prepare_ranks()
    assert environment == first


def test_a_child_of_a_notebook_has_a_port_of_its_own(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_ranks()
    parent = dict(environment)
    monkeypatch.setattr(process.os, "getpid", lambda: 4_194_305)  # above Linux' largest
    prepare_ranks()
    assert environment["MASTER_PORT"] != parent["MASTER_PORT"]
    environment.update(parent, **TORCHRUN)  # a launcher that the notebook started
    prepare_ranks()
    assert TORCHRUN.items() <= environment.items()


def test_rank_variables_are_removed_after_the_block(environment: dict[str, str]) -> None:
    environment.update(RANK="0", WORLD_SIZE="1")
    with process.rank_variables():
        assert {*RANK_VARIABLES} <= environment.keys()
        with process.rank_variables():  # of the trainer, within the command's
            pass
        assert {*RANK_VARIABLES} <= environment.keys()
    assert environment == {"RANK": "0", "WORLD_SIZE": "1"}


def test_a_child_configuration_drops_inherited_ranks(tmp_path: Path) -> None:
    """The parent listens on MASTER_PORT: torch.distributed could not bind it again."""
    script = """
import os
from colograd import GRPOConfig
GRPOConfig(output_dir="unused", report_to="none", use_cpu=True)
print([name for name in os.environ if name in {names}])
"""
    with socket.socket() as parent:
        parent.bind(("127.0.0.1", 0))
        parent.listen()
        port = str(parent.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, process.RANK_OF_ONE: f"{os.getpid()}:{port}"}
        child = tmp_path / "child.py"
        child.write_text(script.format(names=[*ranks]))
        done = launcher.run(child, env={**os.environ, **ranks})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_torchrun_s_variables_are_left_alone(environment: dict[str, str]) -> None:
    environment.update(TORCHRUN)
    prepare_ranks()
    assert environment == TORCHRUN


def test_what_a_smaller_launcher_leaves_out_is_added(environment: dict[str, str]) -> None:
    environment.update(RANK="1", WORLD_SIZE="2")
    prepare_ranks()
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert environment["MASTER_PORT"] == "29500"  # all ranks must say the same


def test_accelerate_with_one_process_is_rank_0_of_1(environment: dict[str, str]) -> None:
    environment.update(ACCELERATE)
    prepare_ranks()
    prepare_ranks()  # by the command, then by the trainer
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")


def test_accelerate_s_silent_single_process_is_an_error(environment: dict[str, str]) -> None:
    """`accelerate launch --cpu --num_processes 2` sets an address and starts one process without ranks."""
    environment.update(ACCELERATE, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with pytest.raises(RuntimeError, match=r"no RANK: several ranks .* one was started .*torchrun --nproc-per-node"):
        prepare_ranks()
    assert "RANK" not in environment


def test_accelerate_s_real_ranks_are_left_alone(environment: dict[str, str]) -> None:
    environment.update(TORCHRUN, **ACCELERATE)
    prepare_ranks()
    assert environment == {**TORCHRUN, **ACCELERATE}


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", process.free_port()))


# -- The network


def test_no_interface_is_set_where_gloo_finds_one(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo finds one on a single node, and where the host's name resolves to an address that isn't loopback."""
    environment.update(TORCHRUN, LOCAL_WORLD_SIZE="4")
    monkeypatch.setattr(process.socket, "gethostbyname", lambda name: "127.0.1.1")
    process.prepare_network()
    environment.update(TORCHRUN)
    monkeypatch.setattr(process.socket, "gethostbyname", lambda name: "10.0.0.7")
    process.prepare_network()
    assert environment == TORCHRUN


def test_an_interface_that_is_named_or_leads_nowhere_is_left_alone(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.socket, "gethostbyname", lambda name: "127.0.1.1")
    environment.update(TORCHRUN, GLOO_SOCKET_IFNAME="eth7")
    process.prepare_network()
    assert environment.pop("GLOO_SOCKET_IFNAME") == "eth7"
    environment["MASTER_ADDR"] = "127.0.0.1"
    process.prepare_network()
    assert "GLOO_SOCKET_IFNAME" not in environment


# -- Threads


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> list[int]:
    """Fake torch with 2 threads. The list records the requested thread numbers."""
    told = [2]
    torch = SimpleNamespace(get_num_threads=lambda: told[-1], set_num_threads=told.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return told


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "1"}, 1),  # the user's own word
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({**ACCELERATE}, 8),  # the launcher's 1 is nobody's wish
        ({**TORCHRUN}, 4),  # 8 cores for 2 ranks on this machine
        ({**TORCHRUN, "OMP_NUM_THREADS": "2"}, 2),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, 1),
        ({"WORLD_SIZE": "4"}, 2),
    ],
)
def test_a_rank_uses_its_share_of_the_cores(
    environment: dict[str, str], torch_threads: list[int], given: dict[str, str], threads: int
) -> None:
    environment.update(given)
    prepare_threads()
    assert environment["OMP_NUM_THREADS"] == str(threads) and torch_threads[-1] == threads


def test_torch_is_told_only_what_is_new(environment: dict[str, str], torch_threads: list[int]) -> None:
    environment["OMP_NUM_THREADS"] = "2"
    prepare_threads()
    assert torch_threads == [2]


def test_threads_wait_without_spinning_unless_the_user_wants_it(
    environment: dict[str, str], torch_threads: list[int]
) -> None:
    prepare_threads()
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    environment["OMP_WAIT_POLICY"] = "ACTIVE"
    prepare_threads()
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"


def test_threads_are_prepared_before_torch_is_imported_too(
    environment: dict[str, str], torch_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    prepare_threads()
    assert environment["OMP_NUM_THREADS"] == "8"


# -- Logs


def test_logs_are_quiet_unless_asked(environment: dict[str, str]) -> None:
    process.quiet_logs(verbose=True)
    assert environment == {}

    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    process.quiet_logs(verbose=False)
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO" and environment["TOKENIZERS_PARALLELISM"] == "false"


def test_a_recipe_may_be_verbose(tmp_path) -> None:
    """`verbose: true` in a recipe works like the flag and like `GRPOConfig(verbose=True)`."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 1\nverbose: true  # all of it\n")
    assert process.is_verbose(["--config", str(recipe)]) and process.is_verbose([f"--config={recipe}"])
    recipe.write_text("verbose: false\nmodel: {verbose: true}\n")
    assert not process.is_verbose(["--config", str(recipe)]) and process.is_verbose(
        ["--config", str(recipe), "--verbose"]
    )
    assert not process.is_verbose(["--config", str(tmp_path / "none.yaml")]) and not process.is_verbose(["--config"])
    assert process.is_verbose(["--verbose=true"]) and process.is_verbose(["--verbose", "--seed", "1"])
    assert not process.is_verbose(["--verbose", "false"]) and not process.is_verbose(["--verbose=no"])
    assert not process.is_verbose([])


@pytest.mark.slow  # test_launch.py reads a run's output
def test_a_script_that_has_imported_torch_and_transformers_is_quiet_too() -> None:
    script = """
import torch, transformers
from colograd import GRPOTrainer, GRPOConfig
from colograd.training.preparation import prepared_config
prepared_config(GRPOConfig(output_dir="unused", report_to="none"), "model")
import bitsandbytes
bitsandbytes.functional
transformers.logging.get_logger("transformers.trainer").warning("There were missing keys")
torch.ops.aten.searchsorted(torch.arange(4), torch.arange(8).view(4, 2)[:, 0])  # C++ warns of its layout
"""
    dropped = ("TORCH_CPP_LOG_LEVEL", "TRANSFORMERS_VERBOSITY", *process.RANK_VARIABLES)
    given = {name: value for name, value in os.environ.items() if name not in dropped}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=given)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("given", "cores", "expected"), [(None, 16, "16"), (None, 64, "32"), ("4", 16, "4"), ("1", 16, "1")]
)
def test_layers_are_compiled_side_by_side_again_after_vllm_s_import(
    given: str | None, cores: int, expected: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's import sets one compile thread. The user's setting before the import (`given`) comes back."""
    loaded = SimpleNamespace(compile_threads=1)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", loaded)
    monkeypatch.setattr(process, "cpu_threads", lambda: cores)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    environment.update({process.COMPILE_THREADS: given} if given else {})
    asked = environment.get(process.COMPILE_THREADS)
    environment[process.COMPILE_THREADS] = "1"  # vllm/env_override.py
    process.compile_with_threads(asked)
    assert environment[process.COMPILE_THREADS] == expected and loaded.compile_threads == int(expected)
