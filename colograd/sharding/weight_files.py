"""A saved model's files, of which each rank reads its own rows, and a mixture's experts, which transformers saves one
by one and its Trainer doesn't stack again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..parallel import watchdog
from ..parallel.ranks import rank
from ..parallel.shards import Shard
from .rows import Cut

# What an expert's saved matrices are called, in the order in which a parameter has them one below the other.
PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
MOST_ELEMENTS = 2**24  # of whole rows, of which a rank keeps some columns
BLOCKS = (".mlp.", ".block_sparse_moe.")  # of a mixture, here and in some checkpoints


class WeightFiles:
    """The safetensors files of a folder that `save_pretrained` wrote.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = _places(folder)  # by a tensor's name, the file that has it
        self._opened: dict[str, Any] = {}  # a mixture has a hundred thousand tensors, and each file a list of its own

    @torch.no_grad()
    def read(self, names: Sequence[str], cut: Cut) -> None:
        """Give this rank's rows of a parameter (a tied one has several names) the saved values.

        Raises:
            ValueError: there is no such parameter, or one of another shape.
        """
        self.copy(names, cut.local, cut.shape, cut.rows_of(rank()))

    @torch.no_grad()
    def copy(self, names: Sequence[str], place: torch.Tensor, shape: torch.Size, rows: range) -> None:
        """Likewise, ``rows`` of a parameter of this ``shape`` into ``place``."""
        saved = (name.replace(*BLOCKS) if other else name for name in names for other in (False, True))
        name = next((name for name in saved if name in self._places), None)
        watchdog.progress()
        if name is None:
            experts = next(filter(None, (self._experts(name) for name in names)), None)
            if experts is None:
                raise ValueError(f"{str(self.folder)!r} has no weights of {names[0]}: it is of another model.")
            self._check(names[0], (len(experts), *shape[1:]), shape)
            for own, expert in zip(place, rows, strict=False):
                whole = torch.cat([self._tensor(part) for part in experts[expert]])
                self._check(names[0], tuple(whole.shape), shape[1:])
                own.copy_(whole)
            return
        tensor = self._file(name).get_slice(name)
        self._check(name, tensor.get_shape(), shape)
        if rows:
            place.copy_(tensor[rows.start : rows.stop] if shape else self._tensor(name))

    @torch.no_grad()
    def copy_part(self, names: Sequence[str], place: torch.Tensor, shard: Shard) -> None:
        """Likewise, the part ``shard`` of a parameter."""
        if shard.begin is not None:
            rows = range(*shard.boxes[0][0]) if shard.shape else range(1)
            self.copy(names, place, torch.Size(shard.shape), rows)
            return
        (begin, end), *_ = shard.boxes[0]
        assert shard.axis or len(shard.boxes) == 1, shard
        step = max(1, MOST_ELEMENTS // torch.Size(shard.shape[1:]).numel())  # whole rows take memory beside the part
        for first in range(begin, end, step):
            some = range(first, min(first + step, end))
            whole = torch.empty(len(some), *shard.shape[1:], dtype=place.dtype)
            self.copy(names, whole, torch.Size(shard.shape), some)
            boxes = tuple(((0, len(some)), *box[1:]) for box in shard.boxes)
            place[some.start - begin : some.stop - begin].copy_(Shard((*whole.shape,), boxes, shard.axis).of(whole))

    def float32_experts(self, name: str) -> torch.Tensor | None:
        """All experts of a block, if they were saved one by one and in float32."""
        experts = self._experts(name)
        if experts is None or self._tensor(experts[0][0]).dtype != torch.float32:
            return None
        return torch.stack([torch.cat([self._tensor(part) for part in parts]) for parts in experts])

    def _experts(self, name: str) -> list[list[str]] | None:
        """Of a parameter that holds all experts of a block: of each the names of its saved parts, in their order."""
        head, _, last = name.rpartition(".experts.")
        for block in (f"{head}.", f"{head}.".replace(*BLOCKS)):
            for spelled in PARTS.get(last, ()):
                found: list[list[str]] = []
                while self._places.keys() >= {*(parts := [f"{block}experts.{len(found)}.{p}.weight" for p in spelled])}:
                    found.append(parts)
                if found:
                    return found
        return None

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        file = self._places[name]
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, framework="pt", device="cpu")
        return self._opened[file]

    def _check(self, name: str, saved: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(saved) != tuple(shape):
            raise ValueError(
                f"{name} has shape {tuple(saved)} in {str(self.folder)!r} and {tuple(shape)} in the policy: it is of "
                "another model."
            )


def saved_names(model: Any) -> dict[str, str]:
    """By its name, what a parameter is called in files, if transformers saves it whole and under another name."""
    found = dict[str, str]()
    for name, _ in model.named_parameters(remove_duplicate=False):
        try:
            (saved,) = revert_weight_conversion(model, {name: torch.tensor(0)})
        except (RuntimeError, IndexError, ValueError):  # it is saved in parts, which a number doesn't have
            continue
        if saved != name:
            found[name] = saved
    return found


def all_names(model: torch.nn.Module) -> dict[int, list[str]]:
    """What each parameter, by its id, may be called in files."""
    found, saved = dict[int, list[str]](), saved_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).extend(dict.fromkeys((name, saved.get(name, name))))
    return found


def completed(whole: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's `state_dict` in host memory, from its ``whole`` parameters: tied ones and buffers beside them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: whole[names[id(parameters[name])]] if name in parameters else value.to("cpu", copy=True)
        for name, value in model.state_dict().items()
    }


def load_renamed(model: torch.nn.Module, folder: Path) -> bool:
    """Give a whole model that transformers saves under other names, experts one by one, what a folder has for its
    parameters, in place. False: files have its own names.

    Raises:
        ValueError: a parameter isn't there, or of another shape.
    """
    aliases, parameters = dict[int, list[str]](), dict(model.named_parameters(remove_duplicate=False))
    has_experts = any(".experts." in name and name.rpartition(".")[2] in PARTS for name in parameters)
    saved = saved_names(model)
    if not has_experts and not saved:
        return False
    files = WeightFiles(folder)
    for name, parameter in parameters.items():
        aliases.setdefault(id(parameter), []).extend({name: 0, (saved.get(name) or name): 0})
    for names in aliases.values():
        parameter = parameters[names[0]].detach()
        files.copy(names, parameter, parameter.shape, range(len(parameter)) if parameter.dim() else range(1))
    return True


def stacked_masters(names: Iterable[str], folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Of parameters that hold a mixture's experts, those that were saved in float32: name and value, one at a time."""
    asked = [name for name in names if ".experts." in name and name.rpartition(".")[2] in PARTS]
    files = WeightFiles(folder) if asked else None
    for name in asked:
        assert files is not None
        if (found := files.float32_experts(name)) is not None:
            yield name, found


def _places(folder: Path) -> Mapping[str, str]:
    index, file = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        for name in places.values():
            if Path(name).name != name or name in ("", ".."):
                raise ValueError(f"{str(index)!r} names {name!r}, which is no file of its folder.")
        return places
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} has no {SAFE_WEIGHTS_NAME}, of which each rank would read its rows.")
    with safe_open(file, framework="pt", device="cpu") as opened:
        return dict.fromkeys(opened.keys(), SAFE_WEIGHTS_NAME)
