"""A stop signal: its deadline, its two moments, and the exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import tiny

from colograd import train
from colograd.checkpoint import stop_signal
from colograd.checkpoint.stop_signal import StopSignal, exit_status, schedule, seconds_left
from colograd.parallel import ranks
from colograd.parallel.ranks import RankError, Stopped, on_all_ranks

PATIENCE = 60  # seconds


@pytest.mark.parametrize(
    ("stop_within", "environ", "seconds"),
    [
        (None, {}, None),
        (5.0, {}, 5.0),
        (None, {"SLURM_JOB_END_TIME": "1120"}, 120.0),
        (5.0, {"SLURM_JOB_END_TIME": "1120"}, 5.0),
        (300.0, {"SLURM_JOB_END_TIME": "1120"}, 120.0),
        (None, {"SLURM_JOB_END_TIME": "1000"}, None),  # SIGTERM at the time limit: KillWait is unknown
        (None, {"SLURM_JOB_END_TIME": "unlimited"}, None),
        (None, {"TORCHELASTIC_RUN_ID": "1"}, 30.0),
        (None, {"TORCHELASTIC_RUN_ID": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, 90.0),
        (60.0, {"TORCHELASTIC_RUN_ID": "1"}, 60.0),  # torchrun's option may allow more than its variable
    ],
)
def test_deadline_is_the_earlier_limit(stop_within: float | None, environ: dict[str, str], seconds: float) -> None:
    assert seconds_left(stop_within, environ, now=1000.0, name="SIGTERM") == seconds


def test_only_sigterm_starts_torchruns_deadline() -> None:
    assert seconds_left(None, {"TORCHELASTIC_RUN_ID": "1"}, now=1000.0, name="SIGUSR1") is None


def test_schedule_leaves_time_for_a_save() -> None:
    assert schedule(5.0) == (2.5, 4.0)
    assert schedule(120.0) == (110.0, 118.0)
    assert schedule(120.0, save_seconds=20.0) == (80.0, 118.0)
    assert schedule(0.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("setting", "environ", "status"),
    [
        (None, {}, 0),
        (None, {"TORCHELASTIC_RUN_ID": "1"}, 0),  # torchrun would restart the ranks on a machine that goes away
        (None, {"SLURM_JOB_ID": "7"}, 143),
        (None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 143),
        (None, {"SKYPILOT_TASK_ID": "a"}, 143),
        (0, {"SLURM_JOB_ID": "7"}, 0),
        (85, {}, 85),
    ],
)
def test_status_is_143_under_a_scheduler(setting: int | None, environ: dict[str, str], status: int) -> None:
    assert exit_status(setting, environ) == status


@pytest.mark.parametrize(("step", "status"), [(3, 143), (10, 0)])
def test_a_finished_training_ends_with_0(step: int, status: int) -> None:
    def nothing(*_: object) -> None:
        pass

    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=".", push_to_hub=False, report=False),
        checkpointer=SimpleNamespace(
            stop_signal=SimpleNamespace(received="SIGTERM", status=143, has_deadline=False)
        ),
        state=SimpleNamespace(global_step=step, max_steps=10, log_history=[]),
        console=SimpleNamespace(say=nothing),
        train=nothing, save_model=nothing, save_state=nothing, create_model_card=nothing, close=nothing,
    )  # fmt: skip
    assert train.run(trainer) == status  # type: ignore[arg-type]


def test_unknown_stop_signals_are_refused(tmp_path) -> None:
    with pytest.raises(
        ValueError, match="`stop_signals` 'SIGKILL' isn't supported: choose one of SIGTERM, SIGUSR1, SIGUSR2"
    ):
        tiny.config(tmp_path, stop_signals=["SIGTERM", "SIGKILL"])
    with pytest.raises(ValueError, match="`stop_within` is 0"):
        tiny.config(tmp_path, stop_within=0)


def test_signal_cuts_while_the_main_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs no signal handler during a C call. The deadline is sent to the other ranks too."""
    stop, told = StopSignal(names=["SIGUSR1"], stop_within=0.2), []
    monkeypatch.setattr(StopSignal, "_end", lambda self: None)
    stop.tell = lambda *message: told.append(message)
    held = threading.Lock()
    held.acquire()
    stop.install()
    try:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        end = time.monotonic() + PATIENCE
        while not stop.is_cut and time.monotonic() < end:
            held.acquire(timeout=0.05)
        assert stop.is_cut
        assert told == [("SIGUSR1", 0.2)] and stop.received == "SIGUSR1"
    finally:
        stop.remove()
        stop.forget_deadline()


