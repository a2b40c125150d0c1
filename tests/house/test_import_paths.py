"""Every import path that a page, recipe or notebook names leads somewhere; so do the paths in published model cards."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from paths import ROOT
from transformers import LlamaConfig, MixtralConfig

import colograd

# Paths from before the modules had folders: in recipes on the Hub, in notebooks that people keep.
PUBLISHED = (
    "colograd.batch:LossOutput", "colograd.calculator:calculator", "colograd.calculator:products",
    "colograd.config:GRPOConfig", "colograd.data:load_datasets", "colograd.logprobs:policy_logprobs",
    "colograd.losses:LOSSES", "colograd.losses:TokenLoss", "colograd.losses:Tokens", "colograd.quickstart:sums",
    "colograd.rewards:last_number", "colograd.rewards:RewardError", "colograd.sampling:Sampling",
    "colograd.train:main",
)  # fmt: skip


def named_paths() -> set[str]:
    """Every `module:name` in pages, recipes and notebooks."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.yaml")]
    texts = [page.read_text() for page in pages]
    for notebook in ROOT.glob("docs/notebooks/*.ipynb"):
        texts += ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    found = set()
    for text in texts:
        found |= set(re.findall(r"\bcolograd(?:\.\w+)*:[A-Za-z_]\w*", text))
        for module, names in re.findall(r"from (colograd[\w.]*) import ([\w, ]+)", text):
            found |= {f"{module}:{name.strip()}" for name in names.split(",")}
    return found - {"colograd:cpu", "colograd:cuda"}  # tags of container images


@pytest.mark.parametrize("path", sorted({*named_paths(), *PUBLISHED}))
def test_it_can_be_imported(path: str) -> None:
    module, _, name = path.partition(":")
    assert functools.reduce(getattr, name.split("."), importlib.import_module(module)) is not None


INSIDE = {"colograd.agents.sessions": "colograd.extensions.agents.sessions"}


@pytest.mark.parametrize(("old", "new"), (colograd.MOVED | INSIDE).items())
def test_a_former_path_gives_the_same_module(old: str, new: str) -> None:
    """A module keeps its own name and spec."""
    module = importlib.import_module(new)
    assert importlib.import_module(old) is module
    assert module.__name__ == new and module.__spec__ is not None and module.__spec__.name == new


@pytest.mark.parametrize(
    "module", ["train", "commands.cli", "commands.doctor", "commands.plan", "commands.export", "commands.show"]
)
def test_a_command_answers_before_anything_large_is_imported(module: str) -> None:
    """Usage, errors in arguments, and `colograd show` work before any large import."""
    code = (
        f"import sys, colograd.{module}\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=tiny.PATIENCE)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_untrainable_model_is_refused_before_large_imports(tmp_path: Path) -> None:
    """From its configuration alone: vLLM, the trainer and the dataset's rows aren't loaded before the error."""
    refused = {
        "noise": (MixtralConfig(router_jitter_noise=0.1), "mixtral has router_jitter_noise 0.1"),
        "packed otherwise": (LlamaConfig(quantization_config={"quant_method": "gptq"}), "gptq"),
    }
    recipes = []
    for name, (model_config, _) in refused.items():
        model_config.save_pretrained(tmp_path / name)
        settings = {"model_name_or_path": str(tmp_path / name), "dataset_name": "none", "reward_funcs": ["none"]}
        recipes.append(tmp_path / f"{name}.yaml")
        recipes[-1].write_text(json.dumps(settings | {"output_dir": str(tmp_path / "run"), "bf16": False}))
    large = ("vllm", "datasets", "trl", "transformers.trainer", "colograd.trainer")
    code = (
        "import builtins, sys\nfrom colograd.apps import cli\nown = print\n"
        "builtins.print = lambda *said, **to: own(*said, 'torch' in sys.modules, **to)\n"
        "assert {cli.main(['train', '--config', recipe]) for recipe in sys.argv[1:]} == {2}\n"
        f"own([name for name in {large} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, recipes)],
        capture_output=True, text=True, cwd=ROOT, timeout=tiny.PATIENCE, env=tiny.clean_environment(),
    )  # fmt: skip
    first, *_, found = done.stdout.splitlines()
    assert first.startswith("colograd ") and first.endswith("False"), "the first line comes before torch"
    assert found == "[]", done.stderr[-2000:]
    told = done.stderr.splitlines()
    assert len(told) == len(refused)
    for line, (_, said) in zip(told, refused.values(), strict=True):
        assert line.startswith("colograd: error: ") and said in line
