"""Same seeds, same numbers: two checkouts of the repository train alike, and how many processor seconds each takes.

    python tests/benchmarks/checkouts.py BEFORE AFTER [--repeats 1] [--steps 3] [--only PART ...] [--out F.json]

Each run is a process of its own (`ranks`: two), with PYTHONPATH set to the checkout; the checkouts take turns. Parts:

- `recorded`: a tiny random model is trained in float32 on made-up rollouts, with several settings of the loss;
- `quickstart`, `calculator` (a tool and several turns), `lora`: the first steps of that recipe, with the real engine,
  in float32;
- `ranks`: the quickstart on two ranks, in two processes of torchrun;
- `engine`: a tiny run with the real engine for each optional feature (tests/scripts/golden_cases.py), `engine, ranks`
  those on two ranks; `--case` picks some;
- `history`: BEFORE records a run with its checkpoints and rollout log, and both checkouts resume it.

Prints Markdown tables. Exit status 1 if a loss (bit for bit), a sampled completion or a trained weight differs between
the checkouts, or between repeats of one. Seconds fail nothing. The start-up lasts from the process's start until the
trainer is built; a step lasts from the end of the one before. The first step warms up and is apart. Medians; processor
seconds of several ranks are added. Where caches are cold (compiled bytecode), the first process pays for them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import machine, table, write

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "scripts"))

import golden_cases  # noqa: E402

CHILD = ROOT / "tests" / "scripts" / "checkout_run.py"
MODEL = Path("models") / "SmolLM2-135M-Instruct"
RECIPES = {
    "quickstart": "grpo_smollm2_cpu.yaml",
    "calculator": "grpo_calculator_cpu.yaml",
    "lora": "grpo_smollm2_lora_cpu.yaml",
    "ranks": "grpo_smollm2_cpu.yaml",
}
CASES = {"engine": golden_cases.ONE_RANK, "engine, ranks": golden_cases.TWO_RANKS}
PARTS = ("recorded", *RECIPES, *CASES, "history")
# This file imports nothing of the package, because it compares two checkouts.
INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
Answer = dict[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="checkouts.py", description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, metavar="BEFORE", help="folder of a checkout")
    parser.add_argument("after", type=Path, metavar="AFTER", help="folder of another; or of the same")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each part with each checkout (1)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each recipe with the warm-up (3)")
    parser.add_argument("--model", type=Path, help=f"the recipes' model; default: this checkout's {MODEL}")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts; default: all")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="of `engine` and `engine, ranks`; default: all")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write all answers as JSON")
    options = parser.parse_args(argv)
    known = [name for part in options.only for name in CASES.get(part, ())]
    if unknown := [name for name in options.case or () if name not in known]:
        parser.error(f"--case {unknown[0]}: there are {', '.join(known)}.")
    options.model = (options.model or ROOT / MODEL).resolve()
    options.before, options.after = options.before.resolve(), options.after.resolve()
    for checkout in (options.before, options.after):
        if not (checkout / "colograd" / "__init__.py").is_file():
            parser.error(f"{checkout} has no colograd/__init__.py: give the root of a checkout")
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}, but must be at least 1")
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}, but the first only warms up: at least 2")
    if {*options.only} & {*RECIPES} and not options.model.is_dir():
        parser.error(f"there is no model folder {options.model}: make model")
    return options


def run(part: str, checkout: Path, options: argparse.Namespace) -> Answer:
    """Run one part with one checkout, in one or two processes."""
    kept = {name: value for name, value in os.environ.items() if name not in (*INHERITED, "COLOGRAD_SINGLE_PROCESS")}
    job = {"part": part, "checkout": checkout, "model": options.model, "steps": options.steps}
    if part in RECIPES:
        job["recipe"] = ROOT / "recipes" / RECIPES[part]
    if part in (*CASES, "history"):
        job |= {"models": options.models, "history": options.history}
        job["cases"] = [name for name in CASES.get(part, ()) if not options.case or name in options.case]
    ranks = part in ("ranks", "engine, ranks")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if ranks else ()
    with tempfile.TemporaryDirectory(prefix="colograd-checkouts-") as folder:
        given, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        given.write_text(json.dumps(job | {"started": time.time()}, default=str))
        command = [sys.executable, *launcher, CHILD, given, answer]
        environment = kept | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{part} with {checkout} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return joined([json.loads(file.read_text()) for file in sorted(Path(folder).glob("answer.json*"))])


def joined(answers: Sequence[Answer]) -> Answer:
    """Join the answers of a run's ranks: summed processor seconds, the slowest rank's wall clock."""
    if len(answers) == 1:
        return answers[0]

    def total(spans: Sequence[dict[str, float]]) -> dict[str, float]:
        return {"processor": sum(span["processor"] for span in spans), "wall": max(span["wall"] for span in spans)}

    runs = {name: run for answer in answers for name, run in answer["runs"].items()}
    if "start" not in answers[0]:
        return {"runs": runs}
    return {
        "runs": runs,
        "start": total([answer["start"] for answer in answers]),
        "steps": [total(spans) for spans in zip(*(answer["steps"] for answer in answers), strict=True)],
    }


def differences(answers: Mapping[str, Sequence[Answer]]) -> Iterator[tuple[str, str, str]]:
    """Yield each difference from the first side's first process: the run, the kind of number, and a sentence."""
    first = next(iter(answers.values()))[0]["runs"]
    for side, repeats in answers.items():
        for number, answer in enumerate(repeats, start=1):
            for name, run in answer["runs"].items():
                for kind, expected in first[name].items():
                    if run[kind] != expected:
                        yield name, kind, f"{name}, {side} {number}: {_first_difference(kind, run[kind], expected)}"


