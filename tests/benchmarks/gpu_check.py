"""All that wants a GPU, with one command: is this machine right, how fast is it, and how much fits.

    make gpu-check [ARGS="--model M --minutes 9.5 --only doctor publish"]
    python tests/benchmarks/gpu_check.py --device cpu             tiny sizes: does the check itself work?

Each check is a row, in a process of its own that may take LIMIT seconds. One that fails or comes late is a row with its
error; the others go on. Each row is written when it is there. A call that is killed, or runs out of --minutes, loses
only the unfinished row; the next call with the same --out goes on with the missing ones. Needs no network. Writes into
--out: gpu_check.json, gpu_check.md (a section ready for docs/measurements.md), and each check's output. Exit status 1
if a check failed or came late, 2 without such a device, 3 if rows are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = "gpu_check.json"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
LIMIT = 420.0  # seconds of a check
# lines that explain a failure: the project's own, then Python's
REASONS = (
    r"^(?:colograd: error|training_path): .+",
    r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|StaleWeights)\b.*)",
)
# arguments of training_path.py
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "as it is": (),
    "gradient_checkpointing": ("--set", "gradient_checkpointing=true"),
    "full_determinism": ("--set", "full_determinism=true"),
    "float32 under autocast": ("--set", 'model_init_kwargs={"dtype": "float32"}'),
    "cast_lm_head_to_fp32": ("--set", "cast_lm_head_to_fp32=true"),
    "offload_optimizer": ("--set", 'offload_optimizer="sampling"'),
    "stream_optimizer": ("--set", 'offload_optimizer="stream"'),
    "offload_gradients": ("--set", "offload_gradients=true"),
    "layers' inputs on the host": ("--set", 'gradient_checkpointing="offload"'),
    "all of it on the host": (
        "--set", 'offload_optimizer="stream"', "--set", "offload_gradients=true", "--set",
        'gradient_checkpointing="offload"',
    ),
    "LoRA": ("--lora", "16"),
    "torch_compile": ("--set", "torch_compile=true"),
    "use_liger_kernel": ("--set", "use_liger_kernel=true"),
    "every second layer checkpointed": (
        "--set", "gradient_checkpointing=true", "--set", 'gradient_checkpointing_kwargs={"every_n_layers": 2}',
    ),
}  # fmt: skip
NEEDS = {"LoRA": "peft", "use_liger_kernel": "liger_kernel"}
SECONDS = {"torch_compile": 80.0}  # torch_compile compiles at start
ON_CPU = ("as it is", "gradient_checkpointing", "full_determinism")


@dataclass(frozen=True)
class Sizes:
    prompt: int
    long_prompt: int  # tokens; copies of its keys would be most of a layer's activations
    completion: int
    group: int
    prompts: int
    queue: int
    trials: int
    dtype: str  # in the comparison with TRL
    path: tuple[str, ...] = ()  # more arguments of training_path.py
    tail: tuple[int, ...] = (16, 8, 64, 128, 512, 16384)  # of each of two ranks in tail.py


SIZES = {
    "cuda": Sizes(
        prompt=512, long_prompt=4096, completion=1024, group=8, prompts=16, queue=64, trials=2, dtype="bfloat16"
    ),
    "cpu": Sizes(
        prompt=70,
        long_prompt=140,
        completion=16,
        group=4,
        prompts=2,
        queue=4,
        trials=1,
        dtype="float32",
        tail=(4, 2, 2, 4, 16, 256),
    ),
}


@dataclass(frozen=True)
class Check:
    """A benchmark or test that runs in its own process."""

    name: str
    command: tuple[str, ...]
    seconds: float  # estimated seconds on an H100
    tell: Callable[[str, dict[str, Any]], str]  # (standard output, figures) -> the finding in one line
    writes: bool = True
    needs: str = ""
    gpus: int = 0
    lack: str = ""  # reason for skipping the check

    @property
    def stem(self) -> str:
        return "".join(letter if letter.isalnum() else "_" for letter in self.name)


@dataclass(frozen=True)
class Result:
    name: str
    status: str
    said: str
    seconds: float = 0.0
    limit_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    report: str = ""  # Markdown
    code: str = ""

    @property
    def is_bad(self) -> bool:
        return self.status in ("failed", "late")

    def line(self) -> str:
        return f"{self.name}: {self.status} ({self.seconds:.0f} s): {self.said}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda", help="cpu: tiny sizes, some minutes")
    parser.add_argument("--model", help="a folder; default: the quickstart's, or random weights (on a CPU tiny)")
    parser.add_argument(
        "--minutes", type=float, help="of this call; a later one goes on (default: until all rows are there)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the checks whose names begin so")
    parser.add_argument("--again", action="store_true", help="run rows that --out has already, too")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "gpu_check", help="folder for what is found")
    options = parser.parse_args(argv)
    names = [check.name for check in checks("M", "R", options.device)]
    for name in options.only or ():
        if not any(known.startswith(name) for known in names):
            parser.error(f"--only names {name!r}, with which no check begins. There are: {', '.join(names)}")
    return options


# -- what is checked


def checks(model: str, recipe: str, device: str) -> list[Check]:
    """Return all checks in their order. Checks that others depend on come first."""
    sizes, on_cpu = SIZES[device], device == "cpu"
    group = ("--num-generations", str(sizes.group))
    path = (
        str(HERE / "training_path.py"), "--model", model, *group, "--prompt-tokens", str(sizes.prompt),
        "--completion-tokens", str(sizes.completion), "--prompts-per-step", str(sizes.prompts), *sizes.path,
    )  # fmt: skip
    in_place = ("--prompt-tokens", str(sizes.long_prompt), "--copied-keys", "turns", "--steps", "5")
    rollouts = (
        str(HERE / "rollouts.py"), "--model", model, *group, "--prompts", str(sizes.queue), "--completion-tokens",
        str(sizes.completion // 2), "--mean-tokens", str(sizes.completion // 4), "--trials", str(sizes.trials),
    )  # fmt: skip
    beside = (
        str(HERE / "side_by_side.py"), "--model", model, *group, "--prompt-tokens", str(max(sizes.prompt // 2, 70)),
        "--completion-tokens", str(sizes.completion // 4), "--prompts-per-step", str(sizes.prompts // 2),
        "--rows-per-microbatch", str(min(sizes.group, 16)), "--steps", "2", "--repeats", str(sizes.trials), "--dtype",
        sizes.dtype,
    )  # fmt: skip
    doctor = ("-m", "colograd.apps.cli", "doctor", "--config", recipe)
    publish = (str(HERE / "weights.py"), "--model", model, "--publishes", "5", "--eager")
    attention = (
        str(HERE / "attention.py"), "--groups", str(sizes.group), "--completions", str(sizes.completion), "--prompts",
        *(str(sizes.prompt * times) for times in (1, 4, 16)), *(() if on_cpu else ("--heads", "28", "4", "128")),
    )  # fmt: skip
    overlap = (
        str(HERE / "tail.py"), "--model", model, "--device", device, "--pairs", str(sizes.trials), "--measured",
        *map(str, sizes.tail),
    )  # fmt: skip
    features = (str(HERE / "features.py"), *(("--device", "cpu", "--only", "bfloat16") if on_cpu else ()))
    sleep = ("--sampled", "--set", "vllm_enable_sleep_mode=true")
    full = ("--prompt-tokens", str(sizes.long_prompt), "--full-length", "--steps", "2")
    options = {name: given for name, given in OPTIONS.items() if not on_cpu or name in ON_CPU}
    return [
        Check("doctor", doctor, 60, tell_doctor, writes=False),
        Check("gpu tests", gpu_tests(only_collect=on_cpu), 60, last_line, writes=False),
        Check("features", features, 200, tell_features),
        Check("training", (*path, "--sampled"), 90, tell_training),
        Check("memory", (*path, *full), 30, tell_memory),
        Check("sleep and wake", (*path, *sleep), 60, tell_sleep),
        Check("publish", publish, 60, last_line),
        Check("attention", attention, 20, tell_attention),
        Check("keys in place", (*path, *in_place), 60, tell_in_place),
        *(
            Check(f"path, {name}", (*path, *given), SECONDS.get(name, 25.0), tell_training, needs=NEEDS.get(name, ""))
            for name, given in options.items()
        ),
        Check("rollouts", rollouts, 60, tell_rollouts),
        Check("overlap", overlap, 100, tell_overlap, gpus=0 if on_cpu else 2),
        Check("side by side", beside, 110, tell_side_by_side, needs="trl"),
    ]


def gpu_tests(only_collect: bool) -> tuple[str, ...]:
    """Run the tests marked `gpu`, without the project's pytest options, because their plugins may be missing."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu\n" in path.read_text()]
    options = ("-o", "addopts=", "-m", "gpu", "-q", "-p", "no:cacheprovider")
    return ("-m", "pytest", *options, *(["--collect-only"] if only_collect else []), *map(str, marked))


