"""Head of a language model: log-probability and entropy of each label, by an online softmax (arXiv 1805.02867).

Only one tile of logits (some labels x some of the vocabulary) exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton

from ..runtime import cpu_products
from . import attention

HIDDEN = -1e30  # Logit of tokens that the sampler couldn't choose. Finite, so that products don't become NaN.
FLOAT32_PRODUCTS = "colograd_float32_products"  # Attribute that `cast_lm_head_to_fp32` sets on a head module.
TILE_ELEMENTS = {"cpu": 2**23, "cuda": 2**24}  # Maximum number of logits in a tile, by device.
TILE_ROWS = 8192  # Maximum number of labels in a tile. More labels would make tiles too narrow for fast products.
TILE_COLUMNS = 64  # On a GPU tile widths are rounded down to multiples of this, because unaligned rows are slow.


# The tokens that the sampler could choose for each label (e.g. with top-k), as in `kept_tokens/rider.py`. The method
# ``hidden(row, vocabulary)`` takes a slice of n labels and a slice of c token ids. It returns (n, c) bool, True where
# the sampler couldn't choose the id.
Candidates: TypeAlias = Any
OtherDistribution: TypeAlias = Any  # A teacher's distribution for each label, as in `distillation/head.py`.


@dataclass(frozen=True, slots=True)
class Head:
    """Conversion of hidden states to logits: softcap(scale * (hidden @ weight.T + bias)) / temperature."""

    temperature: float
    scale: float
    softcap: float
    dtype: torch.dtype  # Dtype of the matrix products.
    wide: bool = False  # Whether products of 16-bit weights return float32 logits (`cast_lm_head_to_fp32`).
    part: Any = None  # Range of token ids in this rank's shard of the weight (`VocabularyPart`). None: all.
    candidates: Candidates | None = None  # Tokens that the softmax is over. None means the whole vocabulary.
    low: ClassVar[float] = HIDDEN

    @classmethod
    def of(cls, model: Any, temperature: float, device: torch.device, candidates: Candidates | None = None) -> Head:
        own = model.get_output_embeddings()
        scale, softcap = logit_transform(model).values()
        wide, part = getattr(own, FLOAT32_PRODUCTS, False), getattr(own, "vocabulary", None)
        return cls(temperature, scale, softcap, product_dtype(own.weight, device, wide), wide, part, candidates)

    @property
    def exact(self) -> torch.dtype:
        """Dtype of computations on logits: float64 if the matrix products are float64, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def chain(self) -> float:
        """Derivative of the final logits with respect to hidden @ weight.T, without the factor of a soft cap."""
        return self.scale / self.temperature

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute scale * (hidden @ weight.T + bias), before soft cap and temperature, in a new tensor."""
        tile = self.product(hidden, weight, bias).to(self.exact)
        return tile if self.scale == 1.0 else tile.mul_(self.scale)

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute hidden @ weight.T + bias in a new tensor. If `wide`, sums aren't rounded to 16 bits."""
        if not self.wide:
            return torch.nn.functional.linear(hidden, weight, bias)
        if hidden.is_cuda and self.dtype in (torch.bfloat16, torch.float16):
            tile = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return tile if bias is None else tile.add_(bias)
        wide_bias = None if bias is None else bias.to(self.exact)
        return torch.nn.functional.linear(hidden.to(self.exact), weight.to(self.exact), wide_bias)

    def finish_(self, tile: torch.Tensor, row: slice, vocabulary: slice, keep_cap: bool = False) -> torch.Tensor | None:
        """Apply soft cap and temperature to a `logits` tile in place. Logits outside `candidates` become `HIDDEN`.

        With ``keep_cap`` and a soft cap return t = tanh(tile / softcap): the derivative of the soft cap is 1 - t^2.
        """
        capped = None
        if self.softcap:
            tile.div_(self.softcap).tanh_()
            capped = tile.clone() if keep_cap else None
        if (factor := (self.softcap or 1.0) / self.temperature) != 1.0:
            tile.mul_(factor)
        if self.candidates is not None:
            tile.masked_fill_(self.candidates.hidden(row, vocabulary), HIDDEN)
        return capped


def product_dtype(weight: torch.Tensor, device: torch.device, wide: bool) -> torch.dtype:
    """Return the dtype of a head's products: float32 in place of bfloat16 on CPUs without bfloat16 instructions."""
    found = (None if wide else attention.autocast_dtype(device)) or weight.dtype
    slow = device.type == "cpu" and found == torch.bfloat16 and cpu_products.wanted()
    return torch.float32 if slow else found


def logit_transform(model: Any) -> dict[str, Any]:
    config = model.config.get_text_config()
    scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= float(getattr(config, name, None) or 1.0)
    return {"scale": scale, "softcap": float(getattr(config, "final_logit_softcapping", None) or 0.0)}


