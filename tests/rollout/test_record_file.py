"""Record files, and groups as records: torn, changed or hostile records are dropped or give one clear error."""

from __future__ import annotations

import random
import struct
import zlib
from array import array
from pathlib import Path

import pytest
import torch

from colograd.batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout
from colograd.rollout import record_file, store
from colograd.rollout.record_file import HEAD, MAGIC, Record, RecordFile, read_records
from colograd.rollout.store import JournalError, RewardedGroup, RolloutStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = RecordFile(tmp_path / "some.records")
    for position in range(3):
        file.append(Record(position, bytes([position]) * (100 + position)))
    file.flush()
    file.close()
    return tmp_path / "some.records"


def contents(path: Path) -> list[tuple[int, int]]:
    return [(record.position, len(record.content)) for record in read_records(path)]


def test_whole_records_are_read_and_a_torn_one_is_dropped_and_overwritten(path: Path) -> None:
    assert contents(path) == [(0, 100), (1, 101), (2, 102)]
    whole = path.read_bytes()
    for cut in range(len(MAGIC), len(whole)):
        path.write_bytes(whole[:cut])
        assert contents(path) == [(0, 100), (1, 101), (2, 102)][: len(contents(path))] and len(contents(path)) < 3
    path.write_bytes(whole[:-1])
    file = RecordFile(path)
    file.append(Record(7, b"seven"))
    file.close()
    assert contents(path) == [(0, 100), (1, 101), (7, 5)]


def test_records_that_pack_to_nothing_or_not_at_all_are_read_too(tmp_path: Path) -> None:
    given = [b"", b"x", bytes(10_000_000), random.Random(0).randbytes(1000)]
    file = RecordFile(tmp_path / "f")
    for content in given:
        file.append(Record(1, content))
    file.close()
    assert [record.content for record in read_records(tmp_path / "f")] == given


def test_a_changed_byte_ends_what_is_read_before_it(path: Path) -> None:
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
        found = contents(path)
        assert found == [(0, 100), (1, 101), (2, 102)][: len(found)] and len(found) < 3


def test_a_header_that_claims_too_much_takes_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = record_file.pa.Codec

    class Codec:
        def __init__(self, name: str) -> None:
            self.real = real(name)

        def decompress(self, data: bytes, decompressed_size: int, asbytes: bool) -> bytes:
            asked.append(decompressed_size)
            return self.real.decompress(data, decompressed_size=decompressed_size, asbytes=asbytes)

    monkeypatch.setattr(record_file.pa, "Codec", Codec)
    for length, size in ((2**32 - 1, 10), (20, 2**31), (20, 2**32 - 1), (20, 90_000)):
        packed = b"x" * 20
        bare = HEAD.pack(0, length, size, 0)
        path.write_bytes(MAGIC + HEAD.pack(0, length, size, zlib.crc32(packed, zlib.crc32(bare))) + packed)
        assert contents(path) == []
    assert max(asked, default=0) <= 20 * record_file.GROWTH


def test_what_is_no_such_file_has_no_records(tmp_path: Path) -> None:
    for content in (b"", b"hello", struct.pack("<q", 1) * 50):
        (tmp_path / "f").write_bytes(content)
        assert contents(tmp_path / "f") == []


# -- groups


PROMPT = Prompt({"prompt": "2 + 2 =", "answer": "4"}, ModelInput((11, 12, 13)), 5)


def made_up() -> RewardedGroup:
    rollouts = tuple(
        Rollout(
            ModelInput((11, 12, 13)) if index < 2 else ModelInput((11, 12, 13, 14)),
            array("i", range(100, 100 + length)),
            -torch.rand(length),
            torch.tensor([index == 0 or i % 2 == 0 for i in range(length)]),
            FinishReason.LENGTH if index else FinishReason.STOP,
            3,
            ({"role": "assistant", "content": "é \U0001f600"},) if index else (),
            {"steps": [1, None]} if index else {},
        )
        for index, length in enumerate((3, 1, 40))
    )
    rewards = torch.tensor([[1.0, float("nan")], [0.25, 2.0], [0.0, -1.0]])
    logged = Logged({"note": ("a", None, "c")}, {"share": (1.5, 3)})
    return RewardedGroup(Group(PROMPT.example, rollouts, PROMPT.position), rewards, logged)


def recalled(folder: Path, prompt: Prompt = PROMPT) -> RewardedGroup:
    found = RolloutStore(folder, 0, {"seed": 1})
    found.begin(3, "weights")
    try:
        return found.recall([prompt])[prompt.position]
    finally:
        found.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kept = RolloutStore(tmp_path, 0, {"seed": 1})
    kept.begin(3, "weights")
    kept.add(made_up())
    kept.close()
    assert not kept.problem
    return tmp_path


def test_a_group_is_the_same_again(folder: Path) -> None:
    expected, found = made_up(), recalled(folder)
    assert torch.equal(found.rewards.nan_to_num(7), expected.rewards.nan_to_num(7)) and found.logged == expected.logged
    assert found.group.example is PROMPT.example and found.group.position == 5
    for mine, theirs in zip(found.group.rollouts, expected.group.rollouts, strict=True):
        for name in ("input", "completion_ids", "finish_reason", "policy_version", "messages", "columns"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.completion_ids.typecode == "i" and mine.sampler_logprobs.dtype == torch.float32
        assert torch.equal(mine.sampled, theirs.sampled)
    with pytest.raises(JournalError, match="position 5 is of another prompt"):
        recalled(folder, Prompt({"prompt": "2 + 3 ="}, PROMPT.input, 5))


def test_a_hostile_group_is_one_clear_error_or_dropped(folder: Path) -> None:
    """The record's checksum is right, but its content was forged."""
    (path,) = folder.glob("_journal/step-*/rank-*.records")
    about, group = read_records(path)
    draw, errors = random.Random(0), 0
    for _ in range(400):
        content = bytearray(group.content)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.unlink()
        file = RecordFile(path)
        file.append(about)
        file.append(Record(5, bytes(content)))
        file.close()
        try:
            found = recalled(folder)
        except JournalError as error:
            errors += 1
            assert "position 5" in str(error)
        else:
            assert len(found.group.rollouts) == 3
    assert errors > 50


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"step": "x"}', b"[" * 5_000, b'{"step": 3, "weights": "", "settings": 5}']
)
def test_a_file_that_says_nonsense_about_itself_is_named(folder: Path, content: bytes) -> None:
    (path,) = folder.glob("_journal/step-*/rank-*.records")
    path.unlink()
    file = RecordFile(path)
    file.append(Record(store.ABOUT, content))
    file.close()
    with pytest.raises(JournalError, match=r"rank-00000.records is foreign: .*Only files of the journal"):
        recalled(folder)


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    class Full(RecordFile):
        def append(self, record: Record) -> None:
            raise OSError(28, "No space left on device")

    kept = RolloutStore(tmp_path, 0, {})
    kept.begin(3, "")
    kept.open_files[""].__class__ = Full
    kept.add(made_up())
    assert "No space left on device" in kept.problem and "the run goes on" in kept.problem
    kept.close()
