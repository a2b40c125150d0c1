"""`Judge`: calls a task's filters and metrics in worker processes. `CodeEval` runs a model's programs.

Time and memory limits stop faulty programs, but no attacker: programs have the user's rights and network."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import pickle
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from ...rewards.answers import chance_of_pass

CODE_SECONDS = 20.0
MEMORY = 4 * 2**30
FILE_BYTES = 16 * 2**20
ENDED_BY_SCHEDULER = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGUSR2)
# A task's attributes with its data. A judge drops them, because each call brings its document.
DOCUMENTS = ("dataset", "task_docs", "_training_docs", "_fewshot_docs", "_instances", "sampler", "fewshot_rnd")


class Judge:
    def __init__(self, task: Any) -> None:
        self.task = copy.copy(task)
        for name in DOCUMENTS:
            if hasattr(self.task, name):
                with contextlib.suppress(AttributeError):
                    setattr(self.task, name, None)

    def __reduce__(self) -> Any:
        for name, module in [*sys.modules.items()]:
            if name.startswith("/"):  # A module next to a task's YAML file, named by its path. Workers can't import it.
                cloudpickle.register_pickle_by_value(module)
        return _restored, (cloudpickle.dumps(self.task),)

    def __call__(self, instances: Sequence[Any], responses: Sequence[list[Any]]) -> dict[tuple[str, str], Any]:
        """Return a question's {(metric, filter): value}. ``responses``: for each request a list of texts or scores."""
        doc, self.task._instances = instances[0].doc, list(instances)
        for instance, of_one in zip(instances, responses, strict=True):
            instance.resps = list(of_one)
        self.task.apply_filters()
        return {
            (metric, name): value
            for name in instances[0].filtered_resps
            for metric, value in self.task.process_results(doc, [i.filtered_resps[name] for i in instances]).items()
        }


def _restored(pickled: bytes) -> Judge:
    with code_runs_apart():
        return Judge(pickle.loads(pickled))


class CodeEval:
    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,), **_: Any
    ) -> tuple[dict[str, float], dict[int, list[Any]]]:
        """Return {"pass@k": mean over references}, and {reference's index: [(prediction's index, passed), ...]}."""
        passes = [
            [run_python(f"{code}\n{tests}\n", CODE_SECONDS) for code in candidates]
            for tests, candidates in zip(references, predictions, strict=True)
        ]
        shares = {
            f"pass@{each}": sum(chance_of_pass(len(of_one), sum(of_one), each) for of_one in passes) / len(passes)
            for each in k
            if all(len(of_one) >= each for of_one in passes)
        }
        return shares, {index: [*enumerate(of_one)] for index, of_one in enumerate(passes)}


@contextlib.contextmanager
def code_runs_apart() -> Iterator[None]:
    """Let `evaluate.load("code_eval")` return `CodeEval` in this context, without the Hub."""
    try:
        import evaluate
    except ImportError:
        yield
        return
    load = evaluate.load
    evaluate.load = lambda path, *args, **kwargs: CodeEval() if path == "code_eval" else load(path, *args, **kwargs)
    try:
        yield
    finally:
        evaluate.load = load


def run_python(program: str, seconds: float) -> bool:
    """Run a model's Python program without the trainer's environment variables. Return whether it reached its end."""

    def limit() -> None:
        for kind, most in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, int(seconds) + 1),
        ):
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the program dies with the worker.

    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="colograd-code-", ignore_cleanup_errors=True) as folder:
        path, end = Path(folder, "program.py"), Path(folder, "end")
        last = f"import io as _io\n_io.open({str(end)!r}, 'w').write('{token}')\n"
        path.write_text(f"{program}\n{last}", encoding="utf-8", errors="replace")
        variables = {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=variables,
                start_new_session=True,
                preexec_fn=limit,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if status not in ENDED_BY_SCHEDULER:  # A program ended by a scheduler's signal runs once more.
                break
        return end.is_file() and end.read_text(errors="replace") == token
