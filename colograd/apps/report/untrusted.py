"""Read a run's files, check their values, and limit the values' sizes. The files may come from anyone.

Only files inside the run's folder are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 2**20
LARGEST_STEP = 2**53  # JavaScript represents all smaller integers exactly.
LONGEST_TEXT = 4_000


def open_inside(folder: Path, name: str) -> BinaryIO | None:
    """Open a regular file in a folder. Return None if ``name`` is missing, another kind of file, or a link to outside.

    Opening never waits, even if ``name`` is a pipe.
    """
    root = folder.resolve()
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # Circular links and "\0" in a name raise.
        path = (root / name).resolve()
        if path.is_relative_to(root):
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            if stat.S_ISREG(os.fstat(number).st_mode):
                return os.fdopen(number, "rb")
            os.close(number)
    return None


class Tail:
    """Reads the lines that were appended to a file since the last read."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.offset = 0
        self._inode = -1

    def restarted(self) -> bool:
        if (file := open_inside(self.folder, self.name)) is None:
            return self.offset > 0
        with file:
            found = os.fstat(file.fileno())
        if (self._inode in (-1, found.st_ino)) and found.st_size >= self.offset:
            return False
        self.offset, self._inode = 0, -1
        return True

    def read(self) -> Iterator[bytes]:
        if (file := open_inside(self.folder, self.name)) is None:
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset)
            rest = b""
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    yield line
                    self.offset += len(line) + 1


def parse(line: bytes, beginning: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if there is none.

    A killed run may have left half a line, and the next run's event then follows on the same line. So if the line isn't
    valid JSON, parse the part of the line from the last occurrence of ``beginning`` (an event's first bytes) on.
    """
    for part in (line, line[max(line.rfind(beginning), 0) :]):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(part)
            return found if isinstance(found, dict) else None
    return None


def number(value: Any, digits: int = 5) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and abs(value) < LARGEST_STEP:
        return value
    try:
        found = float(f"{value:.{digits}g}")
    except OverflowError:
        return None
    if not math.isfinite(found):
        return None
    return int(found) if found.is_integer() and abs(found) < LARGEST_STEP else found


def whole(value: Any) -> int | None:
    found = number(value, 17)
    return found if isinstance(found, int) and 0 <= found < LARGEST_STEP else None


def text(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Return a text that UTF-8 can encode, cut to ``longest`` characters. Other types become an empty text."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= longest else value[:longest] + " …"
    return cut.encode(errors="replace").decode()


def texts(value: Any, most: int, longest: int) -> list[str]:
    return [text(item, longest) for item in items(value)[:most] if isinstance(item, str)]


def entries(value: Any, most: int, bounded: Callable[[Any], Any]) -> dict[str, Any]:
    return {text(str(name), 200): bounded(each) for name, each in list(mapping(value).items())[:most]}


def plain(value: Any, depth: int = 6) -> Any:
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return number(value, 12)
    if depth and isinstance(value, list):
        return [plain(item, depth - 1) for item in value[:256]]
    if depth and isinstance(value, dict):
        return entries(value, 512, lambda item: plain(item, depth - 1))
    return None if isinstance(value, (list, dict)) else text(str(value))


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
