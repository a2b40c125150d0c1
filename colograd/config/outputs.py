"""A run's output files: checkpoints, the rollout log, and logs for people."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from transformers import TrainingArguments

from .knob import knob, recording


@dataclass
class SavingKnobs(TrainingArguments):
    """Checkpoints."""

    save_in_background: bool = knob(
        True,
        "Write checkpoints from a copy in host memory while training goes on. Where something needs the files at once "
        "(a push to the Hub, a callback's `on_save`), or the memory for the copy isn't there, training waits for them.",
    )
    save_failures: int = knob(
        3,
        "Checkpoints in a row that can't be written (a full disk, say) before the run ends with the error.",
        at_least=1,
    )

    def resolve_saving(self, nodes_are_apart: bool) -> None:
        """Resolve ``save_on_each_node``: it is also on if nodes share no file system."""
        self.save_on_each_node: bool = self.save_on_each_node or nodes_are_apart


@dataclass
class JournalKnobs:
    """The journal."""

    journal: str | None = knob(
        None,
        "Record every group when it is scored (`_journal/` in the run's folder), so that a resumed run neither samples "
        "nor scores it again. `until_checkpoint`: what the last two checkpoints have made needless is deleted; `keep`: "
        "nothing is; `off`. Unset: `until_checkpoint` in a run that saves checkpoints.",
        one_of=("off", "until_checkpoint", "keep"),
        spellings={"false": "off"},
    )

    rescore: bool = knob(
        False,
        "Score the recorded samples of a resumed run's first round again, as the reward functions have changed since. "
        "Without it a change is an error, as recorded rewards are of the old code.",
    )

    @property
    def keeps_journal(self) -> bool:
        """Whether groups are recorded."""
        return self.journal != "off"

    def _resolve_journal(self, saves: bool) -> None:
        if self.journal is None:
            self.journal = "until_checkpoint" if saves else "off"


TRACKERS = ("wandb", "trackio", "tensorboard")  # `report_to` names them by their packages


@dataclass
class LogKnobs:
    """Logs."""

    log_completions: bool = recording(
        False,
        "Write every completion to `completions/completions_<step>.parquet` (`colograd show` prints it), print a "
        "sample now and then, and send that step's to wandb or trackio. Of an evaluation too.",
    )
    log_completions_steps: int | None = recording(
        None, "Steps between two tables, printed and sent; default `logging_steps`."
    )
    num_completions_to_print: int | None = recording(
        None, "Rows of the printed table; default all, 0 prints none.", at_least=0
    )
    log_completions_hub_repo: str | None = recording(
        None, "A dataset on the Hub to which the files of `log_completions` go, every two minutes."
    )
    log_multimodal: bool = recording(
        True, "Have small pictures of prompts' images in the completions log and in the tables that trackers get."
    )
    log_unique_prompts: bool = recording(False, "Show and send one completion per prompt only.")
    report: bool = recording(
        True,
        "Record for the report of the run: metrics of every step, what happens inside rollouts and alarms "
        "(`_report/` in its folder; see docs/metrics.md), and some groups token by token (`_journal/`). When training "
        "ends, `report.html` is made of it; `colograd watch` shows it meanwhile (see docs/metrics.md).",
    )
    report_groups: int = recording(
        2,
        "Groups of each step that are recorded token by token: the one whose rewards differ most, then the one where "
        "the sampler and the trainer differ most. 0: none.",
        at_least=0,
    )
    verbose: bool = knob(False, "Let vLLM and transformers log as they like.")

    def resolve_replay(self) -> None:
        """Record nothing: a replay leaves the run's folder as it is."""
        self.report = False

    def _check_trackers(self) -> None:
        """Refuse a tracker that isn't installed: transformers would do so after the model is loaded."""
        for name in getattr(self, "report_to", None) or ():
            if name in TRACKERS and name not in sys.modules and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"report_to has {name!r}, but the package {name} isn't installed: pip install {name}, or take it "
                    "out (report_to: none; the run's own report needs no tracker)."
                )
