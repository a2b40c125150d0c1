"""Completions of a step: samples that were recorded token by token, and rows of the completions log."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...extensions.recording.completions import FOLDER, IMAGES, TEXT, CompletionFile, data_url, prompt_of
from ...rollout.record_file import heads, read_records
from ...runtime.sizes import THUMBNAIL_BYTES, THUMBNAILS
from .untrusted import entries, items, mapping, number, open_inside, plain, text, whole

SAMPLES = "_report/samples.records"
MOST_SAMPLE_BYTES = 2**28
LONGEST_TEXT = 200_000
MOST_TOKENS = 4096
MOST_TURNS = 1024
MILLI = 1000  # A page gets log-probabilities as whole numbers of thousandths.
PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]{1,8000}={0,2}")
_FILE = re.compile(r"(.{1,100})_(\d{1,12})\.parquet")


class Samples:
    """Finds a run's completions by step. Only `of_step` reads them from their files, because they may be large."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[int, dict[str, str]] = defaultdict(dict)  # Step -> purpose -> file of the completions log.
        self.stored: set[int] = set()  # Steps with completions that were recorded token by token.
        self._offset = 0

    @property
    def steps(self) -> list[int]:
        return sorted({*self.stored, *self.files})

    def refresh(self) -> list[int]:
        """Look for new completions in the run's folder. Return their steps."""
        touched = []
        with contextlib.suppress(OSError):
            for path in os.scandir(self.folder / FOLDER):
                match = _FILE.fullmatch(path.name)
                if match and match[1] not in self.files[int(match[2])]:
                    touched.append(int(match[2]))
                    self.files[touched[-1]][match[1]] = path.name
        if (file := open_inside(self.folder, SAMPLES)) is not None:
            with file:
                start = self._offset if self._offset <= os.fstat(file.fileno()).st_size else 0
                for step, length, _, _ in heads(file, start):
                    self._offset = file.tell() + length
                    if whole(step) is not None:
                        touched.append(step)
                        self.stored.add(step)
        return touched

    def of_step(self, step: int, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
        """Return the completions of whole groups, and the number of omitted completions.

        A group is omitted if its estimated size exceeds the rest of ``most_bytes``. The first group is never omitted.
        """
        groups: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}  # (Purpose, position) -> index -> completion.
        for found in self._recorded(step):
            groups.setdefault((found["purpose"], found["position"]), {})[found["index"]] = found
        for purpose, name in sorted(self.files.get(step, {}).items()):
            if (file := open_inside(self.folder, f"{FOLDER}/{name}")) is not None:
                with file, contextlib.suppress(Exception):  # A bad file can raise any error.
                    for found in _rows(file, "train" if purpose == "completions" else text(purpose, 100)):
                        groups.setdefault((found["purpose"], found["position"]), {}).setdefault(found["index"], found)
        kept: list[dict[str, Any]] = []
        room = most_bytes
        for group in groups.values():  # Groups that were recorded token by token come first.
            size = sum(map(_size, group.values()))
            if not kept or size <= room:
                room -= size
                kept += group.values()
        kept.sort(key=lambda found: (found["purpose"] != "train", found["purpose"], found["position"], found["index"]))
        return kept, sum(map(len, groups.values())) - len(kept)

    def _recorded(self, step: int) -> Iterator[dict[str, Any]]:
        if step in self.stored and (file := open_inside(self.folder, SAMPLES)) is not None:
            with file:
                for record in read_records(file, lambda at: at == step, MOST_SAMPLE_BYTES):
                    with contextlib.suppress(Exception):  # A run's files may come from anyone and contain anything.
                        yield from filter(None, map(_recorded, json.loads(record.content)))


def _size(found: dict[str, Any]) -> int:
    return 400 + len(found["text"]) + 16 * len(found.get("tokens", ())) + sum(map(len, found.get("images", ())))


def _checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "position": whole(entry.get("position")) or 0,
        "index": whole(entry.get("index")) or 0,
        "purpose": text(entry.get("purpose"), 100) or "train",
        "prompt": _prompt(entry.get("prompt")),
        "text": text(entry.get("text"), LONGEST_TEXT),
        "length": whole(entry.get("length")),
        "finish": text(entry.get("finish"), 20),
        "reward": number(entry.get("reward")),
        "rewards": entries(entry.get("rewards"), 64, number),
        "advantage": number(entry.get("advantage"), 4),
        "extra": plain(mapping(entry.get("extra"))),
    }
    images = items(entry.get("images"))[: 2 * THUMBNAILS]
    pictures = [image for image in images if isinstance(image, str) and PICTURE.fullmatch(image)]
    return found | ({"images": pictures} if pictures else {})


