"""A checkpoint that differs from its manifest is refused, with the file and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colograd.checkpoint import manifest
from colograd.checkpoint.folders import ASIDE, check, commit, complete_steps
from colograd.checkpoint.manifest import MANIFEST, Damaged
from colograd.checkpoint.search import find_damage
from colograd.parallel.layout import RankLayout

FILES = {
    "model.safetensors": b"w" * 1000,
    "optimizer-00000-of-00002.safetensors": b"o" * 500,
    "optimizer-00001-of-00002.safetensors": b"p" * 500,
    "rng_state_0.pth": b"r" * 50,
    "trainer_state.json": b"{}",
    "below/config.json": b"{}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A committed checkpoint with its manifest."""
    aside = tmp_path / ASIDE / "checkpoint-3"
    for name, content in FILES.items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(content)
    commit(aside, tmp_path / "checkpoint-3", {name: manifest.entry_of(aside / name) for name in FILES})
    return tmp_path / "checkpoint-3"


def test_all_files_but_itself_are_in_it(folder: Path) -> None:
    files = manifest.read(folder)
    assert files is not None and files.keys() == FILES.keys()
    assert {name: entry.size for name, entry in files.items()} == {name: len(data) for name, data in FILES.items()}
    assert check(folder)
    (folder / "added.txt").write_text("somebody's notes")
    assert check(folder), "what was added later is nobody's business"


def test_checkpoint_without_trainer_state_is_still_checked(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()
    assert complete_steps(str(folder.parent)) == [3]
    with pytest.raises(ValueError, match=r"trainer_state\.json is missing"):
        check(folder)


def test_without_one_nothing_is_checked(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert manifest.read(folder) is None and not check(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "was changed after it was written"),
        (lambda data: data[:-1], "has .* bytes, but .* were written"),
        (lambda data: data + b" ", "has .* bytes, but .* were written"),
        (None, "is missing"),
    ],
    ids=["flipped", "truncated", "longer", "missing"],
)
def test_a_damaged_file_is_named(folder: Path, name: str, damage: Any, said: str) -> None:
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(ValueError, match=f"checkpoint-3 is damaged: {name} {said}") as caught:
        check(folder)
    assert "\n" not in str(caught.value)


def test_folder_with_a_files_name_counts_as_missing(folder: Path) -> None:
    (folder / "rng_state_0.pth").unlink()
    (folder / "rng_state_0.pth").mkdir()
    with pytest.raises(ValueError, match=r"rng_state_0\.pth is missing"):
        check(folder)


GOOD = {"size": 2, "xxh3_128": "0"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "can't be read"),
        ("\xff", "can't be read"),
        ("[" * 100_000, "can't be read"),
        ("[]", "has no object `files`"),
        (json.dumps({"version": 1, "files": []}), "has no object `files`"),
        (json.dumps({"version": 2, "files": {}}), "has version 2, but this Colograd reads manifests of version 1"),
        (json.dumps({"version": 1, "files": {"../../etc/passwd": GOOD}}), "may name only files in the checkpoint's"),
        (json.dumps({"version": 1, "files": {"/etc/passwd": GOOD}}), "may name only files in the checkpoint's"),
        (json.dumps({"version": 1, "files": {"a/../../b": GOOD}}), "may name only files in the checkpoint's"),
        (json.dumps({"version": 1, "files": {"": GOOD}}), "may name only files in the checkpoint's"),
        (json.dumps({"version": 1, "files": {"a\0b": GOOD}}), "may name only files in the checkpoint's"),
        (json.dumps({"version": 1, "files": {"a": 3}}), "lacks a valid size or checksum of a"),
        (json.dumps({"version": 1, "files": {"a": GOOD | {"size": -1}}}), "lacks a valid size or checksum of a"),
        (json.dumps({"version": 1, "files": {"a": GOOD | {"size": True}}}), "lacks a valid size or checksum of a"),
        (json.dumps({"version": 1, "files": {"a": GOOD | {"xxh3_128": 7}}}), "lacks a valid size or checksum of a"),
        (" " * (manifest.LARGEST + 1), "more than any manifest needs"),
    ],
)
def test_a_hostile_manifest_is_one_clear_error(folder: Path, text: str, said: str) -> None:
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=f"{MANIFEST} .*{said}"):
        manifest.read(folder)


@pytest.mark.parametrize(("apart", "readers"), [(False, 1), (True, 2)])
def test_ranks_share_the_work_and_leave_nothing_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, apart: bool, readers: int
) -> None:
    """With separate folders the ranks of each node check all files, else all ranks together."""
    names: list[str] = []
    monkeypatch.setattr(manifest, "check", lambda folder, files, to_read: names.extend(to_read))
    for rank in range(4):
        find_damage(str(folder), RankLayout(rank, 4, ranks_per_node=2), apart, None)  # type: ignore[arg-type]
    assert sorted(names) == sorted([*FILES] * readers)
