"""The journal: every group of a round as it was scored, on the disk before it is trained on.

A run that is killed goes on from its last checkpoint; the rounds after it are in the journal, so that nothing is
sampled and no reward is called again. A file per rank and round:

    RUN/_journal/step-00000012/rank-00000.records

The first record says of which round and run it is, each further one holds a group: a table with a row per completion.
Beside them are the figures of the steps that were trained on it (`figures`), and in RUN/_journal the run's recipe: with
them `colograd replay` trains a round again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout, RoutedExperts
from ..data.images import ImageReader
from .figures import note_figures
from .pictures import at_pictures, pictures_bytes, with_pictures
from .record_file import Record, RecordFile, read_records

FOLDER = "_journal"  # transformers pushes no such name to the Hub
ASIDE = "_journal.old"
ABOUT = -1  # the position of the record that says what a file is about
SAMPLED = 1024  # entries of each parameter that a digest of the weights reads

# What reading bytes that no journal has written may raise.
NONSENSE = (
    AssertionError, AttributeError, IndexError, KeyError, MemoryError, OSError, OverflowError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip

TABLE = pa.schema(
    [
        ("input", pa.list_(pa.int32())),  # null: that of the first row
        ("completion", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampled", pa.list_(pa.bool_())),  # null: all
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("messages", pa.string()),  # JSON
        ("columns", pa.string()),  # JSON
        ("rewards", pa.list_(pa.float32())),
        ("example", pa.string()),  # a digest of the dataset's row
        ("logged", pa.string()),  # JSON, of the whole group: in the first row
    ]
)


# With `router_replay` (see `batch.RoutedExperts`). A prompt's are null where they are those of the row before.
EXPERTS = pa.schema(
    [pa.field("prompt", pa.binary()), pa.field("completion", pa.binary()), pa.field("shape", pa.list_(pa.int32()))]
)


class JournalError(ValueError):
    """What was recorded doesn't fit this run."""

    says_all = True  # see `process.tell_briefly`


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A group with its rewards, as it is before its advantages."""

    group: Group
    rewards: torch.Tensor  # [G, R] float32
    logged: Logged


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """What a round's records hold for: a digest of the weights that sampled it, and the settings of the run."""

    step: int
    weights: str  # empty: unknown, of a policy that is cut
    settings: Mapping[str, Any]


