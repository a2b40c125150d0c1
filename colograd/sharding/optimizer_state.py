"""Files of an optimizer's state, written by one or several ranks. Any number of ranks can read them.

A rank's optimizer updates parts of parameters. The rank's file has one tensor per part and state (e.g. ``exp_avg``),
named ``parameter name|index of the part's first element|state name``. The index counts in the flattened parameter. If
the file's header has the parameter under ``shards``, the index counts in the rank's flattened tensor-parallel part."""

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
from torch.optim import Optimizer

from ..parallel import watchdog
from ..parallel.shards import Shard
from .strategy import Owned, Write

PATTERN = "optimizer-*-of-*.safetensors"
SEPARATOR = "|"


class Stored(NamedTuple):
    """A saved range of elements of a parameter's state, e.g. of Adam's first moment.

    For a scalar state, e.g. the step count, ``stop`` is equal to ``start``."""

    start: int
    stop: int
    values: Any  # A sequence of elements, read from the file when sliced, or a scalar's tensor.
    shard: Shard | None = None  # Part that ``start`` and ``stop`` count in. None: the whole parameter.


State = Mapping[str, Mapping[str, Sequence[Stored]]]  # saved ranges, by parameter name, then by state name


def can_be_cut(optimizer: Optimizer, owned: Sequence[Owned]) -> bool:
    """Return whether `save` can write the optimizer's state. Each value must be a scalar tensor or as large as its
    parameter, all parameters must be in ``owned``, and the settings of the parameter groups must be JSON values."""
    parts = {id(piece.part) for piece in owned}
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(id(parameter) in parts for parameter in (*grouped, *optimizer.state)):
        return False
    for p, v in ((p, v) for p, values in optimizer.state.items() for v in values.values()):
        if not isinstance(v, torch.Tensor) or not (v.shape == p.shape or not v.dim() or v.numel() == p.numel() > 1):
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
    optimizer: Optimizer, owned: Sequence[Owned], folder: Path, rank: int, ranks: int, write: Write = save_file
) -> None:
    tensors = {}
    for piece in owned:
        for key, value in optimizer.state.get(piece.part, {}).items():
            if isinstance(value, torch.Tensor):
                flat = value.detach().reshape(-1) if value.dim() else value.detach()
                tensors[SEPARATOR.join((piece.name, str(piece.start), key))] = flat
    if write is save_file:  # copies, because `save_file` rejects tensors that share memory
        tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    watchdog.progress()
    shards = {piece.name: piece.shard.as_json() for piece in owned if piece.shard is not None}
    header = {"param_groups": json.dumps(_settings(optimizer.param_groups))}
    write(tensors, folder / _name(rank, ranks), header | ({"shards": json.dumps(shards)} if shards else {}))


