"""Readers of a saved model's safetensors files. A rank can read its rows of a parameter without the other rows.

Transformers may save the experts of an MoE layer one by one. The readers stack them into one parameter again."""

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
from ..parallel.shards import Shard

# Names of an expert's matrices in saved files, ordered as in the model's stacked parameter.
PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
MOST_ELEMENTS = 2**24  # Maximum elements per read (but at least a row), if a rank has only some columns.
BLOCKS = (".mlp.", ".block_sparse_moe.")  # Names of an MoE block, in transformers and in some checkpoints.


class WeightFiles:
    """Safetensors files that `save_pretrained` wrote into ``folder``.

    Raise a ValueError if the index of the files names a file outside of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Files stay open, because opening a file reads its list of up to 100,000 tensors.
        self._files: dict[str, Any] = {}
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.is_file():
            self.file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
            for name in self.file_of.values():
                if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\0" in name:
                    raise ValueError(
                        f"{str(index)!r} names {name!r:.100}, which isn't a file in the index's folder. Use a "
                        "checkpoint from a trusted source."
                    )
        elif not (folder / SAFE_WEIGHTS_NAME).is_file():
            raise ValueError(f"{str(folder)!r} has no {SAFE_WEIGHTS_NAME}. Use a complete checkpoint.")
        else:
            self._files[SAFE_WEIGHTS_NAME] = safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt", device="cpu")
            self.file_of = dict.fromkeys(self._files[SAFE_WEIGHTS_NAME].keys(), SAFE_WEIGHTS_NAME)

    @torch.no_grad()
    def copy(self, names: Sequence[str], place: torch.Tensor, shape: torch.Size, rows: range) -> None:
        """Read ``rows`` of a parameter of shape ``shape`` into ``place``. ``names``: its possible names in files."""
        candidates = (name.replace(*BLOCKS) if other else name for name in names for other in (False, True))
        name = next((name for name in candidates if name in self.file_of), None)
        watchdog.progress()
        if name is None:
            experts = next(filter(None, (self.experts(name) for name in names)), None)
            if experts is None:
                raise ValueError(
                    f"{str(self.folder)!r} has no weights of {names[0]}: the folder is of another model, or "
                    "incomplete. Use a complete checkpoint of the policy's model."
                )
            self._check(names[0], (len(experts), *shape[1:]), shape)
            for row, expert in zip(place, rows, strict=False):
                whole = torch.cat([self.tensor(part) for part in experts[expert]])
                self._check(names[0], tuple(whole.shape), shape[1:])
                row.copy_(whole)
            return
        tensor = self.file(name).get_slice(name)
        self._check(name, tensor.get_shape(), shape)
        if rows:
            place.copy_(tensor[rows.start : rows.stop] if shape else self.tensor(name))

    @torch.no_grad()
    def copy_part(self, names: Sequence[str], place: torch.Tensor, shard: Shard) -> None:
        if shard.begin is not None:
            rows = range(*shard.boxes[0][0]) if shard.shape else range(1)
            self.copy(names, place, torch.Size(shard.shape), rows)
            return
        (begin, end), *_ = shard.boxes[0]
        assert shard.axis or len(shard.boxes) == 1, shard
        step = max(1, MOST_ELEMENTS // torch.Size(shard.shape[1:]).numel())
        for first in range(begin, end, step):
            rows = range(first, min(first + step, end))
            whole = torch.empty(len(rows), *shard.shape[1:], dtype=place.dtype)
            self.copy(names, whole, torch.Size(shard.shape), rows)
            boxes = tuple(((0, len(rows)), *box[1:]) for box in shard.boxes)
            place[rows.start - begin : rows.stop - begin].copy_(Shard((*whole.shape,), boxes, shard.axis).of(whole))

    def experts(self, name: str) -> list[list[str]] | None:
        """Return the names of each expert's saved matrices, for a parameter that stacks experts."""
        head, of_experts, last = name.rpartition(".experts.")
        if not of_experts:
            return None
        for block in (f"{head}.", f"{head}.".replace(*BLOCKS)):
            for names in PARTS.get(last, ()):
                experts: list[list[str]] = []
                while self.file_of.keys() >= {*(part := [f"{block}experts.{len(experts)}.{n}.weight" for n in names])}:
                    experts.append(part)
                if experts:
                    return experts
        return None

    def tensor(self, name: str) -> torch.Tensor:
        return self.file(name).get_tensor(name)

    def file(self, name: str) -> Any:
        file = self.file_of[name]
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
        return self._files[file]

    def _check(self, name: str, saved: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(saved) != tuple(shape):
            raise ValueError(
                f"{name} has shape {tuple(saved)} in {str(self.folder)!r} and {tuple(shape)} in the policy, so "
                "the file is of another model. Use a checkpoint of the policy's model."
            )


def saved_names(model: Any) -> dict[str, str]:
    """Return parameter name -> name in saved files, for parameters that transformers renames but doesn't split."""
    names = dict[str, str]()
    for name, _ in model.named_parameters(remove_duplicate=False):
        try:
            (saved,) = revert_weight_conversion(model, {name: torch.tensor(0)})
        except (RuntimeError, IndexError, ValueError):
            continue
        if saved != name:
            names[name] = saved
    return names


def all_names(model: torch.nn.Module) -> dict[int, list[str]]:
    """Return ``id(parameter)`` -> the names that the parameter may have in saved files."""
    names, saved = dict[int, list[str]](), saved_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).extend(dict.fromkeys((name, saved.get(name, name))))
    return names


