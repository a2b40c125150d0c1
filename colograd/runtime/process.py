"""Environment variables, threads and log levels of the process.

Torch, transformers and vLLM read most settings when they are imported, so this module doesn't import them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import logging
import os
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from .shipped import file_or_shipped

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_OF_ONE = "COLOGRAD_RANK_OF_ONE"  # Holds "process id:port" of a process that set its rank variables itself.
GPU_NODES, GPU_DRIVER = "/dev/nvidia[0-9]*", Path("/proc/driver/nvidia/version")
_command_began: float | None = None
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILE_THREADS = 32  # torch's default maximum of compile processes.


def command_arguments(argv: Sequence[str] | None) -> list[str]:
    """Return a command's arguments (default: `sys.argv[1:]`). Quiet other packages' logs, and note the time for
    `command_began`."""
    global _command_began
    _command_began = time.perf_counter()
    arguments = list(sys.argv[1:] if argv is None else argv)
    quiet_logs(is_verbose(arguments))
    return arguments


def is_verbose(argv: Sequence[str]) -> bool:
    """Return whether a command turns on ``verbose``, by a flag or in its recipe. Search the recipe's text for the
    setting: the parser would import packages that read log levels at import."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    recipe = ""
    with contextlib.suppress(ValueError, IndexError, OSError):  # The parser will report a bad command or recipe.
        recipe = file_or_shipped(Path(words[words.index("--config") + 1])).read_text(encoding="utf-8")
    for word, value in reversed([*zip(argv, [*argv[1:], "--"], strict=False)]):
        flag, equals, attached = word.partition("=")
        if flag == "--verbose":
            return (attached if equals else value).lower() not in ("false", "f", "no", "n", "off", "0")
    return bool(re.search(r"^verbose:\s*(true|yes|on)\b", recipe, re.IGNORECASE | re.MULTILINE))


def command_began() -> float | None:
    """Return when the command began (`time.perf_counter`). Return None in later calls, and outside of a command."""
    global _command_began
    began, _command_began = _command_began, None
    return began


def tell_briefly() -> None:
    """Make Python print an uncaught error without its traceback if the error's ``says_all`` is true. An `except` would
    hide errors from `FailureDetector.leave` and `ranks.part`, which read `sys.last_value` when the process ends."""
    usual = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if getattr(error, "says_all", False):
            print(f"colograd: error: {error}\n(--verbose shows the frames of the trainer, too)", file=sys.stderr)
        else:
            usual(kind, error, frames)

    sys.excepthook = tell


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def cpu_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size())


