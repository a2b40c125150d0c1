"""Log of completions: files, a printed table, and tables in trackers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerState

from ...batch import Group, ScoredGroup
from ...config import GRPOConfig
from ...parallel.ranks import gather
from .completions import FOLDER, IMAGES, TEXT, CompletionRow, chosen_rows, columns, print_table, write_log
from .group_views import as_utf8, completion_rows
from .trackers import Spare, Trackers

UPLOAD_MINUTES = 2  # minutes between uploads to the Hub, as in TRL
PROBLEM = "log_completions: some completions can't be logged"


class CompletionLog:
    def __init__(
        self,
        config: GRPOConfig,
        reward_names: Sequence[str],
        trackers: Trackers | None = None,
        images: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._spare = Spare(warn)
        self.config, self.names, self.images = config, list(reward_names), images and config.log_multimodal
        self.trackers = Trackers(config.report_to or ()) if trackers is None else trackers
        self._texts: dict[int, list[bytes]] = {}  # a group's position -> its completions in UTF-8
        self._uploads: Any = None
        if config.log_completions_hub_repo is not None and config.layout.is_main:
            from huggingface_hub import CommitScheduler

            folder = Path(str(config.output_dir)) / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            hub = {"repo_id": config.log_completions_hub_repo, "repo_type": "dataset", "token": config.hub_token}
            hub |= {"private": config.hub_private_repo, "allow_patterns": ["*.parquet"]}
            self._uploads = CommitScheduler(folder_path=folder, every=UPLOAD_MINUTES, **hub)

    def keep(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None:
        """Keep the texts that were decoded for rewards. Decoding them again would be the slowest part of logging."""
        self._texts |= {group.position: as_utf8(of_group) for group, of_group in zip(groups, texts, strict=True)}

    def add(
        self, steps: Sequence[Sequence[ScoredGroup]], decode: Callable[[Group], list[str]], state: TrainerState
    ) -> None:
        """Log the completions of optimizer steps. All ranks must call, because the main one gathers the rows."""
        config = self.config
        every = config.log_completions_steps or max(int(state.logging_steps), 1)
        for step, groups in enumerate(steps, start=state.global_step + 1):
            rows = self._rows(groups, decode, step)
            if not config.layout.is_main:
                continue
            with self._spare(PROBLEM):
                write_log(str(config.output_dir), rows, self.names, step, images=self.images)
                if (step - 1) % every == 0:
                    self._show(rows, f"Step {step}", "completions", self.names)
        self._texts.clear()  # also deletes texts of groups that no step logs

    def add_evaluation(
        self,
        groups: Sequence[ScoredGroup],
        decode: Callable[[Group], list[str]],
        state: TrainerState,
        name: str,
        reward_names: Sequence[str] | None = None,
    ) -> None:
        """Log an evaluation's completions. All ranks must call, because the main one gathers the rows."""
        names, step = self.names if reward_names is None else reward_names, state.global_step
        rows = [dataclasses.replace(row, advantage=math.nan) for row in self._rows(groups, decode, step)]
        self._texts.clear()
        if self.config.layout.is_main and rows:
            with self._spare(PROBLEM):
                write_log(str(self.config.output_dir), rows, names, step, re.sub(r"[^\w.-]", "_", name), self.images)
                self._show(rows, f"Step {step}, {name}", f"{name}_completions", names)

    def _show(self, rows: Sequence[CompletionRow], title: str, key: str, names: Sequence[str]) -> None:
        config = self.config
        if self.trackers:
            sent = chosen_rows(rows, None, config.log_unique_prompts)
            texts = {TEXT: [row.completion for row in sent]}
            pictures = {IMAGES: [row.thumbnails for row in sent]} if self.images else {}
            self.trackers.table(key, columns(sent, names, self.images) | texts, pictures)
        if config.num_completions_to_print != 0:
            print_table(rows, names, title, config.num_completions_to_print, config.log_unique_prompts)

    def _rows(
        self, groups: Sequence[ScoredGroup], decode: Callable[[Group], list[str]], step: int
    ) -> list[CompletionRow]:
        own: list[CompletionRow] = []
        with self._spare(PROBLEM):  # after an error, too, this rank must call `gather`: the others wait there
            texts = [self._texts.get(scored.group.position) or as_utf8(decode(scored.group)) for scored in groups]
            own = completion_rows(groups, texts, step, self.images)
        return sorted((row for part in gather(own) for row in part), key=lambda row: row.position)

    def close(self) -> None:
        if self._uploads is not None:
            with self._spare("log_completions_hub_repo: the last files aren't uploaded"):
                self._uploads.trigger().result()
                self._uploads.stop()


def log_of(trainer: Any) -> CompletionLog | None:
    if not trainer.args.log_completions:
        return None
    names, images = [reward.name for reward in trainer.rewards], trainer.policy.processor is not None
    log = CompletionLog(trainer.args, names, trainer.recorder.trackers, images, trainer.console.warn)
    trainer.closing.callback(log.close)
    return log