def _first_difference(kind: str, found: Any, expected: Any) -> str:
    if isinstance(found, str):
        return f"{kind} {found[:12]}, expected {expected[:12]}"
    if len(found) != len(expected):
        return f"{len(found)} {kind}, expected {len(expected)}"
    index = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
    numbers = (float.fromhex(x[index]) if kind == "losses" else x[index][:12] for x in (found, expected))
    return f"{kind} from number {index + 1} on: {', expected '.join(f'{x}' for x in numbers)}"


def numbers_table(answers: Mapping[str, Sequence[Answer]], differing: set[tuple[str, str]]) -> str:
    rows = []
    for name, run in next(iter(answers.values()))[0]["runs"].items():
        same = ["**differ**" if (name, kind) in differing else "same" for kind in ("losses", "completions", "weights")]
        last = float.fromhex(run["losses"][-1])
        rows.append([name, str(len(run["losses"])), *same, f"{last:.9g}", f"`{run['weights'][:12]}`"])
    return table(["Run", "Steps", "Losses", "Completions", "Weights", "Last loss", "SHA-256 of the weights"], rows)


def medians(answers: Sequence[Answer]) -> dict[str, float]:
    found = {}
    for clock in ("processor", "wall"):
        spans = {
            "start-up": [answer["start"][clock] for answer in answers],
            "first step": [answer["steps"][0][clock] for answer in answers],
            "step": [step[clock] for answer in answers for step in answer["steps"][1:]],
        }
        found |= {f"{span}, {clock} s": statistics.median(values) for span, values in spans.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    sides = {"before": options.before, "after": options.after}
    print(f"{options.repeats} process(es) of each checkout and part, on {machine()}")
    everything: dict[str, Any] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="colograd-goldens-") as folder:
        options.history = Path(folder) / "history"
        options.models = {}
        if {*options.only} & {*CASES, "history"}:
            sys.path.insert(0, str(ROOT / "tests" / "helpers"))
            options.models = golden_cases.make_models(Path(folder))
        if "history" in options.only:
            run("history", options.before, options)
        compare(options, sides, everything, failures)
    print("", *(f"- {failure}" for failure in failures), sep="\n")
    print(f"checkouts: {'not the same: ' + str(len(failures)) + ' differences' if failures else 'the same numbers'}")
    given = {"repeats": options.repeats, "steps": options.steps, "model": options.model.name, "machine": machine()}
    write(options.out, {"settings": given, "differences": failures, **everything})
    return 1 if failures else 0


def compare(
    options: argparse.Namespace, sides: Mapping[str, Path], everything: dict[str, Any], failures: list[str]
) -> None:
    """Run all parts with both checkouts, and print their tables."""
    for part in options.only:
        answers: dict[str, list[Answer]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, checkout in sides.items():
                answers[side].append(run(part, checkout, options))
        found = list(differences(answers))
        failures += [text for *_, text in found]
        everything[part] = {"answers": answers}
        print("", f"{part}:", "", numbers_table(answers, {(name, kind) for name, kind, _ in found}), sep="\n")
        if part in RECIPES:
            before, after = (medians(answers[side]) for side in sides)
            ratio = {name: after[name] / before[name] for name in before}
            rows = [[name, f"{before[name]:.2f}", f"{after[name]:.2f}", f"{ratio[name]:.3f}"] for name in before]
            print("", table(["Median", "before", "after", "after / before"], rows), sep="\n")
            everything[part] |= {"before": before, "after": after, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
