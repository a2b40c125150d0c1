"""Reverse KL divergence KL(policy || teacher) per label (target token), computed one vocabulary tile at a time.

The policy's head calls methods of `TeacherLogits` (`distillation_kl: exact`) or `TeacherTop` (`top_k`). The head's
forward calls `sums`, then `gaps` (and `add`) per tile, then `result`. The backward calls `spread` per tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...policy.head import HIDDEN, Candidates, Head, Spread, cast, parts, tile_shape
from ...policy.logprobs import Compute, ForwardStep, Pass, calls


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """A teacher's head, which may have more tokens than the policy's head."""

    model: Any
    weight: torch.Tensor  # (number of tokens, hidden)
    bias: torch.Tensor | None

    @classmethod
    def of(cls, model: Any, device: torch.device | None = None) -> TeacherHead:
        """Return the head of ``model``, copied to ``device`` if given. Offloaded and sharded teachers need the copy."""
        head = model.get_output_embeddings()
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        bias = None if bias is None else bias.detach()
        if device is not None:
            weight, bias = weight.to(device, copy=True), None if bias is None else bias.to(device, copy=True)
        return cls(model, weight, bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def beside(self, row: Pass) -> TeacherLogits:
        return self.logits(row.batch.scores["teacher_states"], row.temperature, row.candidates)

    def logits(self, states: torch.Tensor, temperature: float, candidates: Candidates | None = None) -> TeacherLogits:
        """Return the logits for ``states`` (N, hidden). ``candidates``: tokens that could be sampled (None: all)."""
        head = Head.of(self.model, temperature, states.device, candidates)
        return TeacherLogits(states.to(head.dtype), self.weight, self.bias, head)


@dataclass(slots=True, eq=False)
class TeacherLogits:
    """Tiles of the teacher's logits y, and running sums of KL(policy || teacher) for the policy's logits x.

    The divergence is the policy's expectation of x - y, minus log sum e^x, plus log sum e^y (sums over tokens)."""

    states: torch.Tensor  # (N, hidden)
    weight: torch.Tensor
    bias: torch.Tensor | None
    head: Head
    gap: torch.Tensor = field(init=False)  # (N,): sum of e^(x - max x) (x - y)
    total: torch.Tensor = field(init=False)  # (N,): sum of e^(y - maximum)
    maximum: torch.Tensor = field(init=False)  # (N,): largest y

    def tile(self, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return a tile of the teacher's logits, (n labels, c tokens)."""
        part, bias = cast(self.weight, self.bias, vocabulary, self.head.dtype)
        tile = self.head.logits(self.states[row], part, bias)
        self.head.finish_(tile, row, vocabulary)
        return tile

    def sums(self, like: torch.Tensor) -> TeacherLogits:
        self.gap, self.total = torch.zeros_like(like), torch.zeros_like(like)
        self.maximum = torch.full_like(like, torch.finfo(like.dtype).min / 2)  # finite: -inf minus -inf is NaN
        return self

    def read(self, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return a tile of the teacher's logits y, and update the running maximum and sum of e^(y - maximum)."""
        tile = self.tile(row, vocabulary)
        largest = torch.maximum(self.maximum[row], tile.amax(dim=1))
        self.total[row] *= (self.maximum[row] - largest).exp()
        self.total[row] += (tile - largest[:, None]).exp_().sum(dim=1)
        self.maximum[row] = largest
        return tile

    def gaps(self, tile: torch.Tensor, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return x - y (n, c) for a tile of the policy's logits x."""
        return self.read(row, vocabulary).neg_().add_(tile)

    def add(self, row: slice, decay: torch.Tensor, power: torch.Tensor, gaps: torch.Tensor) -> None:
        """Multiply `gap` by ``decay``, then add e^(x - max x) (``power``) times ``gaps``, summed over a tile."""
        self.gap[row] = decay * self.gap[row] + torch.linalg.vecdot(power, gaps)

    def result(self, total: torch.Tensor, normaliser: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence (N,), and log sum e^y (N,) of the teacher's logits y.

        ``total``: sum of e^(x - max x), (N,), with the policy's logits x. ``normaliser``: log sum e^x, (N,)."""
        theirs = self.maximum + self.total.log()
        return self.gap / total - normaliser + theirs, theirs

    def spread(
        self, first: Spread | None, place: tuple[slice, slice], gradient: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> Spread:
        """Return the loss's gradient through entropy and divergence with respect to the policy's logits in ``place``.

        ``place``: a tile. ``first``: the part through the entropy (None: 0). ``gradient``: the loss's gradient with
        respect to the divergence, (n,). ``saved``: rows of the tensors that `result` returned."""
        divergence, of_teacher = saved
        logq = self.tile(*place).sub_(of_teacher[:, None]).mul_(gradient[:, None])
        slope, constant = gradient, gradient * divergence
        if first is not None:
            slope, constant = slope + first.slope, constant + first.constant
        return Spread(slope, constant, logq)


REST = 1e-6  # Minimum probability of all tokens outside the top K together, because 1 minus the top K's sum is inexact.


@dataclass(slots=True, eq=False)
class TeacherTop:
    """The teacher's K most probable tokens for N labels.

    All other tokens count as one token, so the result is a lower bound of the divergence."""

    ids: torch.Tensor  # (N, K) int64
    logprobs: torch.Tensor  # (N, K)
    own: torch.Tensor = field(init=False)  # the policy's logits of the tokens `ids`, (N, K)

    @classmethod
    def beside(cls, row: Pass) -> TeacherTop:
        ids, logprobs = row.batch.scores["teacher_top"].unbind(1)
        return cls(ids.long(), logprobs)

    def sums(self, like: torch.Tensor) -> TeacherTop:
        self.own = like.new_full(self.ids.shape, HIDDEN)
        return self

    def columns(self, row: slice, vocabulary: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each top token's column in a tile (0 if outside), and whether the tile has the token, (n, K) each."""
        ids = self.ids[row]
        inside = (ids >= vocabulary.start) & (ids < vocabulary.stop)
        return (ids - vocabulary.start).where(inside, 0), inside

    def spread(
        self, first: Spread | None, place: tuple[slice, slice], gradient: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> Spread:
        """Return the loss's gradient, as `TeacherLogits.spread` does.

        The divergence KL has the gradient p (gap - KL) with respect to a token's logit. p is the policy's probability
        of the token, q is the teacher's, and gap = log p - log q. All tokens outside the top K share one gap."""
        divergence, of_teacher = saved
        own, of_rest = of_teacher[:, :-1], of_teacher[:, -1]
        slope, constant = torch.zeros_like(gradient), gradient * (divergence - of_rest)
        if first is not None:
            slope, constant = slope + first.slope, constant + first.constant
        index, inside = self.columns(*place)
        return Spread(slope, constant, more=(index, (own * gradient[:, None]).where(inside, 0.0)))

    def gaps(self, tile: torch.Tensor, row: slice, vocabulary: slice) -> None:
        """Copy the policy's logits of top tokens from a tile to `own`. Return None, so the head doesn't call `add`."""
        index, inside = self.columns(row, vocabulary)
        self.own[row] = torch.where(inside, tile.gather(1, index), self.own[row])

    def result(self, total: torch.Tensor, normaliser: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence (N,), and values for its gradient, (N, K + 1).

        The values are p (gap - r) per top token (p and gap: see `spread`), and r, the gap of all other tokens."""
        logp, logq = self.own - normaliser[:, None], self.logprobs.to(self.own)
        p, gap = logp.exp(), logp - logq
        # A top token that the policy can't sample counts as a token outside the top K.
        here = logq.exp().where(self.own > HIDDEN / 2, 0.0)
        rest, theirs = ((1 - of.sum(1)).clamp(min=REST) for of in (p, here))
        of_rest = rest.log() - theirs.log()
        found = torch.linalg.vecdot(p, gap) + rest * of_rest
        return found, torch.cat([p * (gap - of_rest[:, None]), of_rest[:, None]], dim=1)


class TeacherStep(ForwardStep):
    def __init__(self, head: TeacherHead | type[TeacherTop]) -> None:
        self.head = head

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        row.other = self.head.beside
        return inner(row)


def label_states(row: Pass) -> tuple[torch.Tensor, ...]:
    """Return the head's inputs for N labels, (N, hidden)."""
    hidden = row.label_states()
    return (hidden.to(Head.of(row.model, row.temperature, hidden.device).dtype),)


def label_top_tokens(k: int, row: Pass) -> tuple[torch.Tensor, ...]:
    hidden, head = row.label_states(), row.model.get_output_embeddings()

    def top(hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            return top_tokens(TeacherHead.of(row.model).logits(hidden, row.temperature, row.candidates), k)

    with calls(head, top):
        return (head(hidden),)


def top_tokens(logits: TeacherLogits, k: int) -> torch.Tensor:
    """Return ids and log-probabilities of each label's K most probable tokens, (N, 2, K) float32."""
    count, found = len(logits.states), []
    rows, columns = tile_shape(count, len(logits.weight), logits.states.device)
    logits.sums(logits.states.new_empty(count, dtype=logits.head.exact))
    for row in parts(count, rows):
        best = logits.maximum.new_empty((row.stop - row.start, 0))
        ids = best.long()
        for vocabulary in parts(len(logits.weight), columns):
            values = logits.read(row, vocabulary)
            top = values.topk(min(k, values.shape[1]))
            best, ids = torch.cat([best, top.values], 1), torch.cat([ids, top.indices + vocabulary.start], 1)
            order = best.topk(min(k, best.shape[1])).indices
            best, ids = best.gather(1, order), ids.gather(1, order)
        normaliser = logits.maximum[row] + logits.total[row].log()
        found.append(torch.stack([ids.float(), (best - normaliser[:, None]).float()], 1))
    return torch.cat(found)