def write_recipe(path: Path, model: str) -> None:
    recipe: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": "colograd.quickstart:sums",
        "reward_funcs": ["last_number"],
        "num_generations": 4,
        "prompts_per_step": 4,
        "max_completion_length": 64,  # no more is sampled
        "vllm_engine_kwargs": {"enforce_eager": True},  # other checks compile: this one says whether the rest is right
        "max_steps": 1,
        "output_dir": str(path.parent / "doctor"),
    }
    path.write_text(json.dumps(recipe, indent=2) + "\n")  # JSON is YAML


# -- each check's finding in one line


def last_line(said: str, figures: Mapping[str, Any]) -> str:
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")


def tell_doctor(said: str, figures: Mapping[str, Any]) -> str:
    lines = [line.removesuffix(": ok") for line in said.splitlines() if line.startswith("sampler/trainer")]
    return "; ".join([last_line(said, figures), *lines])


def tell_features(said: str, figures: Mapping[str, Any]) -> str:
    skipped = [result["case"] for result in figures["results"] if "skipped" in result]
    return f"{len(figures['results']) - len(skipped)} features trained tiny models" + (
        f", without {', '.join(skipped)}" if skipped else ""
    )


def tell_training(said: str, figures: Mapping[str, Any]) -> str:
    speed = f"{figures['tokens_per_second']:,.0f} tokens/s of training"
    share = "" if figures["utilisation"] is None else f", {figures['utilisation']:.1%} of the device's peak"
    differ = f", sampler/trainer {figures['difference']['mean']:.4f} nats" if "difference" in figures else ""
    peak, plan = figures["peak"]["training"] / 1e9, figures["planned"]["training"] / 1e9
    return f"{speed}{share}{differ}, {peak:.2f} GB at the peak, {plan:.2f} planned"


