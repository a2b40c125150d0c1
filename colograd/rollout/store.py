"""`RolloutStore`: every scored group of a round, on the disk before it is trained on.

A killed run continues from its last checkpoint. The rounds after the checkpoint are in the store, so that nothing is
sampled and no reward is called again. Each rank appends to one file per round or evaluation:

    RUN/_journal/step-00000012/rank-00000.records     an `About`, the groups, notes for the report
    RUN/_journal/step-00000012/rank-00000.shown       after pruning, or with `journal: off`: groups with notes
    RUN/_journal/step-00000012/rank-00000.unscored    with `rescore`: groups that are scored again
    RUN/_journal/step-00000012/steps.jsonl            loss and gradient norm of the round's steps (`figures`)
    RUN/_journal/recipe.yaml                          the run's recipe, for `colograd replay`

Extensions have further files in a round's folder (`RolloutStore.note_beside`, `open_beside`).

Resume and replay read `.records` (`recall`). The report reads `.records` and `.shown` (`group_table`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import torch

from ..batch import Group, Prompt
from ..checkpoint.folders import move_aside
from .group_records import NONSENSE, JournalError, RewardedGroup, digest_of_example, group_bytes, group_of
from .group_table import NOTES, SHOWN, keep_shown, reduced
from .record_file import Record, RecordFile, read_records

FOLDER = "_journal"  # transformers doesn't push names like this to the Hub
UNSCORED = ".unscored"  # suffix of a file with groups that are scored again
RECIPE = "recipe.yaml"
# Settings with the reward functions' names, and with digests of their sources.
REWARD_FUNCS, REWARD_CODE = "reward_funcs", "reward_code"
F = TypeVar("F")
ABOUT = -1  # position of a file's first record, an `About`
SAMPLED = 1024  # about how many entries of each parameter a digest of the weights reads


@dataclass(frozen=True, slots=True)
class About:
    """The first record of a round's file: the weights that sampled the round, and the settings of the run."""

    step: int  # optimizer step of the weights
    weights: str  # digest of the weights that sampled; empty if unknown, as for a sharded policy
    settings: Mapping[str, Any]


@dataclass(slots=True)
class _OpenFile:
    records: RecordFile
    positions: set[int]  # positions of the groups in the file
    digests: dict[int, str] = field(default_factory=dict)  # position -> digest of the dataset's row


