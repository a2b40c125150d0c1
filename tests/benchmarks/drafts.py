"""Drafts from siblings and earlier epochs: tokens per second of an engine with and without, by how many sequences run.

    python tests/benchmarks/drafts.py [--model M] [--then FOLDER] [--sequences 1 2 4 8 16] [--temperatures 1.0 0.6]

The task is the quickstart's. A first epoch samples --group completions of each prompt; then each prompt is sampled
again with another seed while so many sequences run, always that many until no prompt is left: by an engine with
`drafts: siblings`, and by one without drafts. With --then
the second epoch is sampled once more, by a later checkpoint of the run ("later"). Last, whole rounds of --round prompts
with all their completions, of which the tail has drafts: where fewer sequences run than `draft_step_tokens` has tokens.

`tokens/step`: a sequence's tokens of a step. `accepted`: the share of drafted tokens. `equal`: the share of completions
that both engines sampled alike; in bfloat16 wider steps round otherwise, in float32 on a CPU all are.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # OpenMP reads how to wait when torch is imported: spinning, it would time the neighbours

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import ROOT, versions  # noqa: E402

from colograd.engine.draft_index import CompletionMemory  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
HEADER = (
    "weights", "T", "sequences", "tokens/s", "with drafts", "ratio", "by processor s", "tokens/step", "accepted",
    "equal",
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="drafts.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub id; default: SmolLM2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engine")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="at once (1 2 4 8 16)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6], help="(1.0 0.6)")
    parser.add_argument("--then", type=Path, metavar="FOLDER", help="a later checkpoint, for another second epoch")
    parser.add_argument("--prompts", type=int, default=16, help="of the task (16)")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt in the first epoch (8)")
    parser.add_argument("--completion-tokens", type=int, default=48, help="of a completion at most (48)")
    parser.add_argument("--round", type=int, default=8, help="prompts of a whole round (8)")
    parser.add_argument("--step-tokens", type=int, help="draft_step_tokens; default: the engine's")
    parser.add_argument("--trials", type=int, default=3, help="whole rounds (3)")
    parser.add_argument("--out", "--json", dest="out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


@dataclasses.dataclass
class Cell:
    """What one engine did, of one kind of weights, temperature and number of sequences."""

    tokens: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    sequence_steps: int = 0  # steps, each counted once per sequence that ran in it
    drafted: float = 0.0
    accepted: float = 0.0
    ids: list[Any] = dataclasses.field(default_factory=list)


def task_prompts(model: str, count: int) -> list[tuple[int, ...]]:
    """Token ids of different prompts of the quickstart's task."""
    from transformers import AutoTokenizer

    from colograd.tasks.quickstart import sums

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [each[0]["content"] for each in sums(count * 4)["prompt"]]
    chats = [[{"role": "user", "content": text}] for text in dict.fromkeys(asked)][:count]
    if tokenizer.chat_template is None:
        return [tuple(tokenizer(chat[0]["content"]).input_ids) for chat in chats]
    return [tuple(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)) for c in chats]


def build(options: argparse.Namespace, folder: str, context: int, drafts: str) -> Any:
    from colograd import GRPOConfig
    from colograd.engine.vllm_engine import Needs, VLLMEngine

    config = GRPOConfig(output_dir=folder, report_to="none", drafts=drafts, draft_step_tokens=options.step_tokens)
    sequences = max(*options.sequences, options.round * options.group)
    engine = VLLMEngine(
        options.model, config, getattr(torch, options.dtype), context, 2**28 if config.on_cpu else 2**31,
        Needs(sequences=sequences),
    )  # fmt: skip
    engine.stamp(0)
    return engine


def load(engine: Any, folder: Path) -> None:
    """Put a checkpoint's weights into the engine."""
    from safetensors.torch import load_file

    engine.invalidate()
    engine.model.load_weights(
        pair for file in sorted(folder.glob("model*.safetensors")) for pair in load_file(file).items()
    )
    engine.stamp(0)


def in_turn(engine: Any, prompts: Sequence[tuple[int, ...]], sampling: Any, width: int) -> Cell:
    """Completions of the prompts, one after the other, ``width`` at a time; at least three times as many."""
    engine.stamp(0)
    engine.take_counts()
    number = max(len(prompts), 3 * width)
    cell, running, ids = Cell(), dict[str, int](), dict[int, list[int]]()
    waiting = [(position, prompts[position % len(prompts)]) for position in range(number)]
    started, processor = time.perf_counter(), time.process_time()
    while waiting or running:
        while waiting and len(running) < width:
            position, prompt = waiting.pop(0)
            running[engine.submit(prompt, sampling, 1000 + position, n=1)] = position
        cell.sequence_steps += len(running)
        for request, (completion,) in engine.advance():
            ids[running.pop(request)] = list(completion.ids)
    cell.seconds, cell.processor_seconds = time.perf_counter() - started, time.process_time() - processor
    return counted(cell, engine, [ids[position] for position in range(number)])


def whole_round(engine: Any, prompts: Sequence[Any], sampling: Any, seed: int) -> Cell:
    engine.stamp(0)
    engine.take_counts()
    started, processor = time.perf_counter(), time.process_time()
    groups = sorted(engine.generate(prompts, sampling, version=0, seed=seed), key=lambda group: group.position)
    cell = Cell(seconds=time.perf_counter() - started, processor_seconds=time.process_time() - processor)
    return counted(cell, engine, [list(rollout.completion_ids) for group in groups for rollout in group.rollouts])