def cast(
    weight: torch.Tensor, bias: torch.Tensor | None, vocabulary: slice, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight[vocabulary].to(dtype), None if bias is None else bias[vocabulary].to(dtype)


def parts(total: int, size: int) -> Iterator[slice]:
    """Return slices of at most ``size`` elements that cover range(total). A total of 0 gives one empty slice."""
    return (slice(start, min(start + size, total)) for start in range(0, max(total, 1), size))


def vocabulary_size(model: Any) -> int:
    """Return the number of token ids in the model's whole input embedding, even if this rank has only a shard."""
    table = model.get_input_embeddings()
    own = getattr(table, "vocabulary", None)
    return int(table.weight.shape[0] if own is None else own.size)


def tile_shape(labels: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    rows = max(1, min(labels, TILE_ROWS))
    columns = TILE_ELEMENTS.get(device.type, 2**24) // rows
    if device.type != "cpu":
        columns -= columns % TILE_COLUMNS
    return rows, max(1, min(vocabulary, columns))


def kernels_for(states: torch.Tensor, head: Head, other: OtherDistribution | None) -> ModuleType | None:
    on_cuda = states.is_cuda and torch.version.cuda is not None
    if not on_cuda or head.exact != torch.float32 or other is not None or not has_triton():
        return None
    from . import head_kernels

    return head_kernels


def label_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, head: Head,
    entropy_gradient: bool = False, other: OtherDistribution | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Compute each label's log-probability, entropy and, with a teacher's distribution ``other``, KL(policy || other).

    The results are (N,) float32 in nats (float64 for float64 weights). The entropy is differentiable only with
    ``entropy_gradient``. ``hidden`` (N, hidden) predicts the labels. ``weight`` (V, hidden) may be this rank's shard.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if head.part is not None:
            hidden, labels = head.part.enter(hidden), labels - head.part.start
        found = _LabelLogprobs.apply(hidden, weight, bias, labels, head, entropy_gradient, other)
    return found[:2] if other is None else found


@dataclass(frozen=True, slots=True)
class Spread:
    """The loss's gradient through entropy and KL divergence, with respect to a tile of logits (n labels, c columns).

    The gradient is p (slope log p - constant - logq), with p = softmax(logits) and the fields `slope`, `constant` and
    `logq`. Then `more` adds its values in K columns of each label's row.
    """

    slope: torch.Tensor  # The factor `slope` of each label, (n,).
    constant: torch.Tensor  # The term `constant` of each label, (n,).
    logq: torch.Tensor | None = None  # The teacher's log-probabilities times the KL divergence's gradient, (n, c).
    more: tuple[torch.Tensor, torch.Tensor] | None = None  # Column indices (n, K), and values to add there, (n, K).


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
        head: Head, entropy_gradient: bool, other: OtherDistribution | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        states = hidden.to(head.dtype)
        rows, columns = tile_shape(len(labels), len(weight), hidden.device)
        running = states.new_zeros((4, len(labels)), dtype=head.exact)
        label_logit, moment, total, maximum = running.unbind()
        maximum.fill_(torch.finfo(head.exact).min / 2)  # Not -inf: the difference of two maxima must be finite.
        kernels = kernels_for(states, head, other)
        sums = None if other is None else other.sums(total)
        for vocabulary in parts(len(weight), columns):
            part, part_bias = cast(weight, bias, vocabulary, head.dtype)
            for row in parts(len(labels), rows):
                if kernels is None:
                    tile = head.logits(states[row], part, part_bias)
                    head.finish_(tile, row, vocabulary)
                    _add_tile(tile, labels, (row, vocabulary), running[:, row], sums)
                else:
                    tile = head.product(states[row], part, part_bias)
                    kernels.add_tile(head, tile, (labels, row, vocabulary), running[:, row])
        if head.part is not None:
            maximum, (label_logit, moment, total) = head.part.combine(maximum, (label_logit, moment, total))
        normaliser = maximum + total.log()
        ctx.head, ctx.other = head, other
        divergence, of_other = (None, None) if sums is None else sums.result(total, normaliser)
        entropy = total.log() - moment / total  # log Z - E[x] for x = logit - maximum, Z = sum of e^x.
        of_backward = entropy if entropy_gradient else None
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, of_backward, divergence, of_other)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return label_logit - normaliser, entropy, divergence

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, of_entropy: torch.Tensor, of_divergence: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the loss's gradients with respect to hidden states, weight and bias.

        With respect to a logit, a log-probability has the derivative onehot - p, the entropy H has -p (log p + H), and
        the KL divergence from a teacher has p (log p - log q - KL). p is the policy's probability, and q is the
        teacher's probability. onehot is 1 for the label's logit, else 0.
        """
        hidden, weight, bias, labels, normaliser, entropy, divergence, of_other = ctx.saved_tensors
        head: Head = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states = hidden.to(head.dtype)
        rows, columns = tile_shape(len(labels), len(weight), hidden.device)
        d_hidden = torch.zeros_like(hidden, dtype=head.exact) if needs_hidden else None
        d_weight = torch.empty_like(weight, dtype=_gradient_dtype(weight)) if needs_weight else None
        d_bias = torch.empty_like(bias, dtype=_gradient_dtype(bias)) if needs_bias else None
        kernels = kernels_for(states, head, ctx.other)
        gradient, of_entropy = gradient.contiguous(), of_entropy.contiguous()
        dtype = head.exact if needs_bias else head.dtype  # A bias's gradient sums a tile before rounding.
        with torch.autocast(hidden.device.type, enabled=False):
            for vocabulary in parts(len(weight), columns):
                part, part_bias = cast(weight, bias, vocabulary, head.dtype)
                of_weight: torch.Tensor | None = None
                of_bias: torch.Tensor | None = None
                for row in parts(len(labels), rows):
                    own_entropy = None if entropy is None else entropy[row]
                    if kernels is None:
                        spread = None
                        if own_entropy is not None:
                            spread = Spread(-of_entropy[row], of_entropy[row] * own_entropy)
                        if ctx.other is not None and of_divergence is not None:
                            saved = divergence[row], of_other[row]
                            spread = ctx.other.spread(spread, (row, vocabulary), of_divergence[row], saved)
                        tile = head.logits(states[row], part, part_bias)
                        of_row = labels[row], normaliser[row], gradient[row]
                        _turn_to_gradient(head, tile, of_row, (row, vocabulary), spread)
                    else:
                        tile = head.product(states[row], part, part_bias)
                        values = normaliser[row], gradient[row], of_entropy[row], own_entropy
                        tile = kernels.gradient(head, tile, (labels, row, vocabulary), values, dtype)
                    if d_bias is not None:
                        of_bias = _plus(of_bias, tile.sum(dim=0), head.exact)
                    tile = tile.to(head.dtype)
                    if d_hidden is not None:
                        d_hidden[row] += tile @ part
                    if d_weight is not None:
                        of_weight = _plus(of_weight, tile.t() @ states[row], head.exact)
                if d_weight is not None:
                    d_weight[vocabulary] = of_weight
                if d_bias is not None:
                    d_bias[vocabulary] = of_bias
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None


def _add_tile(
    tile: torch.Tensor, labels: torch.Tensor, place: tuple[slice, slice], running: torch.Tensor, sums: Any
) -> None:
    """Add a tile of final logits x to the ``running`` statistics (4, n) of n labels, and overwrite the tile.

    With m as the maximum of x, a label's statistics are its logit, the sums of (x - m) e^(x - m) and e^(x - m), and m.
    """
    label_logit, moment, total, maximum = running.unbind()
    index, inside = _columns(labels[place[0]], place[1])
    gaps = None if sums is None else sums.gaps(tile, *place)
    label_logit += tile.gather(1, index).squeeze(1).where(inside, 0.0)
    largest = torch.maximum(maximum, tile.amax(dim=1))
    fall = maximum - largest
    decay = fall.exp()
    moment.add_(fall * total).mul_(decay)
    total *= decay
    maximum.copy_(largest)
    tile.sub_(largest[:, None])
    power = tile.exp()
    total += power.sum(dim=1)
    moment += torch.linalg.vecdot(power, tile)
    if gaps is not None:
        sums.add(place[0], decay, power, gaps)


def _turn_to_gradient(
    head: Head, tile: torch.Tensor, of_row: tuple[torch.Tensor, ...], place: tuple[slice, slice], spread: Spread | None
) -> None:
    """Overwrite a tile of `Head.logits` with the loss's gradient with respect to hidden @ weight.T."""
    labels, normaliser, gradient = of_row
    chain, (index, inside) = head.chain, _columns(labels, place[1])
    gradient = gradient * chain
    capped = head.finish_(tile, *place, keep_cap=True)
    tile.sub_(normaliser[:, None])
    if spread is None:
        tile.exp_().mul_(-gradient[:, None])
    else:  # The sum of p (slope log p - constant - logq), see `Spread`, and -p gradient.
        power = tile.exp()
        tile.mul_((spread.slope * chain)[:, None]).sub_((gradient + spread.constant * chain)[:, None])
        if spread.logq is not None:
            tile.sub_(spread.logq, alpha=chain)
        tile.mul_(power)
        del power
        if spread.more is not None:
            tile.scatter_add_(1, spread.more[0], spread.more[1] * chain)
    tile.scatter_add_(1, index, gradient.where(inside, 0.0)[:, None])
    if capped is not None:
        tile.addcmul_(tile, capped.square_(), value=-1.0)


def _columns(labels: torch.Tensor, vocabulary: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each label's column in a tile, int64 (n, 1), and a bool mask of the labels in the tile, (n,). The column
    of a label outside the tile is 0."""
    inside = (labels >= vocabulary.start) & (labels < vocabulary.stop)
    return (labels - vocabulary.start).where(inside, 0)[:, None], inside


def _plus(total: torch.Tensor | None, term: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return term if total is None else total.to(dtype).add_(term)


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype
