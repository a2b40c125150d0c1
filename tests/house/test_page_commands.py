"""Commands and recipes on the pages: files that they name exist, and their arguments are understood."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import DOCS, RECIPES, ROOT

from colograd.apps import cli
from colograd.config.parse import GROUPS, planned_settings

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TRAINERS = ("colograd/train.py", "colograd.train")
# Placeholders on the pages, and values for them.
WORDS = {
    "RECIPE": "recipes/grpo_qwen.yaml", "FILE": "recipes/accelerate_configs/ddp.yaml", "N": "2",
    "F": "recipes/accelerate_configs/ddp.yaml", "$RANK_OF_NODE": "0", "$FIRST_NODE": "10.0.0.1",
    "…": "recipes/grpo_qwen.yaml", "recipe.yaml": "recipes/grpo_smollm2_cpu.yaml",
}  # fmt: skip
STARTS = ("colograd", "torchrun", "accelerate", "make", "sbatch", "python", ".venv/bin/python")
# `make` itself reads these.
OF_MAKE = {"CONFIG", "ARGS", "BENCH", "PYTHON", "VENV", "JOBS", "KIND", "VERSION", "WITH"}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if language in languages:
            yield text


def commands() -> Iterator[tuple[str, str]]:
    """(file, command) of blocks, of inline code with arguments, and of recipes' comments."""
    for page in PAGES:
        for text in blocks(page, "bash"):
            yield from ((page.name, line) for line in text.replace("\\\n", " ").splitlines())
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`([^`]+)`", prose):
            words = code.split() or [""]
            # Others are names (`colograd show`), or parts of a command (`torchrun --nnodes`).
            is_part = words[0] in ("torchrun", "accelerate") and "--config" not in words
            if (len(words) > 2 or words[0] == "sbatch") and not is_part and not re.search(r"[|\[]", code):
                yield page.name, " ".join(words)
    for path in sorted(RECIPES.rglob("*.*")):
        comments = re.findall(r"^# +(.+)", path.read_text(), re.MULTILINE)
        yield from ((path.name, line) for line in comments if line.split("#")[0].rstrip()[-1:] not in ".,;:")


COMMANDS = sorted({(page, line.strip()) for page, line in commands() if line.split() and line.split()[0] in STARTS})


class Parsed(Exception):
    """A command's own parser has understood its arguments."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to the clone's folder, and remove variables that a recipe's `env` sets."""
    monkeypatch.chdir(ROOT)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda text: str(text)[:60])
def test_command_is_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)
    words = words[: words.index("|")] if "|" in words else words
    program, *words = [WORDS.get(word, word) for word in words]
    if program == "colograd":
        check_colograd(words, monkeypatch)
    elif program == "make":
        check_make(words)
    elif program == "sbatch":
        script = next(index for index, word in enumerate(words) if word.endswith(".slurm"))
        assert (ROOT / words[script]).is_file()
        check_training(words[script + 1 :])
    else:
        check_program(program, words, monkeypatch)


def check_program(program: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        found = get_args_parser().parse_args(words)
        script, rest = found.training_script, found.training_script_args
    elif program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert words[0] == "launch"
        found = launch_command_parser().parse_args(words[1:])
        assert found.config_file is None or (ROOT / found.config_file).is_file()
        script, rest = found.training_script, found.training_script_args
    else:
        script, *rest = words[1:] if words[0] == "-m" else words
    if script in TRAINERS:
        check_training(rest)
    elif script == "colograd.apps.cli":
        check_colograd(rest, monkeypatch)
    elif script not in ("-", "script.py") and not script.startswith(
        "llama.cpp/"
    ):  # the reader's own, another project's
        assert (ROOT / script).is_file() or (ROOT / f"{script.replace('.', '/')}.py").is_file(), script


def check_training(words: Sequence[str]) -> None:
    assert planned_settings(words)["model_name_or_path"], "neither a recipe nor a model"


def check_colograd(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, *rest = words
    assert name in cli.COMMANDS
    if name in ("train", "doctor"):
        check_training(rest)
        return
    of_parser = argparse.ArgumentParser.parse_known_args

    def parse(self: Any, args: Any = None, namespace: Any = None) -> Any:
        """Raise the arguments that the command's own parser leaves unknown."""
        raise Parsed(of_parser(self, args, namespace)[1])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises(Parsed) as parsed:
        cli.main(words)
    monkeypatch.undo()
    (unknown,) = parsed.value.args
    assert not unknown or name in ("eval", "replay", "plan"), unknown
    planned_settings(unknown)  # these take keys of a recipe too
    assert all(Path(word).is_file() for word in rest if word.startswith("recipes/"))


def check_make(words: Sequence[str]) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in words:
        name, equals, value = word.partition("=")
        assert name in (OF_MAKE if equals else targets), word
        if name == "CONFIG":
            check_training(["--config", value])
        elif name == "ARGS" and "train" in words:
            check_training(["--config", "recipes/grpo_smollm2_cpu.yaml", *shlex.split(value)])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_recipes_on_pages_have_known_keys(page: Path) -> None:
    known = {field.name for group in GROUPS for field in dataclasses.fields(group)} | {"env"}
    for text in blocks(page, "yaml"):
        keys = yaml.safe_load(text)
        assert isinstance(keys, dict) and set(keys) <= known, set(keys) - known
        assert "use_peft" not in keys or keys.get("lora_dropout") == 0, "the sampler has no dropout"


def test_recipes_of_adapters_have_no_dropout() -> None:
    recipes = [yaml.safe_load(path.read_text()) for path in RECIPES.glob("*.yaml")]
    assert {recipe["lora_dropout"] for recipe in recipes if recipe.get("use_peft")} == {0.0}
