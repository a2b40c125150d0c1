"""Kinds of teachers among the `second_models`, one per field of the rows (see `distillation_kl`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...batch import TEACHER, PackedRow
from ...config import GRPOConfig
from ...policy.logprobs import PolicyForward
from ...policy.second_models import Kind, own_logprobs, prepared
from .head import label_states, label_top_tokens
from .teacher import config_of, teacher_bytes, teacher_of

UNTAUGHT = float("inf")  # value of a teacher's log-probability if the prompt names no teacher

Read = Callable[[Any, Any, PackedRow, float], torch.Tensor]  # as `Kind.read`, without a name


def _states(second: Any, model: Any, row: PackedRow, temperature: float) -> torch.Tensor:
    """Compute a row's hidden states, and keep them on the host: they are larger than the rest of the row."""
    (found,), _ = PolicyForward(model, temperature).run(label_states, prepared(row))
    return found.cpu()


def _top(second: Any, model: Any, row: PackedRow, temperature: float) -> torch.Tensor:
    (found,), _ = PolicyForward(model, temperature).run(functools.partial(label_top_tokens, second.top), prepared(row))
    return found.cpu()


def _of_its_groups(
    field: str, read: Read, second: Any, model: Any, row: PackedRow, temperature: float, name: str
) -> torch.Tensor:
    """Compute (N,) values of the groups that ``name`` this one of several teachers; empty: there is one teacher.

    Other places keep their value, or are UNTAUGHT.
    """
    if not name:
        return read(second, model, row, temperature)
    lengths = [sum(len(rollout.completion_ids) for rollout in part.rollouts) for part in row.parts]
    values = row.values(field)
    values = torch.full((sum(lengths),), UNTAUGHT, device=row.device) if values is None else values.clone()
    own = [index for index, part in enumerate(row.parts) if str(part.example.get(TEACHER) or "") == name]
    if own:
        places = values.split(lengths)  # views
        parts = tuple(row.parts[index] for index in own)
        said = read(second, model, PackedRow(parts, row.mask_truncated, row.device), temperature)
        for index, of_part in zip(own, said.split([lengths[index] for index in own]), strict=True):
            places[index].copy_(of_part)
    return values


def _kind(field: str, read: Read) -> Kind:
    def configs(config: GRPOConfig) -> dict[str, GRPOConfig]:
        return {name: config_of(config, name) for name in config.teachers}

    return Kind(field, "teacher", teacher_of, teacher_bytes, functools.partial(_of_its_groups, field, read), configs)


LOGPROBS = _kind("teacher_logprobs", own_logprobs)
STATES, TOP = _kind("teacher_states", _states), _kind("teacher_top", _top)
