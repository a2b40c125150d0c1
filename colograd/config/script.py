"""A run's data: dataset, prompts, rewards. Names as in TRL's ScriptArguments and its grpo script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .knob import UNUSED, check_values, knob, names_checked


@names_checked
@dataclass
class ScriptArguments:
    """Arguments of ``colograd train`` that are not the trainer's own."""

    dataset_name: str | None = knob(
        None,
        "The dataset: a Hub id, a local .json, .jsonl, .csv or .parquet file or a folder, or the import path "
        "`package.module:function` of a function that returns a `datasets.Dataset` (or a `DatasetDict`).",
    )
    dataset_config: str | None = knob(None, "The dataset's configuration (its `name` in `load_dataset`).")
    dataset_kwargs: dict[str, Any] | str | None = knob(
        None, "Keyword arguments for the dataset function, or for `load_dataset`."
    )
    dataset_train_split: str = knob("train", "The split to train on.")
    dataset_test_split: str = knob("test", "The split to evaluate on, where there is one.")
    datasets: list[dict[str, Any]] | str | None = knob(
        None,
        "A mixture, in place of `dataset_name`: a list of mappings with `path` and optionally `name`, `data_dir`, "
        "`data_files`, `split`, `columns`, `fraction` and `source` (a name, which becomes the part's value in a column "
        "`source`, for `curriculum`); the parts are concatenated. With `fraction` (in all or none) "
        "that is each part's share of the mixture, as large as can be without repeating.",
    )
    exams: list[str] = knob(
        [],
        "Benchmarks that an evaluation takes: tasks, groups or tags of lm-evaluation-harness by name, such as `gsm8k`, "
        "or a task's YAML file; `name[:100]` the first rows, `name@4` 4 completions per question; see "
        "docs/guide/evaluation.md.",
        extension="evaluation",
    )
    test_split_size: float | None = knob(None, "Share or number of examples of a mixture to hold out for evaluation.")
    dataset_streaming: bool = knob(False, "Read a stored dataset while training, and not before; needs `max_steps`.")
    streaming: bool = knob(False, "The same for a mixture (`datasets`).")
    dataset_prompt_column: str = knob("prompt", "The column that holds the prompt, if it isn't called `prompt`.")
    system_prompt: str | None = knob(
        None, "A system message put before each prompt (a plain prompt becomes a conversation)."
    )
    reward_model_name_or_path: str | None = knob(None, "A reward model: as if it stood first in `reward_funcs`.")
    reward_funcs: list[str] = knob(
        [],
        "The reward functions: names of built-in rewards, import paths (`package.module:function` or "
        "`package.module.function`), or reward models (a folder or a Hub id). Their weights are `reward_weights`.",
    )
    tools: list[str] = knob([], "Functions that the model may call while it writes, by import path.", extension="tools")
    environment_factory: str | None = knob(
        None, "What makes environments (a class, mostly) or a dict of such, by import path.", extension="tools"
    )
    rollout_func: str | None = knob(
        None, "A function that writes completions in the engine's place, or a class (a rollout source), by import path."
    )

    agent: str | None = knob(
        None,
        "A program that calls the model over HTTP while it is trained, once per completion: a function's import path, "
        "or a command line.",
        extension="agents",
    )
    ignore_bias_buffers: bool = knob(False, f"No effect: {UNUSED['ignore_bias_buffers']}.")

    def __post_init__(self) -> None:
        check_values(self)

    def all_rewards(self) -> list[str]:
        """Return the reward functions with the reward model before them, as in TRL's script."""
        return [*([self.reward_model_name_or_path] if self.reward_model_name_or_path else []), *self.reward_funcs]
