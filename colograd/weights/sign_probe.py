"""One change of many parameters at once that a decoder's output doesn't show, as long as all of them take part.

Some channels of the residual stream get the other sign: in the embedding, in what each layer adds to the stream (the
rows of its last projections), and in the columns of whatever reads it. Likewise some channels of each norm, and the
columns behind it. Queries, keys and values, with their biases, are negated as a whole: the first two cancel in the
scores, the last in the output projection. A change of sign is exact in every dtype, and doing it twice restores every
bit. Where an architecture is built otherwise, its output changes, and `proof` shows its parameters one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..policy.lora import base_name
from .mapping import Slice

EMBEDDING, HEAD, LAST_NORM = "embed_tokens", "lm_head", "norm"
READERS = {  # of the residual stream, and the norm between it and them
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "post_attention_layernorm"),
}
WRITERS = {"o_proj": -1.0, "down_proj": 1.0}  # into it, and the sign of what they read
NEGATED = ("q_proj", "k_proj", "v_proj", "qkv_proj")
NORMS_OF_HEADS = ("q_norm", "k_norm")

Signs = dict[str, torch.Tensor]  # by parameter: 1 and -1, of a shape that expands to the parameter's


def cancelling(shapes: Mapping[str, Sequence[int]], norms: bool) -> Signs:
    """Signs that cancel each other in a decoder built like Llama.

    Args:
        shapes: of the policy's parameters by their names without adapters; tied ones once.
        norms: change them too; not where a norm multiplies by 1 + its weight.

    Returns:
        Of each parameter that can be changed so; empty where the names are other ones.
    """
    embedding = next((name for name in shapes if _kind(name) == EMBEDDING), None)
    if embedding is None:
        return {}
    width = shapes[embedding][1]
    draw = torch.Generator().manual_seed(0)
    stream, *of_norms = torch.randint(0, 2, (1 + len(shapes), width), generator=draw) * 2.0 - 1.0
    tied = not any(_kind(name) == HEAD for name in shapes)
    changed = (*READERS.values(), *(() if tied else (LAST_NORM,))) if norms else ()
    found: Signs = {
        name: signs
        for name, signs in zip(shapes, of_norms, strict=True)
        if _kind(name) in changed and tuple(shapes[name]) == (width,)
    }
    others = {name: _signs_of(name, stream, found, norms) for name in shapes}
    return found | {name: signs for name, signs in others.items() if signs is not None}


def _signs_of(name: str, stream: torch.Tensor, of_norms: Signs, norms: bool) -> torch.Tensor | None:
    """Of a parameter that is no norm of the stream, given those of the norms."""
    kind, is_bias = _kind(name), name.endswith(".bias")
    all_of_it = torch.tensor(-1.0)
    if kind == EMBEDDING:
        return stream[None]
    if kind in READERS and is_bias:
        return all_of_it if kind in NEGATED else None
    if kind in READERS or (kind == HEAD and not is_bias):
        block = re.match(r".*\.\d+\.", name)
        before = f"{block.group()}{READERS[kind]}" if block and kind in READERS else _last_norm(of_norms)
        signs = stream * of_norms.get(f"{before}.weight", 1.0)
        return (-signs if kind in NEGATED else signs)[None]
    if kind in WRITERS:
        return stream if is_bias else WRITERS[kind] * stream[:, None]
    return all_of_it if kind in NORMS_OF_HEADS and norms else None


def _last_norm(of_norms: Signs) -> str:
    return next((name.removesuffix(".weight") for name in of_norms if _kind(name) == LAST_NORM), "")


def _kind(name: str) -> str:
    return name.split(".")[-2] if "." in name else name


@contextmanager
def with_signs(slices: Sequence[Slice], signs: Signs) -> Iterator[None]:
    """The engine's tensors times ``signs`` while the context lasts; every bit as before afterwards."""
    _multiply(slices, signs)
    try:
        yield
    finally:
        _multiply(slices, signs)


@torch.no_grad()
def _multiply(slices: Sequence[Slice], signs: Signs) -> None:
    for part in slices:
        own = signs.get(plain_name(part))
        if own is not None:
            part.destination.mul_(part.part_of(own.to(part.destination).expand(part.source.shape)))


def plain_name(part: Slice) -> str:
    """The parameter's name in a model without adapters."""
    return base_name(part.name) or part.name
