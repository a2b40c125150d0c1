"""Packed forward -> log-probability and entropy of each label, never the logits of a whole row.

Only positions that predict a completion token reach the head. Its logits exist one tile (some rows x some of the
vocabulary) at a time: the forward keeps a running maximum and sum per row (an online softmax, arXiv 1805.02867), the
backward computes each tile again. So memory grows with neither vocabulary nor labels, but for two numbers per label.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..batch import MicroBatch, PackedRow, StepBatch
from ..parallel import watchdog
from . import attention, images, padded, router_replay, sequence_parallel
from .exchanges import enter
from .head import FLOAT32_PRODUCTS, HIDDEN, Head, Kept, cast, logit_transform, parts, product_dtype
from .lora import unwrap
from .packing import collate
from .routing import Routing, routing_of
from .sequence_parallel import RowPart
from .teacher_head import Spread, TeacherHead, TeacherLogits, TeacherTop, TopTokens, top_tokens
from .tensor_parallel import VocabularyPart

# Logits alive at once. Two float32 tensors of a tile's size live in the forward: 64 MiB each on a GPU, where smaller
# tiles would leave it waiting for launches; 32 MiB on a CPU, whose allocator doesn't reuse all that is freed.
TILE_ELEMENTS = {"cpu": 2**23, "cuda": 2**24}
# More rows than these make a tile too narrow for fast matrix products.
TILE_ROWS = 8192


def policy_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each label, at ``temperature``: its log-probability (N,) float32 in nats, differentiable, and the entropy of
    its distribution (N,) float32 in nats, with a gradient if it is asked for."""
    return PolicyForward(model, temperature, entropy_gradient)(micro_batch)[:2]


def routed_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    """`policy_logprobs` and what the routers did, of a mixture of experts that tells (`routing.tells_routing`)."""
    logprobs, entropy, *routing = PolicyForward(model, temperature, entropy_gradient, routing=True)(micro_batch)
    return logprobs, entropy, Routing(*routing)


@torch.no_grad()
def with_old_logprobs(model: torch.nn.Module, step: StepBatch, temperature: float) -> StepBatch:
    """The step with the present weights' log-probabilities, without dropout: the sampler had none, and a resumed run
    finds the same ones."""
    with evaluation_mode(model):
        forward = PolicyForward(model, temperature)
        rows = tuple(dataclasses.replace(row, old_logprobs=forward.of_row(row)[0]) for row in step.rows)
    return dataclasses.replace(step, rows=rows)


