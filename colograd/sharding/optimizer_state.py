"""An optimizer's state in one file per rank, by parameter and range of elements. Any number of ranks can read it.

A rank writes ``optimizer-R-of-N.safetensors`` with a tensor ``parameter|first element|name of the state`` for each part
that it owns. Without sharding one rank writes all parts. If a rank's part of a parameter isn't a range of elements
(but some columns, say), the ranges count elements of the part, and the file's header describes the part (``shards``).
Optimizers with other state use the usual file (``optimizer.pt``), as do older checkpoints of runs without sharding.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer import OPTIMIZER_NAME

from ..parallel import watchdog
from ..parallel.shards import Shard
from .strategy import Owned, WriteTensors

PATTERN = "optimizer-*-of-*.safetensors"
SEPARATOR = "|"


class Stored(NamedTuple):
    """A range of a parameter's state in a file."""

    start: int
    stop: int
    read: Callable[[int, int], torch.Tensor]  # (first, last) -> elements of the range
    shard: Shard | None = None  # the range counts elements of this part; None: elements of the whole parameter


def can_be_cut(optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
    """Return whether `save` can write an optimizer's state.

    Each state must be a tensor of an owned parameter, with as many elements as the parameter or with one, and the
    groups' settings must be JSON values.
    """
    parts = {id(piece.part) for piece in owned}
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(id(parameter) in parts for parameter in (*grouped, *optimizer.state)):
        return False
    for parameter, values in optimizer.state.items():
        if not all(isinstance(v, torch.Tensor) and v.numel() in (parameter.numel(), 1) for v in values.values()):
            return False
        if any(v.numel() == 1 and v.dim() and v.shape != parameter.shape for v in values.values()):
            return False
    try:
        json.dumps(_settings(optimizer))
    except (TypeError, ValueError):
        return False
    return True


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def save(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[Owned],
    folder: Path,
    rank: int,
    ranks: int,
    write: WriteTensors = save_file,
) -> None:
    """Write the state of this rank's parts.

    Args:
        optimizer: the optimizer of the parts.
        owned: this rank's parts.
        folder: the checkpoint's folder.
        rank: number of this file.
        ranks: number of files.
        write: writes the file.
    """
    tensors = {}
    for piece in owned:
        for key, value in optimizer.state.get(piece.part, {}).items():
            if isinstance(value, torch.Tensor):
                flat = value.detach().reshape(-1) if value.dim() else value.detach()
                tensors[SEPARATOR.join((piece.name, str(piece.start), key))] = flat
    if write is save_file:  # it requires tensors that share no memory
        tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    watchdog.progress()
    shards = {piece.name: piece.shard.as_json() for piece in owned if piece.shard is not None}
    header = {"param_groups": json.dumps(_settings(optimizer))} | ({"shards": json.dumps(shards)} if shards else {})
    write(tensors, folder / _name(rank, ranks), header)


def _name(rank: int, ranks: int) -> str:
    return f"optimizer-{rank:05d}-of-{ranks:05d}.safetensors"


def is_sharded(folder: Path) -> bool:
    """Return whether a checkpoint has the optimizer state in files of this format."""
    return any(folder.glob(PATTERN))


def load(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[Owned],
    folder: Path,
    order: Sequence[str] = (),
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Read the state of this rank's parts into the optimizer.

    Args:
        optimizer: the optimizer of the parts.
        owned: this rank's parts.
        folder: the checkpoint's folder.
        order: the names of all trained parameters, in the order of an optimizer without sharding.
        rank: this rank.
        ranks: number of ranks. If this rank's file has all of its parts, the other files may be on other nodes.

    Raises:
        ValueError: a file is missing, or the state belongs to another model.
    """
    with contextlib.ExitStack() as files:
        in_shards = is_sharded(folder)
        rank_file = folder / _name(rank, ranks)
        stored, settings = _in_shards(folder, files, rank_file, owned) if in_shards else _in_one_file(folder, order)
        parts = {id(piece.part): piece for piece in owned}
        numbered = [parts[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        if stored and (missing := sorted({piece.name for piece in numbered} - stored.keys())):
            raise ValueError(
                f"The optimizer state in {str(folder)!r} lacks {len(missing)} trained parameters "
                f"({', '.join(missing[:3])}). Resume from a complete checkpoint of this model."
            )
        state = {
            index: {key: _assemble(piece, key, ranges, folder) for key, ranges in stored[piece.name].items()}
            for index, piece in enumerate(numbered)
            if piece.name in stored
        }
        _check_settings(settings, optimizer, folder)
        counts = iter(range(len(numbered)))
        groups = [
            {**saved, "params": [next(counts) for _ in group["params"]]}
            for saved, group in zip(settings, optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_settings(settings: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    present = optimizer.param_groups
    if not isinstance(settings, list) or len(settings) != len(present):
        raise ValueError(
            f"The optimizer state in {str(folder)!r} must have {len(present)} groups of parameters. Resume from a "
            "checkpoint of this run."
        )
    for saved, group in zip(settings, present, strict=True):
        for name, value in saved.items() if isinstance(saved, dict) else [("", saved)]:
            if name in group and _kind(value) != _kind(group[name]) and None not in (value, group[name]):
                raise ValueError(
                    f"The optimizer state in {str(folder)!r} has {name} {value!r:.50}, which is of the wrong type. "
                    "Resume from another checkpoint."
                )


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_kind(one) for one in value]
    return float if isinstance(value, int | float) else type(value)


State = Mapping[str, Mapping[str, Sequence[Stored]]]  # parameter -> name of a state -> ranges


def _in_shards(
    folder: Path, files: contextlib.ExitStack, rank_file: Path, owned: Sequence[Owned]
) -> tuple[State, list[dict[str, Any]]]:
    """Return states and settings from this rank's file if it has all parts, else from the files of all ranks."""
    if rank_file.is_file():
        stored, settings = _in_files([rank_file], files)
        if all(_has(stored, piece) for piece in owned):
            return stored, settings
    names = {path.name for path in folder.glob(PATTERN)}
    ranks = int(Path(min(names)).stem.rpartition("-")[2])
    missing = [name for name in (_name(rank, ranks) for rank in range(ranks)) if name not in names]
    if not missing:
        return _in_files([folder / name for name in sorted(names)], files)
    if rank_file.is_file() and not stored:  # the optimizer has no state
        return stored, settings
    raise ValueError(
        f"The optimizer state in {str(folder)!r} was written by {ranks} ranks, but {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing there. Resume with the same number of ranks, nodes and "
        "sharding, or copy the missing files from the machines that wrote them."
    )


def _in_files(paths: Sequence[Path], files: contextlib.ExitStack) -> tuple[State, list[dict[str, Any]]]:
    stored: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
        header = file.metadata()
        settings = json.loads(header["param_groups"])
        shards = {name: Shard.from_json(value) for name, value in json.loads(header.get("shards", "{}")).items()}
        for entry in file.keys():  # noqa: SIM118 (no dictionary)
            name, first, key = entry.rsplit(SEPARATOR, 2)
            shape = file.get_slice(entry).get_shape()
            size = shape[0] if shape else 0  # a scalar, such as the step count, belongs to every range
            start = int(first)
            reader = _reader(file, entry, scalar=not shape)
            stored[name][key].append(Stored(start, start + size, reader, shards.get(name)))
    return stored, settings


def _has(stored: State, piece: Owned) -> bool:
    """Return whether the ranges contain all elements of a piece's states."""
    states = stored.get(piece.name, {})
    elements = range(piece.start, piece.stop)
    counts = {
        key: sum(len(range(max(r.start, piece.start), min(r.stop, piece.stop))) for r in ranges)
        for key, all_ranges in states.items()
        if any(r.stop > r.start for r in all_ranges)
        for ranges in [[r for r in all_ranges if r.shard == piece.shard]]
    }
    return bool(states) and all(count == len(elements) for count in counts.values())


def _reader(file: Any, entry: str, scalar: bool) -> Callable[[int, int], torch.Tensor]:
    if scalar:
        return lambda first, last: file.get_tensor(entry)
    return lambda first, last: file.get_slice(entry)[first:last]


def _in_one_file(folder: Path, order: Sequence[str]) -> tuple[State, list[dict[str, Any]]]:
    path = folder / OPTIMIZER_NAME
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no optimizer state ({OPTIMIZER_NAME} or {PATTERN}). Use a complete checkpoint."
        )
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mmap: a rank reads only its part
    for values in saved["state"].values():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(
                    f"{str(path)!r} has a tensor of {value.nbytes:,} bytes, more than the file. Resume from another "
                    "checkpoint."
                )
    stored = {
        order[index]: {key: [_whole(value)] for key, value in values.items() if isinstance(value, torch.Tensor)}
        for index, values in saved["state"].items()
    }
    return stored, [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]


def _whole(value: torch.Tensor) -> Stored:
    if not value.dim():
        return Stored(0, 0, lambda first, last: value)
    flat = value.reshape(-1)
    return Stored(0, flat.numel(), lambda first, last: flat[first:last])


def _assemble(piece: Owned, key: str, ranges: Sequence[Stored], folder: Path) -> torch.Tensor:
    """Assemble a part's state from saved ranges, in the part's shape. Several files may have the same range."""
    first = ranges[0]
    if first.stop == first.start:
        return first.read(0, 0).clone()
    same_shard = [r for r in ranges if r.shard == piece.shard]
    values = _join(same_shard, piece.start, piece.stop)
    if values is not None:
        return values.view(piece.part.shape)
    shards = [shard for shard in (piece.shard, *(r.shard for r in ranges)) if shard is not None]
    whole = _whole_value(ranges, shards[0].shape) if shards else None
    if whole is None:
        raise ValueError(
            f"The optimizer state in {str(folder)!r} lacks elements of {piece.name} ({key}). Resume from a complete "
            "checkpoint of this model."
        )
    return piece.of(whole).clone()


def _join(ranges: Sequence[Stored], start: int, stop: int) -> torch.Tensor | None:
    """Join elements ``start`` ... ``stop`` from ranges of the same tensor; None if some are missing."""
    pieces, at = [], start
    for stored in sorted(ranges, key=lambda r: r.start):
        last = min(stored.stop, stop)
        if stored.start <= at < last:
            pieces.append(stored.read(at - stored.start, last - stored.start))
            at = last
    return torch.cat(pieces) if pieces and at == stop else None


def _whole_value(ranges: Sequence[Stored], shape: Sequence[int]) -> torch.Tensor | None:
    """Assemble a whole parameter's state from ranges of the parameter and of its parts; None if some are missing."""
    missing = torch.ones(*shape, dtype=torch.bool)
    whole: torch.Tensor | None = None
    for shard in dict.fromkeys(r.shard for r in ranges):
        shard_ranges = [r for r in ranges if r.shard == shard]
        if shard is not None:
            local = _join(shard_ranges, 0, torch.Size(shard.local_shape).numel())
            if local is None:
                continue
            whole = torch.empty(*shape, dtype=local.dtype) if whole is None else whole
            shard.write(local.view(shard.local_shape), whole)
            shard.write(torch.zeros(shard.local_shape, dtype=torch.bool), missing)
            continue
        for stored in shard_ranges:
            values = stored.read(0, stored.stop - stored.start)
            whole = torch.empty(*shape, dtype=values.dtype) if whole is None else whole
            whole.view(-1)[stored.start : stored.stop] = values
            missing.view(-1)[stored.start : stored.stop] = False
    return None if missing.any() else whole
