"""A saved model's files, of which each rank reads its own rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..parallel import watchdog
from ..parallel.ranks import rank
from .rows import Cut


class WeightFiles:
    """The safetensors files of a folder that `save_pretrained` wrote.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = _places(folder)  # by a tensor's name, the file that has it

    @torch.no_grad()
    def read(self, names: Sequence[str], cut: Cut) -> None:
        """Give this rank's rows of a parameter the saved values.

        Args:
            names: of the parameter; a tied one has several, of which one is saved.

        Raises:
            ValueError: there is no such parameter, or one of another shape.
        """
        name = next((name for name in names if name in self._places), None)
        if name is None:
            raise ValueError(f"{str(self.folder)!r} has no weights of {names[0]}: it is of another model.")
        watchdog.progress()
        with safe_open(self.folder / self._places[name], framework="pt", device="cpu") as file:
            saved = file.get_slice(name)
            if tuple(saved.get_shape()) != tuple(cut.shape):
                raise ValueError(
                    f"{name} has shape {tuple(saved.get_shape())} in {str(self.folder)!r} and {tuple(cut.shape)} in "
                    "the policy: it is of another model."
                )
            rows = cut.rows_of(rank())
            if rows:
                cut.local.copy_(saved[rows.start : rows.stop])


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