def test_first_ctrl_c_after_another_ranks_doesnt_interrupt() -> None:
    stop = StopSignal()
    stop.install()
    try:
        stop.received = "Ctrl-C"  # of rank 0, which the ranks exchange after a step
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.remove()


PROGRAM = """
import ctypes, os, signal, sys, time
from colograd.checkpoint.stop_signal import StopSignal

stop = StopSignal(names=["SIGTERM", "SIGUSR2"], stop_within=eval(sys.argv[1]), status=143)
stop.install()
if os.fork() == 0:  # a child's signals aren't the trainer's
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os.wait()
print("ready", flush=True)
ctypes.CDLL(None).usleep.restype = None
for _ in range(600):
    ctypes.CDLL(None).usleep(900_000)
"""


@pytest.mark.parametrize(
    ("within", "signals", "least"),
    [("0.5", [signal.SIGTERM], 0.0), ("None", [signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM], 2.0)],
)
def test_process_ends_with_the_status(within: str, signals: list[int], least: float) -> None:
    """The process ends at its deadline or at a second signal. A launcher's immediate copy doesn't count."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, within], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        assert process.poll() is None
        started = time.monotonic()
        for index, number in enumerate(signals):
            process.send_signal(number)
            time.sleep(0.1 if index == 0 else stop_signal.REPEATED + 0.2)
        assert process.wait(PATIENCE) == 143
        assert time.monotonic() - started >= least


OUTSIDE_PROGRAM = """
import ctypes, os, signal, sys
from colograd.checkpoint.stop_signal import StopSignal

signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))  # a script's own handler stays
stop = StopSignal.outside_training(["SIGTERM", "SIGUSR1"], 143, lambda *message: print(*message, flush=True))
if (child := os.fork()) == 0:  # a pool ends its workers by SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
signal.raise_signal(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
ctypes.CDLL(None).sleep(600)
"""


def test_signal_outside_of_training_ends_all_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE_PROGRAM], capture_output=True, text=True, timeout=5 * PATIENCE, check=False
    )
    assert (done.returncode, done.stdout.split("\n")[:3]) == (143, ["-15", "mine", "SIGTERM 0.0"])
    assert "no training was under way" in done.stderr


def test_handlers_of_two_trainers_end_in_any_order() -> None:
    before, descriptor = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    first, second = (StopSignal.outside_training(["SIGTERM"], 143, lambda *_: None) for _ in range(2))
    first.remove()
    assert signal.getsignal(signal.SIGTERM) is stop_signal._notice
    second.remove()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(descriptor) == descriptor


ENDING_PROGRAM = """
import atexit, signal, sys, time
from colograd.checkpoint.stop_signal import StopSignal

atexit.register(time.sleep, 600)  # a library's teardown
stop = StopSignal(names=["SIGTERM"], stop_within=300.0, status=143)
stop.leave = lambda: print("left")
stop.install()
signal.raise_signal(signal.SIGTERM)
while not stop.has_deadline:
    time.sleep(0.01)
stop.remove()
if sys.argv[1] == "finished":
    stop.forget_deadline()
    atexit.unregister(time.sleep)
if sys.argv[1] == "failed":
    raise RuntimeError("a failure")
"""


@pytest.mark.parametrize(
    ("end", "status", "output"), [("stopped", 143, "left"), ("failed", 1, "left"), ("finished", 0, "")]
)
def test_stopped_process_ends_without_teardown(end: str, status: int, output: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING_PROGRAM, end],
        stdout=subprocess.PIPE,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (status, output)


@pytest.mark.parametrize(
    ("mine", "others", "raised"),
    [
        (None, Stopped("b"), Stopped),
        (Stopped("a"), None, Stopped),
        (MemoryError("a"), Stopped("b"), MemoryError),
        (Stopped("a"), ValueError("b"), RankError),
    ],
)
def test_all_ranks_stop_together(mine, others, raised, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = next((shared for shared in ranks.SHARED if isinstance(others, shared)), None)
    report = None if others is None else (kind, f"{type(others).__name__}: {others}")
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather", lambda value: [value, report])
    with pytest.raises(raised), on_all_ranks("the rollout"):
        if mine is not None:
            raise mine
