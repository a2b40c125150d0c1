"""Take exams: published benchmarks, with their question, sampling and checker, and the numbers to expect.

colograd eval MODEL --on gsm8k math500 [--n N] [--limit ROWS] [--json FILE] [--completions FILE] [--any_flag value]
torchrun --nproc-per-node 8 -m colograd.apps.cli eval MODEL --on aime24 aime25

MODEL is a folder or Hub id, a checkpoint-N, or a run's folder (its saved model, else its newest checkpoint). An adapter
is merged into a copy of its base first. Exams: gsm8k, math500, aime24, aime25, gpqa, mbpp, mbpp_plus; `name[:100]`
takes the first rows, `name@4` 4 completions per question, `name=FILE` data of your own with the dataset's columns.

--n, --limit, --temperature, --top-p and --max-tokens are for all exams. --json writes results with every question's
count of right completions, --completions each completion with its verdict (JSON lines). Other flags are configuration
keys that engine and prompts depend on, such as --dtype, --seed, --vllm_tensor_parallel_size or
--chat_template_kwargs.enable_thinking false. Exit status 2 for bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime import process
from ..runtime.waiting import Waiting

if TYPE_CHECKING:
    from ..batch import ScoredGroup
    from ..config import GRPOConfig
    from ..engine.protocol import Engine
    from .exams.exam import ExamSpec
    from .exams.prompts import ExamPrompts
    from .exams.results import ExamResult

SET = ("--report_to", "none", "--report", "false", "--save_strategy", "no", "--vllm_enable_sleep_mode", "false")


def main(argv: Sequence[str] | None = None) -> int:
    """Take the exams. Return the exit status."""
    argv = process.command_arguments(argv)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    with contextlib.ExitStack() as closing:
        try:
            options, flags = parse(argv)
            process.follow_launcher()
            waiting = Waiting(
                "colograd eval: loading the libraries", lambda: "", shown=os.environ.get("RANK", "0") == "0"
            )
            with process.rank_variables(), process.collector_at_rest(), waiting:
                sitting = prepare(options, flags, closing)
            sitting.take(options)
            leave_ranks()
        except (ValueError, RuntimeError, OSError) as error:
            if process.is_verbose(argv):
                raise
            print(f"colograd eval: error: {error}", file=sys.stderr)
            return 2
    return 0


def leave_ranks() -> None:
    """Let each rank end at any time: no exchange follows."""
    from ..parallel.faults import leave

    leave()


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own options. Return them, and the flags of the configuration."""
    parser = argparse.ArgumentParser(prog="colograd eval", allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--on", nargs="+", metavar="EXAM", default=[])
    parser.add_argument("--n", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--completions", type=Path)
    try:
        options, flags = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}: colograd eval MODEL --on gsm8k.") from None
    if options.model is None:
        raise ValueError("the model is missing: colograd eval MODEL --on gsm8k, the model first.")
    if not options.on:
        raise ValueError("--on is missing, but names the exams: --on gsm8k math500.")
    for name, least in (("n", 1), ("limit", 1), ("max_tokens", 1), ("temperature", 0.0)):
        value = getattr(options, name)
        if value is not None and not value >= least:  # NaN too
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be at least {least:g}: raise it.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p is {options.top_p}, but must be in (0, 1].")
    for path in filter(None, (options.json, options.completions)):  # before hours are spent
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a file.")
    return options, flags


def specs_of(options: argparse.Namespace) -> dict[str, ExamSpec]:
    """Return the exams, with the options that change all exams applied."""
    from .exams.catalogue import EXAMS
    from .exams.exam import parse_specs

    changes = {name: getattr(options, name) for name in ("n", "temperature", "top_p", "max_tokens")}
    changes = {name: value for name, value in changes.items() if value is not None}
    found = {}
    for name, spec in parse_specs(options.on, EXAMS, **changes).items():
        found[name] = spec if options.limit is None else dataclasses.replace(spec, limit=options.limit)
    return found


def model_of(name: str) -> str:
    """Return the folder or Hub id of the model ``name``; for a run its saved model or its newest checkpoint.

    Raises:
        ValueError: a folder with neither a model nor a checkpoint in it.
    """
    from ..checkpoint.search import model_folder

    if not os.path.isdir(name):
        return name
    folder = model_folder(name)
    if folder is None:
        raise ValueError(
            f"{name} holds neither a model (model.safetensors), an adapter nor a complete checkpoint: give a model's "
            "folder, a checkpoint-N, or a run's output_dir."
        )
    return folder


@dataclass(frozen=True, slots=True)
class Sitting:
    """A model in an engine, and the exams for it."""

    model: str
    config: GRPOConfig
    engine: Engine
    tokenizer: Any
    prompts: dict[str, ExamPrompts]

    def take(self, options: argparse.Namespace) -> None:
        """Take the exams one after the other, print the table, and write the requested files. A collective."""
        from ..parallel.faults import waiting
        from ..parallel.ranks import gather, on_all_ranks
        from .exams.results import table

        results, rows = [], []
        with waiting("the exams"):
            for name, prompts in self.prompts.items():
                result, groups = self._take_one(prompts)
                results.append(result)
                if options.completions is not None:
                    rows += [row for part in gather([*self._rows(name, groups)]) for row in part]
            with on_all_ranks("writing the results"):
                if self.config.layout.is_main:
                    for line in table(results):
                        print(line, flush=True)
                    _write(options, self.model, results, rows)

    def _take_one(self, prompts: ExamPrompts) -> tuple[ExamResult, list[ScoredGroup]]:
        import torch

        from ..batch import Group, Prompt
        from ..batch import ScoredGroup as Scored
        from ..engine.load import stepping
        from ..parallel.ranks import on_all_ranks
        from ..reporting.console import Console
        from ..reporting.metrics import PhaseTimes
        from ..rollout.rounds import roll_out
        from ..rollout.stages import Stages
        from .exams.taking import take

        layout, engine, exam = self.config.layout, self.engine, prompts.exam
        console = Console(enabled=layout.is_main, bars=True)

        def collect(asked: Sequence[Prompt], sampling: Any, judge: Any) -> list[ScoredGroup]:
            def write(wanted: Sequence[Prompt]) -> Iterator[Group]:
                bar = console.progress(len(wanted), exam.name, "question")
                with contextlib.closing(bar), stepping(engine, bar.sampled):
                    for group in engine.generate(wanted, sampling, version=0, seed=self.config.seed, purpose="eval"):
                        bar.update(sum(len(rollout.completion_ids) for rollout in group.rollouts))
                        yield group

            def scored(group: Group, rewards: torch.Tensor) -> ScoredGroup:
                return Scored(group, rewards, torch.zeros(len(group.rollouts)))

            with on_all_ranks(f"the exam {exam.name}"):
                stages = Stages(write, judge, scored)
                return engine.on_engine_leader(lambda: roll_out(asked, stages, PhaseTimes()), others=[])

        return take(exam, prompts.prompts(layout.data_rank, layout.data_size), self._decode, collect)

    def _decode(self, group: Any) -> list[str]:
        ids = [list(rollout.completion_ids) for rollout in group.rollouts]
        found: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return found

    def _rows(self, exam: str, groups: Sequence[ScoredGroup]) -> Iterator[dict[str, Any]]:
        for scored in groups:
            texts = self._decode(scored.group)
            for rollout, text, right in zip(scored.group.rollouts, texts, scored.rewards[:, 0].tolist(), strict=True):
                yield {
                    "exam": exam,
                    "row": scored.group.position,
                    "prompt": scored.group.example["prompt"],
                    "completion": text,
                    "right": bool(right),
                    "answer": scored.group.example["answer"],
                    "tokens": len(rollout.completion_ids),
                    "finish_reason": rollout.finish_reason.value,
                }


def prepare(options: argparse.Namespace, flags: Sequence[str], closing: contextlib.ExitStack) -> Sitting:
    """Read the questions and build the engine. A collective.

    Raises:
        ValueError: bad input.
    """
    specs, model = specs_of(options), model_of(options.model)  # before the slow imports
    scratch = closing.enter_context(tempfile.TemporaryDirectory(prefix="colograd-eval-"))

    from transformers import AutoConfig, AutoTokenizer

    from ..config import parse_arguments
    from ..data import PromptRules
    from ..parallel.ranks import gather, on_all_ranks
    from ..policy.loading import check_tokenizer
    from ..runtime.hub import check_model_name
    from ..training.assembly import engine_alone
    from .exams.prompts import ExamPrompts

    _, config, of_model, _ = parse_arguments(["--output_dir", scratch, *SET, "--dtype", "auto", *flags])
    config.resolve_loading(**of_model.init_kwargs())
    revision, trust = of_model.model_revision, config.trust_remote_code
    with on_all_ranks("the model's files"):
        folder = merged(model, Path(scratch), config)
    served = gather(folder)[config.layout.node * config.layout.ranks_per_node]
    with on_all_ranks("the model's configuration"):
        check_model_name(served, revision=revision)
        model_config = AutoConfig.from_pretrained(served, revision=revision, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(served, revision=revision, trust_remote_code=trust)
        check_tokenizer(tokenizer)
        if config.chat_template_path is not None:
            tokenizer.chat_template = Path(config.chat_template_path).read_text()
    context = int(getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**31)
    context = min(context, config.vllm_max_model_length or context)
    with on_all_ranks("the exams' questions"):
        rules = PromptRules(
            tokenizer,
            max_prompt_tokens=context - 1,
            overlong="error",
            chat_template_kwargs=dict(config.chat_template_kwargs or {}),  # type: ignore[arg-type]
            name="",
        )
        prompts = {name: ExamPrompts.of(spec, rules) for name, spec in specs.items()}
    length = max(min(part.longest + part.exam.max_tokens, context) for part in prompts.values())
    each = max(-(-len(part) // config.layout.data_size) * part.exam.n for part in prompts.values())
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    engine = engine_alone(config, served, model_config, end, length, each, closing)
    if config.layout.is_main:
        print(f"model: {model}", engine.describe(), sep="\n", flush=True)
        for part in prompts.values():
            if part.longest + part.exam.max_tokens > context:
                print(
                    f"{part.exam.name}: the exam allows {part.exam.max_tokens:,} tokens, but the context of "
                    f"{context:,} leaves fewer behind its longest question"
                )
    return Sitting(model, config, engine, tokenizer, prompts)


def merged(model: str, scratch: Path, config: GRPOConfig) -> str:
    """Return the model, or a copy of its base with the adapter added, which each node's first rank makes."""
    from ..policy.lora import adapter_folder

    if adapter_folder(model) is None or not config.layout.leads_node:
        return model
    from .export import export

    if config.layout.is_main:
        print(f"model: {model} is an adapter, which is merged into a copy of its base", flush=True)
    folder = scratch / "merged"
    export(Path(model), folder)
    return str(folder)


def _write(
    options: argparse.Namespace, model: str, results: Sequence[ExamResult], rows: Sequence[dict[str, Any]]
) -> None:
    if options.json is not None:
        found = {"model": model, "exams": [result.as_json() for result in results]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    if options.completions is not None:
        options.completions.parent.mkdir(parents=True, exist_ok=True)
        with options.completions.open("w", encoding="utf-8") as file:
            for row in sorted(rows, key=lambda row: (row["exam"], row["row"])):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
