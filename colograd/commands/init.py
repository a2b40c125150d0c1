"""``colograd init [FOLDER]``: a first recipe and a reward function of one's own, by a few questions or by flags."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ..runtime import gpus

RECIPE, TASK, EXAMPLE = "recipe.yaml", "mytask.py", "prompts.jsonl"
QUICKSTART_MODEL = Path("models/SmolLM2-135M-Instruct")
PROMPTS = (
    "prompt",
    "question",
    "problem",
    "instruction",
    "input",
    "query",
)  # usual names of the column; the first wins
ANSWERS = ("answer", "solution", "target", "output", "response", "label", "completion")
READ = 50  # rows of the data
ON_GPU = {"group": 8, "prompts": 32, "length": 512, "rate": "1.0e-6", "steps": 200}
ON_CPU = {"group": 8, "prompts": 8, "length": 48, "rate": "2.0e-5", "steps": 30}


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's choices, from flags or answers to questions."""

    model: str
    data: str  # a file, a Hub id, or an import path
    prompt: str  # column of the data
    answer: str  # column of the data
    reward: str  # `number`: the last number is the answer; `own`: a function that the user will change
    has_gpu: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, and print the commands to run next. Returns the exit status."""
    options = _parser().parse_args(argv)
    folder: Path = options.folder
    if there := [name for name in (RECIPE, TASK) if (folder / name).exists()]:
        raise ValueError(f"{folder / there[0]} is there, and is never overwritten: name another FOLDER.")
    try:
        choices = choose(options, asks=sys.stdin.isatty() and not options.yes)
    except (EOFError, KeyboardInterrupt):
        print("\ncolograd init: nothing was written", file=sys.stderr)
        return 130
    written = write(folder, choices)
    print(f"wrote {', '.join(str(path) for path in written)}")
    if not Path(choices.model).is_dir():
        print(f"model:     {choices.model} comes from the Hub; --model names another one, or a folder")
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"check it:  {change}colograd doctor --config {RECIPE}")
    print(f"train:     {change}colograd train --config {RECIPE}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colograd init",
        description="Write a first recipe and reward function. Asks for the values that no flag sets.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    parser.add_argument("--model", help="a Hub id or a folder")
    parser.add_argument("--data", help="a .jsonl, .json, .csv or .parquet file, or a Hub id; none: an example is made")
    parser.add_argument("--prompt-column", help="the column that holds the prompt")
    parser.add_argument("--answer-column", help="the column that the reward compares with")
    parser.add_argument("--reward", choices=("number", "own"), help="the last number is the answer; or your function")
    parser.add_argument("--yes", action="store_true", help="ask nothing, take what is usual")
    return parser


def choose(options: argparse.Namespace, asks: bool) -> Choices:
    """Take each choice from its flag, or else from the user's answer if ``asks``, or else its default."""
    has_gpu = bool(gpus.nodes())
    small = str(QUICKSTART_MODEL) if QUICKSTART_MODEL.is_dir() else "HuggingFaceTB/SmolLM2-135M-Instruct"
    usual = "Qwen/Qwen2.5-1.5B-Instruct" if has_gpu else small
    model = options.model or _ask(asks, "Model (a Hub id or a folder)", usual)
    data = options.data or _ask(asks, "Data (a file or a Hub id; empty: an example)", "")
    rows = [{"prompt": "", "answer": "0"}] if not data else first_rows(Path(data))
    prompt = _column(options.prompt_column, rows, PROMPTS, data, asks, "the prompt")
    answer = _column(options.answer_column, rows, ANSWERS, data, asks, "what the reward compares with", but=prompt)
    likely = "number" if rows and all(_ends_in_number(row.get(answer)) for row in rows) else "own"
    reward = options.reward or _ask(asks, "Reward: `number` (the last number is the answer) or `own`", likely)
    if reward not in ("number", "own"):
        raise ValueError(f"the reward is {reward!r}, but must be `number` or `own`.")
    # The recipe is read in FOLDER, the flags in the current directory.
    data = str(Path(data).resolve()) if data and Path(data).exists() else data or EXAMPLE
    model = str(Path(model).resolve()) if Path(model).exists() else model
    return Choices(model, data, prompt, answer, reward, has_gpu)


