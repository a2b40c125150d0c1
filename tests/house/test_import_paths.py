"""Every import path in a page, recipe or notebook can be imported, and so can every path in published cards."""

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
from colograd.runtime.importing import import_when_used

# Paths from before the modules had folders. Recipes on the Hub and users' notebooks have them.
PUBLISHED = (
    "colograd.batch:LossOutput", "colograd.calculator:calculator", "colograd.calculator:products",
    "colograd.config:GRPOConfig", "colograd.data:load_datasets", "colograd.logprobs:policy_logprobs",
    "colograd.losses:LOSSES", "colograd.losses:TokenLoss", "colograd.losses:Tokens", "colograd.quickstart:sums",
    "colograd.rewards:last_number", "colograd.rewards:RewardError", "colograd.sampling:Sampling",
    "colograd.train:main",
)  # fmt: skip


def named_paths() -> set[str]:
    """Return each `module:name` in the pages, recipes and notebooks."""
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


@pytest.mark.parametrize(("old", "new"), colograd.MOVED.items())
def test_a_former_path_gives_the_same_module(old: str, new: str) -> None:
    """The module keeps its own name and spec."""
    module = importlib.import_module(new)
    assert importlib.import_module(old) is module
    assert module.__name__ == new and module.__spec__ is not None and module.__spec__.name == new


@pytest.mark.parametrize(
    "module", ["train", "commands.cli", "commands.doctor", "commands.plan", "commands.export", "commands.show"]
)
def test_a_command_answers_before_anything_large_is_imported(module: str) -> None:
    """Its usage, bad arguments, and `colograd show` at all."""
    code = (
        f"import sys, colograd.{module}\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=tiny.PATIENCE)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_untrainable_model_is_refused_before_large_imports(tmp_path: Path) -> None:
    """Its configuration suffices: neither vLLM, nor the trainer, nor the dataset's rows are loaded before the error."""
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
    large = ("vllm", "datasets", "trl", "transformers.trainer", "colograd.trainer", "bitsandbytes.functional")
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


def test_a_package_is_imported_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name or by a module below it. A failing import fails again on each use."""
    for name, last in (("slow_one", ""), ("slow_two", ""), ("broken_one", "raise ImportError('no such device')")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"from . import part\nfrom {name}.part import NAME, Of\n{last}\n")
        (tmp_path / name / "part.py").write_text("NAME = __name__\nclass Of: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("slow_one", "slow_two", "broken_one", "there_is_none"):
        import_when_used(name)
        assert f"{name}.part" not in sys.modules
    first = importlib.import_module("slow_one")
    assert importlib.util.find_spec("slow_one") is not None and "slow_one.part" not in sys.modules
    assert first.NAME == "slow_one.part" and importlib.import_module("slow_one") is first
    below, package = importlib.import_module("slow_two.part"), sys.modules["slow_two"]
    assert below is package.part and below.Of is package.Of, "run once, though the package imports it, too"
    assert below.__spec__ is not None and below.__spec__.origin == below.__file__
    with pytest.raises(AttributeError, match="nothing"):
        first.nothing  # noqa: B018
    for name in ("broken_one.part", "broken_one"):
        with pytest.raises(ImportError, match="no such device"):
            importlib.import_module(name)
    with pytest.raises(ImportError, match="there_is_none"):
        importlib.import_module("there_is_none")
    import_when_used("slow_one")
    assert sys.modules["slow_one"] is first
