"""The process: threads, rank variables and log levels, set before torch, transformers and vLLM read them.

The module imports only the standard library: those packages read most settings once, when they are first imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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

from . import gpus
from .shipped import file_or_shipped

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_OF_ONE = "COLOGRAD_RANK_OF_ONE"  # "process:port" of a process that set its own variables of rank 0 of 1
_command_began: float | None = None
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILE_THREADS = 32  # torch's own limit


def command_arguments(argv: Sequence[str] | None) -> list[str]:
    """Begin the command, quietly unless it is verbose. Return its arguments; default: the process's own. The command's
    first trainer prints how long the start took, with imports."""
    global _command_began
    _command_began = time.perf_counter()
    arguments = list(sys.argv[1:] if argv is None else argv)
    quiet_logs(is_verbose(arguments))
    return arguments


def is_verbose(argv: Sequence[str]) -> bool:
    """Return whether a command's flags or its recipe set ``verbose``. Reads the recipe as text: a parser needs packages
    that read the log levels when they are imported."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    recipe = ""
    with contextlib.suppress(ValueError, IndexError, OSError):  # the parser refuses such a command or file later
        recipe = file_or_shipped(Path(words[words.index("--config") + 1])).read_text(encoding="utf-8")
    return "--verbose" in words or bool(re.search(r"^verbose:\s*(true|yes|on)\b", recipe, re.IGNORECASE | re.MULTILINE))


def command_began() -> float | None:
    """Return when the command began (`time.perf_counter`); None in the second call, or if the process is no command."""
    global _command_began
    began, _command_began = _command_began, None
    return began


def tell_briefly() -> None:
    """Make Python print an uncaught error with ``says_all`` as one line, without a traceback. It stays uncaught:
    `FailureDetector.leave` and `ranks.part` look for it when the process ends."""
    usual = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if getattr(error, "says_all", False):
            print(f"colograd: error: {error}\n(--verbose shows the frames of the trainer, too)", file=sys.stderr)
        else:
            usual(kind, error, frames)

    sys.excepthook = tell