def _ask(asks: bool, question: str, usual: str) -> str:
    if not asks:
        return usual
    shown = f" [{usual}]" if usual else ""
    return input(f"{question}{shown}: ").strip() or usual


def first_rows(path: Path) -> list[dict[str, Any]]:
    """The first rows of a local file; none of a Hub id."""
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".json", ".csv", ".parquet"):
        return []
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a file that is there, or a Hub id.")
    try:
        if suffix == ".parquet":
            import pyarrow.parquet as pq

            batches = pq.ParquetFile(path).iter_batches(READ)
            found: Any = next(batches).to_pylist()
        else:
            with path.open(encoding="utf-8", newline="") as file:
                if suffix == ".csv":
                    found = [row for row, _ in zip(csv.DictReader(file), range(READ), strict=False)]
                else:
                    found = _json_rows(file.read())
    except (ValueError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as {suffix[1:]} ({error}).") from error
    if not found or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"{path} has no rows, but needs one object with the same keys per row.")
    return list(found)


def _json_rows(text: str) -> list[Any]:
    """The rows of a JSON list, or of one object per line."""
    if text.lstrip().startswith("["):
        whole: list[Any] = json.loads(text)
        return whole[:READ]
    lines = (line for line in text.splitlines() if line.strip())
    return [json.loads(line) for line, _ in zip(lines, range(READ), strict=False)]


def _column(
    given: str | None,
    rows: Sequence[dict[str, Any]],
    usual: Sequence[str],
    data: str,
    asks: bool,
    what: str,
    but: str = "",
) -> str:
    """The name of the column that holds ``what``, other than ``but``; the first usual name if there are no rows."""
    there = [name for name in (rows[0] if rows else {}) if name != but]
    likely = next((name for name in usual if name in there), "" if there else usual[0])
    name = given or (likely if likely and not asks else _ask(asks, f"Column that holds {what}", likely))
    if there and name not in there:
        raise ValueError(
            f"{data} has no column {name!r} for {what}; it has {', '.join(map(repr, there))}"
            f"{f' beside the prompt, {but!r}' if but else ''}: name one (--prompt-column, --answer-column)."
        )
    return name


def _ends_in_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or str(value).strip().rstrip(".")[-1:].isdigit()


def write(folder: Path, choices: Choices) -> list[Path]:
    """Write the recipe, a reward function if no built-in one fits, and an example if the user has no data."""
    folder.mkdir(parents=True, exist_ok=True)
    own = choices.reward == "own" or choices.answer != "answer"
    values = {"own": own, "chats": _chats(choices.model), "run": Path(choices.model).name}
    files = {RECIPE: _filled("recipe.yaml.jinja", choices, **values, **(ON_GPU if choices.has_gpu else ON_CPU))}
    if own:
        if not choices.answer.isidentifier() or keyword.iskeyword(choices.answer):
            raise ValueError(
                f"the column {choices.answer!r} can't be a parameter of a function: rename it in the data."
            )
        files[TASK] = _filled("mytask.py.jinja", choices, recipe=RECIPE)
    if choices.data == EXAMPLE:
        files[EXAMPLE] = "".join(
            json.dumps({"prompt": f"What is {a} + {b}? Give only the number.", choices.answer: str(a + b)}) + "\n"
            for a in range(10)
            for b in range(10)
        )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def _filled(template: str, choices: Choices, **values: Any) -> str:
    source = Path(__file__).with_name(template).read_text(encoding="utf-8")
    environment = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["quoted"] = functools.partial(json.dumps, ensure_ascii=False)  # for YAML
    return environment.from_string(source).render(dataclasses.asdict(choices) | values)


def _chats(model: str) -> bool:
    """Whether the model expects a conversation: its folder has a chat template, or its name says so."""
    folder = Path(model)
    if not folder.is_dir():
        return re.search(r"instruct|chat|-it\b", model, re.IGNORECASE) is not None
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (
        settings.is_file() and "chat_template" in settings.read_text(encoding="utf-8")
    )
