"""Where a start goes: from the command to the first generation, by stage, in wall and processor seconds.

    python tests/benchmarks/startup.py [--repeats 3] [--ranks 2] [--config recipes/X.yaml --any_flag value ...]

Each start is the command that a user types (`python colograd/train.py --config ...`) in a fresh process. The process
ends at the engine's first request for a completion. A stage's time is its own: time of a nested stage counts for the
nested stage only. Wall seconds are the main thread's; processor seconds are all threads' while it was in that stage.
The first start on a machine reads files that aren't in memory yet: of several the quickest counts. With several ranks,
started by torchrun, the figures are the first one's.

Then it prints the time from the command to the refusal of a model that can't be trained, with all imports before it,
and counts: forwards of the measured start, captures and page-locked bytes of a planned one on a GPU.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "grpo_smollm2_cpu.yaml"
LARGE = ROOT / "recipes" / "grpo_qwen_32b_h200.yaml"
QWEN_32B = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768,
    "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16",
}  # fmt: skip

# module that calls a timed function -> function -> stage
STAGES = {
    "colograd.config": {"parse_arguments": "recipe and command line"},
    "colograd.policy.supported": {"check_supported": "the model's configuration: is it supported?"},
    "colograd.data": {"load_datasets": "dataset"},
    "colograd.trainer": {
        "assemble": "engine and policy brought together",
        "choose_kernels": "kernels",
        "resolve_by_memory": "memory plan",
        "SeamTrainer.__init__": "transformers.Trainer",
        "GRPOTrainer.train": "train: until the first generation",
    },
    "colograd.training.preparation": {
        "load_policy": "policy: model and tokenizer",
        "train_prompts_of": "prompts: tokenised",
    },
    "colograd.policy.loading": {"choose_rows": "proof of the rows"},
    "colograd.training.assembly": {
        "prove_rows": "proof of the rows",
        "VLLMEngine.__init__": "engine: vLLM is built",
        "VLLMEngine.check": "check of the sampling settings",
        "weight_sync": "weights: mapped, compared, shared",
    },
    "colograd.weights.proof": {"check_read": "weights: proof that they are read"},
    "colograd.rollout.sampler": {},
}
IMPORTS = ("torch", "transformers", "datasets", "accelerate", "peft", "deepspeed", "trl", "vllm")
OTHER = "everything else"
ONE = "one-start"  # first argument of the measured process


class Clock:
    """Seconds by stage. Only the innermost of nested stages counts."""

    def __init__(self, begun: float) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()
        self._open = [OTHER]
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._wall, self._processor = time.time(), used.ru_utime + used.ru_stime
        self.seconds["interpreter"] = [self._wall - begun, self._processor]

    def lap(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        wall, processor = time.time(), used.ru_utime + used.ru_stime
        spent = self.seconds.setdefault(self._open[-1], [0.0, 0.0])
        spent[0] += wall - self._wall
        spent[1] += processor - self._processor
        self._wall, self._processor = wall, processor

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.lap()
        self._open.append(name)
        try:
            yield
        finally:
            self.lap()
            self._open.pop()


class Wrapping(importlib.abc.MetaPathFinder):
    """Import hook that times functions as stages, and ends at the first generation."""

    def __init__(self, clock: Clock, ends: Callable[..., NoReturn]) -> None:
        self.clock, self.ends = clock, ends

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in STAGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for function, stage in STAGES[name].items():
                *owner, attribute = function.split(".")
                holder = functools.reduce(getattr, owner, module)
                if hasattr(holder, attribute):
                    setattr(holder, attribute, self.wrapped(getattr(holder, attribute), stage))
            if name == "colograd.rollout.sampler":
                module.Sampler.generate = self.ends
            if name == "colograd.trainer":
                count_forwards(self.clock.counts)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def wrapped(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.stage(stage):
                return function(*args, **kwargs)

        return timed


def count_forwards(counts: Counter[str]) -> None:
    """Count forwards of transformers' models (the policy) and of vLLM's (the engine), by device."""
    import torch

    def count(module: torch.nn.Module, arguments: Any) -> None:
        package, name = type(module).__module__.partition(".")[0], type(module).__name__
        for whose, of, end in (("policy", "transformers", "Model"), ("engine", "vllm", "ForCausalLM")):
            if package == of and name.endswith(end):
                counts[f"forwards of the {whose} on the {next(module.parameters()).device.type}"] += 1

    torch.nn.modules.module.register_module_forward_pre_hook(count)


def time_imports(clock: Clock) -> None:
    """Time the outermost import of each large package as a stage."""
    theirs, main, inside = builtins.__import__, threading.main_thread(), [False]

    def timed(name: str, *args: Any, **kwargs: Any) -> Any:
        top = name.partition(".")[0]
        if inside[0] or top not in IMPORTS or name in sys.modules or threading.current_thread() is not main:
            return theirs(name, *args, **kwargs)
        inside[0] = True
        try:
            with clock.stage(f"import {top}"):
                return theirs(name, *args, **kwargs)
        finally:
            inside[0] = False

    builtins.__import__ = timed


def start(out: Path, begun: float, arguments: Sequence[str]) -> None:
    """Run the command in this process until the engine gets its first request."""
    clock = Clock(begun)

    def ends(*args: Any, **kwargs: Any) -> NoReturn:
        from torch import distributed

        clock.lap()
        if distributed.get_rank() == 0:
            out.write_text(json.dumps({"seconds": clock.seconds, "counts": clock.counts}))
        distributed.barrier()
        os._exit(0)

    sys.meta_path.insert(0, Wrapping(clock, ends))
    time_imports(clock)
    sys.argv = [str(ROOT / "colograd" / "train.py"), *arguments]
    sys.path[0] = str(ROOT / "colograd")  # as Python does it
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit("startup: the command ended without a generation")


def measure(arguments: Sequence[str], ranks: int) -> dict[str, dict[str, Any]]:
    """Return wall and processor seconds by stage, and counts, of one start."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stages.json")
        own = [ONE, str(out), str(time.time())]
        elsewhere = ["--output_dir", f"{folder}/run", "--resume_from_checkpoint", "false"]
        subprocess.run(
            [sys.executable, *launcher, __file__, *own, *arguments, *elsewhere], check=True, stdout=sys.stderr
        )
        return json.loads(out.read_text())


