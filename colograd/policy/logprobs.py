"""Packed forward -> log-probability and entropy of each label, without the logits of a whole row.

Only positions that predict a completion token reach the head. Its logits exist one tile (some rows x some of the
vocabulary) at a time. The forward keeps a running maximum and sum per row (an online softmax, arXiv 1805.02867), and
the backward computes each tile again. So memory doesn't grow with the vocabulary, and grows by two numbers per label.
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
from ..extensions.distillation.head import Spread, TeacherHead, TeacherLogits, TeacherTop, TopTokens, top_tokens
from ..extensions.experts import router_replay
from ..extensions.experts.routing import Routing, routing_of
from ..extensions.images import towers as images
from ..extensions.sequence_parallel import forward as sequence_parallel
from ..extensions.sequence_parallel.forward import RowPart
from ..extensions.tensor_parallel.layers import VocabularyPart
from ..parallel import watchdog
from . import attention, padded
from .exchanges import enter
from .head import FLOAT32_PRODUCTS, HIDDEN, Head, cast, logit_transform, parts, product_dtype
from .lora import unwrap
from .packing import collate

# Number of logits that exist at once. The forward has two float32 tensors of a tile's size. On a GPU each has 64 MiB,
# because smaller tiles would be bound by kernel launches; on a CPU 32 MiB, because its allocator doesn't reuse all
# freed memory.
TILE_ELEMENTS = {"cpu": 2**23, "cuda": 2**24}
# More rows than these make a tile too narrow for fast matrix products.
TILE_ROWS = 8192


def policy_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each label's log-probability and the entropy of its distribution at ``temperature``.

    Both are (N,) float32 in nats. The log-probability is differentiable, the entropy only with ``entropy_gradient``.
    """
    return PolicyForward(model, temperature, entropy_gradient)(micro_batch)[:2]


def routed_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    """Compute `policy_logprobs` and the `Routing` of a mixture of experts (only if `routing.tells_routing`)."""
    logprobs, entropy, *routing = PolicyForward(model, temperature, entropy_gradient, routing=True)(micro_batch)
    return logprobs, entropy, Routing(*routing)


@torch.no_grad()
def with_old_logprobs(model: torch.nn.Module, step: StepBatch, temperature: float) -> StepBatch:
    """Return the step with the present weights' log-probabilities added to every row.

    Dropout is off, because the sampler has none and a resumed run must compute the same values.
    """
    with evaluation_mode(model):
        forward = PolicyForward(model, temperature)
        rows = tuple(dataclasses.replace(row, old_logprobs=forward.of_row(row)[0]) for row in step.rows)
    return dataclasses.replace(step, rows=rows)


