"""``colograd init [FOLDER]`` asks questions, or reads flags, and writes a recipe with a reward function or an agent."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import keyword
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..runtime import process

RECIPE, TASK, AGENT, EXAMPLE = "recipe.yaml", "mytask.py", "myagent.py", "prompts.jsonl"
QUICKSTART_MODEL = Path("models/SmolLM2-135M-Instruct")
# Usual names of a prompt's column and of an answer's column. The first that the data has is proposed.
PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWERS = ("answer", "solution", "target", "output", "response", "label", "completion")
READ = 50
# A recipe gets the numbers QWEN if the machine has a GPU, or the model has at least LARGE billions of parameters. Other
# recipes get QUICKSTART. Except for `steps`, the numbers are those of recipes/grpo_qwen.yaml and grpo_smollm2_cpu.yaml.
LARGE = 1.0
QWEN = {"group": 8, "prompts": 64, "length": 512, "warmup": 5, "steps": 116}
QUICKSTART = {"group": 8, "prompts": 8, "length": 48, "warmup": 2, "steps": 30}

# Pairs (upper bound of a model's billions of parameters, learning rate).
RATES = ((0.3, 2.0e-5), (LARGE, 5.0e-6), (float("inf"), 1.0e-6))

# Long texts in the data raise the recipe's completion length to at most LONGER times its usual value.
LONGER = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="colograd init",
        description="Write a first recipe and reward function. Asks for the values that no flag sets.",
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    add("--model", help="a Hub id or a folder")
    add("--data", help="a .jsonl, .json, .csv or .parquet file, or a Hub id; none: an example is made")
    add("--prompt-column", help="the column that holds the prompt")
    add("--answer-column", help="the column that the reward compares with")
    add("--reward", choices=("number", "own"), help="the last number is the answer; or your function")
    add("--agent", action="store_true", help="a program that calls the model, instead of a reward")
    add("--yes", action="store_true", help="ask nothing, take what is usual")
    options = parser.parse_args(argv)
    folder: Path = options.folder
    if there := [name for name in (RECIPE, TASK, AGENT) if (folder / name).exists()]:
        raise ValueError(f"{folder / there[0]} exists, and is never overwritten: name a FOLDER without this file.")
    try:
        choices = choose(options, asks=sys.stdin.isatty() and not options.yes)
    except (EOFError, KeyboardInterrupt):
        print("\ncolograd init: nothing was written", file=sys.stderr)
        return 130
    if choices["data"] == EXAMPLE and (folder / EXAMPLE).exists():
        raise ValueError(
            f"{folder / EXAMPLE} exists, and is never overwritten: name it with --data, or name another FOLDER."
        )
    print(f"wrote {', '.join(str(path) for path in write(folder, choices))}")
    if not Path(choices["model"]).is_dir():
        print(f"model:     {choices['model']} comes from the Hub; --model names another one, or a folder")
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"check it:  {change}colograd doctor --config {RECIPE}")
    print(f"train:     {change}colograd train --config {RECIPE}")
    return 0


def choose(options: argparse.Namespace, asks: bool) -> dict[str, Any]:
    """Return the recipe's values. For values without a flag ask the user if ``asks`` is true, else use defaults."""
    has_gpu, ask = bool(process.gpu_nodes()), functools.partial(_ask, asks)
    small = str(QUICKSTART_MODEL) if QUICKSTART_MODEL.is_dir() else "HuggingFaceTB/SmolLM2-135M-Instruct"
    usual = "Qwen/Qwen2.5-1.5B-Instruct" if has_gpu else small
    model = ask(options.model, "Model (a Hub id or a folder)", usual, _model)
    data, rows = ask(options.data, "Data (a file or a Hub id; empty: an example)", "", lambda d: (d, first_rows(d)))
    names = [*rows[0]] if rows else []
    if asks and data and rows:
        print("its columns:", *(f"  {name}: {str(value)[:80]!r}" for name, value in rows[0].items()), sep="\n")
    free = [name for name in names if name not in (options.prompt_column, options.answer_column)]
    check = functools.partial(_one_of, "--prompt-column", names)
    prompt = ask(options.prompt_column, "Column that holds the prompt", _likely(free, PROMPTS, but=ANSWERS), check)
    names = [name for name in names if name != prompt]
    only = names[0] if len(names) == 1 else None

    def parameter(name: str) -> str:
        if not _one_of("--answer-column", names, name).isidentifier() or keyword.iskeyword(name):
            rule = "must be a Python identifier, because a reward function takes the column as a parameter"
            raise ValueError(f"the answer column is {name!r}, but {rule}: rename the column.")
        return name

    question, usual = "Column that the reward compares with", _likely(names, ANSWERS)
    answer = ask(options.answer_column or only, question, usual, parameter)
    numbers = [str(row.get(answer)).strip().rstrip(".")[-1:].isdigit() for row in rows]
    likely = "number" if rows and all(numbers) else "own"
    question = "Reward: `number` (the last number is the answer) or `own`"
    reward = "agent"
    if not options.agent:
        reward = ask(options.reward, question, likely, functools.partial(_one_of, "--reward", ("number", "own")))
    elif options.reward:
        raise ValueError("--agent and --reward are both given, but an agent returns its own reward: remove one flag.")
    longest = max((len(str(row.get(name))) for row in rows for name in (prompt, answer)), default=0)
    # `colograd train` runs in FOLDER, but paths in flags are relative to the present directory, so make them absolute.
    data = str(Path(data).resolve()) if data and Path(data).exists() else data or EXAMPLE
    model = str(Path(model).resolve()) if Path(model).exists() else model
    columns = {"prompt": prompt, "answer": answer}
    return sizes_for(model, has_gpu, longest) | columns | {"model": model, "data": data, "reward": reward}


