"""Files of an optimizer's state: one file per rank that any number of ranks can read.

A rank writes ``optimizer-R-of-N.safetensors`` with a tensor ``parameter|first element|name of the state`` for each part
that its optimizer updates. Without sharding one rank writes all parts. If a rank's part of a parameter isn't a range of
elements (but some columns, for example), the ranges count elements of the part, and the file's header describes the
part under ``shards``. Optimizers with other state, and older checkpoints of runs without sharding, use transformers'
file ``optimizer.pt``.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    """A saved range of one state of a parameter, e.g. of a moment; or a scalar for all ranges, e.g. the step count."""

    start: int  # First element of the range.
    stop: int  # Last element of the range + 1. For a scalar equal to ``start``.
    values: Any  # Elements of the range, read from the file when sliced. For a scalar its tensor.
    shard: Shard | None = None  # The part that ``start`` and ``stop`` count in. None for the whole parameter.


State = Mapping[str, Mapping[str, Sequence[Stored]]]  # saved ranges by parameter name and name of the state


def can_be_cut(optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
    """Return whether `save` can write an optimizer's state: tensors with as many elements as a parameter of ``owned``,
    or with one element, and settings of parameter groups that are JSON values."""
    parts = {id(piece.part) for piece in owned}
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(id(parameter) in parts for parameter in (*grouped, *optimizer.state)):
        return False
    for parameter, values in optimizer.state.items():
        for value in values.values():
            if not isinstance(value, torch.Tensor) or value.numel() not in (parameter.numel(), 1):
                return False
            if value.numel() == 1 and value.dim() and value.shape != parameter.shape:
                return False
    try:
        json.dumps(_settings(optimizer.param_groups))
    except (TypeError, ValueError):
        return False
    return True


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _name(rank: int, ranks: int) -> str:
    return f"optimizer-{rank:05d}-of-{ranks:05d}.safetensors"


def save(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[Owned],
    folder: Path,
    rank: int,
    ranks: int,
    write: WriteTensors = save_file,
) -> None:
    """Write the optimizer state of this rank's parts ``owned`` into ``folder``, as file ``rank`` of ``ranks``."""
    tensors = {}
    for piece in owned:
        for key, value in optimizer.state.get(piece.part, {}).items():
            if isinstance(value, torch.Tensor):
                flat = value.detach().reshape(-1) if value.dim() else value.detach()
                tensors[SEPARATOR.join((piece.name, str(piece.start), key))] = flat
    if write is save_file:  # `save_file` requires tensors that share no memory
        tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    watchdog.progress()
    shards = {piece.name: piece.shard.as_json() for piece in owned if piece.shard is not None}
    header = {"param_groups": json.dumps(_settings(optimizer.param_groups))}
    write(tensors, folder / _name(rank, ranks), header | ({"shards": json.dumps(shards)} if shards else {}))


def is_sharded(folder: Path) -> bool:
    return any(folder.glob(PATTERN))


