"""Head of a language model: log-probability and entropy of each label, without the logits of a whole row.

The logits exist one tile (some rows x some of the vocabulary) at a time. The forward keeps a running maximum and sum
per row (an online softmax, arXiv 1805.02867), and the backward computes each tile again. So memory doesn't grow with
the vocabulary, and grows by two numbers per label.

After its product, a tile is read once by a kernel on a GPU (`head_kernels`). The torch code here does the same in
several passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton

from ..runtime import cpu_products
from . import attention

HIDDEN = -1e30  # logit of a token that isn't a candidate: probability 0, and no infinity in any product
FLOAT32_PRODUCTS = "colograd_float32_products"  # attribute of a head, see `cast_lm_head_to_fp32`
# Number of logits that exist at once. The passes in torch have two float32 tensors of a tile's size. On a GPU each has
# 64 MiB, because smaller tiles would be bound by kernel launches; on a CPU 32 MiB, because its allocator doesn't reuse
# all freed memory.
TILE_ELEMENTS = {"cpu": 2**23, "cuda": 2**24}
# More rows than these make a tile too narrow for fast matrix products.
TILE_ROWS = 8192
# On a GPU a tile has a multiple of these columns, because rows that don't start at aligned bytes are slow.
TILE_COLUMNS = 64


class Candidates(Protocol):
    """Tokens of the vocabulary that each label's distribution is over."""

    def hidden(self, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return (n, c) bool, True where the token isn't among the label's candidates."""


class HeadPart(Protocol):
    """Entries ``start`` ... ``stop`` of a vocabulary of ``size`` entries: one rank's part of a head."""

    start: int
    stop: int
    size: int

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the ranks' common input; its backward sums their gradients."""

    def combine(
        self, maximum: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Combine the ranks' maxima and sums (label's logit, moment, total) into the whole vocabulary's."""


class OtherSums(Protocol):
    """Running sums of a divergence from another distribution, over the policy's tiles."""

    def gaps(self, tile: torch.Tensor, row: slice, vocabulary: slice) -> torch.Tensor | None: ...
    def add(self, row: slice, decay: torch.Tensor, power: torch.Tensor, gaps: torch.Tensor) -> None: ...
    def result(self, total: torch.Tensor, normaliser: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class OtherDistribution(Protocol):
    """Another distribution of each label, for the policy's divergence from it (N,), which is differentiable."""

    def sums(self, like: torch.Tensor) -> OtherSums: ...

    def spread(
        self, first: Spread | None, place: tuple[slice, slice], gradient: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> Spread:
        """Add the divergence's part of a tile's gradient to ``first``."""


@dataclass(frozen=True, slots=True)
class Head:
    """Computation of logits from hidden states: capped(scale * product) / temperature."""

    temperature: float
    scale: float
    softcap: float  # limit of tanh soft-capping; 0: none
    dtype: torch.dtype  # dtype of the matrix products
    wide: bool = False  # whether the product returns its logits in `exact`
    part: HeadPart | None = None  # this rank's rows of the weight; None: all rows
    candidates: Candidates | None = None  # None: the whole vocabulary

    @classmethod
    def of(cls, model: Any, temperature: float, device: torch.device, candidates: Candidates | None = None) -> Head:
        """Describe a model's head for rows on ``device``, inside a call of the head."""
        own = model.get_output_embeddings()
        scale, softcap = logit_transform(model).values()
        wide, part = getattr(own, FLOAT32_PRODUCTS, False), getattr(own, "vocabulary", None)
        return cls(temperature, scale, softcap, product_dtype(own.weight, device, wide), wide, part, candidates)

    @property
    def exact(self) -> torch.dtype:
        """Dtype of everything except the products."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def chain(self) -> float:
        """Derivative of the logits after the product, without the cap's."""
        return self.scale / self.temperature

    @property
    def transform(self) -> dict[str, Any]:
        """How `head_kernels.Tile` turns products into logits."""
        cap = self.softcap or 1.0
        capped = bool(self.softcap)
        return {"low": HIDDEN, "before": self.scale / cap, "behind": cap / self.temperature, "capped": capped}

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return one tile (rows, columns) before the cap and the temperature: a new tensor, for in-place work."""
        tile = self.product(hidden, weight, bias).to(self.exact)
        return tile if self.scale == 1.0 else tile.mul_(self.scale)

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply into a new tensor. A wide product is as vLLM's for a head in float32: on a GPU from 16-bit factors.

        float32 holds the product of two bfloat16 numbers exactly.
        """
        if not self.wide:
            return torch.nn.functional.linear(hidden, weight, bias)
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

    def hidden(self, row: slice, vocabulary: slice) -> torch.Tensor | None:
        """Return (n, c) bool, True for tokens that aren't among their label's candidates; None: all are."""
        return None if self.candidates is None else self.candidates.hidden(row, vocabulary)

    def hide_(self, tile: torch.Tensor, row: slice, vocabulary: slice) -> torch.Tensor:
        """Write `HIDDEN` into a finished tile for every token that isn't among its label's candidates."""
        hidden = self.hidden(row, vocabulary)
        return tile if hidden is None else tile.masked_fill_(hidden, HIDDEN)


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
    own: HeadPart | None = getattr(table, "vocabulary", None)
    return int(table.weight.shape[0]) if own is None else own.size


def tile_shape(labels: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Return rows and columns of the logits that exist at once."""
    rows = max(1, min(labels, TILE_ROWS))
    columns = TILE_ELEMENTS.get(device.type, 2**24) // rows
    if device.type != "cpu":
        columns -= columns % TILE_COLUMNS
    return rows, max(1, min(vocabulary, columns))


def kernels_for(states: torch.Tensor, head: Head, other: OtherDistribution | None) -> ModuleType | None:
    """Return `head_kernels`, or None where the passes run in torch.

    That is without a GPU or Triton, in float64, and for a divergence from another distribution.
    """
    if not states.is_cuda or torch.version.cuda is None or head.exact != torch.float32 or other is not None:
        return None
    if not has_triton():
        return None
    from . import head_kernels

    return head_kernels


def label_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: Head,
    entropy_gradient: bool = False,
    other: OtherDistribution | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute each label's log-probability, entropy and, with ``other``, reverse KL divergence KL(policy || other).

    Each is (N,) float32 in nats (float64 for float64 weights). The entropy is differentiable with ``entropy_gradient``.
    The weight's gradient has its ``grad_dtype``, if any.

    Args:
        hidden: (N, hidden) states that predict the labels.
        weight: (V, hidden) of the head, or this rank's rows.

    Raises:
        RuntimeError: a second derivative is requested, which isn't implemented.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if head.part is not None:
            hidden, labels = head.part.enter(hidden), labels - head.part.start
        found = _LabelLogprobs.apply(hidden, weight, bias, labels, head, entropy_gradient, other)
    return found[:2] if other is None else found


@dataclass(frozen=True, slots=True)
class Spread:
    """Gradient spread over the vocabulary: p (slope log p - constant - logq) for each logit."""

    slope: torch.Tensor  # (n,)
    constant: torch.Tensor  # (n,)
    logq: torch.Tensor | None = None  # (n, c)
    more: tuple[torch.Tensor, torch.Tensor] | None = None  # (n, K) columns, and (n, K) summands for them

    @classmethod
    def of_entropy(cls, gradient: torch.Tensor, entropy: torch.Tensor) -> Spread:
        return cls(-gradient, gradient * entropy)


class _LabelLogprobs(torch.autograd.Function):
    """Function from hidden states and head to log softmax(logits)[label], entropy, and divergence from another one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: Head,
        entropy_gradient: bool,
        other: OtherDistribution | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        states = hidden.to(head.dtype)
        rows, columns = tile_shape(len(labels), len(weight), hidden.device)
        running = states.new_zeros((4, len(labels)), dtype=head.exact)
        label_logit, moment, total, maximum = running.unbind()
        # Not -inf: the first difference to a real maximum has to be finite.
        maximum.fill_(torch.finfo(head.exact).min / 2)
        kernels = kernels_for(states, head, other)
        sums = None if other is None else other.sums(total)
        for vocabulary in parts(len(weight), columns):
            part, part_bias = cast(weight, bias, vocabulary, head.dtype)
            for row in parts(len(labels), rows):
                if kernels is None:
                    tile = head.logits(states[row], part, part_bias)
                    _add_tile(head, tile, labels, row, vocabulary, running[:, row], sums)
                else:
                    tile = head.product(states[row], part, part_bias)
                    at = labels[row], vocabulary.start, head.hidden(row, vocabulary)
                    kernels.Tile(tile, *at, **head.transform).add_to(running[:, row])
        if head.part is not None:
            maximum, (label_logit, moment, total) = head.part.combine(maximum, (label_logit, moment, total))
        normaliser = maximum + total.log()
        ctx.head, ctx.other = head, other
        divergence, of_other = (None, None) if sums is None else sums.result(total, normaliser)
        entropy = total.log() - moment / total  # H = log Z - E[x], the maximum subtracted from both
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
        """Compute the gradients tile by tile, through the temperature, the cap and the scale.

        d logprob / d logit = onehot - p, d H / d logit = -p (log p + H) and d KL / d logit = p (log p - log q - KL).
        """
        hidden, weight, bias, labels, normaliser, entropy, divergence, of_other = ctx.saved_tensors
        head: Head = ctx.head
        other: OtherDistribution | None = ctx.other
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states = hidden.to(head.dtype)
        rows, columns = tile_shape(len(labels), len(weight), hidden.device)
        d_hidden = torch.zeros_like(hidden, dtype=head.exact) if needs_hidden else None
        d_weight = torch.empty_like(weight, dtype=_gradient_dtype(weight)) if needs_weight else None
        d_bias = torch.empty_like(bias, dtype=_gradient_dtype(bias)) if needs_bias else None
        kernels = kernels_for(states, head, other)
        gradient, of_entropy = gradient.contiguous(), of_entropy.contiguous()
        dtype = head.exact if needs_bias else head.dtype  # a bias's gradient sums unrounded numbers
        with torch.autocast(hidden.device.type, enabled=False):
            for vocabulary in parts(len(weight), columns):
                part, part_bias = cast(weight, bias, vocabulary, head.dtype)
                # Finish sums over rows before the next columns, so that no second gradient of the head's size exists.
                of_weight: torch.Tensor | None = None
                of_bias: torch.Tensor | None = None
                for row in parts(len(labels), rows):
                    if kernels is None:
                        place = _Place.of(labels, row, vocabulary, head)
                        spread = None if entropy is None else Spread.of_entropy(of_entropy[row], entropy[row])
                        if other is not None and of_divergence is not None:
                            saved = divergence[row], of_other[row]
                            spread = other.spread(spread, (row, vocabulary), of_divergence[row], saved)
                        tile = head.logits(states[row], part, part_bias)
                        _turn_to_gradient(head, tile, place, normaliser[row], gradient[row], spread)
                    else:
                        tile = head.product(states[row], part, part_bias)
                        at = labels[row], vocabulary.start, head.hidden(row, vocabulary)
                        of_row = [normaliser[row], gradient[row], of_entropy[row]]
                        of_row.append(None if entropy is None else entropy[row])
                        tile = kernels.Tile(tile, *at, **head.transform).gradient(of_row, head.chain, dtype)
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
    head: Head,
    tile: torch.Tensor,
    labels: torch.Tensor,
    row: slice,
    vocabulary: slice,
    running: torch.Tensor,
    sums: OtherSums | None,
) -> None:
    """Add a tile of `Head.logits`, which it overwrites, to the ``running`` statistics (4, n) of its rows."""
    label_logit, moment, total, maximum = running.unbind()
    tile = head.hide_(head.finish_(head.cap_(tile) if head.softcap else tile), row, vocabulary)
    place = _Place.of(labels, row, vocabulary)
    gaps = None if sums is None else sums.gaps(tile, row, vocabulary)
    label_logit += tile.gather(1, place.index).squeeze(1).where(place.inside, 0.0)
    # Running sums of e^(x - max) and of e^(x - max) (x - max), moved whenever the maximum rises.
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
    if sums is not None and gaps is not None:
        sums.add(row, decay, power, gaps)


def _turn_to_gradient(
    head: Head,
    tile: torch.Tensor,
    place: _Place,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    spread: Spread | None,
) -> None:
    """Turn a tile of `Head.logits` into the gradient of the head's product, in place.

    Args:
        gradient: (n,) gradient of the log-probabilities.
        spread: gradient of entropy and divergence; None: they are constants.
    """
    chain = head.chain
    gradient = gradient * chain
    capped = head.cap_(tile).clone() if head.softcap else None
    head.finish_(tile)
    if place.hidden is not None:
        tile.masked_fill_(place.hidden, HIDDEN)
    tile.sub_(normaliser[:, None])
    if spread is None:
        tile.exp_().mul_(-gradient[:, None])
    else:  # p (slope log p - constant - logq - gradient)
        power = tile.exp()
        tile.mul_((spread.slope * chain)[:, None]).sub_((gradient + spread.constant * chain)[:, None])
        if spread.logq is not None:
            tile.sub_(spread.logq, alpha=chain)
        tile.mul_(power)
        del power
    if spread is not None and spread.more is not None:
        tile.scatter_add_(1, spread.more[0], spread.more[1] * chain)
    tile.scatter_add_(1, place.index, gradient.where(place.inside, 0.0)[:, None])
    if capped is not None:
        tile.addcmul_(tile, capped.square_(), value=-1.0)


def _plus(total: torch.Tensor | None, term: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add a term, in ``dtype`` from the second term on, so that a single term takes no further memory."""
    return term if total is None else total.to(dtype).add_(term)


@dataclass(frozen=True, slots=True)
class _Place:
    """Places of the rows' labels in a tile."""

    index: torch.Tensor  # (n, 1) int64, column of each label; 0 if the label is in another tile
    inside: torch.Tensor  # (n,) bool, whether the label is in this tile
    hidden: torch.Tensor | None = None  # (n, c) bool, True for tokens outside the label's candidates

    @classmethod
    def of(cls, labels: torch.Tensor, row: slice, vocabulary: slice, head: Head | None = None) -> _Place:
        """Find the labels' places; with a ``head`` also the hidden tokens."""
        own = labels[row]
        inside = (own >= vocabulary.start) & (own < vocabulary.stop)
        hidden = None if head is None else head.hidden(row, vocabulary)
        return cls((own - vocabulary.start).where(inside, 0)[:, None], inside, hidden)


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the accumulated gradient. (In torch only leaves have a `grad_dtype`.)"""
    own = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return own or parameter.dtype
