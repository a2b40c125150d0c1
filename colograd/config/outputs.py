"""Settings of a run's output files: checkpoints, the rollout log (`_journal/`), and logs for people."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

from .knob import knob, recording

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # Worker processes ignore these signals (worker_process.py).


@dataclass
class SavingKnobs(TrainingArguments):
    """Settings of checkpoints, of the rollout log, and of signals that stop the run."""

    save_in_background: bool = knob(True)
    """Write checkpoints from a copy in host memory while training goes on. Training waits if files are needed at once
    (a push to the Hub, a callback's `on_save`) or memory for the copy is missing."""
    save_failures: int = knob(3, at_least=1)
    """Checkpoints in a row that can't be written (e.g. a full disk) before the run ends with the error."""
    stop_signals: list[str] = knob([*STOP_SIGNALS], one_of=STOP_SIGNALS)
    """Signals that stop the run with a checkpoint at the end of the round, as Ctrl-C does. A second one, more than two
    seconds later, ends it at once."""
    stop_within: float | None = knob(None, above=0)
    """Seconds from such a signal to the end of the process. A round that can't end in time is cut: decoding stops, a
    checkpoint of the last finished round is written, and the rollout log has the scored groups. Unset: the round is
    finished, or cut before SLURM_JOB_END_TIME, or within torchrun's TORCH_ELASTIC_SHUTDOWN_TIMEOUT (30 s) after
    SIGTERM. Set it to less than a scheduler's grace period."""
    exit_status_after_stop: int | None = knob(
        None, at_least=0, at_most=255, remedy="143 is the status of a process that SIGTERM ended"
    )
    """Exit status of `colograd train` after such a stop. Unset: 143 where SLURM_JOB_ID, KUBERNETES_SERVICE_HOST or a
    variable of SkyPilot is set, since schedulers take 0 for a finished job; else 0. While the trainer is built or a
    finished model is saved: 143 everywhere. A finished training: 0."""
    journal: str | None = knob(None, one_of=("off", "until_checkpoint", "keep"), spellings={"false": "off"})
    """Record every scored group in `_journal/`, so that a resumed run neither samples nor scores it again.
    `until_checkpoint`: delete rounds before the last two checkpoints; `keep`: delete nothing; `off`. Unset:
    `until_checkpoint` in a run that saves checkpoints."""
    rescore: bool = knob(False)
    """Score the recorded samples of a resumed run's first round again, after reward functions changed. Without it such
    a change is an error."""

    def resolve_saving(self, nodes_are_apart: bool) -> None:
        self.save_on_each_node: bool = self.save_on_each_node or nodes_are_apart

    @property
    def keeps_journal(self) -> bool:
        return self.journal != "off"


TRACKERS = ("wandb", "trackio", "tensorboard")  # A tracker needs the package of its name.


@dataclass
class LogKnobs:
    """Settings of logs and the report."""

    log_completions: bool = recording(False)
    """Write every completion to `completions/completions_<step>.parquet` (`colograd show` prints it), print a sample
    now and then, and send it to wandb or trackio. Evaluations too."""
    log_completions_steps: int | None = recording(None)
    """Steps between two printed and sent tables; default `logging_steps`."""
    num_completions_to_print: int | None = recording(None, at_least=0)
    """Rows of the printed table; default all, 0: no table."""
    log_completions_hub_repo: str | None = recording(None)
    """A dataset on the Hub that gets the files of `log_completions` every two minutes."""
    log_multimodal: bool = recording(True)
    """Keep small pictures of prompts' images in the completions log and the trackers' tables."""
    log_unique_prompts: bool = recording(False, "Show and send one completion per prompt.")
    report: bool = recording(True)
    """Record the run for its report (`_report/`, with some groups token by token), and write `report.html` at the end;
    `colograd watch` shows it during training (see docs/metrics.md)."""
    report_groups: int = recording(2, at_least=0)
    """Groups of each step that are recorded token by token: first the largest reward difference, then the largest
    difference of sampler and trainer. 0: none."""
    verbose: bool = knob(False, "Show the logs of vLLM and transformers.")

    def resolve_replay(self) -> None:
        """Turn off the report for a replay, which writes nothing into the run's folder."""
        self.report = False