def load(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[Owned],
    folder: Path,
    order: Sequence[str] = (),
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Read the state of this rank's parts ``owned`` into the optimizer. A missing file, or a file of another model,
    raises a ValueError. If this rank's file has all of its parts, other ranks' files may be missing. ``order`` has the
    names of all trained parameters as in an optimizer without sharding."""
    with contextlib.ExitStack() as files:
        if is_sharded(folder):
            stored, settings = _in_shards(folder, files, folder / _name(rank, ranks), owned)
        else:
            stored, settings = _in_one_file(folder, order)
        parts = {id(piece.part): piece for piece in owned}
        numbered = [parts[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        if stored and (missing := sorted({piece.name for piece in numbered} - stored.keys())):
            raise ValueError(
                f"The checkpoint's optimizer state is incomplete: {str(folder)!r} lacks {len(missing)} trained "
                f"parameters ({', '.join(missing[:3])}). Resume from a complete checkpoint of this model."
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
    def kind(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [kind(one) for one in value]
        return float if isinstance(value, int | float) else type(value)

    present = optimizer.param_groups
    if not isinstance(settings, list) or len(settings) != len(present):
        raise ValueError(
            f"The checkpoint's optimizer state doesn't fit this run: {str(folder)!r} must have {len(present)} "
            "parameter groups, like the optimizer of this run. Resume from a checkpoint of this run."
        )
    for saved, group in zip(settings, present, strict=True):
        for name, value in saved.items() if isinstance(saved, dict) else [("", saved)]:
            if name in group and kind(value) != kind(group[name]) and None not in (value, group[name]):
                raise ValueError(
                    f"The checkpoint's optimizer state has a setting of the wrong type: {str(folder)!r} has {name} "
                    f"{value!r:.50}. Resume from another checkpoint."
                )


def _in_shards(
    folder: Path, files: contextlib.ExitStack, rank_file: Path, owned: Sequence[Owned]
) -> tuple[State, list[dict[str, Any]]]:
    """Return states and settings from this rank's file if it has all parts ``owned``, else from all ranks' files."""
    if rank_file.is_file():
        stored, settings = _in_files([rank_file], files)
        for piece in owned:
            states = stored.get(piece.name, {}).values()
            if not states or not all(_spans(r, piece.shard, piece.start, piece.stop) for r in states if not _scalar(r)):
                break
        else:
            return stored, settings
    names = {path.name for path in folder.glob(PATTERN)}
    ranks = int(Path(min(names)).stem.rpartition("-")[2])
    missing = [name for name in (_name(rank, ranks) for rank in range(ranks)) if name not in names]
    if not missing:
        return _in_files([folder / name for name in sorted(names)], files)
    if rank_file.is_file() and not stored:  # an optimizer without state needs no other files
        return stored, settings
    raise ValueError(
        f"The checkpoint's optimizer state is incomplete: {str(folder)!r} was written by {ranks} ranks, but "
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing there. Resume with the same number of "
        "ranks, nodes and sharding, or copy the missing files from the machines that wrote them."
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
            values, start = file.get_slice(entry), int(first)
            shape = values.get_shape()
            size, values = (shape[0], values) if shape else (0, file.get_tensor(entry))
            stored[name][key].append(Stored(start, start + size, values, shards.get(name)))
    return stored, settings


def _in_one_file(folder: Path, order: Sequence[str]) -> tuple[State, list[dict[str, Any]]]:
    path = folder / OPTIMIZER_NAME
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no optimizer state ({OPTIMIZER_NAME} or {PATTERN}). Use a complete checkpoint."
        )
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # with mmap a rank reads only its part
    stored: dict[str, dict[str, list[Stored]]] = {}
    for index, values in saved["state"].items():
        states = stored.setdefault(order[index], {})
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.nbytes > value.untyped_storage().nbytes():
                    raise ValueError(
                        f"{str(path)!r} has a tensor of {value.nbytes:,} bytes, more than the size of the file. Resume "
                        "from another checkpoint."
                    )
                flat = value.reshape(-1) if value.dim() else value
                states[key] = [Stored(0, value.numel() if value.dim() else 0, flat)]
    return stored, _settings(saved["param_groups"])


def _assemble(piece: Owned, key: str, ranges: Sequence[Stored], folder: Path) -> torch.Tensor:
    """Assemble a part's state from saved ranges, in the part's shape. Several files may hold equal ranges."""
    if _scalar(ranges):
        scalar: torch.Tensor = ranges[0].values.clone()
        return scalar
    if spans := _spans(ranges, piece.shard, piece.start, piece.stop):
        return _join(spans).view(piece.part.shape)
    shards = [shard for shard in (piece.shard, *(r.shard for r in ranges)) if shard is not None]
    whole = _whole_value(ranges, shards[0].shape) if shards else None
    if whole is None:
        raise ValueError(
            f"The checkpoint's optimizer state is incomplete: {str(folder)!r} lacks elements of {piece.name} ({key}). "
            "Resume from a complete checkpoint of this model."
        )
    return piece.of(whole).clone()


def _scalar(ranges: Sequence[Stored]) -> bool:
    return ranges[0].start == ranges[0].stop


def _spans(ranges: Sequence[Stored], shard: Shard | None, start: int, stop: int) -> list[tuple[Stored, int, int]]:
    """Return pieces of saved ranges that make up elements ``start`` to ``stop`` - 1; [] if elements are missing."""
    spans, at = [], start
    for stored in sorted((r for r in ranges if r.shard == shard), key=lambda r: r.start):
        if stored.start <= at < min(stored.stop, stop):
            spans.append((stored, at - stored.start, min(stored.stop, stop) - stored.start))
            at = min(stored.stop, stop)
    return spans if at == stop else []


def _join(spans: Sequence[tuple[Stored, int, int]]) -> torch.Tensor:
    return torch.cat([stored.values[first:last] for stored, first, last in spans])


def _whole_value(ranges: Sequence[Stored], shape: Sequence[int]) -> torch.Tensor | None:
    """Assemble a whole parameter's state from saved ranges of the parameter and its parts; None if some are missing."""
    missing = torch.ones(*shape, dtype=torch.bool)
    whole: torch.Tensor | None = None
    for shard in dict.fromkeys(r.shard for r in ranges):
        if shard is None:
            for stored in (r for r in ranges if r.shard is None):
                values = stored.values[0 : stored.stop - stored.start]
                whole = torch.empty(*shape, dtype=values.dtype) if whole is None else whole
                whole.view(-1)[stored.start : stored.stop] = values
                missing.view(-1)[stored.start : stored.stop] = False
        elif spans := _spans(ranges, shard, 0, torch.Size(shard.local_shape).numel()):
            local = _join(spans).view(shard.local_shape)
            whole = torch.empty(*shape, dtype=local.dtype) if whole is None else whole
            shard.write(local, whole)
            shard.write(torch.zeros(shard.local_shape, dtype=torch.bool), missing)
    return None if missing.any() else whole
