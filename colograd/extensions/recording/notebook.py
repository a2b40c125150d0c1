"""A notebook's progress table with columns of rewards. Only notebooks import this module: it needs IPython."""

from __future__ import annotations

from typing import Any

from transformers.utils.notebook import NotebookProgressCallback

COLUMNS = {"loss": "Training Loss", "reward": "Training Reward", "completions/mean_length": "Mean Length"}


class RewardTable(NotebookProgressCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs or self.training_tracker is None or self.first_column != "Step":
            return  # a table with one row per epoch gets its rows from evaluations
        rewards = {name.split("/")[1]: name for name in logs if name.startswith("rewards/") and name.endswith("/mean")}
        shown = {column: name for name, column in COLUMNS.items()} | (rewards if len(rewards) > 1 else {})
        row = dict.fromkeys(self.training_tracker.inner_table[0], "No Log") | {"Step": state.global_step}
        self.training_tracker.write_line(row | {column: logs[name] for column, name in shown.items() if name in logs})
