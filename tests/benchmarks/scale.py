"""The host's work for a step of many tokens, without the arithmetic of policy and engine: seconds and bytes per token.

    python tests/benchmarks/scale.py [--prompts 256] [--completions 16] [--tokens 8192] [--ranks 1] [--out F.json]

Made-up completions come out of vLLM's own output types, group by group as an engine finishes them, and go the trainer's
way: rollouts, text, a reward in worker processes, advantages, statistics, balance and packing, the log, and each
micro-batch once to the device. For comparison a second process gets a sixteenth of the prompts: a cost per token that
differs grows faster than the tokens. Seconds are wall clock and processor time of the fullest rank, per token that it
sampled; bytes are the process's peak resident memory, less the memory before the step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colograd.runtime import process

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
RANK = "COLOGRAD_SCALE_RANK"  # for ranks: the options as JSON
PROMPT_TOKENS = 200
BUDGET = 16384  # tokens of a micro-batch


class Stages:
    """Wall-clock and processor seconds of this process by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before = time.perf_counter(), time.process_time()
        yield
        found = self.seconds.setdefault(name, [0.0, 0.0])
        found[0] += time.perf_counter() - before[0]
        found[1] += time.process_time() - before[1]


def made_up_outputs(options: argparse.Namespace, position: int) -> Any:
    """Return a finished request in vLLM's output types."""
    import numpy as np
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    draw = np.random.default_rng(position)
    lengths = draw.integers(options.tokens // 2, options.tokens + 1, options.completions)
    outputs = []
    for index, length in enumerate(lengths.tolist()):
        ids = draw.integers(100, 40000, length).tolist()
        flat = FlatLogprobs(
            list(range(length)), list(range(1, length + 1)), ids, (-draw.random(length)).tolist(), [1] * length,
            [None] * length,
        )  # fmt: skip
        outputs.append(CompletionOutput(index, "", ids, 0.0, flat, finish_reason="stop"))
    return RequestOutput(str(position), None, list(range(100, 100 + PROMPT_TOKENS)), None, outputs, True)


def odd_length(completions: list[str], **_: Any) -> list[float]:
    """A reward function that reads each text."""
    return [float(len(text) % 2) for text in completions]


def be_rank(options: argparse.Namespace) -> None:
    process.prepare_threads()
    import torch
    import torch.distributed as dist

    if options.ranks > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    from transformers import AutoTokenizer

    from colograd.parallel.ranks import gather, rank

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made_up_outputs(options, 0)  # imports vLLM
    options.prompts //= options.ranks
    found = one_step(options, rank() * options.prompts, tokenizer)
    of_ranks = gather(found)
    if rank() == 0:
        worst = max(of_ranks, key=lambda one: one["total"][1])
        Path(options.report).write_text(json.dumps(worst | {"bytes": max(one["bytes"] for one in of_ranks)}))
    if options.ranks > 1:
        dist.destroy_process_group()


def one_step(options: argparse.Namespace, first: int, tokenizer: Any) -> dict[str, Any]:
    """Run this rank's part of a step. The rank's prompts begin at ``first``."""
    import torch

    from colograd.batch import Group, ModelInput, SampledStep, ScoredGroup
    from colograd.engine.protocol import Sampled
    from colograd.engine.vllm_engine import finish_reason_of
    from colograd.extensions.recording.completions import write_log
    from colograd.extensions.recording.group_views import as_utf8, completion_rows
    from colograd.losses.advantages import group_advantages
    from colograd.policy.packing import PackingRules, collate
    from colograd.reporting.metrics import PhaseTimes
    from colograd.rewards.functions import resolve_rewards
    from colograd.rewards.scoring import Scorer
    from colograd.rollout.statistics import RolloutStatistics
    from colograd.training.learner import step_batch

    stages, scorer = Stages(), Scorer(resolve_rewards([odd_length], None), workers=1)
    device = torch.device("cpu")
    from figures import OwnMemory

    peak = OwnMemory()
    before = peak.resident
    peak.start()
    groups, scorings, kept, tokens = [], [], [], 0

    def decode(group: Group) -> list[str]:
        return tokenizer.batch_decode([list(r.completion_ids) for r in group.rollouts], skip_special_tokens=True)

    for position in range(first, first + options.prompts):
        output = made_up_outputs(options, position)
        with stages.stage("rollouts"):
            asked = ModelInput(tuple(output.prompt_token_ids))
            rollouts = tuple(
                Sampled(
                    array("i", one.token_ids), array("f", one.logprobs.logprobs), finish_reason_of(one.finish_reason)
                ).rollout(asked, 0)
                for one in output.outputs
            )
        group = Group({"prompt": "How much is it?"}, rollouts, position)
        tokens += sum(len(rollout.completion_ids) for rollout in rollouts)
        with stages.stage("text"):
            texts = decode(group)
        with stages.stage("rewards"):
            scorings.append(scorer.submit([group], [texts]))
        groups.append(group)
        if options.log:
            kept.append(as_utf8(texts))
        del output, texts
    with stages.stage("rewards"):
        rewards = [scoring.result() for scoring in scorings]
    with stages.stage("statistics"):
        scored = tuple(
            ScoredGroup(group, of_group, group_advantages(of_group[:, 0], "group"))
            for group, of_group in zip(groups, rewards, strict=True)
        )
        step = SampledStep(scored, scored)
        statistics = RolloutStatistics.of(step.sampled, lambda rewards: rewards[:, 0], False)
    with stages.stage("balance and packing"):
        rules = PackingRules(BUDGET, False, True, True, options.ranks > 1, False, 1e-5, device)
        batch = step_batch(step, statistics, rules, ["odd_length"], PhaseTimes())
    with stages.stage("to the device"):
        through = sum(collate(row).input_ids.numel() for row in batch.rows)
    if options.log:
        with stages.stage("log"), tempfile.TemporaryDirectory() as folder:
            rows = completion_rows(scored, kept, 1)
            write_log(folder, rows, ["odd_length"], 1)
    scorer.close()
    total = [sum(seconds[clock] for seconds in stages.seconds.values()) for clock in (0, 1)]
    return {"tokens": tokens, "packed": through, "forwards": len(batch.rows), "stages": stages.seconds, "total": total,
            "bytes": (peak.resident - before) / tokens,
            "workers": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime}  # fmt: skip


def run(options: argparse.Namespace, prompts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given = vars(options) | {"prompts": prompts, "report": str(Path(folder) / "report.json"), "out": None}
        environment = os.environ | {RANK: json.dumps(given), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, __file__]
        if options.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
            command[1:1] = [*launcher, "--master-port", str(process.free_port())]
        subprocess.run(command, env=environment, check=True)
        return json.loads(Path(given["report"]).read_text())


def report(found: Sequence[dict[str, Any]], ranks: int) -> str:
    from figures import machine, table

    def per_token(one: dict[str, Any], seconds: Sequence[float]) -> list[str]:
        return [f"{1e6 * value / one['tokens']:.3f}" for value in seconds]

    names = list(found[-1]["stages"])
    rows = [[name, *(cell for one in found for cell in per_token(one, one["stages"][name]))] for name in names]
    rows += [["in all", *(cell for one in found for cell in per_token(one, one["total"]))]]
    rows += [["bytes per token at the peak", *(cell for one in found for cell in (f"{one['bytes']:.0f}", ""))]]
    head = ["stage", *(cell for one in found for cell in (f"{one['tokens'] / 1e6:.1f} M tokens", "processor"))]
    return f"{ranks} rank(s) on {machine()}; microseconds per token, wall clock and processor\n\n{table(head, rows)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scale.py", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256, help="of a step, on all ranks (256)")
    parser.add_argument("--completions", type=int, default=16, help="per prompt (16)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the longest completion (8192)")
    parser.add_argument("--ranks", type=int, default=1, help="that share the prompts (1)")
    parser.add_argument("--log", action="store_true", help="write the completions log, too")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    if options.prompts % (16 * options.ranks):
        parser.error(f"--prompts is {options.prompts}, but must be a multiple of 16 x {options.ranks} ranks")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from figures import write

    found = [run(options, options.prompts // 16), run(options, options.prompts)]
    print(report(found, options.ranks), flush=True)
    write(options.out, {"ranks": options.ranks, "steps": found})
    return 0


if __name__ == "__main__":
    if RANK in os.environ:
        be_rank(argparse.Namespace(**json.loads(os.environ[RANK])))
    else:
        sys.exit(main())