@dataclass(frozen=True, slots=True)
class PolicyForward:
    """One forward of the policy, from a packed row to its labels' log-probabilities.

    All is computed inside a call of the model (or its wrapper), and of its head, so that their hooks fire: a sharded
    model gathers its weights in them. Where ranks meet in a forward, the model's ``around_forward`` is a context in
    which it fails on all or on none.
    """

    model: torch.nn.Module  # or a wrapper around it, such as a PeftModel
    temperature: float
    entropy_gradient: bool = False
    routing: bool = False
    teacher: TeacherHead | TopTokens | None = None  # of the model that made the batch's `teacher_states`, or top tokens

    @staticmethod
    def prepare(row: PackedRow) -> MicroBatch:
        """The row's tensors on the device: the only place that lays rows out."""
        return collate(row)

    def of_row(self, row: PackedRow) -> tuple[torch.Tensor, ...]:
        return self(self.prepare(row))

    def __call__(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """`policy_logprobs`; with a teacher, the divergence from it (N,); the fields of a `Routing` if asked for:
        tensors alone, for a sharded model's hooks."""
        return self._call(self._compute, micro_batch)

    def states(self, micro_batch: MicroBatch) -> torch.Tensor:
        """(N, hidden) what the head would be given for the labels, in the dtype of its products."""
        (found,) = self._call(self._states, micro_batch)
        return found

    def top(self, micro_batch: MicroBatch, k: int) -> torch.Tensor:
        """(N, 2, K) of each label the most probable tokens' ids and log-probabilities, see `MicroBatch.teacher_top`."""
        (found,) = self._call(functools.partial(self._top, k), micro_batch)
        return found

    def _call(self, compute: Callable[..., Any], micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        watchdog.progress()  # of a pass over many rows each is one
        around = getattr(self.model, "around_forward", nullcontext)
        with calls(self.model, compute), around():
            found: tuple[torch.Tensor, ...] = self.model(micro_batch)
        return found

    def _states(self, micro_batch: MicroBatch) -> tuple[torch.Tensor]:
        model = unwrap(self.model)
        hidden = hidden_states(model, micro_batch)[0].index_select(0, micro_batch.logit_positions)
        return (hidden.to(TeacherHead.of(model).dtype(hidden.device)),)

    def _top(self, k: int, micro_batch: MicroBatch) -> tuple[torch.Tensor]:
        model = unwrap(self.model)
        hidden = hidden_states(model, micro_batch)[0].index_select(0, micro_batch.logit_positions)
        head = model.get_output_embeddings()
        kept = None if micro_batch.kept is None else Kept(micro_batch.kept, hidden.device)

        def top(hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                logits = TeacherHead.of(model).logits(hidden, self.temperature, kept)
                return top_tokens(logits, k, tile_shape(len(hidden), len(logits.weight), hidden.device))

        with calls(head, top):
            found: torch.Tensor = head(hidden)
        return (found,)

    def _compute(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        model = unwrap(self.model)
        micro_batch, part = sequence_parallel.cut(model, micro_batch)
        asked = {"output_router_logits": True} if self.routing else {}
        states, routers = _states_and_routers(model, micro_batch, part, **asked)
        hidden = states[0].index_select(0, micro_batch.logit_positions)
        head = model.get_output_embeddings()

        def logprobs(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            bias, wide = getattr(head, "bias", None), getattr(head, FLOAT32_PRODUCTS, False)
            part: VocabularyPart | None = getattr(head, "vocabulary", None)
            at, transform = self.temperature, {**logit_transform(model), "part": part}
            if micro_batch.kept is not None:
                transform["kept"] = Kept(micro_batch.kept, hidden.device, 0 if part is None else part.start)
            given = hidden, head.weight, bias, micro_batch.labels
            if self.teacher is None:
                return label_logprobs(*given, at, transform, self.entropy_gradient, wide)
            logits = self.teacher.beside(micro_batch, at, transform.get("kept"))
            of_policy = Head(at, dtype=product_dtype(head.weight, hidden.device, wide), wide=wide, **transform)
            return label_divergences(*given, of_policy, logits, self.entropy_gradient)

        with calls(head, logprobs):
            found: tuple[torch.Tensor, ...] = head(hidden)
        found = found if part is None else tuple(map(part.gather, found))
        if self.routing:
            chosen = model.config.get_text_config().num_experts_per_tok
            routing = routing_of(routers, chosen, micro_batch, part)
            found += tuple(getattr(routing, field.name) for field in dataclasses.fields(routing))
        return found


@contextmanager
def calls(module: torch.nn.Module, compute: Callable[..., Any]) -> Iterator[None]:
    """While the context lasts, calling ``module`` runs its hooks around ``compute`` in place of its own forward."""
    own = module.__dict__.get("forward")  # of an instance: accelerate may have put one there
    module.forward = compute
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout while the context lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def hidden_states(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """A packed row's last hidden states, (1, T, hidden); a model without packed attention runs its sequences padded."""
    return _states_and_routers(model, micro_batch)[0]


def _states_and_routers(
    model: Any, micro_batch: MicroBatch, part: RowPart | None = None, **asked: Any
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """`hidden_states`, or those of this rank's ``part`` of the tokens; and of each layer with experts its router's
    logits (T, E), where ``asked`` has them returned."""
    if part is not None:
        asked["row_part"] = part
    if images.embeds(model, micro_batch) and model.config._attn_implementation == attention.NAME:
        with attention.packed_rows():
            return images.packed_hidden_states(model, micro_batch), ()
    whole = model.base_model is not model and not images.reads_text_alone(model)
    body = model.base_model if whole else model.get_decoder()
    if body is model:  # whose class names another attribute (Llama 4's)
        body = model.model
    routed = micro_batch.experts if router_replay.replays(model) else None
    if model.config._attn_implementation != attention.NAME:
        return padded.hidden_states(model, body, micro_batch, routed, **asked)
    if routed is not None:
        asked[padded.ROUTED] = routed
    with attention.packed_rows():
        output = body(
            input_ids=micro_batch.input_ids,
            # Hides nothing. Without one transformers looks at the positions' values, for which the host would wait.
            attention_mask=torch.ones_like(micro_batch.input_ids, dtype=torch.bool),
            position_ids=micro_batch.position_ids,
            layout=micro_batch.layout,
            use_cache=False,
            **asked,
        )
    routers = getattr(output, "router_logits", None) or ()
    return output.last_hidden_state, [logits.flatten(0, -2) for logits in routers]


def label_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: float,
    transform: dict[str, Any],
    entropy_gradient: bool = False,
    float32_products: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`policy_logprobs` from hidden states (N, hidden) and the head's weight (V, hidden), or this rank's rows of it.

    Matrix products are in autocast's dtype or the head's, all else in float32 (float64 for float64 weights). With
    ``float32_products`` the logits aren't rounded to 16 bits. The weight's gradient has its ``grad_dtype``, if any.

    Raises:
        RuntimeError: at a second derivative, which isn't implemented.
    """
    dtype = product_dtype(weight, hidden.device, float32_products)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(temperature, dtype=dtype, wide=float32_products, **transform)
        if head.part is not None:
            hidden, labels = enter(hidden, head.part.group), labels - head.part.start
        logprobs, entropy, _ = _LabelLogprobs.apply(hidden, weight, bias, labels, head, entropy_gradient, None)
    return logprobs, entropy


def label_divergences(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: Head,
    teacher: TeacherLogits | TeacherTop,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`label_logprobs`, and the reverse KL divergence KL(policy || teacher) of each label's distribution, (N,) float32
    in nats, differentiable in the policy. The teacher's logits exist a tile at a time too."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _LabelLogprobs.apply(hidden, weight, bias, labels, head, entropy_gradient, teacher)


def products_in_float32(model: Any) -> None:
    """Have the model's logits, and those of its copies, come out of the head's product in float32."""
    setattr(unwrap(model).get_output_embeddings(), FLOAT32_PRODUCTS, True)


def tile_shape(labels: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of the logits that exist at once."""
    rows = max(1, min(labels, TILE_ROWS))
    return rows, max(1, min(vocabulary, TILE_ELEMENTS.get(device.type, 2**24) // rows))


class _LabelLogprobs(torch.autograd.Function):
    """log softmax(logits)[label], the entropy and the divergence from a teacher, from hidden states and head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: Head,
        entropy_gradient: bool,
        teacher: TeacherLogits | TeacherTop | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        states = hidden.to(head.dtype)
        rows, columns = tile_shape(len(labels), len(weight), hidden.device)
        label_logit, moment, total = states.new_zeros((3, len(labels)), dtype=head.exact).unbind()
        # Not -inf: the first difference to a real maximum has to be finite.
        maximum = torch.full_like(total, torch.finfo(head.exact).min / 2)
        sums = None if teacher is None else teacher.sums(total)
        for vocabulary in parts(len(weight), columns):
            part, part_bias = cast(weight, bias, vocabulary, head.dtype)
            for row in parts(len(labels), rows):
                tile = head.logits(states[row], part, part_bias)
                tile = head.hide_(head.finish_(head.cap_(tile) if head.softcap else tile), row, vocabulary)
                place = _Place.of(labels, row, vocabulary)
                gaps = None if sums is None else sums.gaps(tile, row, vocabulary)
                label_logit[row] += tile.gather(1, place.index).squeeze(1).where(place.inside, 0.0)
                # Running sums of e^(x - max) and of e^(x - max) (x - max), moved whenever the maximum rises.
                largest = torch.maximum(maximum[row], tile.amax(dim=1))
                fall = maximum[row] - largest
                decay = fall.exp()
                moment[row] = decay * (moment[row] + fall * total[row])
                total[row] *= decay
                maximum[row] = largest
                tile.sub_(largest[:, None])
                power = tile.exp()
                total[row] += power.sum(dim=1)
                moment[row] += torch.linalg.vecdot(power, tile)
                if sums is not None and gaps is not None:
                    sums.add(row, decay, power, gaps)
        if head.part is not None:  # sums of the whole vocabulary out of each rank's
            largest = head.part.group.max_(maximum.clone())
            fall = maximum - largest
            decay = fall.exp()
            shared = torch.stack([label_logit, decay * (moment + fall * total), decay * total])
            (label_logit, moment, total), maximum = head.part.group.sum_(shared).unbind(), largest
        normaliser = maximum + total.log()
        ctx.head, ctx.teacher = head, teacher
        divergence, of_teacher = (None, None) if sums is None else sums.result(total, normaliser)
        entropy = total.log() - moment / total  # H = log Z - E[x], both less the maximum
        kept = entropy if entropy_gradient else None
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, kept, divergence, of_teacher)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return label_logit - normaliser, entropy, divergence

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, of_entropy: torch.Tensor, of_divergence: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """d logprob / d logit = onehot - p, d H / d logit = -p (log p + H) and d KL / d logit = p (log p - log q - KL),
        through the temperature, the cap and the scale, tile by tile."""
        hidden, weight, bias, labels, normaliser, entropy, divergence, of_teacher = ctx.saved_tensors
        head: Head = ctx.head
        teacher: TeacherLogits | TeacherTop | None = ctx.teacher
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states = hidden.to(head.dtype)
        rows, columns = tile_shape(len(labels), len(weight), hidden.device)
        d_hidden = torch.zeros_like(hidden, dtype=head.exact) if needs_hidden else None
        d_weight = torch.empty_like(weight, dtype=_gradient_dtype(weight)) if needs_weight else None
        d_bias = torch.empty_like(bias, dtype=_gradient_dtype(bias)) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for vocabulary in parts(len(weight), columns):
                part, part_bias = cast(weight, bias, vocabulary, head.dtype)
                # Sums over rows are finished before the next columns: no second gradient of the head's size.
                of_weight: torch.Tensor | None = None
                of_bias: torch.Tensor | None = None
                for row in parts(len(labels), rows):
                    place = _Place.of(labels, row, vocabulary, head)
                    spread = None if entropy is None else Spread.of_entropy(of_entropy[row], entropy[row])
                    if teacher is not None and of_divergence is not None:
                        saved = divergence[row], of_teacher[row]
                        spread = teacher.spread(spread, (row, vocabulary), of_divergence[row], saved)
                    tile = _tile_gradient(
                        head, states[row], part, part_bias, place, normaliser[row], gradient[row], spread
                    )
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


def _tile_gradient(
    head: Head,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    place: _Place,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    spread: Spread | None,
) -> torch.Tensor:
    """A tile's logits again, turned into the gradient of the head's product.

    Args:
        gradient: (n,) of the log-probabilities.
        spread: the gradient of all but the log-probabilities; None: the rest are constants.
    """
    chain = head.scale / head.temperature
    gradient = gradient * chain
    tile, capped = head.logits(hidden, weight, bias), None
    if head.softcap:
        capped = head.cap_(tile)
        tile = tile.clone()
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
    return tile


def _plus(total: torch.Tensor | None, term: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum, in ``dtype`` from the second term on: a single one takes no memory of its own."""
    return term if total is None else total.to(dtype).add_(term)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a tile the labels of its rows are."""

    index: torch.Tensor  # (n, 1) the column, any where it lies in another tile
    inside: torch.Tensor  # (n,) whether it lies there
    hidden: torch.Tensor | None = None  # (n, c) whether the token is one that wasn't kept

    @classmethod
    def of(cls, labels: torch.Tensor, row: slice, vocabulary: slice, head: Head | None = None) -> _Place:
        """With what is hidden, for a head."""
        own = labels[row]
        inside = (own >= vocabulary.start) & (own < vocabulary.stop)
        hidden = None if head is None or head.kept is None else head.kept.hidden(row, vocabulary)
        return cls((own - vocabulary.start).where(inside, 0)[:, None], inside, hidden)


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What the gradient accumulates in. (Asking a tensor that isn't a leaf is an error in torch.)"""
    own = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return own or parameter.dtype