def completed(whole: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return ``model``'s state dict in host memory: buffers, and parameters from ``whole``, also under tied names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: whole[names[id(parameters[name])]] if name in parameters else value.to("cpu", copy=True)
        for name, value in model.state_dict().items()
    }


def load_renamed(model: torch.nn.Module, folder: Path) -> bool:
    """Read a model's weights from files with other parameter names.

    Return False, and read nothing, if the model stacks no experts and renames no parameters."""
    parameters, names_of = dict(model.named_parameters(remove_duplicate=False)), all_names(model)
    has_experts = any(".experts." in name and name.rpartition(".")[2] in PARTS for name in parameters)
    if not has_experts and all(name in parameters for names in names_of.values() for name in names):
        return False
    files = WeightFiles(folder)
    for names in names_of.values():
        parameter = parameters[names[0]].detach()
        files.copy(names, parameter, parameter.shape, range(len(parameter)) if parameter.dim() else range(1))
    return True


def float32_weights(folder: Path, stacked_names: Iterable[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the value (on the CPU) of each weight that a saved model stores in float32.

    ``stacked_names`` are the model's parameters that stack MoE experts."""
    if (folder / SAFE_WEIGHTS_NAME).is_file() or (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        files = WeightFiles(folder)
        for name in files.file_of:
            if files.file(name).get_slice(name).get_dtype() == "F32":
                yield name, files.tensor(name)
        for name in stacked_names:
            parts = files.experts(name)
            if parts is not None and files.tensor(parts[0][0]).dtype == torch.float32:
                yield name, torch.stack([torch.cat([files.tensor(part) for part in expert]) for expert in parts])


@torch.no_grad()
def load_whole(model: Any, folder: str) -> None:
    """Read a saved model's weights with `from_pretrained`, which knows parameter names of old transformers versions."""
    loaded, found = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder!r} lacks {len(missing)} policy weights ({', '.join(missing[:3])}): the folder is of "
            "another model, or a file is missing. Use a complete checkpoint of the policy's model."
        )
    for (name, parameter), saved in zip(model.named_parameters(), loaded.parameters(), strict=True):
        if parameter.shape != saved.shape:
            rule = "but another shape in the policy. Use a checkpoint of the policy's model"
            raise ValueError(f"{name} has shape {tuple(saved.shape)} in {folder!r}, {rule}.")
        parameter.copy_(saved)
