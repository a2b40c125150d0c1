"""How many tokens rows with images have, before training.

A processor takes up to half a second for one row (SmolVLM's cuts an image into 13 tiles of 512 x 512 pixels). Most can
tell from an image's size how many tokens it will have. That they are right is seen on some rows that are processed;
where they aren't, all are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
from datasets import Dataset

from ..parallel import watchdog
from ..runtime.process import cpu_threads

Row = dict[str, Any]
PROBES = 4  # rows of different lengths that are processed, beside the first, the shortest and the longest
AT_ONCE = 4  # rows per thread whose images are in memory
SAID_AFTER = 10.0  # seconds


def image_lengths(
    rows: Dataset,
    load: Callable[[Row, int], Row],
    counted: Callable[[Row, int], int | None],
    processed: Callable[[Row, int], int],
    tell: Callable[[str], None],
) -> list[int]:
    """The number of tokens of each row.

    Args:
        load: a row with its images decoded, which is done in threads; raises where one is broken.
        counted: of such a row, by its images' sizes; None: the processor can't tell.
        processed: as it will be trained on.
        tell: is told how far it is where it takes long.

    Raises:
        ValueError: what these find, of the first row that has it.
    """
    found = _counted(rows, load, counted, tell)
    if found is not None and all(processed(rows[row], row) == found[row] for row in _probes(found)):
        return found
    tell("images: the processor can't tell numbers of tokens by images' sizes alone, so each row is processed")
    return [processed(rows[row], row) for row in _marked(range(len(rows)), len(rows), tell)]


def _counted(
    rows: Dataset, load: Callable[[Row, int], Row], counted: Callable[[Row, int], int | None], tell: Callable
) -> list[int] | None:
    lengths, size = [], AT_ONCE * cpu_threads()
    raw = undecoded(rows)
    with ThreadPoolExecutor(cpu_threads()) as threads:
        for first in _marked(range(0, len(raw), size), len(raw), tell):
            part = raw[first : first + size]
            numbers = range(first, first + len(part["prompt"]))
            each = [{name: of[row - first] for name, of in part.items()} for row in numbers]
            for row, loaded in zip(numbers, threads.map(load, each, numbers), strict=True):
                if (length := counted(loaded, row)) is None:
                    return None
                lengths.append(length)
    return lengths


def _probes(lengths: list[int]) -> list[int]:
    """Rows to process: the first, the shortest, the longest and some of further lengths."""
    of_each: dict[int, int] = {}
    for row, length in enumerate(lengths):
        of_each.setdefault(length, row)
    return sorted({0, of_each[min(lengths)], of_each[max(lengths)], *[*of_each.values()][:PROBES]})


def _marked(rows: range, total: int, tell: Callable[[str], None]) -> Iterator[int]:
    """The rows, of which is told now and then how many are done."""
    last = time.monotonic()
    for row in rows:
        watchdog.progress("the prompts' images")
        if time.monotonic() - last > SAID_AFTER:
            last = time.monotonic()
            tell(f"reading images: {row:,} of {total:,} rows")
        yield row


def undecoded(rows: Dataset) -> Dataset:
    """The same rows, with images as bytes and paths."""
    found = rows.with_format(None)
    found.info.features = _undecoded(found.features)
    return found


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return type(feature)({name: _undecoded(part) for name, part in feature.items()})
    return feature
