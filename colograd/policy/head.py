"""Logits of a language-model head, one tile (some rows x some of the vocabulary) at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..extensions.tensor_parallel.layers import VocabularyPart
from ..runtime import cpu_products
from . import attention

HIDDEN = -1e30  # logit of a token that isn't a candidate: probability 0, and no infinity in any product
FLOAT32_PRODUCTS = "colograd_float32_products"  # attribute of a head, see `cast_lm_head_to_fp32`


class Kept(Protocol):
    """Candidate tokens of a head's N labels, indexed for tiles of the logits."""

    def hidden(self, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return (n, c) bool, True where the token isn't among the label's candidates."""


@dataclass(frozen=True, slots=True)
class Head:
    """Computation of logits from hidden states: capped(scale * product) / temperature."""

    temperature: float
    scale: float
    softcap: float  # limit of tanh soft-capping; 0: none
    dtype: torch.dtype  # dtype of the matrix products
    wide: bool = False  # whether the product returns its logits in `exact`
    part: VocabularyPart | None = None  # this rank's rows of the weight, if ranks share out the vocabulary
    kept: Kept | None = None  # candidate tokens of the labels; None: the whole vocabulary

    @property
    def exact(self) -> torch.dtype:
        """Dtype of everything except the products."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return one tile (rows, columns) before the cap and the temperature: a new tensor, for in-place work."""
        tile = self._product(hidden, weight, bias) if self.wide else torch.nn.functional.linear(hidden, weight, bias)
        tile = tile.to(self.exact)
        return tile if self.scale == 1.0 else tile.mul_(self.scale)

    def _product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply as vLLM does for a head in float32: on a GPU from 16-bit factors.

        float32 holds the product of two bfloat16 numbers exactly.
        """
        if hidden.is_cuda and self.dtype in (torch.bfloat16, torch.float16):
            tile = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return tile if bias is None else tile.add_(bias)
        wide_bias = None if bias is None else bias.to(self.exact)
        return torch.nn.functional.linear(hidden.to(self.exact), weight.to(self.exact), wide_bias)

    def cap_(self, tile: torch.Tensor) -> torch.Tensor:
        """Compute tanh(tile / softcap) in place; the slope of the cap is 1 minus the square of this."""
        return tile.div_(self.softcap).tanh_()

    def finish_(self, tile: torch.Tensor) -> torch.Tensor:
        """Turn the result of `cap_` (without a cap, of `logits`) into the logits used for sampling, in place."""
        factor = (self.softcap or 1.0) / self.temperature
        return tile if factor == 1.0 else tile.mul_(factor)

    def hide_(self, tile: torch.Tensor, row: slice, vocabulary: slice) -> torch.Tensor:
        """Write `HIDDEN` into a finished tile for every token that isn't among its label's candidates."""
        return tile if self.kept is None else tile.masked_fill_(self.kept.hidden(row, vocabulary), HIDDEN)


def product_dtype(weight: torch.Tensor, device: torch.device, wide: bool) -> torch.dtype:
    """Return the dtype of a head's matrix products.

    It is autocast's or the weight's, and float32 on a CPU without bfloat16 products.
    """
    found = (None if wide else attention.autocast_dtype(device)) or weight.dtype
    slow = device.type == "cpu" and found == torch.bfloat16 and cpu_products.wanted()
    return torch.float32 if slow else found


def logit_transform(model: Any) -> dict[str, Any]:
    """Return the scale (Granite, Cohere, Falcon-H1) and the soft cap (Gemma) of the logits after the head."""
    config = model.config.get_text_config()
    scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= float(getattr(config, name, None) or 1.0)
    return {"scale": scale, "softcap": float(getattr(config, "final_logit_softcapping", None) or 0.0)}


def cast(
    weight: torch.Tensor, bias: torch.Tensor | None, vocabulary: slice, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a slice of a head in the dtype of its products."""
    return weight[vocabulary].to(dtype), None if bias is None else bias[vocabulary].to(dtype)


def parts(total: int, size: int) -> Iterator[slice]:
    """Return slices that cover 0 ... total; one empty slice if ``total`` is 0."""
    return (slice(start, min(start + size, total)) for start in range(0, max(total, 1), size))


def vocabulary_size(model: Any) -> int:
    """Return the number of entries of the input embedding, summed over ranks if they share them out."""
    table = model.get_input_embeddings()
    own = getattr(table, "vocabulary", None)
    return int(table.weight.shape[0] if own is None else own.size)
