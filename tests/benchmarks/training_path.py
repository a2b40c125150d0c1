"""The training path on its own: seconds of a step, model FLOP utilisation, peak memory against the plan.

    python tests/benchmarks/training_path.py [--model M] [--set gradient_checkpointing=true] [--lora 16] [--sampled]
        [--profile] [--out F.json]

The real trainer runs some steps; the first one warms up. Without --sampled completions are made up, the same ones in
every process, so that options can be compared: they are written as a run's journal, and replayed without an engine.
With --sampled the engine writes them, and its log-probabilities are compared with the trainer's. With --set
vllm_enable_sleep_mode=true it prints the memory that the sleep gives back. With --copied-keys attention copies a
prompt's keys for each of its completions, in every step, or in every second one: the others then read them in place,
however short the prompt is, on completions of the same lengths. With --torch-backward, steps with copied keys have
torch's own backward of attention too, which on a CPU without products of bfloat16 isn't what is run else. With
--profile one more step runs under torch's profiler, which prints what the GPU's time goes to. The formula of the FLOPs
is in colograd/extensions/recording/utilisation.py.

Exit status 1 where a loss or gradient isn't finite, sampler and trainer disagree, or, on a GPU, more memory was taken
than planned or the sleep gave too little back.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import random
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from contestants import hash_reward  # noqa: E402
from figures import GB, PeakMemory, machine, table, write  # noqa: E402
from phases import versions  # noqa: E402
from side_by_side import make_prompts  # noqa: E402

from colograd.extensions.recording.utilisation import Matrices, Work, peak_of  # noqa: E402
from colograd.policy import attention, merged_attention  # noqa: E402
from colograd.policy.merged_attention import calls_at_once  # noqa: E402

# kinds of kernels by name; the first that matches counts
KINDS = {
    "attention": r"flash|fmha|attention",  # before the products, because flash kernels name cutlass
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitK|mm$|linear",
    "the head's two kernels": r"_add_tile|_turn_to_gradient",
    "copies and casts": r"copy|Memcpy|Memset|CatArray|fill|clone",
    "norms, sums": r"reduce|norm|sum",
    "gathering and scattering": r"index|gather|scatter|embedding",
    "element-wise": r"elementwise|vectorized|unrolled|triton|mul|add|silu",
    "others": r"",
}
DIFFERENCE = "sampling/sampling_logp_difference"
GIVEN_BACK = 0.9  # least share of the KV cache that a sleep frees
EVERYTHING = 2**30  # tokens of a window that hides nothing
SHORTEST = 8  # Completions have at least 1/8 of the longest length.


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training_path.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder or Hub id")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="tokens of each prompt, template included (120)")
    parser.add_argument("--completion-tokens", type=int, default=64, help="tokens of a completion at most (64)")
    parser.add_argument("--num-generations", type=int, default=8, help="completions per prompt (8)")
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps with the one that warms up (3)")
    parser.add_argument("--full-length", action="store_true", help="made-up completions have all their tokens")
    parser.add_argument(
        "--prompt-per-completion", action="store_true", help="rows repeat the prompt: nothing is shared"
    )
    parser.add_argument("--sampled", action="store_true", help="the engine writes the completions")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of GRPOConfig")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="train an adapter of rank R on all layers")
    parser.add_argument("--copied-keys", choices=("never", "always", "turns"), default="never", help="in attention")
    parser.add_argument("--torch-backward", action="store_true", help="of attention, in steps with copied keys")
    parser.add_argument("--profile", action="store_true", help="one more step, with the kernels of its training")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    options.all_steps = options.steps + options.profile
    if options.copied_keys == "turns" and options.steps < 3:
        parser.error(f"--steps is {options.steps}, but the first warms up, and turns are two: at least 3")
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}, but the first only warms up: at least 2")
    try:
        options.fields = {name: json.loads(value) for name, _, value in (given.partition("=") for given in options.set)}
    except json.JSONDecodeError as error:
        parser.error(f"--set takes FIELD=JSON, such as gradient_checkpointing=true: {error}")
    return options


def made_up(
    prompt: Any, version: int, vocabulary: int, size: int, lengths: tuple[int, int], seed: int | None = None
) -> Any:
    """Return a group as it is recorded, with random tokens and rewards of a seed or of the prompt's place.

    Args:
        lengths: the shortest and the longest completion.
    """
    from colograd.batch import FinishReason, Group, Logged, Rollout
    from colograd.rollout.store import RewardedGroup

    draw = random.Random(prompt.position if seed is None else seed)
    rollouts = tuple(
        Rollout(
            input=prompt.input,
            completion_ids=array("i", [draw.randrange(vocabulary) for _ in range(length)]),
            sampler_logprobs=torch.zeros(length),
            sampled=torch.ones(length, dtype=torch.bool),
            finish_reason=FinishReason.STOP,
            policy_version=version,
        )
        for length in [draw.randint(*lengths) for _ in range(size)]
    )
    rewards = torch.tensor([[draw.random()] for _ in rollouts])
    return RewardedGroup(Group(prompt.example, rollouts, prompt.position), rewards, Logged({}, {}))


def write_journal(run: Path, config: Any, rows: Any, tokenizer: Any, full_length: bool, same_each_step: bool) -> None:
    from colograd.data import PromptRules, tokenize_prompts
    from colograd.rollout.store import RolloutStore
    from colograd.training.recorded_settings import settings_of

    prompts = tokenize_prompts(rows, PromptRules(tokenizer, sys.maxsize, "error", {}, "train"))
    journal = RolloutStore(run, 0, settings_of(config, [hash_reward.__name__]))
    longest = config.max_completion_length
    lengths = (longest if full_length else -(-longest // SHORTEST), longest)
    for step in range(config.max_steps):
        journal.begin(step, weights="")
        for place in range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step):
            given = len(tokenizer), config.num_generations, lengths
            seed = place - step * config.prompts_per_step if same_each_step else None
            journal.add(made_up(prompts[place, place], step, *given, seed))
    journal.close()


class Watch:
    """Records a run's log entries, FLOPs, peak memory of each phase, and the memory that each sleep gives back."""

    def __init__(self) -> None:
        self.memory = PeakMemory()
        self.steps: list[dict[str, Any]] = []
        self.sleeps: list[int] = []  # bytes
        self.work = Work()
        self.last = self.sampling_peak = 0.0
        self.processor = self.processor_s = 0.0  # at the start of the present and of the last training
        self.copies = False
        self.kernels: list[tuple[str, float, int]] = []  # of the profiled training: name, seconds, calls

    def begin_training(self, rows: Any, copies: bool) -> None:
        self.copies = copies
        self.sampling_peak = self.memory.peak()
        self.memory.reset()
        self.work = Work.of_rows(rows)
        self.processor = time.process_time()

    def end_training(self) -> None:
        self.processor_s = time.process_time() - self.processor

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Record the kernels of a training on the GPU, or its operators on a CPU."""
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if self.memory.cuda else ProfilerActivity.CPU
        time_of = "self_device_time_total" if self.memory.cuda else "self_cpu_time_total"
        with profile(activities=[kind]) as found:
            yield
            if self.memory.cuda:
                torch.cuda.synchronize()
        events = [(event.key, getattr(event, time_of) / 1e6, event.count) for event in found.key_averages()]
        self.kernels = sorted((event for event in events if event[1] > 0), key=lambda event: -event[1])

    def step(self, metrics: dict[str, Any]) -> None:
        now = time.perf_counter()
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        peaks = {"sampling_peak": self.sampling_peak, "training_peak": self.memory.peak()}
        work = {"tokens": self.work.tokens, "predicted": self.work.predicted, "pairs": self.work.pairs}
        self.steps.append({**numbers, **peaks, **work, "wall": now - self.last, "processor": self.processor_s,
                           "copies": self.copies})  # fmt: skip
        self.last = now

    def sleeping(self, engine: Any) -> Callable[[], None]:
        """Wrap the engine's `sleep` to read the GPU's free memory before and after."""
        sleep = engine.sleep

        def watched() -> None:
            if not engine.asleep:
                before = torch.cuda.mem_get_info()[0]
                sleep()
                self.sleeps.append(torch.cuda.mem_get_info()[0] - before)

        return watched


def make_config(options: argparse.Namespace, folder: str) -> Any:
    from colograd import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": folder,
        "num_generations": options.num_generations,
        "prompts_per_step": options.prompts_per_step,
        "max_completion_length": options.completion_tokens,
        "generation_kwargs": {"ignore_eos": True},
        "max_steps": options.all_steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if not options.sampled:  # made-up log-probabilities need no correction
        settings |= {"vllm_importance_sampling_correction": False, "shuffle_dataset": False, "journal": "keep"}
        settings["reward_workers"] = 0
    return GRPOConfig(**(settings | options.fields))


def adapter(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def make_trainer(options: argparse.Namespace, folder: str, watch: Watch) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from colograd import GRPOTrainer
    from colograd.apps.replaying.replayer import Replay, Replayer

    kind: Any = GRPOTrainer if options.sampled else Replayer

    own, own_slow, steps = attention._calls, merged_attention.slow, itertools.count()

    def copying(query: Any, value: Any, layout: Any, window: int | None) -> Any:
        return calls_at_once(layout, window or EVERYTHING, query.device) if query.is_cuda else ()

    class Watched(kind):
        def publish(self) -> None:
            watch.memory.reset()
            super().publish()

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            copies = options.copied_keys == "always" or (options.copied_keys == "turns" and next(steps) % 2 == 1)
            attention._calls = copying if copies else own
            merged_attention.slow = (lambda _: False) if copies and options.torch_backward else own_slow
            if options.copied_keys == "turns":
                attention._in_place_from = 0
            with contextlib.ExitStack() as profiled:
                if options.profile and len(watch.steps) == options.all_steps - 1:
                    profiled.enter_context(watch.profiled())
                watch.begin_training(inputs.rows, copies)
                loss = super().training_step(model, inputs, num_items_in_batch)
                watch.end_training()
            return loss

        def report_step(self, metrics: Any) -> None:  # a replay logs no step
            super().report_step(metrics)
            watch.step({**metrics, **self.learner.figures})

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.last = time.perf_counter()

    count = options.prompts_per_step * options.all_steps
    tokenizer, config = AutoTokenizer.from_pretrained(options.model), make_config(options, folder)
    prompts = make_prompts(tokenizer, options.prompt_tokens, count, seed=0)
    rows = Dataset.from_list([{"prompt": prompt, "signal": True} for prompt in prompts])
    recorded = {}
    if not options.sampled:
        run = Path(folder) / "recorded"
        write_journal(run, config, rows, tokenizer, options.full_length, options.copied_keys == "turns")
        recorded = {"replay": Replay(run, 1, options.all_steps)}
    trainer = Watched(
        model=options.model,
        reward_funcs=hash_reward,
        args=config,
        train_dataset=rows,
        callbacks=[Steps()],
        peft_config=adapter(options.lora) if options.lora else None,
        **recorded,
    )
    if options.prompt_per_completion:
        learner = trainer.learner
        learner.rules = dataclasses.replace(learner.rules, share_prompts=False)
    if trainer.engine is not None and trainer.engine.sleeps:
        trainer.engine.sleep = watch.sleeping(trainer.engine)
    return trainer


# -- the figures


def planned(trainer: Any) -> dict[str, int]:
    """Return planned bytes of each phase without other processes' memory and the reserve, and the bytes of both."""
    from colograd.memory.table import PHASES

    plan = trainer.memory_plan
    devices = plan.run.devices
    others = devices.total - devices.available
    found = {phase: devices.total - others - plan.margin - plan.remains(phase) for phase in PHASES}
    return {**found, "margin": plan.margin, "kv_bytes": plan.kv_bytes}


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train. Return the figures, with problems as ``faults``."""
    from colograd.policy.row_proof import TOLERANCE, TOLERANCE_16_BIT

    started, watch = time.perf_counter(), Watch()
    base = 0 if watch.memory.cuda else watch.memory.now()  # on a CPU the process without the trainer
    trainer = make_trainer(options, folder, watch)
    start_s, tokens = time.perf_counter() - started, 0
    try:
        trainer.train()
        plan, tokens = planned(trainer), trainer.learner.rules.max_tokens
        matrices = Matrices.of(trainer.model)
        half = trainer.policy.model.dtype == torch.bfloat16 or trainer.args.bf16
        dtypes = {trainer.policy.model.dtype, *([trainer.engine.dtype] if trainer.engine else [])}
        exact = dtypes == {torch.float32} and not trainer.args.bf16
        limit = TOLERANCE[torch.float32] if exact else TOLERANCE_16_BIT
        asked_to_sleep, checkpointing = trainer.engine and trainer.engine.sleeps, trainer.args.checkpointing
    finally:
        trainer.close()
    steps = watch.steps[1 : options.steps]
    found = summary(steps, matrices, peak_of(machine()) if half else None)
    if options.copied_keys == "turns":
        found["in_turns"] = in_turns(steps, "time/train" if watch.memory.cuda else "processor")
    found |= {"start_s": start_s, "microbatch_tokens": tokens, "every_n_layers": checkpointing, "planned": plan}
    # The plan is that without --copied-keys.
    planned_for = [step for step in steps if not step["copies"]] if options.copied_keys == "turns" else steps
    # torch still counts the memory that a sleeping cache has given back.
    slept = plan["kv_bytes"] if asked_to_sleep else 0
    found["peak"] = {
        "sampling": max(step["sampling_peak"] for step in steps) - base,
        "training": max(step["training_peak"] for step in planned_for) - base - slept,
    }
    if watch.kernels:
        found["kernels"] = watch.kernels
    if watch.sleeps:
        found["given_back"] = min(watch.sleeps)
    if options.sampled:
        found["difference"] = {
            "mean": max(step[f"{DIFFERENCE}/mean"] for step in steps),
            "max": max(step[f"{DIFFERENCE}/max"] for step in steps),
            "allowed": limit,
        }
    return {**found, "faults": faults(found, steps, on_gpu=watch.memory.cuda), "steps": watch.steps}


def summary(steps: Sequence[dict[str, Any]], matrices: Matrices | None, peak: float | None) -> dict[str, Any]:
    """Return medians over the counted steps. None if the device's peak or the model's FLOPs are unknown."""
    names = sorted({name for step in steps for name in step if name.startswith("time/")})
    seconds = {name.removeprefix("time/"): statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    tokens, trained = sum(step["tokens"] for step in steps), sum(step["time/train"] for step in steps)
    works = [Work(step["tokens"], step["predicted"], step["pairs"]) for step in steps]
    flops = sum(matrices.flops(work) for work in works) if matrices else None
    return {
        "step_s": statistics.median(step["wall"] for step in steps),
        "seconds": seconds,
        "processor_s": statistics.median(step["processor"] for step in steps),
        "tokens": tokens // len(steps),
        "tokens_per_second": tokens / trained,
        "flops": flops and flops // len(steps),
        "flops_per_second": flops and flops / trained,
        "peak_flops_per_second": peak,
        "utilisation": flops / trained / peak if flops and peak else None,
    }


def in_turns(steps: Sequence[dict[str, Any]], seconds: str) -> dict[str, float]:
    """Return median ``seconds`` of steps that copy keys and that read them in place, their ratio, and both peaks'
    bytes."""
    copied, in_place = ([step for step in steps if step["copies"] == copies] for copies in (True, False))
    ratio = statistics.median(a[seconds] / b[seconds] for a, b in zip(copied, in_place, strict=False))
    found = {"ratio": ratio}
    for name, ways in {"copied": copied, "in_place": in_place}.items():
        found[name] = statistics.median(step[seconds] for step in ways)
        found[f"{name}_peak"] = max(step["training_peak"] for step in ways)
    return found


def faults(found: dict[str, Any], steps: Sequence[dict[str, Any]], on_gpu: bool) -> list[str]:
    said = []
    for name in ("loss", "grad_norm"):
        values = [step[name] for step in steps if name in step]
        if not all(map(math.isfinite, values)):
            said.append(f"{name} isn't finite: {values}")
    if not any(step.get("grad_norm") for step in steps):
        said.append("no step had a gradient")
    difference = found.get("difference")
    if difference and not difference["mean"] <= difference["allowed"]:
        said.append(
            f"sampler and trainer differ by {difference['mean']:.2g} nats on average, more than the "
            f"{difference['allowed']:g} allowed"
        )
    if not on_gpu:  # on a CPU the libraries' memory counts, too
        return said
    for phase, peak in found["peak"].items():
        if peak > found["planned"][phase] + found["planned"]["margin"]:
            said.append(
                f"{peak / GB:.2f} GB at the peak of {phase}, {found['planned'][phase] / GB:.2f} planned and "
                f"{found['planned']['margin'] / GB:.2f} kept free"
            )
    cache = found["planned"]["kv_bytes"]
    if "given_back" in found and found["given_back"] < GIVEN_BACK * cache:
        said.append(f"a sleep gave {found['given_back'] / GB:.2f} GB back of a cache of {cache / GB:.2f}")
    return said


def kinds_of(kernels: Sequence[tuple[str, float, int]]) -> list[tuple[str, float, int]]:
    """Return seconds and calls by `KINDS`, the longest first."""
    sums = dict.fromkeys(KINDS, (0.0, 0))
    for name, seconds, calls in kernels:
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))
        sums[kind] = sums[kind][0] + seconds, sums[kind][1] + calls
    return sorted(((kind, *both) for kind, both in sums.items() if both[1]), key=lambda row: -row[1])


def report(found: dict[str, Any], settings: dict[str, Any]) -> str:
    rows = [
        ["step, s", f"{found['step_s']:.3f}"],
        *([f"{name}, s", f"{seconds:.3f}"] for name, seconds in found["seconds"].items()),
        ["training, processor s", f"{found['processor_s']:.3f}"],
        ["tokens through the model", f"{found['tokens']:,}"],
        ["tokens/s of training", f"{found['tokens_per_second']:,.0f}"],
    ]
    if found["flops_per_second"]:
        rows.append(["model TFLOP/s of training", f"{found['flops_per_second'] / 1e12:.3f}"])
    if found["utilisation"] is not None:
        rows.append(["of the device's peak", f"{found['utilisation']:.1%}"])
    for phase, peak in found["peak"].items():
        rows.append([f"GB at the peak of {phase} (planned)", f"{peak / GB:.2f} ({found['planned'][phase] / GB:.2f})"])
    if turns := found.get("in_turns"):
        said = f"{turns['copied']:.3f} and {turns['in_place']:.3f} ({turns['ratio']:.2f})"
        rows.append(["s of training (on a CPU of the processor), keys copied and read in place (ratio)", said])
        said = f"{turns['copied_peak'] / GB:.2f} and {turns['in_place_peak'] / GB:.2f}"
        rows.append(["GB at the peak of training, keys copied and read in place", said])
    if "given_back" in found:
        rows.append(["GB that a sleep gives back", f"{found['given_back'] / GB:.2f}"])
    if "difference" in found:
        rows.append(["sampler/trainer, nats on average", f"{found['difference']['mean']:.4f}"])
    kernels = kinds_of(found.get("kernels", []))
    rows += [[f"{kind}, ms of the profiled training (calls)", f"{1000 * s:.1f} ({n:,})"] for kind, s, n in kernels]
    head = (
        f"{settings['model']}, {settings['machine']}: {settings['prompts_per_step']} prompts of "
        f"{settings['prompt_tokens']} tokens x {settings['num_generations']} completions of at most "
        f"{settings['completion_tokens']}, {'sampled' if settings['sampled'] else 'made up'}; medians of "
        f"{settings['steps'] - 1} step(s)"
    )
    changed = [*settings["set"], *([f"LoRA of rank {settings['lora']}"] if settings["lora"] else [])]
    return "\n".join([head, "", table(["A step", ", ".join(changed) or "as it is"], rows)])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    process.prepare_ranks()
    with tempfile.TemporaryDirectory(prefix="colograd-bench-") as folder:
        found = measure(options, folder)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "fields")}
    settings |= {"model": Path(options.model).name, "machine": machine(), "versions": versions()}
    print(report(found, settings))
    write(options.out, {"settings": settings, **found})
    for fault in found["faults"]:
        print(f"training_path: {fault}", file=sys.stderr)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