def prepare_threads() -> None:
    """Set OMP_NUM_THREADS to a rank's cores if it is unset, or if a launcher set 1. Without the variable vLLM's CPU
    worker would set one thread, and training would use one core. If OMP_WAIT_POLICY is unset, set it to PASSIVE:
    threads that spin at barriers make a backward several times slower next to a busy process."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if "OMP_NUM_THREADS" not in os.environ or (launched and os.environ["OMP_NUM_THREADS"] == "1"):
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads())
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (torch := sys.modules.get("torch")) and torch.get_num_threads() != int(os.environ["OMP_NUM_THREADS"]):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def compile_with_threads(given: str | None) -> None:
    """Set the number of torch.compile's processes to ``given`` (default: the cores of a rank, at most 32). vLLM's
    import sets the number to 1, which would compile the kernels of the policy's layers one by one."""
    number = given or str(min(MOST_COMPILE_THREADS, cpu_threads()))
    os.environ[COMPILE_THREADS] = number
    # torch._inductor.config reads the variable only when it is imported.
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.compile_threads = int(number)  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Make glibc keep the large blocks that training frees. Otherwise page faults take a third of a step on a CPU."""
    _call_glibc("mallopt", -4, 0)  # -4: the constant M_MMAP_MAX of malloc.h.
    _call_glibc("mallopt", -1, 2**31 - 1)  # -1: the constant M_TRIM_THRESHOLD of malloc.h.


def give_back_freed_memory() -> None:
    """Return freed memory to the system (glibc only). The start of a run needs more memory than its training."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(function: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Only glibc has these functions.
        getattr(ctypes.CDLL("libc.so.6"), function)(*arguments)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable Python's garbage collector in this context. The collector takes a quarter of the time of imports. With
    400 sequences of 1,500 tokens it also takes a quarter of the host's time while vLLM samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def follow_launcher() -> None:
    """If `accelerate launch` started only this process, make Linux send the process SIGTERM when `launch` dies, because
    `launch` then forwards no signals."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        _call_glibc("prctl", 1, signal.SIGTERM)  # 1: the constant PR_SET_PDEATHSIG of sys/prctl.h.


@contextlib.contextmanager
def rank_variables() -> Iterator[None]:
    """Set missing rank variables (RANK, WORLD_SIZE, ...) while a trainer is built, and remove them afterwards.
    Otherwise child processes would inherit them, and torch.distributed would bind the same port there."""
    added = prepare_ranks()
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def drop_inherited_ranks() -> None:
    """Remove rank variables that the parent process, not a launcher, has set: the parent still uses the MASTER_PORT."""
    process, _, port = os.environ.get(RANK_OF_ONE, "").partition(":")
    if port and process != str(os.getpid()) and port == os.environ.get("MASTER_PORT"):
        for name in (*RANK_VARIABLES, RANK_OF_ONE):
            os.environ.pop(name, None)


def prepare_ranks() -> list[str]:
    """Set missing rank variables for vLLM's external launcher, and return the names of the added ones. Without a
    launcher the process becomes rank 0 of 1 on a free port."""
    drop_inherited_ranks()
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise RuntimeError(
            f"The launcher set MASTER_ADDR={os.environ['MASTER_ADDR']} but no RANK: several ranks were requested, but "
            "only one was started (`accelerate launch --cpu --num_processes N` does this). Start ranks on a CPU "
            "with `torchrun --nproc-per-node N -m colograd.train --config ...`, or set --num_processes 1."
        )
    before = {*os.environ}
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        os.environ[RANK_OF_ONE] = f"{os.getpid()}:{os.environ['MASTER_PORT']}"
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()) if os.environ["WORLD_SIZE"] == "1" else "29500")
    return [*({*os.environ} - before)]


def prepare_network() -> None:
    """Let gloo use the network interface that reaches MASTER_ADDR, if a run has several nodes and the host's name
    resolves to a loopback address. Gloo's default would be unusable there."""
    if local_world_size() >= int(os.environ.get("WORLD_SIZE") or 1) or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import psutil

    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # A UDP connect sends nothing: the system only picks a route.
        used = str(probe.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if used in [each.address for each in addresses] and not used.startswith("127."):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def quiet_logs(verbose: bool) -> None:
    if verbose:
        return
    if not gpu_nodes():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Without this, deepspeed warns about a missing GPU.
    for name in ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL", "GLOO_LOG_LEVEL"):
        os.environ.setdefault(name, "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    for name in ("vllm", "datasets", "httpx", "torch.distributed", "filelock", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A script may have imported transformers and torch already, which read their variables at import.
    given, theirs = os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error"), logging.getLogger("transformers")
    if given == "error" and theirs.level in (logging.NOTSET, logging.WARNING):  # transformers' default levels.
        theirs.setLevel(logging.ERROR)
    if (torch := sys.modules.get("torch")) is not None:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            read_log_level = "_ZN3c1011initLoggingEv"  # Mangled C++ name of c10::initLogging().
            ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__ or ""), "lib", "libc10.so"))[read_log_level]()


def gpu_nodes() -> list[str]:
    return sorted(glob.glob(GPU_NODES))


def why_gpu_unused(torch_version: str, cuda_version: str | None) -> str:
    """Explain why torch finds no GPU although the machine has one. ``cuda_version`` is None for a torch without
    CUDA."""
    if not (names := gpu_nodes()):
        return ""
    driver = None
    with contextlib.suppress(OSError):
        driver = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", GPU_DRIVER.read_text(encoding="utf-8"))
    machine = f"{names[0]} is a GPU{f' (driver {driver.group()})' if driver else ''}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda_version is None:
        what = f"torch {torch_version} is built without CUDA: install a build with CUDA"
    elif hidden is not None:
        what = f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides it from torch {torch_version}: unset it"
    else:
        what = (
            f"torch {torch_version}, built with CUDA {cuda_version}, can't use it. Often the driver is too old for "
            "that CUDA: update the driver, or install a torch that is built with an older CUDA"
        )
    return f"{machine}, but {what}; or set use_cpu: true (--use_cpu) to train on the CPU."