def tell_memory(said: str, figures: Mapping[str, Any]) -> str:
    parts = (
        f"{figures['peak'][phase] / 1e9:.2f} GB at the peak of {phase}, {figures['planned'][phase] / 1e9:.2f} planned"
        for phase in ("training", "sampling")
    )
    return f"{', '.join(parts)}; micro-batches of {figures['microbatch_tokens']:,} tokens"


def tell_sleep(said: str, figures: Mapping[str, Any]) -> str:
    if "given_back" not in figures:
        return "does nothing on a CPU"
    seconds = figures["seconds"]
    return (
        f"{figures['given_back'] / 1e9:.2f} GB of {figures['planned']['kv_bytes'] / 1e9:.2f} given back in "
        f"{seconds.get('sleep', 0.0):.3f} s, taken again in {seconds.get('wake', 0.0):.3f} s; afterwards "
        f"sampler/trainer {figures['difference']['mean']:.4f} nats"
    )


def tell_attention(said: str, figures: Mapping[str, Any]) -> str:
    ratios = (f"{cell['ratio']:.2f} at prompts of {cell['prompt']}" for cell in figures["cells"])
    return "keys copied / read in place, seconds: " + ", ".join(ratios)


def tell_in_place(said: str, figures: Mapping[str, Any]) -> str:
    turns, plan = figures["in_turns"], figures["planned"]["training"]
    peaks = f"{turns['copied_peak'] / 1e9:.2f} and {turns['in_place_peak'] / 1e9:.2f} GB at the peak"
    return f"keys copied / read in place: {turns['ratio']:.2f} in seconds, {peaks}, {plan / 1e9:.2f} planned in place"


def tell_rollouts(said: str, figures: Mapping[str, Any]) -> str:
    ratio = figures["ratio"]
    return f"{ratio['throughput']:.2f} of plain vLLM's throughput, {ratio['streamed_rewards']:.2f} of rewards hidden"


