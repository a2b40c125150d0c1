"""Train tiny models with each feature on this machine's GPU: three steps each, and what breaks a rule.

    python tests/benchmarks/features.py [--only lora teacher] [--at-once 5] [--out F.json]
    python tests/benchmarks/features.py --device cpu --only bfloat16     on the test suite's device in host memory

The cases are those of tests/helpers/host_cuda_cases.py for one rank, each in a process of its own, several at once.
Rules: the run ends; sampler and trainer agree; after a publish the engine has the policy's weights; a resumed run goes
on; closing frees the GPU's memory. Exit status 1 if a case breaks a rule.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "helpers"))

import host_cuda_cases  # noqa: E402

NEEDS = {"qlora": "bitsandbytes"}
FLOAT32 = 0.005  # nats on a GPU, where vLLM multiplies in TF32
LIMIT = 240.0  # seconds of a case


class Unrecorded:
    """Counters that the device in host memory fills and a GPU doesn't."""

    def __init__(self) -> None:
        self.waits, self.races, self.kernels = Counter[Any](), Counter[Any](), Counter[str]()

    def clear(self) -> None:
        pass


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [name for name in host_cuda_cases.CASES if name not in host_cuda_cases.RANKS]
    parser = argparse.ArgumentParser(prog="features.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the device in host memory")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--at-once", type=int, default=5, help="processes at a time (5)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # for child processes
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.names = options.only or names
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run one case in this process."""
    record = None
    if options.device == "cpu":
        host_cuda_cases.prepare()
        host_cuda_cases.shorten()
    else:
        from colograd.runtime import process

        process.prepare_threads()
        record = Unrecorded()
        host_cuda_cases.ROUNDING["float32"] = FLOAT32
    folder = options.folder
    result = host_cuda_cases.run(options.case, folder / "models", folder / f"run-{options.case}", record)
    return {**result, "faults": host_cuda_cases.faults(result)}


def result_of(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if (needed := NEEDS.get(name)) and importlib.util.find_spec(needed) is None:
        return {"case": name, "skipped": f"{needed} isn't installed", "faults": [], "seconds": 0.0}
    command = [sys.executable, __file__, "--device", options.device, "--case", name, "--folder", str(folder)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        said = [line for line in done.stdout.splitlines() if line.startswith('{"case"')]
        found = json.loads(said[-1]) if said else {"faults": [f"exit status {done.returncode}: {done.stderr[-2000:]}"]}
    except subprocess.TimeoutExpired:
        found = {"faults": [f"still running after {LIMIT:.0f} s"]}
    return {"case": name, **found, "seconds": round(time.monotonic() - started, 1)}


def report(results: Sequence[dict[str, Any]]) -> str:
    from figures import machine, table  # The device in host memory must be installed before torch is imported.

    rows = []
    for result in results:
        nats = max((step.get(host_cuda_cases.DIFFERENCE, 0.0) for step in result.get("steps", [])), default=0.0)
        outcome = result.get("skipped") or " ".join(" ".join(result["faults"]).split())[-200:].replace("|", "/") or "ok"
        rows.append([result["case"], outcome, f"{nats:.4f}", f"{result['seconds']:.0f}"])
    return f"{machine()}\n\n" + table(["Feature", "Result", "sampler/trainer, nats at most", "s"], rows, text_columns=2)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.case:
        print(json.dumps(run(options)), flush=True)
        sys.stderr.flush()
        os._exit(0)  # the device in host memory can't end otherwise
    with tempfile.TemporaryDirectory(prefix="colograd-bench-") as folder, ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(lambda name: result_of(name, options, Path(folder)), options.names))
    bad = [result["case"] for result in results if result["faults"]]
    print(report(results))
    from figures import write

    write(options.out, {"results": results, "bad": bad})
    if bad:
        print(f"RuntimeError: {len(bad)} of {len(results)} broke a rule: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