def load(
    optimizer: Optimizer, owned: Sequence[Owned], folder: Path, order: Sequence[str] = (), rank: int = 0, ranks: int = 1
) -> None:
    """Read the optimizer state of the parts ``owned`` by this rank.

    Other ranks' files are read only if this rank's file lacks a part. Only ``optimizer.pt`` needs ``order``: the names
    of all trained parameters in the order of an optimizer without sharding."""
    own, names = _name(rank, ranks), sorted(path.name for path in folder.glob(PATTERN))
    parts = {id(piece.part): piece for piece in owned}
    numbered = [parts[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    with contextlib.ExitStack() as files:
        if own in names:
            stored, settings = _in_files(folder, [own], files)
            state, missing = _assemble(numbered, stored)
        if own not in names or missing:
            stored, settings = _in_files(folder, _complete(folder, names), files) if names else _in_one(folder, order)
            state, missing = _assemble(numbered, stored)
    if missing:
        raise ValueError(
            f"The checkpoint's optimizer state is incomplete: {str(folder)!r} lacks elements of {len(missing)} trained "
            f"parameters ({', '.join(missing[:3])}). Resume from a complete checkpoint of this model."
        )
    _check_settings(settings, optimizer, folder)
    groups = optimizer.state_dict()["param_groups"]
    groups = [{**saved, "params": group["params"]} for saved, group in zip(settings, groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_settings(settings: Any, optimizer: Optimizer, folder: Path) -> None:
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
                    f"The checkpoint's optimizer state has a setting of the wrong type: {str(folder)!r} has "
                    f"`{name}: {value!r:.50}`. Resume from another checkpoint."
                )


def _complete(folder: Path, names: Sequence[str]) -> Sequence[str]:
    ranks = int(Path(names[0]).stem.rpartition("-")[2])
    if missing := [name for name in (_name(rank, ranks) for rank in range(ranks)) if name not in names]:
        raise ValueError(
            f"The checkpoint's optimizer state is incomplete: {str(folder)!r} was written by {ranks} ranks, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing there. Resume with the same numbers "
            "of ranks and nodes and the same sharding, or copy the missing files from the machines that wrote them."
        )
    return names


def _in_files(folder: Path, names: Sequence[str], files: contextlib.ExitStack) -> tuple[State, list[dict[str, Any]]]:
    stored: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        file = files.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
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


def _in_one(folder: Path, order: Sequence[str]) -> tuple[State, list[dict[str, Any]]]:
    path = folder / "optimizer.pt"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} has neither {path.name} nor {PATTERN}. Use a complete checkpoint.")
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # `mmap`: a rank reads only its part
    if saved["state"].keys() - range(len(order)):
        raise ValueError(
            f"{str(path)!r} has the optimizer state of more than the {len(order)} parameters that this run trains. "
            "Resume from a checkpoint of this model."
        )
    stored: dict[str, dict[str, list[Stored]]] = {}
    for index, values in saved["state"].items():
        states = stored.setdefault(order[index], {})
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.nbytes > value.untyped_storage().nbytes():
                    raise ValueError(
                        f"{str(path)!r} has a tensor of {value.nbytes:,} bytes, but stores fewer bytes for it. "
                        "Resume from another checkpoint."
                    )
                flat = value.reshape(-1) if value.dim() else value
                states[key] = [Stored(0, value.numel() if value.dim() else 0, flat)]
    return stored, _settings(saved["param_groups"])


def _assemble(pieces: Sequence[Owned], stored: State) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the pieces' states (index in ``pieces`` -> state name -> value), and names of incomplete parameters."""
    states: dict[int, dict[str, Any]] = {}
    missing = []
    for index, piece in enumerate(pieces if stored else ()):
        states[index] = {}
        for key, ranges in stored.get(piece.name, {}).items():
            if ranges[0].start == ranges[0].stop:
                states[index][key] = ranges[0].values.clone()
            elif (values := _join(ranges, piece.shard, piece.start, piece.stop)) is not None:
                states[index][key] = values.view(piece.part.shape)
            else:
                shards = [shard for shard in (piece.shard, *(r.shard for r in ranges)) if shard is not None]
                whole = _whole_value(ranges, shards[0].shape) if shards else None
                states[index][key] = None if whole is None else piece.of(whole).clone()
        if piece.name not in stored or any(value is None for value in states[index].values()):
            missing.append(piece.name)
    return states, missing


def _join(ranges: Sequence[Stored], shard: Shard | None, start: int, stop: int) -> torch.Tensor | None:
    """Join saved ranges of the tensor-parallel part ``shard``, or of the whole parameter if ``shard`` is None.

    Return elements ``start`` to ``stop`` - 1, or None if elements are missing."""
    values, at = [], start
    for stored in sorted((r for r in ranges if r.shard == shard), key=lambda r: r.start):
        if stored.start <= at < (end := min(stored.stop, stop)):
            values.append(stored.values[at - stored.start : end - stored.start])
            at = end
    return torch.cat(values) if values and at == stop else None


def _whole_value(ranges: Sequence[Stored], shape: Sequence[int]) -> torch.Tensor | None:
    """Return a whole parameter's state, joined from ``ranges`` of the parameter or of its tensor-parallel parts. Return
    None if elements are missing."""
    missing = torch.ones(*shape, dtype=torch.bool)
    whole: torch.Tensor | None = None
    for shard in dict.fromkeys(r.shard for r in ranges):
        local_shape = torch.Size(shape if shard is None else shard.local_shape)
        local = _join(ranges, shard, 0, local_shape.numel())
        if local is not None and shard is None:
            return local.view(local_shape)
        if local is not None and shard is not None:
            whole = torch.empty(*shape, dtype=local.dtype) if whole is None else whole
            shard.write(local.view(local_shape), whole)
            shard.write(torch.zeros(local_shape, dtype=torch.bool), missing)
    return None if missing.any() else whole