@dataclass(frozen=True, slots=True)
class PolicyForward:
    """Forward of the policy, from a packed row to its labels' log-probabilities.

    Everything is computed inside calls of the model (or its wrapper) and of its head, so that their hooks run: a
    sharded model gathers its weights in hooks. If ranks exchange tensors in a forward, the model's ``around_forward``
    is a context that makes the forward fail on all ranks or on none.
    """

    model: torch.nn.Module  # or a wrapper around it, such as a PeftModel
    temperature: float
    entropy_gradient: bool = False
    routing: bool = False
    teacher: TeacherHead | TopTokens | None = None  # head for the batch's teacher states, or its top tokens

    @staticmethod
    def prepare(row: PackedRow) -> MicroBatch:
        """Return the row's tensors on the device. Rows are laid out nowhere else."""
        return collate(row)

    def of_row(self, row: PackedRow) -> tuple[torch.Tensor, ...]:
        return self(self.prepare(row))

    def __call__(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Compute `policy_logprobs`, with a teacher the divergence (N,), and with ``routing`` a `Routing`'s fields.

        The result is a flat tuple of tensors, because a sharded model's hooks need that.
        """
        return self._call(self._compute, micro_batch)

    def states(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Compute the head's inputs for the labels, (N, hidden), in the dtype of its products."""
        (found,) = self._call(self._states, micro_batch)
        return found

    def top(self, micro_batch: MicroBatch, k: int) -> torch.Tensor:
        """Compute ids and log-probabilities of each label's K most probable tokens, (N, 2, K).

        See `MicroBatch.scores`.
        """
        (found,) = self._call(functools.partial(self._top, k), micro_batch)
        return found

    def _call(self, compute: Callable[..., Any], micro_batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        watchdog.progress()  # each row of a long pass is progress
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
        kept = micro_batch.candidates(hidden.device)

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
            transform["kept"] = micro_batch.candidates(hidden.device, 0 if part is None else part.start)
            given = hidden, head.weight, bias, micro_batch.labels
            if self.teacher is None:
                return label_logprobs(*given, at, transform, self.entropy_gradient, wide)
            logits = self.teacher.beside(micro_batch, at, transform["kept"])
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
    """Replace ``module``'s forward by ``compute`` while the context lasts; a call still runs the module's hooks."""
    own = module.__dict__.get("forward")  # an instance's forward: accelerate may have set one
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
    """Turn dropout off while the context lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def hidden_states(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Compute a packed row's last hidden states, (1, T, hidden). Without packed attention the sequences are padded."""
    return _states_and_routers(model, micro_batch)[0]


def _states_and_routers(
    model: Any, micro_batch: MicroBatch, part: RowPart | None = None, **asked: Any
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Compute `hidden_states`, with ``part`` only for this rank's tokens.

    The second value has the router's logits (T, E) of each layer with experts, if ``output_router_logits`` is set.
    """
    if part is not None:
        asked["row_part"] = part
    if images.embeds(model, micro_batch) and model.config._attn_implementation == attention.NAME:
        with attention.packed_rows():
            return images.packed_hidden_states(model, micro_batch), ()
    whole = model.base_model is not model and not images.reads_text_alone(model)
    body = model.base_model if whole else model.get_decoder()
    if body is model:  # the class names another attribute (Llama 4)
        body = model.model
    routed = router_replay.experts_of(model, micro_batch)
    if model.config._attn_implementation != attention.NAME:
        return padded.hidden_states(model, body, micro_batch, routed, **asked)
    if routed is not None:
        asked[padded.ROUTED] = routed
    with attention.packed_rows():
        output = body(
            input_ids=micro_batch.input_ids,
            # Hides nothing. Without a mask transformers reads the positions' values, and the host would wait for them.
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
    """Compute `policy_logprobs` from hidden states (N, hidden) and the head's weight (V, hidden) or this rank's rows.

    Matrix products are in autocast's dtype or the head's, all else in float32 (float64 for float64 weights). With
    ``float32_products`` the logits aren't rounded to 16 bits. The weight's gradient has its ``grad_dtype``, if any.

    Raises:
        RuntimeError: a second derivative is requested, which isn't implemented.
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
    """Compute `label_logprobs` and each label's reverse KL divergence KL(policy || teacher).

    The divergence is (N,) float32 in nats, differentiable in the policy. The teacher's logits exist one tile at a time
    too.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _LabelLogprobs.apply(hidden, weight, bias, labels, head, entropy_gradient, teacher)


def products_in_float32(model: Any) -> None:
    """Compute the logits of the model and of its copies with a float32 product in the head."""
    setattr(unwrap(model).get_output_embeddings(), FLOAT32_PRODUCTS, True)


def tile_shape(labels: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Return rows and columns of the logits that exist at once."""
    rows = max(1, min(labels, TILE_ROWS))
    return rows, max(1, min(vocabulary, TILE_ELEMENTS.get(device.type, 2**24) // rows))


class _LabelLogprobs(torch.autograd.Function):
    """Function from hidden states and head to log softmax(logits)[label], entropy, and divergence from a teacher."""

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
        if head.part is not None:  # combine the ranks' sums into the whole vocabulary's
            largest = head.part.group.max_(maximum.clone())
            fall = maximum - largest
            decay = fall.exp()
            shared = torch.stack([label_logit, decay * (moment + fall * total), decay * total])
            (label_logit, moment, total), maximum = head.part.group.sum_(shared).unbind(), largest
        normaliser = maximum + total.log()
        ctx.head, ctx.teacher = head, teacher
        divergence, of_teacher = (None, None) if sums is None else sums.result(total, normaliser)
        entropy = total.log() - moment / total  # H = log Z - E[x], the maximum subtracted from both
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
        """Compute the gradients tile by tile, through the temperature, the cap and the scale.

        d logprob / d logit = onehot - p, d H / d logit = -p (log p + H) and d KL / d logit = p (log p - log q - KL).
        """
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
                # Finish sums over rows before the next columns, so that no second gradient of the head's size exists.
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
    """Compute a tile's logits again and turn them into the gradient of the head's product.

    Args:
        gradient: (n,) gradient of the log-probabilities.
        spread: gradient of entropy and divergence; None: they are constants.
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
        hidden = None if head is None or head.kept is None else head.kept.hidden(row, vocabulary)
        return cls((own - vocabulary.start).where(inside, 0)[:, None], inside, hidden)


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the accumulated gradient. (In torch only leaves have a `grad_dtype`.)"""
    own = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return own or parameter.dtype