def _ask(asks: bool, given: str | None, question: str, usual: str, accept: Callable[[str], Any]) -> Any:
    if given or not asks:
        return accept(given or usual)
    while True:
        try:
            return accept(input(f"{question}{f' [{usual}]' if usual else ''}: ").strip() or usual)
        except ValueError as error:
            print(error)


def _model(name: str) -> str:
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}: give an existing folder, or a Hub id.")
    return name


def _one_of(flag: str, names: Sequence[str], name: str) -> str:
    if names and name not in names:
        raise ValueError(f"{flag} is {name!r}, but must be one of {', '.join(map(repr, names))}: name one.")
    return name


def _likely(names: Sequence[str], usual: Sequence[str], but: Sequence[str] = ()) -> str:
    others = [name for name in names if name not in but]
    return next((name for name in usual if name in names or not names), others[0] if len(others) == 1 else "")


def sizes_for(model: str, has_gpu: bool, longest: int) -> dict[str, Any]:
    """Choose the recipe's sizes and learning rate. ``longest``: characters in the longest prompt or answer."""
    name = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])", Path(model).name, re.IGNORECASE)
    if name:
        billions = float(name[1]) / (1 if name[2] in "bB" else 1000)
    else:  # Files of weights are assumed to have 2 bytes per parameter.
        billions = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) / 2e9
    billions = billions or (LARGE if has_gpu else 0.0)
    sizes = dict(QWEN if has_gpu or billions >= LARGE else QUICKSTART)
    wanted = 1 << (longest // 3).bit_length()  # A token is assumed to have 3 characters.
    sizes["length"] = min(max(sizes["length"], wanted), LONGER * sizes["length"])
    adapter = has_gpu and not _fits(model, 2 * sizes["length"])
    rate = next(rate for most, rate in RATES if billions < most) * (10 if adapter else 1)
    return sizes | {"rate": f"{rate:.1e}".replace("e-0", "e-"), "adapter": adapter}


def _fits(model: str, length: int) -> bool:
    from ..memory.choice import auto, fits
    from . import plan

    try:
        run = plan.described(plan.parse(["--model", model, "--context", str(length)]))
    except (OSError, ValueError):  # Training will report a bad model, in clearer words.
        return True
    return fits(run, auto(run))


def first_rows(name: str) -> list[dict[str, Any]]:
    path = Path(name)
    if not name:
        return [{"prompt": "", "answer": "0"}]
    if not path.is_file() and path.suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet"):
        return []
    from datasets import disable_progress_bars

    from ..data.loading import load_source

    disable_progress_bars()
    rows = load_source(name, None, {}, ("train",), streaming=False)["train"]
    return list(rows.select(range(min(READ, len(rows)))))


def write(folder: Path, choices: dict[str, Any]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    agent, answer, model = choices["reward"] == "agent", choices["answer"], Path(choices["model"])
    own = choices["reward"] == "own" or answer != "answer"
    if model.is_dir():
        tokenizer, chats = model / "tokenizer_config.json", (model / "chat_template.jinja").exists()
        chats |= tokenizer.is_file() and "chat_template" in tokenizer.read_text(encoding="utf-8")
    else:
        chats = re.search(r"instruct|chat|-it\b", choices["model"], re.IGNORECASE) is not None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True, trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["quoted"] = functools.partial(json.dumps, ensure_ascii=False)  # A JSON string is valid YAML.
    values = choices | {"own": own, "chats": chats, "run": model.name, "recipe": RECIPE}
    names = [RECIPE, *([AGENT] if agent else [TASK] if own else [])]
    files = {name: environment.get_template(f"{name}.jinja").render(values) for name in names}
    question = "What is {} * {}?" if agent else "What is {} + {}? Give only the number."
    if choices["data"] == EXAMPLE:
        files[EXAMPLE] = "".join(
            json.dumps({"prompt": question.format(a, b), answer: str(a * b if agent else a + b)}) + "\n"
            for a, b in itertools.product(range(10), repeat=2)
        )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]
