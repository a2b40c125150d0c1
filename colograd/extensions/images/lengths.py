"""Token counts of rows with images, before training.

A processor takes up to half a second for one row (SmolVLM's cuts an image into 13 tiles of 512 x 512 pixels). Most
processors can compute the number of tokens from an image's size. A few rows are processed to check these counts; if one
is wrong, all rows are processed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
from datasets import Dataset

from ...parallel import watchdog
from ...runtime.process import cpu_threads

Row = dict[str, Any]
PROBES = 4  # processed rows of different lengths, in addition to the first, shortest and longest row
AT_ONCE = 4  # rows per thread that have their images in memory
SAID_AFTER = 10.0  # seconds between two progress lines


def image_lengths(
    rows: Dataset,
    load: Callable[[Row, int], Row],
    counted: Callable[[Row, int], int | None],
    processed: Callable[[Row, int], int],
    tell: Callable[[str], None],
) -> list[int]:
    """Return the number of tokens of each row.

    Args:
        load: decodes a row's images, in threads; raises if one is broken.
        counted: the tokens of a decoded row by its images' sizes, or None if the processor can't compute them.
        processed: the tokens of a row as it will be trained on.
        tell: receives progress lines if counting takes long.
    """
    found = _counted(rows, load, counted, tell)
    if found is not None:
        of_each: dict[int, int] = {}  # length -> its first row
        for row, length in enumerate(found):
            of_each.setdefault(length, row)
        probes = sorted({0, of_each[min(found)], of_each[max(found)], *[*of_each.values()][:PROBES]})
        if all(processed(rows[row], row) == found[row] for row in probes):
            return found
    tell("images: the processor can't tell numbers of tokens by images' sizes alone, so each row is processed")
    return [processed(rows[row], row) for row in _marked(range(len(rows)), len(rows), tell)]


def _counted(
    rows: Dataset, load: Callable[[Row, int], Row], counted: Callable[[Row, int], int | None], tell: Callable
) -> list[int] | None:
    lengths, size = [], AT_ONCE * cpu_threads()
    raw = rows.with_format(None)
    raw.info.features = _undecoded(raw.features)  # images as bytes and paths
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


def _marked(rows: range, total: int, tell: Callable[[str], None]) -> Iterator[int]:
    """Yield the rows, and pass a progress line to ``tell`` every `SAID_AFTER` seconds."""
    last = time.monotonic()
    for row in rows:
        watchdog.progress("the prompts' images")
        if time.monotonic() - last > SAID_AFTER:
            last = time.monotonic()
            tell(f"reading images: {row:,} of {total:,} rows")
        yield row


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return type(feature)({name: _undecoded(part) for name, part in feature.items()})
    return feature
