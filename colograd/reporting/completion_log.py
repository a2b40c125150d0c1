"""The completions log: one parquet file per optimizer step and per evaluation, and tables for trackers.

Files are named as TRL names them (``completions/completions_00001.parquet``; those of an evaluation ``eval_00001``) and
have its columns, those that reward functions log with ``log_extra`` among them, and more: where a prompt stands in the
stream, token counts, how each completion ended, and of a model that reads images small pictures of them. Each row has
its prompt's, so that rows may be sorted and filtered; parquet's dictionaries store equal ones of ROWS rows once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from .completion_table import CompletionRow, as_utf8, chosen_rows, completion_rows, extra_names, print_table
from .log_columns import EXTRA_KEY, FIXED, FOLDER, IMAGES, IMAGES_KEY, NAMES_KEY, SIZES, TEXT, column_names, prompt_of
from .trackers import Trackers

if TYPE_CHECKING:  # `colograd show` reads a log without torch and transformers
    from transformers import TrainerState

    from ..batch import Group, ScoredGroup
    from ..config import GRPOConfig

ROWS = 256  # that are packed and written together
PACKING = 4096  # times that rows may be larger than their file
ROW_BYTES = 2048  # of a row's Python objects
LARGEST_LIST = 100_000  # entries in a file's description of itself
# What reading bytes that no log has written may raise, beside Arrow's own.
NONSENSE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError,
)  # fmt: skip
UPLOAD_MINUTES = 2  # as TRL
IMAGE_TYPE = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))  # of `datasets.Image`, several a row
# What makes `datasets`, and the viewer on the Hub, show them as images.
IMAGE_FEATURE = {"info": {"features": {IMAGES: {"feature": {"_type": "Image"}, "_type": "Sequence"}}}}


def completion_log_of(
    config: GRPOConfig, reward_names: Sequence[str], trackers: Trackers, images: bool
) -> CompletionLog | None:
    """A run's; None where completions aren't logged. images: whether its model reads some."""
    images = images and config.log_multimodal
    return CompletionLog(config, reward_names, trackers, images) if config.log_completions else None


class CompletionLog:
    """Writes what ``log_completions`` asks for."""

    def __init__(
        self,
        config: GRPOConfig,
        reward_names: Sequence[str],
        trackers: Trackers | None = None,
        images: bool = False,
    ) -> None:
        """images: whether prompts' images are logged."""
        self.config, self.names, self.images = config, list(reward_names), images
        self.trackers = Trackers(config.report_to or ()) if trackers is None else trackers
        self._texts: dict[int, list[bytes]] = {}  # of groups, by position, until they are logged
        self._uploads: Any = None
        if config.log_completions_hub_repo is not None and config.layout.is_main:
            self._uploads = _start_uploads(Path(str(config.output_dir)) / FOLDER, config)

    def keep(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None:
        """Take what was decoded for the rewards: a text is 5 bytes a token, and decoding it the most that is done."""
        self._texts |= {group.position: as_utf8(of_group) for group, of_group in zip(groups, texts, strict=True)}

    def _texts_of(self, groups: Sequence[ScoredGroup], decode: Callable[[Group], list[str]]) -> list[list[bytes]]:
        return [self._texts.get(scored.group.position) or as_utf8(decode(scored.group)) for scored in groups]

    def add(
        self, steps: Sequence[Sequence[ScoredGroup]], decode: Callable[[Group], list[str]], state: TrainerState
    ) -> None:
        """Log the completions of a round, of all ranks: a collective.

        Args:
            steps: this rank's groups of each of the round's optimizer steps.
            decode: a group's texts, where they weren't kept.
            state: as it is before the round.
        """
        config = self.config
        every = config.log_completions_steps or max(int(state.logging_steps), 1)
        for step, groups in enumerate(steps, start=state.global_step + 1):
            rows = self._rows(groups, decode, step)
            if not config.layout.is_main:
                continue
            write_log(str(config.output_dir), rows, self.names, step, images=self.images)
            if (step - 1) % every == 0:
                self._show(rows, f"Step {step}", "completions")
        self._texts.clear()  # those of groups that no step took, too

    def add_evaluation(
        self, groups: Sequence[ScoredGroup], decode: Callable[[Group], list[str]], state: TrainerState, name: str
    ) -> None:
        """Log the completions of an evaluation, which have no advantages: a collective.

        Args:
            groups: this rank's.
            decode: a group's texts, where they weren't kept.
            state: whose step it is done after.
            name: its metrics' prefix, and the file's.
        """
        step = state.global_step
        found = self._rows(groups, decode, step)
        self._texts.clear()
        rows = [dataclasses.replace(row, advantage=math.nan) for row in found]
        if self.config.layout.is_main and rows:
            write_log(str(self.config.output_dir), rows, self.names, step, re.sub(r"[^\w.-]", "_", name), self.images)
            self._show(rows, f"Step {step}, {name}", f"{name}_completions")

    def _show(self, rows: Sequence[CompletionRow], title: str, key: str) -> None:
        """Print the table, and send it to the trackers."""
        config = self.config
        sent = chosen_rows(rows, None, config.log_unique_prompts)
        if self.trackers:
            texts = {TEXT: [row.completion for row in sent]}
            pictures = {IMAGES: [row.thumbnails for row in sent]} if self.images else {}
            self.trackers.table(key, columns(sent, self.names, self.images) | texts, pictures)
        print_table(rows, self.names, title, config.num_completions_to_print, config.log_unique_prompts)

    def _rows(
        self, groups: Sequence[ScoredGroup], decode: Callable[[Group], list[str]], step: int
    ) -> list[CompletionRow]:
        """The rows of all ranks, by position."""
        from ..parallel.ranks import gather

        parts = gather(completion_rows(groups, self._texts_of(groups, decode), step, self.images))
        return sorted((row for part in parts for row in part), key=lambda row: row.position)

    def close(self) -> None:
        """Wait until what is to go to the Hub is there."""
        if self._uploads is not None:
            self._uploads.trigger().result()
            self._uploads.stop()


def _start_uploads(folder: Path, config: GRPOConfig) -> Any:
    """Begin to send a folder's complete files to ``log_completions_hub_repo``, every two minutes, from a thread."""
    from huggingface_hub import CommitScheduler

    folder.mkdir(parents=True, exist_ok=True)
    return CommitScheduler(
        repo_id=str(config.log_completions_hub_repo),
        repo_type="dataset",
        folder_path=folder,
        every=UPLOAD_MINUTES,
        private=config.hub_private_repo,
        token=config.hub_token,
        allow_patterns=["*.parquet"],
    )


def columns(rows: Sequence[CompletionRow], reward_names: Sequence[str], images: bool = False) -> dict[str, list[Any]]:
    """Rows as columns, texts as UTF-8; a reward function's column has its name, and so has one that was logged.

    images: have the column of images' sizes; that of small pictures isn't among these.
    """
    found = {name: [row.text if name == TEXT else getattr(row, name) for row in rows] for name in FIXED}
    if images:
        found[SIZES] = [list(row.sizes) for row in rows]
    extra = extra_names(rows)
    of_rewards, of_extra = column_names(reward_names, extra, images)
    for index, column in enumerate(of_rewards):
        found[column] = [row.rewards[index] for row in rows]
    for name, column in zip(extra, of_extra, strict=True):
        found[column] = _storable([row.extra.get(name) for row in rows])
    return found


def _storable(values: list[Any]) -> list[Any]:
    """The values, or their texts where parquet has no type for them all."""
    try:
        pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return [None if value is None else str(value) for value in values]
    return values


def write_log(
    run_dir: str | Path,
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    step: int,
    kind: str = "completions",
    images: bool = False,
) -> Path:
    """Write a step's completions, or those of an evaluation after it; a file is complete or not there.

    Prompts that parquet has no type for (messages of different shapes) are written as JSON. Where there are `images`,
    the file has their columns, empty for a row without one.
    """
    data = columns(rows, reward_names, images)
    data[TEXT] = pa.array(data[TEXT], pa.string())
    try:
        table = pa.table(data)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        table = pa.table(data | {"prompt": [json.dumps(prompt) for prompt in data["prompt"]]})
    named: dict[bytes, Any] = {NAMES_KEY: list(reward_names), EXTRA_KEY: extra_names(rows)}
    if images:
        table = table.set_column(table.column_names.index(SIZES), SIZES, pa.array(data[SIZES], pa.list_(pa.string())))
        named |= {IMAGES_KEY: [IMAGES, SIZES], b"huggingface": IMAGE_FEATURE}
    table = table.replace_schema_metadata({key: json.dumps(names).encode() for key, names in named.items()})
    folder = Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{step:05d}.parquet"
    aside = path.with_suffix(".partial")
    if images:
        _write_with_images(table, rows, aside)
    else:
        pq.write_table(table, aside, row_group_size=ROWS, write_page_checksum=True)
    os.replace(aside, path)
    return path


def _write_with_images(table: pa.Table, rows: Sequence[CompletionRow], path: Path) -> None:
    """Write a table and its rows' small pictures, which Arrow repeats for each row: so of some rows at a time."""
    schema = table.schema.append(pa.field(IMAGES, IMAGE_TYPE))
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as file:
        for first in range(0, max(len(rows), 1), ROWS):
            small = [[{"bytes": each, "path": None} for each in row.thumbnails] for row in rows[first : first + ROWS]]
            part = table.slice(first, ROWS).append_column(schema.field(IMAGES), pa.array(small, IMAGE_TYPE))
            file.write_table(part)


def read_log(path: Path) -> tuple[list[CompletionRow], list[str]]:
    """The rows of a file, without their small pictures, and the names of their rewards.

    Raises:
        ValueError: it is damaged, isn't one, or would take more memory than `_most_bytes` allows.
    """
    try:
        with pq.ParquetFile(path, thrift_container_size_limit=LARGEST_LIST, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            names, extra = (_names(metadata.get(key, b"[]")) for key in (NAMES_KEY, EXTRA_KEY))
            images = IMAGES_KEY in metadata
            return [_row(row, names, extra, images) for row in _raw_rows(file, _most_bytes(path), images)], names
    except (pa.ArrowException, *NONSENSE) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} can't be read ({type(error).__name__}: {reason}): it is damaged, or no completions log. Show "
            "another step, or bring it back from a copy."
        ) from None


