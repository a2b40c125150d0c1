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
        "The dataset: a Hub id, a local .json, .jsonl, .csv or .parquet file or folder, or the import path "
        "`package.module:function` of a function that returns a `datasets.Dataset` or `DatasetDict`.",
    )
    dataset_config: str | None = knob(None, "The dataset's configuration (its `name` in `load_dataset`).")
    dataset_kwargs: dict[str, Any] | str | None = knob(
        None, "Keyword arguments for the dataset function, or for `load_dataset`."
    )
    dataset_train_split: str = knob("train", "The split to train on.")
    dataset_test_split: str = knob("test", "The split to evaluate on, if it exists.")
    datasets: list[dict[str, Any]] | str | None = knob(
        None,
        "A mixture, in place of `dataset_name`: a list of mappings with `path` and optionally `name`, `data_dir`,"
        " `data_files`, `split`, `columns`, `fraction` (each part's share, in all or none) and `source` (its "
        "value in a column `source`, for `curriculum`).",
    )
    exams: list[str] = knob(
        [],
        "Benchmarks of an evaluation: tasks, groups or tags of lm-evaluation-harness such as `gsm8k`, or a task's"
        " YAML file; `name[:100]`: the first rows, `name@4`: 4 completions per question; see "
        "docs/guide/evaluation.md.",
        extension="evaluation",
    )
    test_split_size: float | None = knob(None, "Share or number of examples of a mixture to hold out for evaluation.")
    dataset_streaming: bool = knob(False, "Read a stored dataset during training; needs `max_steps`.")
    streaming: bool = knob(False, "The same for a mixture (`datasets`).")
    dataset_prompt_column: str = knob("prompt", "The column with the prompt.")
    system_prompt: str | None = knob(
        None, "A system message before each prompt; a plain prompt becomes a conversation."
    )
    reward_model_name_or_path: str | None = knob(None, "A reward model, taken as the first of `reward_funcs`.")
    reward_funcs: list[str] = knob(
        [],
        "The reward functions: names of built-in rewards, import paths (`package.module:function`), or reward "
        "models (a folder or a Hub id).",
    )
    tools: list[str] = knob([], "Import paths of functions that the model may call.", extension="tools")
    environment_factory: str | None = knob(
        None, "Import path of what makes environments, often a class; or a dict of such paths.", extension="tools"
    )
    rollout_func: str | None = knob(
        None,
        "Import path of a function that writes completions in the engine's place, or of a class (a rollout source).",
    )

    agent: str | None = knob(
        None,
        "A program that calls the model over HTTP, once per completion: a function's import path, or a command line.",
        extension="agents",
    )
    ignore_bias_buffers: bool = knob(False, f"No effect: {UNUSED['ignore_bias_buffers']}.")

    def __post_init__(self) -> None:
        check_values(self)

    def all_rewards(self) -> list[str]:
        """Return the reward functions with the reward model before them, as in TRL's script."""
        return [*([self.reward_model_name_or_path] if self.reward_model_name_or_path else []), *self.reward_funcs]
