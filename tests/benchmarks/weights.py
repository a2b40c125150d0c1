"""Cost of publishing the policy to the engine: bytes and seconds of a publish, and the memory of the weights.

    python tests/benchmarks/weights.py [--model M] [--dtype bfloat16] [--publishes 10] [--out F.json]

Each way (`shared`, `copied`) is the real trainer and engine in a process of its own, in turns (--trials of each):
memory at the start of training (on a CPU the resident set, on a GPU torch's allocated bytes), then publishes after a
change of every weight. In the same process and in turns with `copied`: a plain copy of as many bytes in one
piece, and the loader that TRL's colocated trainer calls for each tensor. Medians; a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from figures import GB, PeakMemory, machine, table, write
from phases import versions

from colograd.runtime import process

WAYS = ("shared", "copied")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weights.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder or Hub id")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of policy and engine")
    parser.add_argument("--publishes", type=int, default=10, help="timed publishes of each way (10)")
    parser.add_argument("--trials", type=int, default=1, help="processes of each way (1)")
    parser.add_argument("--eager", action="store_true", help="an engine that isn't compiled: it starts sooner")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # for child processes
    return parser.parse_args(argv)


def make_trainer(options: argparse.Namespace, folder: str) -> Any:
    from datasets import Dataset

    from colograd import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": options.dtype},
        optim="adamw_split" if options.dtype == "bfloat16" else "adamw_torch",
        weights=options.way,
        num_generations=8,
        prompts_per_step=2,
        max_completion_length=64,
        vllm_engine_kwargs={"enforce_eager": True} if options.eager else None,
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": f"What is {i} + {i + 1}?"} for i in range(16)])
    return GRPOTrainer(options.model, lambda completions, **_: [float(len(c)) for c in completions], config, rows)


def timed(function: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.0001)


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure one way in this process."""
    trainer = make_trainer(options, folder)
    memory = PeakMemory().now()
    sides = [trainer.model, trainer.engine.model]
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in sides for p in m.parameters()}
    found: dict[str, Any] = {
        "memory_bytes": memory,
        "weights_bytes": sum(held.values()),
        "tensors": len(list(trainer.model.parameters())),
        "moved_bytes": trainer.weights.publish(0),
    }
    rivals: dict[str, Callable[[], Any]] = {"publish": lambda: trainer.weights.publish(0)}
    if options.way == "copied":
        source = torch.zeros(found["moved_bytes"], dtype=torch.uint8, device=trainer.args.device)
        destination = torch.ones_like(source)
        rivals["moving the bytes"] = trainer.weights.write
        rivals["memcpy"] = lambda: destination.copy_(source)
        rivals["loader"] = lambda: [
            trainer.engine.model.load_weights([(name, p.data)]) for name, p in trainer.model.named_parameters()
        ]
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(options.publishes + 1):
        change(trainer.model)
        for name, run in rivals.items():
            seconds[name].append(timed(run))
    found["seconds"] = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first warms up
    trainer.close()
    return found


def measure_apart(way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--way", way, "--model", options.model, "--dtype", options.dtype]
    command += ["--publishes", str(options.publishes), *(["--eager"] if options.eager else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = {name: statistics.median(t["seconds"][name] for t in trials) for name in trials[0]["seconds"]}
    return {**trials[0], "memory_bytes": statistics.median(t["memory_bytes"] for t in trials), "seconds": seconds}


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return copy over memcpy, TRL's loader over copy, and the copies that sharing saves."""
    copied, one_copy = found["copied"]["seconds"], found["copied"]["moved_bytes"]
    return {
        "copied_over_memcpy": copied["moving the bytes"] / copied["memcpy"],
        "loader_over_copied": copied["loader"] / copied["moving the bytes"],
        "copies_saved": (found["copied"]["memory_bytes"] - found["shared"]["memory_bytes"]) / one_copy,
    }


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    shared, copied = found["shared"], found["copied"]
    rows = [
        ["weights in memory, GB", *(f"{found[way]['weights_bytes'] / GB:.3f}" for way in WAYS)],
        ["memory of the process, ready to train, GB", *(f"{found[way]['memory_bytes'] / GB:.3f}" for way in WAYS)],
        ["bytes moved by a publish", *(f"{found[way]['moved_bytes']:,}" for way in WAYS)],
        ["publish, ms", *(f"{found[way]['seconds']['publish'] * 1e3:.1f}" for way in WAYS)],
        ["moving the bytes, ms", "0", f"{copied['seconds']['moving the bytes'] * 1e3:.1f}"],
        ["memcpy of as many bytes, ms", "", f"{copied['seconds']['memcpy'] * 1e3:.1f}"],
        ["TRL's loader, tensor by tensor, ms", "", f"{copied['seconds']['loader'] * 1e3:.1f}"],
    ]
    ratio = ratios(found)
    return "\n".join(
        [
            f"{Path(options.model).name}, {options.dtype}, {shared['tensors']} tensors, on {machine()}; medians of "
            f"{options.publishes} publishes",
            "",
            table(["Weights", *WAYS], rows),
            "",
            f"Copied over memcpy {ratio['copied_over_memcpy']:.2f}; TRL's loader over copied "
            f"{ratio['loader_over_copied']:.1f}; copies of the weights saved by sharing {ratio['copies_saved']:.2f}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.prepare_threads()
    if options.way:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options, folder)))
        return 0
    trials: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.trials):
        for way in WAYS:
            trials[way].append(measure_apart(way, options))
    found = {way: summary(trials[way]) for way in WAYS}
    print(report(found, options))
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "way")}
    settings |= {"machine": machine(), "versions": versions()}
    write(options.out, {"settings": settings, "ways": found, "ratio": ratios(found)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