class Journal:
    """The records of one rank.

    Args:
        run_dir: the run's folder.
        rank: whose groups are recorded. All ranks' are read.
        settings: of the run, by name, as JSON has them: what was recorded with others isn't taken.
        reader: of a model that reads images: makes their pixels of the pictures that are recorded.
    """

    def __init__(
        self, run_dir: str | Path, rank: int, settings: Mapping[str, Any], reader: ImageReader | None = None
    ) -> None:
        self.folder, self.rank, self.reader = Path(run_dir) / FOLDER, rank, reader
        self.settings = json.loads(json.dumps(settings, default=str))
        self.problem = ""  # why the last records aren't on the disk, for people
        self.warning = ""  # what is odd about the round's records, likewise
        self.bytes, self.seconds = 0, 0.0  # written, and spent on it
        self._weights_are_read = True
        self._found: dict[int, bytes] = {}  # of the round, by position
        self._round: Path | None = None  # the present one's folder
        self._file: RecordFile | None = None
        self._unsafe = threading.Event()  # something was written that a failing machine would take along
        self._closing = threading.Lock()  # held while the file is made safe
        self._safety: threading.Thread | None = None

    def start_at_checkpoint(self) -> None:
        """What begins next has weights that come from the disk: they must be those that are recorded."""
        self._weights_are_read = True

    def begin(self, step: int, weights: str, evaluation: str = "") -> None:
        """Begin a round, or an evaluation, whose completions weights of ``step`` sample; `recall` then knows what was
        recorded of it.

        Args:
            weights: their digest (`digest_of`).
            evaluation: its name.

        Raises:
            JournalError: what is there was recorded with other settings, or sampled by other weights.
        """
        self._end_round()
        self._found.clear()
        self.problem = self.warning = ""
        self.seconds = 0.0  # an evaluation's are no round's
        about, folder = About(step, weights, self.settings), self._folder_of(step, evaluation)
        self._round = self._round if evaluation else folder
        for path, found, records in _files(folder):
            self._check_settings(found, path)
            self._check_weights(found, about, path)
            for record in records:
                self._found.setdefault(record.position, record.content)
        self._weights_are_read = False
        self._open(folder, about)

    def _open(self, folder: Path, about: About) -> None:
        try:
            self._file = RecordFile(folder / f"rank-{self.rank:05d}.records")
            if self._file.is_new:
                self._file.append(Record(ABOUT, json.dumps(dataclasses.asdict(about)).encode()))
        except OSError as error:
            self._file, self.problem = None, _problem(folder, error)

    def recall(self, prompts: Sequence[Prompt]) -> dict[int, Recorded]:
        """Those of the prompts' groups that were recorded, by position.

        Raises:
            JournalError: another prompt stood at that position.
        """
        return {
            prompt.position: _group_of(self._found[prompt.position], prompt, self.reader)
            for prompt in prompts
            if prompt.position in self._found
        }

    def add(self, recorded: Recorded) -> None:
        """Write a group: when this returns, it survives the process, and soon after the machine.

        Packing it takes a tenth of a microsecond per token, and the system's cache takes what is written; only waiting
        for the disk is left to a thread. What can't be written is said in `problem`; nothing is raised.
        """
        if self._file is None:
            return
        started = time.perf_counter()
        try:
            self.bytes += self._file.append(Record(recorded.group.position, _bytes_of(recorded)))
        except Exception as error:  # what can't be recorded is trained on all the same
            self.problem = _problem(self._file.path, error)
        else:
            if self._safety is None:
                self._safety = threading.Thread(target=self._make_safe, name="journal", daemon=True)
                self._safety.start()  # and looks at what it is only when there is something to do
            self._unsafe.set()
        self.seconds += time.perf_counter() - started

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step that was trained on the round."""
        if self._round is not None:
            try:
                note_figures(self._round, step, figures)
            except OSError as error:
                self.problem = _problem(self._round, error)

    def take_seconds(self) -> float:
        """What writing took since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def positions(self, step: int) -> set[int]:
        """Of the groups that are recorded of a round."""
        return {record.position for _, _, records in _files(self._folder_of(step, "")) for record in records}

    def has_groups(self, step: int) -> bool:
        """Whether a group is recorded of a round; a start that failed leaves none."""
        return any(next(records, None) is not None for _, _, records in _files(self._folder_of(step, "")))

    def recorded_settings(self) -> Mapping[str, Any]:
        """Those that the first file was recorded with; empty without one."""
        files = (found for _, folder in self._folders() for _, found, _ in _files(folder))
        return next((found.settings for found in files), {})

    def check_settings(self, step: int) -> None:
        """Whether what is recorded from ``step`` on was recorded with this run's settings.

        A file without a group is of a start that failed (by a reward that raised, say): it keeps nobody from changing
        settings, and is deleted.

        Raises:
            JournalError: it wasn't.
        """
        for number, folder in self._folders():
            if number >= step:
                for path, found, records in _files(folder):
                    if found.settings != self.settings and next(records, None) is None:
                        path.unlink(missing_ok=True)
                    else:
                        self._check_settings(found, path)

    def set_aside(self) -> Path | None:
        """Put what is recorded in the place of what was put aside before; where it is then, if there is anything."""
        if not self._folders():
            return None
        aside = self.folder.with_name(ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        self.folder.rename(aside)
        return aside

    def prune(self, before: int) -> None:
        """Delete the rounds before a step: checkpoints hold what came of them."""
        for step, folder in self._folders():
            if step < before:
                shutil.rmtree(folder, ignore_errors=True)

    def rounds(self) -> dict[int, Path]:
        """The folders of rounds, by the step of their weights, in order."""
        return {step: folder for step, folder in self._folders() if folder.name == f"step-{step:08d}"}

    def _folders(self) -> list[tuple[int, Path]]:
        """Those of rounds and evaluations."""
        found = [(re.match(r"step-(\d{8,12})(-|$)", path.name), path) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]), path) for match, path in found if match)

    def close(self) -> None:
        """End the file and the thread. Another round may begin afterwards."""
        self._end_round()
        thread, self._safety = self._safety, None
        if thread is not None:
            self._unsafe.set()
            thread.join()

    def _folder_of(self, step: int, evaluation: str) -> Path:
        suffix = f"-{re.sub(r'[^A-Za-z0-9_.]', '_', evaluation)}" if evaluation else ""
        return self.folder / f"step-{step:08d}{suffix}"

    def _end_round(self) -> None:
        with self._closing:
            if self._file is not None:
                self._flush(self._file)
                self._file.close()
                self._file = None

    def _make_safe(self) -> None:
        """The thread's, until `close` lets go of it."""
        while True:
            self._unsafe.wait()
            self._unsafe.clear()
            if threading.current_thread() is not self._safety:
                return
            with self._closing:
                if self._file is not None:
                    self._flush(self._file)

    def _flush(self, file: RecordFile) -> None:
        try:
            file.flush()
        except OSError as error:
            self.problem = _problem(file.path, error)

    def _check_settings(self, found: About, path: Path) -> None:
        for name in sorted(found.settings.keys() | self.settings.keys()):
            was, new = found.settings.get(name), self.settings.get(name)
            if was != new:
                raise JournalError(f"{path} was recorded with {name} {was!r}, but now it is {new!r}: {self._remedy}.")

    def _check_weights(self, found: About, now: About, path: Path) -> None:
        if found.step != now.step:
            raise JournalError(f"{path} says that it is of step {found.step}, but lies in step {now.step}'s folder.")
        if found.weights and now.weights and found.weights != now.weights:
            if self._weights_are_read:
                raise JournalError(
                    f"{path} was sampled by other weights than those of step {now.step} here: {self._remedy}."
                )
            self.warning = (
                f"journal: the weights of step {now.step} aren't bit for bit those that sampled what is recorded of it "
                "(a GPU's kernels may sum in another order); it is taken as it is"
            )

    @property
    def _remedy(self) -> str:
        return f"put it back, or move {self.folder} away (or set journal: off) to sample anew"