def _most_bytes(path: Path) -> int:
    """That a file's rows may take: some more than its packing can save, and no more than half of what is free."""
    return min(PACKING * path.stat().st_size + 2**26, psutil.virtual_memory().available // 2)


def _raw_rows(file: pq.ParquetFile, most: int, images: bool) -> Iterator[dict[str, Any]]:
    """A file's rows, of which some hundred are in memory at once; what those seen so far take is counted.

    images: whether it has small pictures, which are left where they are.
    """
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    taken = 0
    if sum(group.total_byte_size for group in groups) > most:
        raise ValueError("it says that it holds more than can be packed into it")
    if "dictionary<" in str(file.schema_arrow.types):  # whose rows take more than can be counted before they are there
        raise TypeError("a column is packed as no log's is")
    read = [name for name in file.schema_arrow.names if name != IMAGES] if images else None
    for batch in file.iter_batches(batch_size=ROWS, columns=read, use_threads=False):
        taken += batch.nbytes + ROW_BYTES * batch.num_rows
        if taken > most:
            raise ValueError(f"its rows take more than {most:,} bytes")
        yield from batch.to_pylist()


def _row(row: dict[str, Any], names: Sequence[str], extra: Sequence[str], images: bool) -> CompletionRow:
    of_rewards, of_extra = column_names(names, extra, images)
    return CompletionRow(
        step=int(row["step"]),
        position=int(row["position"]),
        prompt_tokens=int(row["prompt_tokens"]),
        completion_tokens=int(row["completion_tokens"]),
        prompt=prompt_of(row["prompt"]),
        text=row[TEXT].encode(),
        finish_reason=str(row["finish_reason"]),
        advantage=float(row["advantage"]),
        rewards=tuple(math.nan if row[column] is None else float(row[column]) for column in of_rewards),
        extra={name: row[column] for name, column in zip(extra, of_extra, strict=True)},
        sizes=tuple(map(str, row[SIZES] or ())) if images else (),
    )


def _names(said: bytes) -> list[str]:
    names = json.loads(said)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{said[:50]!r} are no names of columns")
    return names


def logged_steps(run_dir: Path) -> dict[int, Path]:
    """The steps whose completions a run has logged, in order."""
    paths = {path.stem.removeprefix("completions_"): path for path in (run_dir / FOLDER).glob("completions_*.parquet")}
    return dict(sorted((int(number), path) for number, path in paths.items() if number.isdigit()))
