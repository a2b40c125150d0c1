"""Evaluate a model on benchmarks, which are tasks of lm-evaluation-harness. The vLLM engine runs in this process.

colograd eval MODEL --tasks gsm8k ifeval [--limit ROWS] [--json FILE] [--completions FILE] [--any_flag value]
torchrun --nproc-per-node 8 -m colograd.apps.cli eval MODEL --tasks aime24@16 mmlu

MODEL is a folder or Hub id, a checkpoint-N, or a run's folder (its saved model, or a newer checkpoint). An adapter in
a folder is merged into a copy of its base. --tasks takes names of tasks, groups and tags of the harness, or YAML files.
`name[:100]` takes the first 100 rows, `name@4` samples 4 completions per question. --include-path DIR adds YAML files.

--temperature, --top-p and --max-tokens apply to all tasks. --limit applies to tasks without a range such as `[:100]`.
--chat-template true applies the chat template to all questions, false to none. By default it is applied to questions
with sampled answers, if the model has a template. --json writes the results to FILE after each name in --tasks.
--resume skips the names that FILE has. --completions writes a JSON line per completion, or per scored question. Other
flags set the engine and the prompts, such as --dtype, --seed, --vllm_tensor_parallel_size or
--chat_template_kwargs.enable_thinking false. Exit status 2 means an error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime import process, registry
from ..runtime.waiting import while_waiting

if TYPE_CHECKING:
    from ..extensions.evaluation.harness import HarnessBenchmark
    from ..extensions.evaluation.sitting import Host

SET = ("--report_to", "none", "--report", "false", "--save_strategy", "no", "--vllm_enable_sleep_mode", "false")


def main(argv: Sequence[str] | None = None) -> int:
    argv = process.command_arguments(argv)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    with contextlib.ExitStack() as closing:
        try:
            options, flags = parse(argv)
            process.follow_launcher()
            shown = os.environ.get("RANK", "0") == "0"
            waiting = while_waiting("colograd eval: loading the libraries", lambda: "", shown)
            with process.rank_variables(), process.collector_at_rest(), waiting:
                prepared = prepare(options, flags, closing)
            run(options, *prepared)
            from ..parallel.faults import leave

            leave()  # From here on ranks may end at different times, so a rank's end is no failure for the others.
        except (ValueError, RuntimeError, OSError) as error:
            if process.is_verbose(argv):
                raise
            print(f"colograd eval: error: {error}", file=sys.stderr)
            return 2
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="colograd eval", allow_abbrev=False, exit_on_error=False, add_help=False)
    add = parser.add_argument
    add("model", nargs="?")
    add("--tasks", "--on", nargs="+", metavar="TASK", default=[])
    add("--include-path", nargs="+", type=Path, default=[])
    for name, kind in (("limit", int), ("max-tokens", int), ("temperature", float), ("top-p", float)):
        add(f"--{name}", type=kind)
    add("--chat-template", choices=("true", "false"))
    add("--json", type=Path)
    add("--completions", type=Path)
    add("--resume", action="store_true")
    try:
        options, flags = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. A valid command is `colograd eval MODEL --tasks gsm8k`.") from None
    if options.model is None:
        raise ValueError("the model is missing: name it first, as in `colograd eval MODEL --tasks gsm8k`.")
    options.tasks = [text for each in options.tasks for text in each.split(",") if text]
    if not options.tasks:
        raise ValueError("--tasks is missing: name the tasks, as in --tasks gsm8k ifeval.")
    for name, least in (("limit", 1), ("max_tokens", 1), ("temperature", 0.0)):
        value = getattr(options, name)
        if value is not None and not value >= least:  # `value < least` would accept NaN.
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be at least {least:g}: raise it.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p is {options.top_p}, but must be above 0 and at most 1: choose 0.9, for example.")
    for path in (options.json, options.completions):  # Find a wrong output path before the long evaluation.
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder, but --json and --completions need a file: name a file.")
    if options.resume and options.json is None:
        raise ValueError("--resume needs the results file of an earlier command: name this file with --json.")
    if missing := [str(folder) for folder in options.include_path if not folder.is_dir()]:
        raise ValueError(f"--include-path is {missing[0]}, but there is no such folder: give an existing one.")
    return options, flags


def model_of(name: str) -> str:
    """Return the folder or Hub id of the model to evaluate. ``name`` is MODEL of the command line.

    For a run's folder, return the folder itself if it holds the newest model, else its newest checkpoint's folder.
    """
    from .export import model_folder

    folder = model_folder(name) if os.path.isdir(name) else name
    if folder is None:
        raise ValueError(
            f"{name} holds no model, no adapter and no checkpoint: give the folder of a model, a checkpoint or a run."
        )
    return folder


def run(
    options: argparse.Namespace, host: Host, benchmarks: dict[str, HarnessBenchmark], document: dict[str, Any]
) -> None:
    """Run benchmarks one after the other, and write the output files after each. All ranks must call this."""
    from ..extensions.evaluation.results import table
    from ..extensions.evaluation.sitting import checkers, take
    from ..parallel.faults import ends_together
    from ..parallel.ranks import gather, on_all_ranks

    is_main, results = host.config.layout.is_main, []
    if is_main and options.completions is not None and not options.resume:
        options.completions.unlink(missing_ok=True)
    with on_all_ranks("the checkers"):
        pool = checkers(benchmarks.values())
    with contextlib.closing(pool), ends_together("the benchmarks"):
        for name, benchmark in benchmarks.items():
            result, answers = take(benchmark, host, pool, contextlib.nullcontext())
            results.append(result)
            rows = gather([*_rows(answers)]) if options.completions is not None else []
            with on_all_ranks("writing the results"):
                if is_main and options.json is not None:
                    groups = {group: _named(values) for group, values in result.groups.items()}
                    document["results"][name] = {"tasks": [each.as_json() for each in result.tasks], "groups": groups}
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    part = options.json.with_name(options.json.name + ".part")
                    part.write_text(json.dumps(document, indent=1) + "\n")
                    os.replace(part, options.json)
                if is_main and options.completions is not None:
                    options.completions.parent.mkdir(parents=True, exist_ok=True)
                    with options.completions.open("a", encoding="utf-8") as file:
                        for row in sorted(itertools.chain(*rows), key=lambda row: (row["task"], row["row"])):
                            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    if is_main:
        print(*table(results), sep="\n", flush=True)


def _named(values: dict[Any, Any]) -> dict[str, Any]:
    return {",".join(key): value for key, value in values.items()}


def _rows(answers: Any) -> Iterator[dict[str, Any]]:
    """Yield the lines of --completions: a dict per completion, or per question if nothing was sampled for it."""
    for each in answers:
        named = [*map(_named, each.verdicts)]
        row = {"task": each.task, "row": each.row, "answer": each.question.target}
        row["prompt"] = each.question.requests[0].instance.args[0]
        rollouts = [rollout for group in each.groups for rollout in group.rollouts]
        for index, text in enumerate(text for texts in each.texts for text in texts):
            yield row | {
                "completion": text,
                "metrics": named[index if len(named) > 1 else 0],
                "tokens": len(rollouts[index].completion_ids),
                "finish_reason": rollouts[index].finish_reason.value,
            }
        if not rollouts:
            yield row | {"metrics": named[0]}


def prepare(
    options: argparse.Namespace, flags: Sequence[str], closing: contextlib.ExitStack
) -> tuple[Host, dict[str, HarnessBenchmark], dict[str, Any]]:
    """Load the questions and build the engine. All ranks must call this.

    Return the engine's `Host`, the benchmarks to run, and the content of the --json file. With --resume this content
    includes the earlier results.
    """
    registry.require("evaluation", "colograd eval")
    from ..extensions.evaluation.specs import names_of

    # Bad names of tasks and models must raise before the slow imports below.
    texts, model = dict(names_of(options.tasks)), model_of(options.model)
    if options.limit is not None:
        parts = {name: text.partition("@") for name, text in texts.items() if "[" not in text}
        texts |= {name: f"{task}[:{options.limit}]{at}{n}" for name, (task, at, n) in parts.items()}
    settings = ("temperature", "top_p", "max_tokens", "chat_template")
    request = {"model": model, "flags": list(flags)} | {name: getattr(options, name) for name in settings}
    done: dict[str, Any] = {}
    if options.resume:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            earlier = json.loads(options.json.read_text())
            if earlier.get("request") != json.loads(json.dumps(request)):
                raise ValueError(
                    f"--resume: {options.json} has results of another model or other settings: name another --json."
                )
            done = dict(earlier["results"])
        texts = {name: text for name, text in texts.items() if text not in done}
        if not texts:
            raise ValueError(f"--resume: {options.json} has results of all tasks: remove --resume to run them again.")
    scratch = closing.enter_context(tempfile.TemporaryDirectory(prefix="colograd-eval-"))

    from transformers import AutoConfig, AutoTokenizer

    from ..config import parse_arguments
    from ..extensions.evaluation.harness import HarnessBenchmark, Rules
    from ..extensions.evaluation.sitting import Host
    from ..parallel.ranks import gather, on_all_ranks
    from ..policy.loading import chat_template, check_tokenizer
    from ..policy.lora import adapter_folder
    from ..reporting.console import Console
    from ..runtime.hub import check_model_name
    from ..training.assembly import engine_alone

    _, config, of_model, _ = parse_arguments(["--output_dir", scratch, *SET, "--dtype", "auto", *flags])
    config.resolve_loading(**of_model.init_kwargs())
    revision, trust = of_model.model_revision, config.trust_remote_code
    is_main, folder = config.layout.is_main, model
    with on_all_ranks("the model's files"):
        # Nodes may not share a disk, so one rank of each node merges the adapter.
        if adapter_folder(model) is not None and config.layout.leads_node:
            from .export import export

            if is_main:
                print(f"model: {model} is an adapter, which is merged into a copy of its base", flush=True)
            folder = str(Path(scratch, "merged"))
            export(Path(model), Path(folder))
    served = gather(folder)[config.layout.node * config.layout.ranks_per_node]
    with on_all_ranks("the model's configuration"):
        check_model_name(served, revision=revision)
        model_config = AutoConfig.from_pretrained(served, revision=revision, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(served, revision=revision, trust_remote_code=trust)
        check_tokenizer(tokenizer)
        if config.chat_template_path is not None:
            tokenizer.chat_template = chat_template(config.chat_template_path)
    context = int(getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**31)
    context = min(context, config.vllm_max_model_length or context)
    with on_all_ranks("the tasks' questions"):
        rules = Rules(
            tokenizer,
            context,
            options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            template={None: None, "true": True, "false": False}[options.chat_template],
            template_kwargs=dict(config.chat_template_kwargs or {}),  # type: ignore[arg-type]
            include=tuple(map(str, options.include_path)),
        )
        made = {text: HarnessBenchmark(text, rules) for text in texts.values()}
    length = min(max(each.longest_sequence for each in made.values()) + 1, context)
    each = max(-(-len(part) // config.layout.data_size) * part.generations for part in made.values())
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    engine = engine_alone(config, served, model_config, end, length, each, closing)
    if is_main:
        print(f"model: {model}", engine.describe(), sep="\n", flush=True)
        print("".join(f"{part.dropped_line()}\n" for part in made.values() if part.dropped), end="")
    host = Host(config, engine, tokenizer, Console(enabled=is_main, bars=True), 0)
    return host, made, {"model": model, "request": request, "results": done}


if __name__ == "__main__":
    sys.exit(main())
