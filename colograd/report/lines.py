"""A run's files, read as they grow: nothing outside of the run's folder, no line twice, no torn line."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_LINE = 64 * 2**20  # bytes; what is longer is no line that a run has written
BLOCK = 2**20


def open_inside(folder: Path, name: str) -> BinaryIO | None:
    """Open a regular file of a folder; None if there is none, or it is a link that leads out. Never waits (named
    pipes).
    """
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            return None
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle; ValueError: a zero byte
        return None
    if stat.S_ISREG(os.fstat(number).st_mode):
        return os.fdopen(number, "rb")
    os.close(number)
    return None


class Tail:
    """The lines of a file that are new since the last look."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.offset = 0  # of the first byte that wasn't part of a whole line
        self._inode = -1

    def restarted(self) -> bool:
        """Whether the file was replaced or became shorter since the last look, so that its lines are read anew."""
        if (file := open_inside(self.folder, self.name)) is None:
            return self.offset > 0
        with file:
            found = os.fstat(file.fileno())
        if (self._inode in (-1, found.st_ino)) and found.st_size >= self.offset:
            return False
        self.offset, self._inode = 0, -1
        return True

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Each new whole line, and where it begins; a last line without its end waits for the next look."""
        if (file := open_inside(self.folder, self.name)) is None:
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset)
            rest, skipping = b"", False
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    begin = self.offset
                    self.offset += len(line) + 1
                    if not skipping:
                        yield begin, line
                    skipping = False
                if len(rest) > LONGEST_LINE:
                    self.offset, rest, skipping = self.offset + len(rest), b"", True


def parse(line: bytes, beginning: bytes) -> dict[str, Any] | None:
    """A line's JSON object; None if it has none.

    Args:
        beginning: how each object begins. A killed run may leave a torn object before the next one, on one line.
    """
    for begin in (0, line.rfind(beginning)):
        if begin < 0:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line[begin:])
            return found if isinstance(found, dict) else None
    return None