def tell_overlap(said: str, figures: Mapping[str, Any]) -> str:
    off, on = figures["off"], figures["auto"]
    simulated = figures["predicted"][0] / figures["predicted"][1]
    return (
        f"two ranks, one with completions 4 times as long: a step {figures['ratio']:.2f} x faster ({simulated:.2f} "
        f"simulated), {on['early']:.0%} trained early, idle {off['idle']:.0%} without and {on['idle']:.0%} with"
    )


def tell_side_by_side(said: str, figures: Mapping[str, Any]) -> str:
    names = {"train": "training", "step": "step", "memory": "peak memory"}
    return "TRL / colograd: " + ", ".join(f"{word} {figures['ratio'][name]:.2f}" for name, word in names.items())


def markdown(said: str) -> str:
    """Cut a benchmark's Markdown out of its output, from the sentence above the first table on."""
    lines = said.splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith("| ")), len(lines))
    return "\n".join(lines[max(first - 2, 0) :]) if first < len(lines) else ""


# -- running them


def run_all(
    wanted: Sequence[Check],
    earlier: Mapping[str, Result],
    seconds: float,
    folder: Path,
    told: Callable[[list[Result], Result], None],
) -> list[Result]:
    """Run checks one after another.

    Args:
        earlier: results by name; these checks aren't run.
        seconds: limit of this call. A check that the limit cuts off has no result.
        told: function that is called with all results so far and the new one.
    """
    end, results = time.monotonic() + seconds, dict(earlier)

    def in_order() -> list[Result]:
        return [results[check.name] for check in wanted if check.name in results]

    for check in wanted:
        left = end - time.monotonic()
        if check.name in results:
            continue
        if left < check.seconds and not missing(check):
            break
        result = run(check, min(LIMIT, left), folder)
        if result.status == "late" and left < LIMIT:
            break
        results[check.name] = result
        told(in_order(), result)
    return in_order()


def missing(check: Check) -> str:
    """Return the missing package or GPUs, or ""."""
    if check.needs and importlib.util.find_spec(check.needs) is None:
        return f"{check.needs} isn't installed"
    return check.lack


def on_machine(check: Check, gpus: int) -> Check:
    return dataclasses.replace(check, lack=f"it needs {check.gpus} GPUs") if gpus < check.gpus else check


def run(check: Check, limit: float, folder: Path) -> Result:
    if why := missing(check):
        return Result(check.name, "skipped", why)
    out, err, figures = (folder / f"{check.stem}.{kind}" for kind in ("out", "err", "json"))
    figures.unlink(missing_ok=True)
    command = [*check.command, *(["--out", str(figures)] if check.writes else [])]
    started = time.monotonic()
    status = execute(command, limit, out, err)
    result = Result(
        check.name,
        "late" if status is None else "failed" if status else "ok",
        "",
        seconds=time.monotonic() - started,
        limit_s=limit,
        figures=read(figures),
        report=markdown(out.read_text()) if check.writes else "",
        code=digest(),
    )
    return dataclasses.replace(result, said=sentence(check, result, out.read_text(), err.read_text(), status))


def execute(command: Sequence[str], limit: float, out: Path, err: Path) -> int | None:
    """Run Python in a process group, and end the group. Return its exit status, or None after ``limit``."""
    with out.open("w") as said, err.open("w") as complained:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(),
            stdout=said,
            stderr=complained,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)


def sentence(check: Check, result: Result, said: str, complained: str, status: int | None) -> str:
    if status is None:
        return f"still running after {result.limit_s:.0f} s, at last: {last_line(complained, {})}"
    if status:
        ended = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{ended}: {reason(complained if complained.strip() else said)}"
    try:
        return check.tell(said, result.figures)
    except Exception as error:  # the other checks must go on
        return f"ok, but what it found can't be told: {error!r}"


def reason(complained: str) -> str:
    """Return the first error, because later errors follow from it."""
    found = (re.findall(pattern, complained, re.MULTILINE) for pattern in REASONS)
    return next((lines[0] for lines in found if lines), last_line(complained, {}))


