"""Streaming's cost and benefit: rollouts compared with plain `LLM.generate`, and rewards that run while others decode.

    python tests/benchmarks/rollouts.py [--model M] [--trials 5] [--out F.json]        (--json is the same as --out)

One engine, one set of requests, each with its own seed, so both sides sample the same tokens. On a CPU that is checked;
a GPU's rounding may depend on the batch, so each side's speed counts its own tokens, and the share of equal completions
is printed. Every completion ends at a token of a fixed random set, which spreads the lengths.

- `ratio.throughput`: tokens per second of `draw` (`Engine.generate` with streaming and a trivial reward) over those
  of `LLM.generate`. They run in turns; the median over the pairs of the wall-clock
  ratio, and of the ratio in processor seconds, which hardly depends on the machine's other work.
- `ratio.streamed_rewards`: of the seconds that two workers spend in a sleeping reward, the share that lies before the
  last completion ends. Each worker is busy for --load (0.5) of the generation's time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import ROOT, versions  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
LEAST_SECONDS = 2.0  # shortest generation that can hide the rewards


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rollouts.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub id; default: SmolLM2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engine")
    parser.add_argument("--prompts", type=int, default=24, help="groups (24)")
    parser.add_argument("--num-generations", type=int, default=4, help="completions of a group (4)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a prompt (32)")
    parser.add_argument("--completion-tokens", type=int, default=256, help="tokens of a completion at most (256)")
    parser.add_argument("--mean-tokens", type=int, default=48, help="one token of so many ends a completion (48)")
    parser.add_argument("--workers", type=int, default=2, help="processes of the sleeping reward (2)")
    parser.add_argument("--load", type=float, default=0.5, help="share of the generation that each is busy (0.5)")
    parser.add_argument("--trials", type=int, default=5, help="pairs of runs that count (5); one more warms up")
    parser.add_argument("--out", "--json", dest="out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    if options.trials < 1:
        parser.error(f"--trials is {options.trials}, but at least one pair has to count")
    return options


class Sampled:
    """The stages of `draw`, with the real engine and the real scorer, without a trainer."""

    def __init__(self, engine: Any, scorer: Any, tokenizer: Any, sampling: Any) -> None:
        self.engine, self.scorer, self.tokenizer, self.sampling = engine, scorer, tokenizer, sampling
        self.interval = (0.0, 0.0)  # start and end of the generation

    def generate(self, prompts: Any) -> Generator[Any]:
        started = time.monotonic()
        yield from self.engine.generate(prompts, self.sampling, version=0, seed=0)
        self.interval = (started, time.monotonic())

    def begin_score(self, groups: Any) -> Any:
        ids = [[list(rollout.completion_ids) for rollout in group.rollouts] for group in groups]
        texts = [self.tokenizer.batch_decode(of_group, skip_special_tokens=True) for of_group in ids]
        return self.scorer.submit(groups, texts)

    def compute_advantages(self, group: Any, rewards: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rewards))


def trivial(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def sleeping(seconds: float) -> Callable[..., list[float]]:
    def asleep(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        started = time.monotonic()
        time.sleep(seconds)
        log_extra("when", [(started, time.monotonic())] * len(completions))
        return [0.0] * len(completions)

    return asleep


def build(options: argparse.Namespace, folder: str) -> tuple[Any, Any, Any, list[Any]]:
    """Return the engine, its tokenizer, the sampling, and the prompts."""
    from transformers import AutoConfig, AutoTokenizer

    from colograd import GRPOConfig
    from colograd.batch import Prompt
    from colograd.engine.protocol import EngineUse
    from colograd.engine.sampling import Sampling
    from colograd.engine.vllm_engine import VLLMEngine
    from colograd.memory.shape import CacheNeed, Shape

    config = GRPOConfig(output_dir=folder, num_generations=max(options.num_generations, 2), report_to="none")
    config.per_device_train_batch_size = options.prompts * options.num_generations
    context = options.prompt_tokens + options.completion_tokens
    dtype, sequences = getattr(torch, options.dtype), options.prompts * options.num_generations
    shape = Shape.of(AutoConfig.from_pretrained(options.model))
    need = CacheNeed.of(shape, dtype.itemsize, context, sequences)  # a CPU decodes few at once
    kv_bytes = 2**28 if config.on_cpu else need.wanted
    engine = VLLMEngine(options.model, config, dtype, context, kv_bytes, EngineUse(sequences=sequences))
    engine.stamp(0)
    draw = random.Random(0)
    ends = draw.sample(range(engine.vocab_size), max(engine.vocab_size // options.mean_tokens, 1))
    limits = {"stop_token_ids": ends, "ignore_eos": True}
    sampling = Sampling(options.num_generations, options.completion_tokens, 1.0, limits)
    prompts = [
        Prompt({"prompt": ""}, tuple(draw.randrange(engine.vocab_size) for _ in range(options.prompt_tokens)), position)
        for position in range(options.prompts)
    ]
    return engine, AutoTokenizer.from_pretrained(options.model), sampling, prompts


def plainly(engine: Any, sampling: Any, prompts: Sequence[Any]) -> list[list[tuple[int, ...]]]:
    from colograd.engine.sampling import request_seed

    parameters = [engine.parameters(p.prompt_ids, sampling, request_seed(0, p.position), sampling.n) for p in prompts]
    given = [{"prompt_token_ids": list(p.prompt_ids)} for p in prompts]
    outputs = engine.llm.generate(given, parameters, use_tqdm=False)
    return [[tuple(c.token_ids) for c in sorted(o.outputs, key=lambda c: c.index)] for o in outputs]


def streamed(stages: Sampled, prompts: Sequence[Any]) -> tuple[list[list[tuple[int, ...]]], list[Any]]:
    """Return the token ids sampled by `draw`, and the groups that it scored."""
    from colograd.reporting.metrics import PhaseTimes
    from colograd.rollout.rounds import PlainRound
    from colograd.rollout.stages import Stages

    steps = Stages(stages.generate, stages.begin_score, stages.compute_advantages, stages.scorer.take_logged)
    scored = [*PlainRound(PhaseTimes()).draw([prompts], steps)[0].sampled]
    return [[tuple(r.completion_ids) for r in s.group.rollouts] for s in scored], scored


def timed(engine: Any, function: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a function's result, its seconds and its processor seconds. Prompts are computed anew."""
    engine.stamp(0)
    started, processor = time.perf_counter(), time.process_time()
    value = function()
    return value, time.perf_counter() - started, time.process_time() - processor