def _problem(path: Path, error: Exception) -> str:
    return (
        f"journal: {path} can't be written ({type(error).__name__}: {error}): the run goes on, but what isn't recorded "
        "would be sampled and scored again if it were killed"
    )


def _files(folder: Path) -> Iterator[tuple[Path, About, Iterator[Record]]]:
    """A round's files, what each is about, and its groups. One that was torn before that was written has none."""
    for path in sorted(folder.glob("rank-*.records")):
        records = read_records(path)
        with contextlib.suppress(FileNotFoundError):  # another rank deleted it
            if (head := next(records, None)) is not None:
                yield path, _about(head, path), records


def digest_of(model: torch.nn.Module) -> str:
    """A digest of up to 1,024 entries of each parameter, evenly spread; empty for a policy that is cut."""
    found = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            return ""
        flat = parameter.detach().reshape(-1)
        part = flat[:: max(1, flat.numel() // SAMPLED)].cpu().contiguous()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        found.update(part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _digest_of(example: Mapping[str, Any]) -> str:
    """Of a dataset's row. What JSON has no type for counts with its type, an image with its pixels too."""
    text = json.dumps(dict(example), sort_keys=True, default=_named)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _named(value: Any) -> str:
    name = type(value).__name__
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{name} {value.size} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    return name


def _about(record: Record, path: Path) -> About:
    try:
        assert record.position == ABOUT
        found = json.loads(record.content)
        return About(int(found["step"]), str(found["weights"]), dict(found["settings"]))
    except NONSENSE as error:
        raise JournalError(f"{path} is no file of this journal ({error!r}): move it away.") from None


def _bytes_of(recorded: Recorded) -> bytes:
    """A group as a table."""
    rollouts, first, logged = recorded.group.rollouts, recorded.group.rollouts[0].input, recorded.logged
    inputs = [list(r.input.ids) if not row or r.input != first else None for row, r in enumerate(rollouts)]
    columns = [
        pa.array(inputs, TABLE.field("input").type),
        _lists([np.frombuffer(r.completion_ids, dtype=np.int32) for r in rollouts]),
        _lists([r.sampler_logprobs.numpy() for r in rollouts]),
        pa.array([None if r.sampled.all() else r.sampled.numpy() for r in rollouts], TABLE.field("sampled").type),
        pa.array([r.finish_reason.value for r in rollouts]),
        pa.array([r.policy_version for r in rollouts], pa.int64()),
        pa.array([_json(r.messages) for r in rollouts]),
        pa.array([_json(dict(r.columns)) for r in rollouts]),
        _lists(list(recorded.rewards.float().numpy())),
        pa.array([_digest_of(recorded.group.example)] * len(rollouts)),
        pa.array([_json({"columns": logged.columns, "metrics": logged.metrics}), *[""] * (len(rollouts) - 1)]),
    ]
    table: bytes = pa.record_batch(columns, schema=TABLE).serialize().to_pybytes()
    return table + _experts_bytes(rollouts) + pictures_bytes(rollouts)


def _experts_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """A second table behind the first, where the engine told the experts of any token."""
    if all(rollout.experts is None for rollout in rollouts):
        return b""
    prompt: torch.Tensor | None = None
    rows: list[tuple[Any, Any, Any]] = []
    for experts in (rollout.experts for rollout in rollouts):
        if experts is None:
            rows.append((None, None, None))
            continue
        known = prompt is not None and torch.equal(prompt, experts.prompt)
        prompt = experts.prompt
        parts = (None if known else experts.prompt, experts.completion)
        first, second = (None if part is None else part.numpy().tobytes() for part in parts)
        rows.append((first, second, _shape_of(experts)))
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), EXPERTS, strict=True)]
    return bytes(pa.record_batch(columns, schema=EXPERTS).serialize().to_pybytes())


