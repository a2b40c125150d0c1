"""`RolloutStore`: the rollout log (setting `journal`). It stores scored groups before they are trained on.

    RUN/_journal/step-00000012/rank-00000.records     a header (`About`), then the scored groups
    RUN/_journal/step-00000012/rank-00000.unscored    with `rescore: true`: groups to score again
    RUN/_journal/step-00000012/steps.jsonl            loss and gradient norm of the optimizer steps
    RUN/_journal/recipe.yaml                          the run's recipe, for `colograd replay`

Each round or evaluation has a folder. In this folder each engine's first rank writes one file of groups. A resumed run
reads the groups that were sampled after its checkpoint, and needn't sample them again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..batch import Group, Prompt
from ..checkpoint.folders import move_aside
from .group_records import NONSENSE, JournalError, RewardedGroup, digest_of_example, group_bytes, group_of
from .record_file import Record, RecordFile, read_records

FOLDER = "_journal"  # It begins with "_", because transformers pushes no such folder to the Hub.
UNSCORED = ".unscored"  # Suffix of files with groups to score again.
RECIPE = "recipe.yaml"
# Keys of recorded settings: names of the reward functions, and digests of their source code.
REWARD_FUNCS, REWARD_CODE = "reward_funcs", "reward_code"
F = TypeVar("F")
ABOUT = -1
# A digest of the weights reads at least this number of entries of each parameter. Smaller ones are read as a whole.
SAMPLED = 1024


@dataclass(frozen=True, slots=True)
class About:
    step: int
    weights: str  # Digest of the weights, or "" for sharded weights.
    settings: Mapping[str, Any]


@dataclass(eq=False)
class RolloutStore:
    """The rollout log of one rank. It writes this rank's groups, and reads the groups of all ranks."""

    run_dir: str | Path
    rank: int
    settings: Mapping[str, Any]
    reader: Any = None
    of_samples: Collection[str] = ()  # Names of settings that completions depend on.

    def __post_init__(self) -> None:
        self.folder, self.file_name = Path(self.run_dir) / FOLDER, f"rank-{self.rank:05d}.records"
        self.settings = json.loads(json.dumps(self.settings, default=str))
        self.problem = ""
        self.warning = ""
        self.seconds = 0.0
        self._weights_are_read = True
        self._found: dict[int, bytes] = {}
        self._unscored: dict[int, bytes] = {}
        self._round: Path | None = None
        self.open_files: dict[str, RecordFile] = {}  # Evaluation's name ("" for training) -> open file.
        self._newest = ""  # Key in `open_files` of the file that was opened last.
        self._beside: dict[Any, Any] = {}
        self._place: tuple[Path, int, dict[str, Any]] | None = None
        self._pruned = 0
        self._flusher = ThreadPoolExecutor(1, "journal")
        self._will_flush = False

    def start(self, step: int, is_writer: bool, rescore: bool = False) -> list[str]:
        """Prepare the log for a run that resumes at ``step``. Return messages for the console.

        Rounds and evaluations from ``step`` on that were recorded with other settings are moved aside, because this
        run's weights will differ. Exception: the round of ``step`` stays if no changed setting affects its
        completions. Its groups are scored again if reward functions have changed.

        Raises:
            JournalError: reward functions have changed, and ``rescore`` is False."""
        self._weights_are_read = True
        if not is_writer:
            return []
        lines, others, changed = list[str](), list[Path](), dict[str, tuple[Any, Any]]()
        for number, folder in self._folders():
            found: dict[str, tuple[Any, Any]] = {}
            for path, about, records in files_of(folder) if number >= step else ():
                if (differences := self._differences(about)) and next(records, None) is None:
                    path.unlink(missing_ok=True)
                else:
                    found |= differences
            rewards_changed = bool(found.keys() & {REWARD_CODE, REWARD_FUNCS})
            if rewards_changed and not rescore:
                was, now = found.get(REWARD_CODE, ({}, {}))
                names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
                raise JournalError(
                    f"{folder} was recorded before reward functions changed ({', '.join(names) or 'their names'}): "
                    "set `rescore: true` to score again, set `journal: off` to sample anew, or restore the old code."
                )
            changed |= found
            if folder == self.round_folder(step) and not found.keys() & set(self.of_samples):
                if rewards_changed:
                    for path in folder.glob("rank-*.records"):
                        path.rename(path.with_suffix(UNSCORED))
                    lines.append(f"journal: the samples of {folder.name} are kept, and scored again (rescore)")
            elif found:
                others.append(folder)
        if others:
            aside = move_aside(self.folder.parent, others)
            settings = ", ".join(f"{name} {was!r:.60}, now {now!r:.60}" for name, (was, now) in changed.items())
            lines.append(
                f"journal: {len(others)} round(s) or evaluations from step {step} on were recorded with other settings "
                f"({settings}): they are in {aside} now, and are sampled anew"
            )
        rounds = [recorded for recorded in self.rounds() if recorded >= step and self.positions(recorded)]
        if rounds:
            lines.append(
                f"journal: {len(rounds)} round(s) are recorded, from step {rounds[0]} to {rounds[-1]}: their groups "
                "are neither sampled nor scored again"
            )
        return lines

    def _differences(self, found: About) -> dict[str, tuple[Any, Any]]:
        names = sorted(found.settings.keys() | self.settings.keys())
        if REWARD_CODE not in found.settings:  # An old version of Colograd recorded no digests of reward functions.
            names = [name for name in names if name != REWARD_CODE]
        pairs = {name: (found.settings.get(name), self.settings.get(name)) for name in names}
        return {name: (was, now) for name, (was, now) in pairs.items() if was != now}

    def keep_recipe(self, recipe: str | None) -> str:
        path, aside = self.folder / RECIPE, self.folder / f"{RECIPE}.partial"
        try:
            path.unlink(missing_ok=True)
            if recipe is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                aside.write_text(recipe, encoding="utf-8")
                os.replace(aside, path)
        except OSError as error:
            return f"journal: {path} can't be written ({error}): `colograd replay` will need the recipe (--config)"
        return ""

    def begin(self, step: int, weights: str, evaluation: str = "") -> str:
        """Open the file of a round or evaluation, and read the groups recorded there. Return a warning, or "".

        Raises:
            JournalError: recorded settings that affect completions differ from this run's, or the first call after
                `start` finds groups that other weights sampled. Later calls only warn of these, because weights that
                are trained again on a GPU may differ in some bits."""
        self._end(self.open_files.keys() - ({""} if evaluation else set()))
        self._found, self._unscored = {}, {}
        problem, self.problem, self.warning = self.problem, "", ""
        self.seconds = 0.0
        about, folder = About(step, weights, self.settings), self.round_folder(step, evaluation)
        self._round = self._round if evaluation else folder
        for path, found, records in files_of(folder):
            self._check_settings(found, path)
            self._check_weights(found, about, path)
            for record in records:
                self._found.setdefault(record.position, record.content)
        for _, _, records in files_of(folder, UNSCORED):
            self._unscored |= {record.position: record.content for record in records}
        self._weights_are_read = False
        self._place = folder, self.rank, dataclasses.asdict(about)
        self._open(folder, about, evaluation)
        return problem or self.problem or self.warning

    def _open(self, folder: Path, about: About, evaluation: str) -> None:
        self._newest = evaluation
        try:
            self.open_files[evaluation] = file = RecordFile(folder / self.file_name)
            if file.is_new:
                file.append(Record(ABOUT, json.dumps(dataclasses.asdict(about)).encode()))
        except OSError as error:
            self.open_files.pop(evaluation, None)
            self.problem = _problem(folder, error)

    def add(self, recorded: RewardedGroup, name: str | None = None) -> None:
        """Append a group to the open file ``name`` (default: the file opened last). An error only sets `problem`."""
        if (file := self.open_files.get(self._newest if name is None else name)) is None:
            return
        started, position = time.perf_counter(), recorded.group.position
        try:
            file.append(Record(position, group_bytes(recorded, file.digests.get(position, ""))))
            if not self._will_flush:
                self._will_flush = True
                self._flusher.submit(self._flush)
        except Exception as error:  # A group that can't be recorded is trained on all the same.
            self.problem = _problem(file.path, error)
        self.seconds += time.perf_counter() - started

    def _flush(self) -> None:
        self._will_flush = False
        for file in list(self.open_files.values()):
            try:
                file.flush()
            except OSError as error:
                self.problem = _problem(file.path, error)

    def note_beside(self, write: Callable[[Path], None]) -> None:
        """Call ``write(folder)`` with the folder of the present training round. An error only sets `problem`."""
        if self._round is not None:
            try:
                write(self._round)
            except Exception as error:
                self.problem = _problem(self._round, error)

    def open_beside(self, kind: Callable[[Path, int, Mapping[str, Any]], F]) -> F | None:
        """Return a further file of the present round or evaluation, opened by ``kind(folder, rank, about)``.

        The file stays open until the next `begin`. None: `begin` hasn't run yet."""
        if kind not in self._beside and self._place is not None:
            self._beside[kind] = kind(*self._place)
        file: F | None = self._beside.get(kind)
        return file

    def lacks(self, problem: str) -> None:
        """Report that the log lacks data of a round. Here nothing happens, because a run samples the round anew.

        The subclass for replays raises ``problem`` as an error."""

    def take_seconds(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken

    def close(self) -> str:
        self._end(self.open_files.keys())
        self._flusher.shutdown()
        self._flusher = ThreadPoolExecutor(1, "journal")
        problem, self.problem = self.problem, ""
        return problem

    def _end(self, names: Collection[str]) -> None:
        self._flusher.submit(self._flush).result()  # After this no flush is queued or runs, so files can be closed.
        for name in [*names]:
            self.open_files.pop(name).close()
        for beside in self._beside.values():
            beside.close()
        self._beside.clear()

    def recall(self, prompts: Sequence[Prompt]) -> dict[int, RewardedGroup]:
        """Return the prompts' recorded groups, keyed by position.

        Also take digests of the prompts' dataset rows. So call this method before user code can change the rows."""
        if (file := self.open_files.get(self._newest)) is not None:
            file.digests |= {prompt.position: digest_of_example(prompt.example) for prompt in prompts}
        return self._recalled(prompts, self._found)

    def recall_samples(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Return the recorded groups to score again, without riders that reward functions logged.

        Riders are data that extensions attach to completions."""
        groups = []
        for recorded in self._recalled(prompts, self._unscored).values():
            rollouts = (
                dataclasses.replace(each, riders=tuple(rider for rider in each.riders if not rider.COLUMN))
                for each in recorded.group.rollouts
            )
            groups.append(dataclasses.replace(recorded.group, rollouts=tuple(rollouts)))
        return groups

    def _recalled(self, prompts: Sequence[Prompt], contents: Mapping[int, bytes]) -> dict[int, RewardedGroup]:
        own = (prompt for prompt in prompts if prompt.position in contents)
        return {prompt.position: group_of(contents[prompt.position], prompt, self.reader) for prompt in own}

    def positions(self, step: int) -> set[int]:
        return {record.position for _, _, records in files_of(self.round_folder(step)) for record in records}

    def rounds(self) -> dict[int, Path]:
        """Return the folders of recorded training rounds, by the optimizer step of the weights that sampled them."""
        pairs = ((step, folder) for step, folder in self._folders() if folder == self.round_folder(step))
        return {step: folder for step, folder in pairs if any(folder.glob("rank-*.records"))}

    def recorded_settings(self) -> Mapping[str, Any]:
        files = (found for _, folder in self._folders() for _, found, _ in files_of(folder))
        return next((found.settings for found in files), {})

    def prune(self, before: int) -> None:
        for step, folder in self._folders():
            if self._pruned <= step < before:
                shutil.rmtree(folder, ignore_errors=True)
        self._pruned = max(self._pruned, before)

    def _folders(self) -> list[tuple[int, Path]]:
        found = [(re.match(r"step-(\d{8,12})(-|$)", path.name), path) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]), path) for match, path in found if match)

    def round_folder(self, step: int, evaluation: str = "") -> Path:
        suffix = f"-{re.sub(r'[^A-Za-z0-9_.]', '_', evaluation)}" if evaluation else ""
        return self.folder / f"step-{step:08d}{suffix}"

    def _check_settings(self, found: About, path: Path) -> None:
        for name, (was, new) in self._differences(found).items():
            if name in self.of_samples:
                raise JournalError(f"{path} was recorded with `{name}` {was!r}, but now it is {new!r}: {self._remedy}.")

    def _check_weights(self, found: About, now: About, path: Path) -> None:
        if found.step != now.step:
            raise JournalError(
                f"{path} is of step {found.step}, but lies in the folder of step {now.step}: move it away."
            )
        if found.weights and now.weights and found.weights != now.weights:
            if self._weights_are_read:
                problem = f"{path} has groups that weights other than this run's sampled at step {now.step}"
                raise JournalError(f"{problem}: {self._remedy}.")
            self.warning = (
                f"journal: the weights of step {now.step} differ in some bits from those that sampled the recorded "
                "groups (a GPU's kernels may sum in another order); the groups are trained on all the same"
            )

    @property
    def _remedy(self) -> str:
        return f"restore what has changed, or move {self.folder} away (or set `journal: off`) to sample anew"


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of some entries of each parameter, or "" for a sharded model (with a DTensor)."""
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
    for path in sorted(folder.glob(f"rank-*{suffix}")):
        records, head = read_records(path, lambda position: position >= ABOUT), None
        with contextlib.suppress(FileNotFoundError):
            head = next(records, None)
        if head is None:
            continue
        try:
            assert head.position == ABOUT
            found = json.loads(head.content)
            about = About(int(found["step"]), str(found["weights"]), dict(found["settings"]))
        except NONSENSE as error:
            foreign = f"{path} is foreign: {error!r}. Only files of the journal may lie in this folder: move it away."
            raise JournalError(foreign) from None
        yield path, about, records