def counted(cell: Cell, engine: Any, ids: list[Any]) -> Cell:
    counts = engine.take_counts()
    cell.ids, cell.tokens = ids, sum(map(len, ids))
    cell.drafted, cell.accepted = counts.get("drafts/tokens", 0.0), counts.get("drafts/accepted", 0.0)
    return cell


@contextlib.contextmanager
def knowing(engine: Any, memory: Any) -> Iterator[None]:
    """The engine, if it drafts, knows these completions and no others."""
    proposer = engine._runner.drafter if memory is not None else None
    if proposer is None:
        yield
        return
    engine.stamp(0)
    proposer.follow_requests()  # into the memory from before
    proposer.memory = copy.deepcopy(memory)
    yield


def first_epoch(engine: Any, prompts: Sequence[Any], sampling: Any, drafts: str) -> Any:
    """Sample it; the completions, if the engine remembers them."""
    memory = CompletionMemory() if drafts != "none" else None
    with knowing(engine, memory):
        whole_round(engine, prompts, sampling, seed=1)
    if memory is None:
        return None
    engine.stamp(0)
    engine._runner.drafter.follow_requests()
    return engine._runner.drafter.memory


def cells(options: argparse.Namespace, folder: str, drafts: str) -> dict[tuple[str, float, str], Cell]:
    """What an engine does, by weights, temperature, and the number of sequences or the trial of a whole round."""
    from colograd.batch import Prompt
    from colograd.engine.sampling import Sampling

    ids = task_prompts(options.model, options.prompts)
    engine = build(options, folder, max(map(len, ids)) + options.completion_tokens, drafts)
    prompts = [Prompt({}, each, position) for position, each in enumerate(ids)]
    ways = {t: Sampling(options.group, options.completion_tokens, t, {}) for t in options.temperatures}
    known = {t: first_epoch(engine, prompts, sampling, drafts) for t, sampling in ways.items()}
    found: dict[tuple[str, float, str], Cell] = {}
    for weights in ("the same", *(["later"] if options.then else [])):
        if weights == "later":
            load(engine, options.then)
        for t, sampling in ways.items():
            for width in options.sequences:
                with knowing(engine, known[t]):
                    found[weights, t, str(width)] = in_turn(engine, ids, sampling, width)
            for trial in range(options.trials):
                with knowing(engine, known[t]):
                    found[weights, t, f"round {trial}"] = whole_round(
                        engine, prompts[: options.round], sampling, 2 + trial
                    )
    engine.close()
    return found


def row(key: tuple[str, float, str], plain: Sequence[Cell], drafted: Sequence[Cell]) -> dict[str, Any]:
    """One line of the table, of the medians of one or more pairs."""

    def rate(cells: Sequence[Cell], name: str) -> float:
        return statistics.median(cell.tokens / getattr(cell, name) for cell in cells)

    pairs = [pair for a, b in zip(plain, drafted, strict=True) for pair in zip(a.ids, b.ids, strict=True)]
    same = [ours == theirs for ours, theirs in pairs]
    tokens, steps = sum(cell.tokens for cell in drafted), sum(cell.sequence_steps for cell in drafted)
    proposed = sum(cell.drafted for cell in drafted)
    return {
        "weights": key[0],
        "temperature": key[1],
        "sequences": key[2],
        "plain": rate(plain, "seconds"),
        "drafts": rate(drafted, "seconds"),
        "ratio": rate(drafted, "seconds") / rate(plain, "seconds"),
        "processor_ratio": rate(drafted, "processor_seconds") / rate(plain, "processor_seconds"),
        "tokens_per_step": tokens / steps if steps else None,
        "drafted": proposed / tokens,
        "acceptance": sum(cell.accepted for cell in drafted) / proposed if proposed else None,
        "equal": statistics.mean(same),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = parse(argv)
    process.quiet_logs(verbose=False)
    process.prepare_ranks()
    with tempfile.TemporaryDirectory() as folder:
        plain, drafted = cells(options, folder, "none"), cells(options, folder, "siblings")
    names: dict[tuple[str, float, str], list[tuple[str, float, str]]] = {}
    for weights, temperature, name in plain:
        shown = f"whole round of {options.round * options.group}" if name.startswith("round") else name
        names.setdefault((weights, temperature, shown), []).append((weights, temperature, name))
    rows = [row(key, [plain[k] for k in keys], [drafted[k] for k in keys]) for key, keys in names.items()]
    shown = [
        [
            each["weights"], f"{each['temperature']:g}", each["sequences"], f"{each['plain']:.1f}",
            f"{each['drafts']:.1f}", f"{each['ratio']:.2f}", f"{each['processor_ratio']:.2f}",
            *("-" if each[key] is None else f"{each[key]:.2f}" for key in ("tokens_per_step", "acceptance", "equal")),
        ]
        for each in rows
    ]  # fmt: skip
    print(
        f"{Path(options.model).name}, {options.dtype}, second epoch of {options.prompts} prompts after "
        f"{options.group} completions each, at most {options.completion_tokens} tokens, on {machine()}\n"
    )
    print(table(HEADER, shown))
    write(options.out, {"rows": rows, "versions": versions(), "machine": machine(), "options": str(vars(options))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