def _recorded(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return a completion that was recorded token by token, or None if one of its tokens isn't a string.

    A list of values per token, e.g. log-probabilities, is left out if it is shorter than the list of tokens.
    """
    tokens = items(entry.get("tokens"))[:MOST_TOKENS]
    if not all(isinstance(token, str) for token in tokens):
        return None
    many, given = len(tokens), entry.get("advantage")
    advantages = [number(value, 4) for value in (given[:many] if isinstance(given, list) else [given])]
    finite = [value for value in advantages if value is not None]
    mean = sum(finite) / len(finite) if finite else None
    optional = {
        "sampler": _milli(entry.get("sampler"), many),
        "trainer": _milli(entry.get("trainer"), many),
        "advantages": advantages if len(advantages) == many and len(set(advantages)) > 1 else None,
        "mask": _bits(entry.get("mask"), many),
        "sampled": _bits(entry.get("sampled"), many),
        "messages": _prompt(entry.get("messages")) if isinstance(entry.get("messages"), list) else None,
        "session": _session(entry.get("session")),
        "cut": True if entry.get("cut") is True else None,
    }
    return {
        **_checked({**entry, "text": "", "length": many, "advantage": mean}),  # `text` is empty, as `tokens` has it.
        "key": text(entry.get("key"), 64),
        "tokens": [text(token, 200) for token in tokens],
        **{name: value for name, value in optional.items() if value is not None},
    }


def _milli(values: Any, many: int) -> list[int | None] | None:
    given = items(values)
    if len(given) < many or not many:
        return None
    found = [number(value, 12) for value in given[:many]]
    return [None if value is None else round(max(min(value, 1e6), -1e6) * MILLI) for value in found]


def _bits(values: Any, many: int) -> str | None:
    """Join [1, 0, 1] into "101". Return None if all values are 1, or if there are fewer values than ``many``."""
    given = items(values)[:many]
    if len(given) < many or all(value == 1 for value in given):
        return None
    return "".join("1" if value == 1 else "0" for value in given)


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return text(value, LONGEST_TEXT)
    messages = (message for message in items(value)[:256] if isinstance(message, dict))
    return [entries(each, 16, lambda v: text(v, LONGEST_TEXT) if isinstance(v, str) else plain(v)) for each in messages]


def _session(value: Any) -> list[dict[str, Any]] | None:
    """Return the model's replies in an agent's session. A reply's ``after`` is the index of the reply it continues."""
    found: list[dict[str, Any]] = []
    for turn in map(mapping, items(value)[:MOST_TURNS]):
        after = whole(turn.get("after"))
        shown: dict[str, Any] = {"after": after if after is not None and after < len(found) else None}
        shown |= {name: number(turn.get(name)) for name in ("prompt_tokens", "tokens", "began", "seconds")}
        shown |= {"messages": _prompt(turn.get("messages") or []), "reply": _prompt([turn.get("reply")])}
        found.append(shown | {"finish": text(turn.get("finish"), 20), "trained": turn.get("trained") is not False})
    return found or None


def _rows(opened: BinaryIO, purpose: str) -> Iterator[dict[str, Any]]:
    """Yield the completions in a file of Colograd's or TRL's completions log."""
    file = CompletionFile(opened, os.fstat(opened.fileno()).st_size)
    places: dict[int, int] = defaultdict(int)  # Position of a group -> index of its next completion.

    # Prompt -> its first row's index, which replaces the position that TRL's files lack.
    prompts: dict[str, int] = {}
    for at, (row, values, extra) in enumerate(file.rows(pictures=True)):
        prompt, written = prompt_of(row.get("prompt")), row.get(TEXT)
        position = whole(row.get("position"))
        if position is None:
            position = prompts.setdefault(json.dumps(_prompt(prompt)), at)
        rewards = dict(zip(file.reward_names, values, strict=True))
        pictures = [mapping(value).get("bytes") for value in items(row.get(IMAGES))] if file.has_images else []
        small = [each for each in pictures if isinstance(each, bytes) and len(each) <= THUMBNAIL_BYTES]
        contents = (str(message.get("content") or "") for message in items(_prompt(written)))
        known = [value for value in map(number, rewards.values()) if value is not None]
        found = {"position": position, "index": places[position], "purpose": purpose, "prompt": prompt}
        found |= {"length": row.get("completion_tokens"), "finish": row.get("finish_reason")}
        found |= {"reward": math.fsum(known) if len(known) == 1 else None, "advantage": row.get("advantage")}
        found |= {"rewards": rewards, "extra": extra, "images": [*map(data_url, small)]}
        yield _checked(found | {"text": written if isinstance(written, str) else "\n".join(contents)})
        places[position] += 1
