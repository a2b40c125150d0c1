"""The manifest of a checkpoint (`manifest.json`): size and checksum of each file.

The checksum XXH3 (128 bits) detects damage by disks, networks and copies at the speed of memory. It is no signature:
whoever changes a file can also change the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import xxhash

MANIFEST = "manifest.json"
VERSION = 1
LARGEST = 2**24  # Maximum bytes of a manifest: enough for a hundred thousand files.
CHUNK = 2**24


class Damaged(ValueError):
    """A checkpoint's manifest is invalid, or a file differs from it."""


class Entry(NamedTuple):
    size: int
    checksum: str  # checksum (128-bit XXH3) in hexadecimal


Manifest = Mapping[str, Entry]  # files' entries, by path in the checkpoint (with slashes)


def entry_of(path: Path) -> Entry:
    size, digest = 0, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Entry(size, digest.hexdigest())


def files_of(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST)


def as_text(files: Manifest) -> str:
    entries = {name: {"size": size, "xxh3_128": checksum} for name, (size, checksum) in sorted(files.items())}
    return json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n"


def read(folder: Path) -> Manifest | None:
    """Read a checkpoint's manifest. None: an older version wrote the checkpoint."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        if path.stat().st_size > LARGEST:
            raise Damaged(f"{MANIFEST} has {path.stat().st_size:,} bytes, more than any manifest needs")
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
            raise Damaged(f"{MANIFEST} has no object `files`, which lists the checkpoint's files")
        if content.get("version") != VERSION:
            version = content.get("version")
            raise Damaged(f"{MANIFEST} has version {version!r}, but this Colograd reads manifests of version {VERSION}")
        files = {}
        for name, value in content["files"].items():
            inside = PurePosixPath(name)
            if not name or "\0" in name or inside.is_absolute() or ".." in inside.parts or inside.as_posix() != name:
                raise Damaged(f"{MANIFEST} names {name!r}, but may name only files in the checkpoint's folder")
            size, checksum = (value.get("size"), value.get("xxh3_128")) if isinstance(value, dict) else (None, None)
            if type(size) is not int or size < 0 or not isinstance(checksum, str):
                raise Damaged(f"{MANIFEST} lacks a valid size or checksum of {name}")
            files[name] = Entry(size, checksum)
        return files
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{MANIFEST} can't be read ({error})") from None


def check(folder: Path, files: Manifest, to_read: Iterable[str] | None = None) -> None:
    """Raise `Damaged` if a file's size or checksum differs from the manifest's entry.

    Sizes are compared for all files, checksums only for the files ``to_read`` (None: all files)."""
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if (present := path.stat().st_size) != size:
            raise Damaged(f"{name} has {present:,} bytes, but {size:,} were written")
    for name in files if to_read is None else to_read:
        try:
            checksum = entry_of(folder / name).checksum
        except OSError as error:
            raise Damaged(f"{name} can't be read ({os.strerror(error.errno or 0)})") from None
        if checksum != files[name].checksum:
            raise Damaged(f"{name} was changed after it was written (its checksum differs)")