def _shape_of(experts: RoutedExperts) -> list[int]:
    """Layers, experts per token, and bytes of each number."""
    return [*experts.completion.shape[1:], experts.completion.element_size()]


def _experts_of(reader: Any, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The rollouts with what stands behind their table."""
    if reader.tell() == reader.size() or at_pictures(reader):
        return tuple(rollouts)
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), EXPERTS)
    batch.validate(full=True)
    found: list[Rollout] = []
    prompt: torch.Tensor | None = None
    for rollout, row in zip(rollouts, batch.to_pylist(), strict=True):
        if row["shape"] is not None:
            if row["prompt"] is not None:
                prompt = _numbers(row["prompt"], len(rollout.input), *row["shape"])
            assert prompt is not None and len(prompt) == len(rollout.input), "the prompt's experts are missing"
            experts = RoutedExperts(prompt, _numbers(row["completion"], len(rollout.completion_ids), *row["shape"]))
            rollout = dataclasses.replace(rollout, experts=experts)
        found.append(rollout)
    return tuple(found)


def _numbers(content: bytes, tokens: int, layers: int, chosen: int, width: int) -> torch.Tensor:
    """(tokens, layers, chosen) numbers of ``width`` bytes."""
    kind = {1: np.int8, 2: np.int16}[width]
    return torch.tensor(np.frombuffer(content, dtype=kind).reshape(tokens, layers, chosen))


def _group_of(content: bytes, prompt: Prompt, images: ImageReader | None = None) -> Recorded:
    """The same again.

    Raises:
        JournalError: of another prompt, or made by no journal.
    """
    where = f"the journal's group at position {prompt.position}"
    try:
        reader = pa.BufferReader(content)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), TABLE)
        batch.validate(full=True)
        assert batch.num_rows > 0, "no rows"
        asked = _input(batch.column("input")[0].as_py(), prompt)
        rollouts = _experts_of(reader, [_rollout(batch, row, asked, prompt) for row in range(batch.num_rows)])
        rollouts = with_pictures(reader, rollouts, images)
        rewards = torch.tensor(np.array(batch.column("rewards").to_pylist(), dtype=np.float32))
        assert rewards.dim() == 2, "rewards differ in number"
        logged = json.loads(batch.column("logged")[0].as_py())
        columns = {str(name): tuple(values) for name, values in logged["columns"].items()}
        metrics = {str(name): (float(total), int(count)) for name, (total, count) in logged["metrics"].items()}
        example = batch.column("example")[0].as_py()
    except (pa.ArrowException, *NONSENSE) as error:
        raise JournalError(f"{where} can't be read ({type(error).__name__}: {error}): move the journal away.") from None
    if example != _digest_of(prompt.example):
        raise JournalError(
            f"{where} is of another prompt: the dataset or its order has changed. Put it back, or move the journal "
            "away to sample anew."
        )
    return Recorded(Group(prompt.example, rollouts, prompt.position), rewards, Logged(columns, metrics))


def _input(ids: Sequence[int], prompt: Prompt) -> ModelInput:
    """What a rollout was asked, with the prompt's images, which the dataset has. Others are recorded (`pictures`)."""
    return prompt.input if tuple(ids) == prompt.input.ids else ModelInput(tuple(ids))


def _rollout(batch: pa.RecordBatch, row: int, asked: ModelInput, prompt: Prompt) -> Rollout:
    def of(name: str) -> Any:
        return batch.column(name)[row]

    ids = array("i", np.array(of("completion").values, dtype=np.int32).tobytes())
    logprobs = torch.tensor(np.array(of("logprobs").values, dtype=np.float32))
    sampled = torch.ones(len(ids), dtype=torch.bool)
    if of("sampled").is_valid:
        sampled = torch.tensor(of("sampled").as_py(), dtype=torch.bool)
    assert len(ids) == len(logprobs) == len(sampled) > 0, "lengths differ"
    return Rollout(
        _input(of("input").as_py(), prompt) if of("input").is_valid else asked,
        ids,
        logprobs,
        sampled,
        FinishReason(of("finish_reason").as_py()),
        int(of("policy_version").as_py()),
        tuple(json.loads(of("messages").as_py())),
        json.loads(of("columns").as_py()),
    )


def _lists(rows: Sequence[np.ndarray]) -> pa.Array:
    """Rows of numbers as one column, without a Python object per number."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _json(value: Any) -> str:
    """As JSON; what that has no type for, as its text, and a picture as its type and size."""
    with contextlib.suppress(TypeError, ValueError):
        return json.dumps(value)
    return json.dumps(
        value, default=lambda each: f"{type(each).__name__} {each.size}" if _is_picture(each) else str(each)
    )


def _is_picture(value: Any) -> bool:
    return hasattr(value, "tobytes") and isinstance(getattr(value, "size", None), tuple)