def throughput(engine: Any, stages: Sampled, prompts: Sequence[Any], trials: int) -> dict[str, Any]:
    """Time both sides in turns. The first side changes from pair to pair, and the first pair warms up."""
    sides = {
        "plain": lambda: plainly(engine, stages.sampling, prompts),
        "streamed": lambda: streamed(stages, prompts)[0],
    }
    found: dict[str, Any] = {name: {"seconds": [], "processor_seconds": [], "tokens": []} for name in sides}
    for trial in range(trials + 1):
        ids = {}
        for name in list(sides)[:: 1 if trial % 2 else -1]:
            ids[name], seconds, processor = timed(engine, sides[name])
            if trial:
                found[name]["seconds"].append(seconds)
                found[name]["processor_seconds"].append(processor)
                found[name]["tokens"].append(sum(len(completion) for group in ids[name] for completion in group))
        equal = share_of_equals(ids["plain"], ids["streamed"])
        assert equal == 1 or torch.cuda.is_available(), "the two sides sampled different tokens"
    lengths = [len(completion) for group in ids["plain"] for completion in group]
    return found | {"equal_completions": equal, "shortest": min(lengths), "longest": max(lengths)}


def share_of_equals(one: Sequence[Any], other: Sequence[Any]) -> float:
    pairs = [a == b for ours, theirs in zip(one, other, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(pairs) / len(pairs)


def hiding(engine: Any, stages: Sampled, prompts: Sequence[Any]) -> dict[str, float]:
    """Return seconds of a generation, of all rewards, of rewards before the generation's end, of the last wait."""
    (_, scored), seconds, _ = timed(engine, lambda: streamed(stages, prompts))
    begin, end = stages.interval
    calls = [s.logged.columns["when"][0] for s in scored]
    return {
        "generation_s": end - begin,
        "reward_s": sum(stop - start for start, stop in calls),
        "hidden_s": sum(max(min(stop, end) - start, 0.0) for start, stop in calls),
        "wait_s": seconds - (end - begin),
    }


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    from colograd.rewards import Scorer, resolve_rewards

    engine, tokenizer, sampling, prompts = build(options, folder)
    in_turns = throughput(
        engine, Sampled(engine, Scorer(resolve_rewards(trivial, None)), tokenizer, sampling), prompts, options.trials
    )
    generation = statistics.median(in_turns["streamed"]["seconds"])
    each = options.load * options.workers * generation / options.prompts
    scorer = Scorer(resolve_rewards(sleeping(each), None), options.workers)
    try:
        stages = Sampled(engine, scorer, tokenizer, sampling)
        runs = [hiding(engine, stages, prompts) for _ in range(options.trials + 1)][1:]
    finally:
        scorer.close()
        engine.close()
    pairs = {
        name: [a / b for a, b in zip(*(per_token(in_turns[side], name) for side in ("plain", "streamed")), strict=True)]
        for name in ("seconds", "processor_seconds")
    }
    ratio = {
        "throughput": statistics.median(pairs["seconds"]),
        "throughput_processor": statistics.median(pairs["processor_seconds"]),
        "streamed_rewards": statistics.median(run["hidden_s"] / run["reward_s"] for run in runs),
    }
    return {"throughput": in_turns, "sleep_s": each, "rewards": runs, "ratio": ratio}


def per_token(side: dict[str, list[float]], name: str) -> list[float]:
    return [seconds / tokens for seconds, tokens in zip(side[name], side["tokens"], strict=True)]


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    in_turns, ratio = found["throughput"], found["ratio"]
    rows = []
    for name, words in (("plain", "LLM.generate"), ("streamed", "Engine.generate, streaming, trivial reward")):
        seconds, processor = (statistics.median(in_turns[name][key]) for key in ("seconds", "processor_seconds"))
        rate = 1 / statistics.median(per_token(in_turns[name], "seconds"))
        rows.append([words, f"{seconds:.2f}", f"{processor:.2f}", f"{rate:,.0f}"])
    middle = {key: statistics.median(run[key] for run in found["rewards"]) for key in found["rewards"][0]}
    return "\n".join(
        [
            f"{Path(options.model).name}, {options.dtype}, {options.prompts} prompts x {options.num_generations} "
            f"completions of {in_turns['shortest']} to {in_turns['longest']} tokens, on {machine()}; load average "
            f"{os.getloadavg()[0]:.1f}; medians of {options.trials}",
            "",
            table(["Rollouts", "s", "processor s", "tokens/s"], rows),
            "",
            f"Throughput {ratio['throughput']:.3f} of plain (processor seconds: {ratio['throughput_processor']:.3f}); "
            f"{in_turns['equal_completions']:.2f} of the completions are equal",
            f"Rewards of {found['sleep_s']:.2f} s in {options.workers} workers: {ratio['streamed_rewards']:.2f} of "
            f"{middle['reward_s']:.1f} s hidden behind {middle['generation_s']:.1f} s of decoding, "
            f"{middle['wait_s']:.2f} s waited",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    process.prepare_ranks()
    with tempfile.TemporaryDirectory(prefix="colograd-bench-") as folder:
        found = measure(options, folder)
    print(report(found, options))
    shortest = min(run["generation_s"] for run in found["rewards"])
    if shortest < LEAST_SECONDS:
        print(f"\nA generation took {shortest:.1f} s: for figures of rewards raise --completion-tokens or --prompts.")
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    settings |= {"machine": machine(), "load_average": os.getloadavg(), "versions": versions()}
    write(options.out, {"settings": settings, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