@functools.cache
def digest() -> str:
    """Return a short hash of the project's code and of the benchmarks, which results are kept with."""
    found = hashlib.blake2b(digest_size=4)
    for path in sorted([*(ROOT / "colograd").rglob("*.py"), *HERE.glob("*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()


def recorded(path: Path, settings: Mapping[str, Any]) -> dict[str, Result]:
    """Return earlier results by name, without those of other machines, models, versions or sizes."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(path.read_text())
        if found["settings"] == json.loads(json.dumps(settings)):
            return {entry["name"]: Result(**entry) for entry in found["checks"]}
    return {}


def read(figures: Path) -> dict[str, Any]:
    """Read a check's figures. A killed check may have left none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(figures.read_text())  # type: ignore[no-any-return]
    return {}


def end_group(process: subprocess.Popen) -> None:
    """Kill a check and its workers, because they may hold GPU memory."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    """Return the environment of a check: one rank, this checkout's package, and no network."""
    from colograd.runtime.process import RANK_VARIABLES

    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    return offline | kept | {"PYTHONPATH": os.pathsep.join(paths)}


# -- the machine and the model

LOOK = """
import json, torch
from colograd.runtime import process
from figures import machine
from phases import versions
cuda = torch.cuda.is_available()
why = "" if cuda else process.why_gpu_unused(torch.__version__, torch.version.cuda)
found = {"cuda": cuda, "gpus": torch.cuda.device_count(), "why": why, "machine": machine()}
print(json.dumps({**found, "versions": versions("trl")}))
"""


def look() -> dict[str, Any]:
    """Look at the machine from another process, because this process must not take memory of the GPU."""
    paths = os.pathsep.join([str(HERE), environment()["PYTHONPATH"]])
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(
        command, env=environment() | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def unfit(device: str, machine: Mapping[str, Any]) -> str:
    if device == "cuda" and not machine["cuda"]:
        return machine["why"] or "torch sees no GPU here: --device cpu (make gpu-check ARGS=...) tries the check itself"
    if device == "cpu" and machine["cuda"]:
        return f"vLLM would use this machine's GPU ({machine['machine']}): leave --device cpu out"
    return ""


def model_for(options: argparse.Namespace) -> str:
    """Return the folder of the named model, of the quickstart's model, or of a new random model."""
    if options.model or (options.device == "cuda" and MODEL.is_dir()):
        return str(Path(options.model or MODEL).resolve())
    folder = options.out.resolve() / ("random-smollm2" if options.device == "cuda" else "tiny")
    if not (folder / "config.json").exists():
        tiny = ["--tiny"] if options.device == "cpu" else []
        command = [sys.executable, str(HERE / "random_model.py"), str(folder), *tiny]
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running check
    machine = look()
    if why := unfit(options.device, machine):
        print(f"gpu_check: {why}", file=sys.stderr)
        return 2
    from gpu_page import page

    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model, recipe = model_for(options), out / "doctor.yaml"
    write_recipe(recipe, model)
    begin = tuple(options.only or [""])
    known = [on_machine(check, machine["gpus"]) for check in checks(model, str(recipe), options.device)]
    settings = {"model": Path(model).name, **machine, **vars(SIZES[options.device])}
    earlier = recorded(out / RESULTS, settings)
    if options.again:
        earlier = {name: result for name, result in earlier.items() if not name.startswith(begin)}
    others = [check for check in known if not check.name.startswith(begin) and check.name in earlier]
    wanted = [check for check in known if check.name.startswith(begin) or check in others]

    def told(results: list[Result], new: Result) -> None:
        """Write the results, so that they survive the end of this process."""
        print(new.line(), flush=True)
        found = {"settings": settings, "seconds": time.monotonic() - started, "checks": [vars(r) for r in results]}
        aside = out / f"{RESULTS}.partial"
        aside.write_text(json.dumps(found, indent=2) + "\n")
        os.replace(aside, out / RESULTS)
        (out / "gpu_check.md").write_text(page(settings, results) + "\n")

    results = run_all(wanted, earlier, 60 * (options.minutes or math.inf), out, told)
    bad = [result.name for result in results if result.is_bad]
    print(f"\n{page(settings, results)}\n\n{len(results) - len(bad)} of {len(wanted)} checks are well: {out}")
    there = {result.name for result in results}
    if lacking := [check.name for check in wanted if check.name not in there]:
        print(f"missing: {', '.join(lacking)}. The same command goes on with them.")
    return 1 if bad else 3 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