def measure_refusal() -> list[float]:
    """Return wall and processor seconds until a mixture with noisy routers is refused."""
    model = {"model_type": "mixtral", "router_jitter_noise": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        settings = {"model_name_or_path": folder, "dataset_name": "none", "reward_funcs": "none", "output_dir": folder}
        flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        command = [sys.executable, str(ROOT / "colograd" / "train.py"), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and "router_jitter_noise" in done.stderr, done.stderr[-2000:]
    return [time.time() - begun, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime]


def planned() -> list[list[str]]:
    """Return counts of a start of `LARGE` on one GPU: captures of CUDA graphs, and host memory to page-lock."""
    from colograd.apps import plan
    from colograd.engine.arguments import MOST_SEQUENCES, graph_sizes

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN_32B))
        flags = ["--model_name_or_path", folder, "--gpus", "1", "--gpu-memory", "141"]
        run = plan.described(plan.parse(["--config", str(LARGE), *flags]))
    locked = run.sizes.gradients * run.offloads_gradients + run.sizes.optimizer * run.streams
    captures = len(graph_sizes(MOST_SEQUENCES, run.sequences))  # its evaluation fills the engine
    return [
        ["captures of CUDA graphs", str(captures)],
        ["host memory page-locked by a thread, GB", f"{locked / 1e9:.0f}"],
    ]


def main() -> None:
    if sys.argv[1:2] == [ONE]:
        start(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    from figures import machine, table, write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument("--out", type=Path, help="for the figures as JSON")
    options, rest = parser.parse_known_args()
    starts = [measure(["--config", str(options.config), *rest], options.ranks) for _ in range(options.repeats)]
    best = min((one["seconds"] for one in starts), key=lambda stages: sum(cpu for _, cpu in stages.values()))
    rows = [[name, f"{wall:.1f}", f"{cpu:.1f}"] for name, (wall, cpu) in best.items() if max(wall, cpu) >= 0.05]
    total = [sum(seconds[clock] for seconds in best.values()) for clock in (0, 1)]
    print(f"{options.config.name} on {machine()}, the quickest of {options.repeats}:\n")
    print(table(["Stage", "wall, s", "processor, s"], [*rows, ["all", *(f"{one:.1f}" for one in total)]]))
    refused = min((measure_refusal() for _ in range(options.repeats)), key=lambda seconds: seconds[1])
    print(f"\nrefused after {refused[0]:.1f} s, {refused[1]:.1f} processor seconds\n")
    print(table(["Count of this start", ""], [[name, str(count)] for name, count in starts[0]["counts"].items()]))
    print(f"\n{LARGE.name} on one GPU of 141 GB, planned for Qwen2.5-32B's shape:\n")
    print(table(["Count of a start", ""], planned()))
    write(options.out, {"machine": machine(), "starts": starts, "refused": refused})


if __name__ == "__main__":
    main()