class RolloutStore:
    """The recorded rollouts of one rank.

    Args:
        run_dir: the run's folder.
        rank: this rank. It writes its own groups, and reads the groups of all ranks.
        settings: the run's settings, JSON-serializable.
        of_samples: names of the settings that a round's samples depend on. The other settings only affect training.
        reader: the run's reader of prompts with media (`data.prompts.PromptReader`), which recorded media need.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        settings: Mapping[str, Any],
        reader: Any = None,
        of_samples: Collection[str] = (),
    ) -> None:
        self.folder, self.rank, self.reader, self.of_samples = Path(run_dir) / FOLDER, rank, reader, of_samples
        self.settings = json.loads(json.dumps(settings, default=str))
        self.problem = ""  # message: why the last records aren't on the disk
        self.warning = ""  # message: an oddity in the round's records
        self.bytes, self.seconds = 0, 0.0  # bytes written, seconds spent on writing
        self._weights_are_read = True
        self._found: dict[int, bytes] = {}  # recorded groups of the round, by position
        self._unscored: dict[int, bytes] = {}  # groups of the round that are scored again
        self._round: Path | None = None  # folder of the current round
        self._open_files: dict[str, _OpenFile] = {}  # by the evaluation's name, or "" for the round
        self._newest = ""  # key of the open file that `add` writes
        self._beside: dict[Any, Any] = {}  # extensions' files of the current round or evaluation, by their class
        self._place: tuple[Path, dict[str, Any]] | None = None  # folder and `About` of the current round or evaluation
        self._pruned = 0  # rounds before this step were pruned
        self._unsafe = threading.Event()  # set: the machine's failure would lose written records
        self._closing = threading.Lock()  # held while files are flushed to the disk
        self._safety: threading.Thread | None = None

    # -- writing

    def start(self, step: int, is_writer: bool, rescore: bool = False) -> list[str]:
        """Prepare for a run that continues from ``step``, with weights from the disk. Return messages for the console.

        Rounds after the checkpoint that were recorded with other settings move aside, as they hold samples of weights
        that this run won't have. The first of these rounds stays if its samples don't depend on the changed settings.
        """
        self._weights_are_read = True
        if not is_writer:
            return []
        lines, others, changed = list[str](), list[Path](), dict[str, tuple[Any, Any]]()
        for number, folder in self._folders():
            if number < step or not (found := self._changed(folder)):
                continue
            rewards_changed = bool(found.keys() & {REWARD_CODE, REWARD_FUNCS})
            if rewards_changed and not rescore:
                was, now = found.get(REWARD_CODE, ({}, {}))
                names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
                raise JournalError(
                    f"{folder} has rewards of functions that have changed since ({', '.join(names) or 'their names'}): "
                    "set rescore: true to score its samples again, set journal: off to sample anew, or restore the old "
                    "code."
                )
            changed |= found
            if number == step and folder == self.round_folder(step) and not found.keys() & set(self.of_samples):
                if rewards_changed:
                    for path in folder.glob("rank-*.records"):
                        path.rename(path.with_suffix(UNSCORED))
                    lines.append(f"journal: the samples of {folder.name} are kept, and scored again (rescore)")
            else:
                others.append(folder)
        if others:
            aside = move_aside(self.folder.parent, others)
            settings = ", ".join(f"{name} {was!r:.60}, now {now!r:.60}" for name, (was, now) in changed.items())
            lines.append(
                f"journal: {len(others)} round(s) or evaluations after step {step} were recorded with other settings "
                f"({settings}): they are in {aside} now, and are sampled anew"
            )
        rounds = [recorded for recorded in self.rounds() if recorded >= step and self.has_groups(recorded)]
        if rounds:
            lines.append(
                f"journal: {len(rounds)} round(s) are recorded, from step {rounds[0]} to {rounds[-1]}: their groups "
                "are neither sampled nor scored again"
            )
        return lines

    def _changed(self, folder: Path) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ from a recorded round, as name -> (recorded value, current value). A file
        without groups comes from a failed start. Its settings don't count, and if they differ it is deleted."""
        changed: dict[str, tuple[Any, Any]] = {}
        for path, found, records in files_of(folder):
            if differences := self._differences(found):
                if next(records, None) is None:
                    path.unlink(missing_ok=True)
                else:
                    changed |= differences
        return changed

    def _differences(self, found: About) -> dict[str, tuple[Any, Any]]:
        names = sorted(found.settings.keys() | self.settings.keys())
        if REWARD_CODE not in found.settings:  # recorded by an older version
            names = [name for name in names if name != REWARD_CODE]
        pairs = {name: (found.settings.get(name), self.settings.get(name)) for name in names}
        return {name: (was, now) for name, (was, now) in pairs.items() if was != now}

    def keep_recipe(self, recipe: str | None) -> str:
        """Write the run's recipe (YAML; None: no recipe) next to its records. Return a message if that fails."""
        path = self.folder / RECIPE
        try:
            if recipe is None:
                path.unlink(missing_ok=True)  # an earlier run's recipe
                return ""
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(".partial")
            aside.write_text(recipe, encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            return f"journal: {path} can't be written ({error}): `colograd replay` will need the recipe (--config)"
        return ""

    def begin(self, step: int, weights: str, evaluation: str = "") -> str:
        """Begin a round or an evaluation, sampled by the weights of ``step``. Then `recall` has its recorded groups.

        Returns:
            A message on problems with these records, or with the last round's.
        """
        self._end(self._open_files.keys() - ({""} if evaluation else set()))
        self._found.clear()
        self._unscored.clear()
        problem, self.problem, self.warning = self.problem, "", ""
        self.seconds = 0.0  # an evaluation's seconds don't count for a round
        about, folder = About(step, weights, self.settings), self.round_folder(step, evaluation)
        self._round = self._round if evaluation else folder
        own: set[int] = set()
        for path, found, records in files_of(folder):
            self._check_settings(found, path)
            self._check_weights(found, about, path)
            for record in records:
                self._found.setdefault(record.position, record.content)
                if path.name == self._file_name:
                    own.add(record.position)
        for _, _, records in files_of(folder, UNSCORED):
            self._unscored |= {record.position: record.content for record in records}
        self._weights_are_read = False
        self._close_beside()
        self._place = folder, dataclasses.asdict(about)
        self._open(folder, about, evaluation, own)
        return problem or self.problem or self.warning

    def _open(self, folder: Path, about: About, evaluation: str, own: set[int]) -> None:
        self._newest = evaluation
        try:
            file = RecordFile(folder / self._file_name)
            self._open_files[evaluation] = _OpenFile(file, own)
            if file.is_new:
                file.append(Record(ABOUT, json.dumps(dataclasses.asdict(about)).encode()))
        except OSError as error:
            self._open_files.pop(evaluation, None)
            self.problem = _problem(folder, error)

    def add(self, recorded: RewardedGroup) -> None:
        """Write a group to the system's cache, so that it survives the end of this process. A thread flushes it to the
        disk soon after. Packing takes a tenth of a microsecond per token. Errors aren't raised, but noted in
        `problem`."""
        if (file := self._open_files.get(self._newest)) is not None:
            started = time.perf_counter()
            self._append(file, recorded)
            self.seconds += time.perf_counter() - started

    def _append(self, file: _OpenFile, recorded: RewardedGroup) -> None:
        try:
            position = recorded.group.position
            content = group_bytes(recorded, file.digests.get(position, ""))
            self.bytes += file.records.append(Record(position, content))
        except Exception as error:  # a group that can't be recorded is still trained on
            self.problem = _problem(file.records.path, error)
            return
        file.positions.add(recorded.group.position)
        if self._safety is None:
            self._safety = threading.Thread(target=self._make_safe, name="journal", daemon=True)
            self._safety.start()
        self._unsafe.set()

    def show(self, notes: Mapping[str, Any], groups: Sequence[RewardedGroup]) -> None:
        """Keep some groups of a step for the report, for as long as the run's folder exists; see `group_table`. Groups
        that aren't in the round's file yet are written too, e.g. in a run without a journal."""
        step, training = notes["step"], notes["purpose"] == "train"
        evaluation = "" if training else notes["purpose"]
        record = Record(NOTES - step, json.dumps(notes, default=str).encode())
        if (file := self._open_files.get(evaluation)) is not None:
            for recorded in groups:
                if recorded.group.position not in file.positions:
                    self._append(file, recorded)
            file.records.append(record)
            return
        folder = self.round_folder(step - 1 if training else step, evaluation)
        with contextlib.closing(RecordFile((folder / self._file_name).with_suffix(SHOWN))) as alone:
            for recorded in groups:
                content = reduced(group_bytes(recorded), notes["tokens"])
                alone.append(Record(recorded.group.position, content))
            alone.append(record)

    # -- files of extensions

    def note_beside(self, write: Callable[[Path], None]) -> None:
        """Call ``write`` with the round's folder. An error is only noted: the round is still trained on."""
        if self._round is not None:
            try:
                write(self._round)
            except Exception as error:
                self.problem = _problem(self._round, error)

    def open_beside(self, kind: Callable[[Path, int, Mapping[str, Any]], F]) -> F | None:
        """Return the file of an extension for the current round or evaluation; None: none has begun.

        Args:
            kind: makes the file from a folder, a rank, and JSON-serializable conditions. The file is opened at the
                first call and closed at the end of the round.
        """
        if self._place is None:
            return None
        folder, conditions = self._place
        if kind not in self._beside:
            self._beside[kind] = kind(folder, self.rank, conditions)
        file: F = self._beside[kind]
        return file

    def _close_beside(self) -> None:
        for file in self._beside.values():
            file.close()
        self._beside.clear()

    def lacks(self, problem: str) -> None:
        """Do nothing: a run samples again. A replay raises `JournalError`."""

    def take_seconds(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken

    def close(self) -> str:
        """Close the files and end the thread. Return a message on problems, or "". Another round may follow."""
        self._end(self._open_files.keys())
        self._close_beside()
        thread, self._safety = self._safety, None
        if thread is not None:
            self._unsafe.set()
            thread.join()
        problem, self.problem = self.problem, ""
        return problem

    def _end(self, names: Collection[str]) -> None:
        with self._closing:
            for name in [*names]:
                records = self._open_files.pop(name).records
                self._flush(records)
                records.close()

    def _make_safe(self) -> None:
        while True:
            self._unsafe.wait()
            self._unsafe.clear()
            if threading.current_thread() is not self._safety:
                return
            with self._closing:
                for file in list(self._open_files.values()):
                    self._flush(file.records)

    def _flush(self, file: RecordFile) -> None:
        try:
            file.flush()
        except OSError as error:
            self.problem = _problem(file.path, error)

    # -- reading

    def recall(self, prompts: Sequence[Prompt]) -> dict[int, RewardedGroup]:
        """Return the prompts' recorded groups, by position. Call it before the user's code gets the prompts' rows,
        because it takes the rows' digests."""
        if (file := self._open_files.get(self._newest)) is not None:
            file.digests |= {prompt.position: digest_of_example(prompt.example) for prompt in prompts}
        return self._recalled(prompts, self._found)

    def recall_samples(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Return the prompts' recorded groups to score again (`rescore`), without riders of their last scoring."""
        groups = []
        for recorded in self._recalled(prompts, self._unscored).values():
            kept = [tuple(rider for rider in each.riders if not rider.COLUMN) for each in recorded.group.rollouts]
            pairs = zip(recorded.group.rollouts, kept, strict=True)
            rollouts = tuple(dataclasses.replace(rollout, riders=riders) for rollout, riders in pairs)
            groups.append(dataclasses.replace(recorded.group, rollouts=rollouts))
        return groups

    def _recalled(self, prompts: Sequence[Prompt], contents: Mapping[int, bytes]) -> dict[int, RewardedGroup]:
        return {
            prompt.position: group_of(contents[prompt.position], prompt, self.reader)
            for prompt in prompts
            if prompt.position in contents
        }

    def positions(self, step: int) -> set[int]:
        return {record.position for _, _, records in files_of(self.round_folder(step)) for record in records}

    def has_groups(self, step: int) -> bool:
        """Return whether a round has recorded groups. A run that fails at its start leaves files without groups."""
        return any(next(records, None) is not None for _, _, records in files_of(self.round_folder(step)))

    def rounds(self) -> dict[int, Path]:
        """Return the folders of rounds that can be trained again, by the step of their weights, in order."""
        return {
            step: folder
            for step, folder in self._folders()
            if folder.name == f"step-{step:08d}" and any(folder.glob("rank-*.records"))
        }

    def recorded_settings(self) -> Mapping[str, Any]:
        """Return the settings in the first file, or an empty mapping if there are no files."""
        files = (found for _, folder in self._folders() for _, found, _ in files_of(folder))
        return next((found.settings for found in files), {})

    # -- pruning

    def prune(self, before: int) -> None:
        """Delete the rounds before a step, as checkpoints hold their result. Keep the groups that the report shows."""
        for step, folder in self._folders():
            if self._pruned <= step < before:
                for path in folder.glob("rank-*.records"):
                    with contextlib.suppress(pa.ArrowException, *NONSENSE):
                        keep_shown(path)
                with contextlib.suppress(OSError):  # the folder isn't empty: it has shown groups
                    for path in [path for path in folder.iterdir() if path.suffix != SHOWN]:
                        path.unlink(missing_ok=True)
                    folder.rmdir()
        self._pruned = max(self._pruned, before)

    # -- names of files, and checks

    @property
    def _file_name(self) -> str:
        return f"rank-{self.rank:05d}.records"

    def _folders(self) -> list[tuple[int, Path]]:
        found = [(re.match(r"step-(\d{8,12})(-|$)", path.name), path) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]), path) for match, path in found if match)

    def round_folder(self, step: int, evaluation: str = "") -> Path:
        """Return the folder of a round or an evaluation, by the step of its weights."""
        suffix = f"-{re.sub(r'[^A-Za-z0-9_.]', '_', evaluation)}" if evaluation else ""
        return self.folder / f"step-{step:08d}{suffix}"

    def _check_settings(self, found: About, path: Path) -> None:
        for name, (was, new) in self._differences(found).items():
            if name in self.of_samples:
                raise JournalError(f"{path} was recorded with {name} {was!r}, but now it is {new!r}: {self._remedy}.")

    def _check_weights(self, found: About, now: About, path: Path) -> None:
        if found.step != now.step:
            raise JournalError(f"{path} holds step {found.step}, but lies in step {now.step}'s folder: move it away.")
        if found.weights and now.weights and found.weights != now.weights:
            if self._weights_are_read:
                raise JournalError(
                    f"{path} was sampled by other weights than those of step {now.step} here: {self._remedy}."
                )
            self.warning = (
                f"journal: the weights of step {now.step} differ in some bits from those that sampled the recorded "
                "groups (a GPU's kernels may sum in another order); the groups are trained on all the same"
            )

    @property
    def _remedy(self) -> str:
        return f"restore what has changed, or move {self.folder} away (or set journal: off) to sample anew"


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of about 1,024 evenly spread entries of each parameter, or "" for a sharded policy."""
    found = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            return ""
        flat = parameter.detach().reshape(-1)
        part = flat[:: max(1, flat.numel() // SAMPLED)].cpu().contiguous()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        found.update(part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _problem(path: Path, error: Exception) -> str:
    return (
        f"journal: {path} can't be written ({type(error).__name__}: {error}): the run goes on. If it is killed, groups "
        "that aren't recorded are sampled and scored again."
    )


def files_of(folder: Path, suffix: str = ".records") -> Iterator[tuple[Path, About, Iterator[Record]]]:
    """Yield a round's files, each with its `About` and its records. Skip a file that was torn before its `About`."""
    for path in sorted(folder.glob(f"rank-*{suffix}")):
        records = read_records(path, lambda position: position >= ABOUT)
        with contextlib.suppress(FileNotFoundError):  # another rank deleted it
            if (head := next(records, None)) is not None:
                yield path, _about(head, path), records


def _about(record: Record, path: Path) -> About:
    try:
        assert record.position == ABOUT
        found = json.loads(record.content)
        return About(int(found["step"]), str(found["weights"]), dict(found["settings"]))
    except NONSENSE as error:
        raise JournalError(f"{path} is no file of this journal ({error!r}): move it away.") from None