def local_world_size() -> int:
    """Return the number of ranks on this machine, by the launcher's variables; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def cpu_threads() -> int:
    """Return the threads that one rank may use: this process's cores, shared by the ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS lacks it
    return max(1, cores // local_world_size())


def prepare_threads() -> None:
    """Set OpenMP up for a process that both samples and trains.

    OMP_NUM_THREADS: if it is unset, vLLM's CPU worker fixes it at one thread, and training would have one core.
    Launchers set it to 1 by default; that value is replaced. OMP_WAIT_POLICY: with spinning barriers, the default, any
    other busy process makes a backward pass several times slower.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if "OMP_NUM_THREADS" not in os.environ or (launched and os.environ["OMP_NUM_THREADS"] == "1"):
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads())
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (torch := sys.modules.get("torch")) and torch.get_num_threads() != int(os.environ["OMP_NUM_THREADS"]):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def given_compile_threads() -> str | None:
    """Return the user's TORCHINDUCTOR_COMPILE_THREADS; None if it is unset. Call it before vLLM is imported."""
    return None if "vllm" in sys.modules else os.environ.get(COMPILE_THREADS)


def compile_with_threads(given: str | None) -> None:
    """Set the number of torch.compile's processes after an engine is built: ``given``, or a rank's cores.

    vLLM's import sets it to 1, because its worker processes may have no children. The engine here is in the trainer's
    process, which may have children. With one process the policy's layers would be compiled one after the other.
    """
    number = given or str(min(MOST_COMPILE_THREADS, cpu_threads()))
    os.environ[COMPILE_THREADS] = number
    # torch's module reads the variable when it is imported. If that has happened, its attribute must be set, too.
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.compile_threads = int(number)  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Let glibc keep the large blocks that training frees: else a third of a step on a CPU goes into page faults."""
    _call_glibc("mallopt", -4, 0)  # M_MMAP_MAX, from malloc.h
    _call_glibc("mallopt", -1, 2**31 - 1)  # M_TRIM_THRESHOLD


def give_back_freed_memory() -> None:
    """Return freed memory to the system once, after a start that held more memory than training will."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(function: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        getattr(ctypes.CDLL("libc.so.6"), function)(*arguments)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Turn Python's garbage collector off within a block that makes many lasting objects. The collector takes a quarter
    of the host's time per token that vLLM samples (400 sequences of 1,500 tokens), and of the time of imports."""
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
    """Make Linux send a SIGTERM when the launcher dies. `accelerate launch` of one process doesn't forward signals."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        _call_glibc("prctl", 1, signal.SIGTERM)  # PR_SET_PDEATHSIG, from sys/prctl.h


@contextlib.contextmanager
def rank_variables() -> Iterator[None]:
    """Complete the rank variables within the block (see `prepare_ranks`), and remove the added ones afterwards.

    accelerate and vLLM read them while a trainer is built. Left in the environment, they would reach every program
    that the script, a tool or an agent starts later, and its torch.distributed would bind this process's port again.
    """
    drop_inherited_ranks()
    before = {*os.environ}
    try:
        prepare_ranks()
        yield
    finally:
        for name in (*RANK_VARIABLES, RANK_OF_ONE):
            if name not in before:
                os.environ.pop(name, None)


def drop_inherited_ranks() -> None:
    """Remove the rank variables that a parent process set for itself, because their port is taken."""
    process, _, port = os.environ.get(RANK_OF_ONE, "").partition(":")
    if port and process != str(os.getpid()) and port == os.environ.get("MASTER_PORT"):
        for name in (*RANK_VARIABLES, RANK_OF_ONE):
            os.environ.pop(name, None)


def prepare_ranks() -> None:
    """Complete the rank variables that vLLM's external launcher needs.

    torchrun and accelerate set them. ``python script.py`` and a notebook are rank 0 of 1 on a free port, so that two
    jobs on one machine don't meet. Variables that a parent process, such as a notebook, set for itself are replaced.
    """
    drop_inherited_ranks()
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        # accelerate's CPU launcher sets an address only if several ranks were requested, and then starts one.
        raise RuntimeError(
            f"The launcher set MASTER_ADDR={os.environ['MASTER_ADDR']} but no RANK: several ranks were asked for and "
            "one was started (`accelerate launch --cpu --num_processes N` is known for this). Start ranks on a CPU "
            "with `torchrun --nproc-per-node N -m colograd.train --config ...`, or ask for --num_processes 1."
        )
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        os.environ[RANK_OF_ONE] = f"{os.getpid()}:{os.environ['MASTER_PORT']}"
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()) if os.environ["WORLD_SIZE"] == "1" else "29500")


def prepare_network() -> None:
    """On several nodes, make gloo use the interface that leads to MASTER_ADDR, unless GLOO_SOCKET_IFNAME names one.
    gloo's own choice, the address of this machine's host name, may be a loopback address, which no other node reaches.
    """
    if local_world_size() >= int(os.environ.get("WORLD_SIZE") or 1) or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import psutil

    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing: the system picks the way there
        used = str(probe.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if used in [each.address for each in addresses] and not used.startswith("127."):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def quiet_logs(verbose: bool) -> None:
    """Keep other packages' log lines off the terminal unless ``verbose``; important warnings still show."""
    if verbose:
        return
    if not gpus.nodes():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed warns that it looked for a GPU
    for name in ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL", "GLOO_LOG_LEVEL"):
        os.environ.setdefault(name, "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    for name in ("vllm", "datasets", "httpx", "torch.distributed", "filelock", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A script may have imported torch and transformers before, so their levels are set here too.
    given, theirs = os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error"), logging.getLogger("transformers")
    if given == "error" and theirs.level in (logging.NOTSET, logging.WARNING):  # transformers' defaults
        theirs.setLevel(logging.ERROR)
    if (torch := sys.modules.get("torch")) is not None:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            read_log_level = "_ZN3c1011initLoggingEv"  # c10::initLogging()
            ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__ or ""), "lib", "libc10.so"))[read_log_level]()
