"""Sign changes of many parameters that together leave the output of a Llama-like decoder unchanged.

Some channels of the residual stream change their sign: in the embedding, in the rows of the projections that write to
the stream, and in the columns of the projections that read the stream. Some channels of each norm change their sign,
together with the columns of the projections that read the norm. Queries, keys and values, with their biases, are
negated as a whole. The signs of queries and keys cancel in the scores, the sign of values in the output projection. A
change of sign is exact in every dtype, and a second change restores every bit. In other architectures the output
changes, and `proof` tests their parameters one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from .mapping import Slice

EMBEDDING, HEAD, LAST_NORM = "embed_tokens", "lm_head", "norm"
READERS = {  # keys: projections that read the residual stream; values: the norm before each projection
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "post_attention_layernorm"),
}
WRITERS = {"o_proj": -1.0, "down_proj": 1.0}  # projections that write to the residual stream, and their input's sign
NEGATED = ("q_proj", "k_proj", "v_proj", "qkv_proj")
NORMS_OF_HEADS = ("q_norm", "k_norm")

Signs = dict[str, torch.Tensor]  # by parameter name: a tensor of 1 and -1 that expands to the parameter's shape


def cancelling(shapes: Mapping[str, Sequence[int]], norms: bool) -> Signs:
    """Return factors (1 or -1) for a Llama-like decoder's parameters that together leave the output unchanged.

    The result is empty if no module is named `embed_tokens`.

    Args:
        shapes: shapes of the policy's parameters, by name in a model without adapters. A tied parameter has one entry.
        norms: whether norms get factors. Must be False for norms that multiply by 1 + weight.
    """
    kinds = {name: name.split(".")[-2] if "." in name else name for name in shapes}  # module name of each parameter
    embedding = next((name for name, kind in kinds.items() if kind == EMBEDDING), None)
    if embedding is None:
        return {}
    width = shapes[embedding][1]
    draw = torch.Generator().manual_seed(0)
    stream, *rows = torch.randint(0, 2, (1 + len(shapes), width), generator=draw) * 2.0 - 1.0
    norm_kinds = {*READERS.values()} | ({LAST_NORM} if HEAD in kinds.values() else set())
    signs: Signs = {
        name: row
        for name, row in zip(shapes, rows, strict=True)
        if norms and kinds[name] in norm_kinds and tuple(shapes[name]) == (width,)
    }
    last_norm = next((name for name in signs if kinds[name] == LAST_NORM), "")
    for name, kind in kinds.items():
        is_bias = name.endswith(".bias")
        if kind == EMBEDDING:
            signs[name] = stream[None]
        elif kind in READERS and is_bias:
            if kind in NEGATED:
                signs[name] = torch.tensor(-1.0)
        elif kind in READERS or (kind == HEAD and not is_bias):
            block = re.match(r".*\.\d+\.", name)
            norm = f"{block.group()}{READERS[kind]}.weight" if block and kind in READERS else last_norm
            columns = stream * signs.get(norm, 1.0)
            signs[name] = (-columns if kind in NEGATED else columns)[None]
        elif kind in WRITERS:
            signs[name] = stream if is_bias else WRITERS[kind] * stream[:, None]
        elif kind in NORMS_OF_HEADS and norms:
            signs[name] = torch.tensor(-1.0)
    return signs


@contextmanager
def with_signs(slices: Sequence[Slice], signs: Signs) -> Iterator[None]:
    """Multiply the engine's tensors by ``signs`` while the context lasts, and restore every bit afterwards."""

    @torch.no_grad()
    def multiply() -> None:
        for part in slices:
            factors = signs.get(part.plain_name)
            if factors is not None:
                part.destination.mul_(part.part_of(factors.to(part.destination).expand(part.source.shape)))

    multiply()
    try:
        yield
    finally:
        multiply()
