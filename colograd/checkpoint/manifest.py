"""A checkpoint's manifest: the size and checksum of each of its files, written last and checked before any is read.

The checksum is XXH3 (128 bits): it finds what disks, networks and copies do to a file, at the speed of memory. It is no
signature: whoever may write into the folder may write a manifest that fits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import xxhash

MANIFEST = "manifest.json"
VERSION = 1
LARGEST = 2**24  # bytes of a manifest: a hundred thousand files
CHUNK = 2**24  # bytes that are read at a time
OF_A_RANK = re.compile(r"(?:optimizer-(\d+)-of-\d+|rng_state_(\d+)|lengths_(\d+)|in_flight_(\d+))\.\w+")


class Damaged(ValueError):
    """A checkpoint isn't what was written; the text says which file and why, in one line."""


class Entry(NamedTuple):
    """A file as it was written."""

    size: int
    checksum: str  # hexadecimal


Manifest = Mapping[str, Entry]  # by path in the folder, with slashes


def entry_of(path: Path) -> Entry:
    """Of a file, by reading it."""
    size, hashed = 0, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            hashed.update(chunk)
            size += len(chunk)
    return Entry(size, hashed.hexdigest())


def files_of(folder: Path) -> list[str]:
    """The paths of all files below a folder, but for its manifest."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def as_text(files: Manifest) -> str:
    """What goes into the manifest's file."""
    entries = {name: {"size": size, "xxh3_128": checksum} for name, (size, checksum) in sorted(files.items())}
    return json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n"


def read(folder: Path) -> Manifest | None:
    """A checkpoint's manifest; None: an older version wrote it, without one.

    Raises:
        Damaged: it is unreadable, or names something outside of the folder.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        if path.stat().st_size > LARGEST:
            raise Damaged(f"{MANIFEST} has {path.stat().st_size:,} bytes, more than any checkpoint's")
        said = json.loads(path.read_text())
        return {_inside(name): _entry(name, value) for name, value in _entries(said).items()}
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{MANIFEST} can't be read ({error})") from None


def _entries(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict) or not isinstance(said.get("files"), dict):
        raise Damaged(f"{MANIFEST} has no list of files")
    if said.get("version") != VERSION:
        raise Damaged(f"{MANIFEST} has version {said.get('version')!r}, and this Colograd reads version {VERSION}")
    files: dict[str, Any] = said["files"]
    return files


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or path.as_posix() != name:
        raise Damaged(f"{MANIFEST} names {name!r}, which is no file of the folder")
    return name


def _entry(name: str, value: Any) -> Entry:
    size, checksum = (value.get("size"), value.get("xxh3_128")) if isinstance(value, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(checksum, str):
        raise Damaged(f"{MANIFEST} has no size and checksum of {name}")
    return Entry(size, checksum)


def check(folder: Path, files: Manifest, to_read: Iterable[str] | None = None) -> None:
    """Compare a folder with its manifest: sizes of all files, checksums of those ``to_read`` (default: of all).

    Raises:
        Damaged: the first file that differs.
    """
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if (present := path.stat().st_size) != size:
            raise Damaged(f"{name} has {present:,} bytes, and {size:,} were written")
    for name in files if to_read is None else to_read:
        try:
            found = entry_of(folder / name).checksum
        except OSError as error:
            raise Damaged(f"{name} can't be read ({os.strerror(error.errno or 0)})") from None
        if found != files[name].checksum:
            raise Damaged(f"{name} was changed after it was written (its checksum differs)")


def shares(files: Iterable[str], rank: int, ranks: int, ranks_per_node: int, apart: bool) -> list[str]:
    """The files whose checksums this rank compares, so that each node reads once what its ranks will load.

    Args:
        apart: nodes have folders of their own, with the files of their own ranks.
    """
    first = rank - rank % ranks_per_node  # of this node
    mine = []
    for index, name in enumerate(sorted(files)):
        of_rank = None if apart else OF_A_RANK.fullmatch(name)
        number = None if of_rank is None else int(next(filter(None, of_rank.groups())))
        if (first + index % ranks_per_node if number is None else number % ranks) == rank:
            mine.append(name)
    return mine
