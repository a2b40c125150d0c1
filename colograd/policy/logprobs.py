"""Packed forward: from a packed row to the log-probability and entropy of each label.

    MicroBatch -> hidden states of the model's body -> states that predict a label -> `head`, one tile at a time

Options wrap this chain. A `ForwardStep` of an extension is installed on a model once (`install`), or comes with the
term of the objective that reads its values. A model without steps runs the plain chain alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import MicroBatch, StepBatch
from ..parallel import watchdog
from . import attention, padded
from .head import FLOAT32_PRODUCTS, Candidates, Head, OtherDistribution, label_logprobs
from .lora import unwrap
from .packing import PackedSequence, collate


@dataclass(slots=True)
class Pass:
    """One forward of a row. Steps change it on the way in, and add values on the way out."""

    model: Any  # without wrappers
    batch: MicroBatch
    temperature: float
    entropy_gradient: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the body
    # Outputs of the layers, (T, ...) each, by their name in the body's output. A step adds an empty list to get them.
    of_layers: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    candidates: Candidates | None = None  # tokens that each label's distribution is over; None: all
    other: Callable[[Pass], OtherDistribution] | None = None  # makes a distribution for `divergence` in `values`
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # further results of the forward

    def label_states(self) -> torch.Tensor:
        """Compute the hidden states that predict the labels, (N, hidden)."""
        run: Callable[[Pass], torch.Tensor] = run_body
        for step in steps_of(self.model):
            run = functools.partial(step.states, run)
        return run(self)[0].index_select(0, self.batch.logit_positions)


Compute = Callable[[Pass], tuple[torch.Tensor, ...]]


class ForwardStep:
    """Option of a model's forwards. A subclass overrides some of these methods."""

    of_rows = False  # whether the rows' data needs this step, so that second models (e.g. a teacher) get it, too

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        """Wrap the whole forward. The model's hooks run outside of it, before and after."""
        return inner(row)

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        """Wrap the computation of the hidden states."""
        return inner(row)

    def attention(self, model: Any, name: str) -> str | dict[str, str]:
        """Return the argument of `set_attn_implementation` for rows with the attention ``name``."""
        return name

    def own_inputs(self, part: PackedSequence) -> dict[str, Any]:
        """Return further inputs of the model's own forward for one sequence (see `row_proof`)."""
        return {}

    def misreads(self, model: Any, part: PackedSequence) -> bool:
        """Return whether the model's own forward would misread a completion's sampled tokens."""
        return False


def steps_of(model: Any) -> tuple[ForwardStep, ...]:
    """Return a model's installed steps. Each wraps those before it."""
    return getattr(model, "forward_steps", ())


def install(model: Any, step: ForwardStep) -> None:
    """Let a model's forwards go through a step. It replaces an earlier one of its class."""
    remove(model, type(step))
    unwrap(model).forward_steps = (*steps_of(unwrap(model)), step)


def remove(model: Any, kind: type[ForwardStep]) -> None:
    """Undo `install`."""
    unwrap(model).forward_steps = tuple(step for step in steps_of(unwrap(model)) if type(step) is not kind)


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
    steps: tuple[ForwardStep, ...] = ()  # wrap the model's own steps

    def __call__(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Compute `policy_logprobs`, and the steps' further values by name."""
        (logprobs, entropy), values = self.run(label_values, micro_batch)
        return logprobs, entropy, values

    def run(self, last: Compute, micro_batch: MicroBatch) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Run a forward that ends with ``last``; return its tensors, and the steps' further values by name."""
        watchdog.progress()  # each row of a long pass is progress
        names: list[str] = []

        def compute(batch: MicroBatch) -> tuple[torch.Tensor, ...]:
            model, run = unwrap(self.model), last
            for step in (*steps_of(model), *self.steps):
                run = functools.partial(step.around, run)
            row = Pass(model, batch, self.temperature, self.entropy_gradient)
            results = run(row)
            names.extend(row.values)
            return *results, *row.values.values()  # flat, because a sharded model's hooks need that

        with calls(self.model, compute), getattr(self.model, "around_forward", nullcontext)():
            results: tuple[torch.Tensor, ...] = self.model(micro_batch)
        first = len(results) - len(names)
        return results[:first], dict(zip(names, results[first:], strict=True))


def policy_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each label's log-probability and the entropy of its distribution at ``temperature``.

    Both are (N,) float32 in nats. The log-probability is differentiable, the entropy only with ``entropy_gradient``.
    """
    return PolicyForward(model, temperature, entropy_gradient)(micro_batch)[:2]


@torch.no_grad()
def with_old_logprobs(model: torch.nn.Module, step: StepBatch, temperature: float) -> StepBatch:
    """Return the step with the present weights' log-probabilities added to every row.

    Dropout is off, because the sampler has none and a resumed run must compute the same values.
    """
    forward = PolicyForward(model, temperature)
    with evaluation_mode(model):
        rows = tuple(dataclasses.replace(row, old_logprobs=forward(collate(row))[0]) for row in step.rows)
    return dataclasses.replace(step, rows=rows)


def run_body(row: Pass, body: Any = None) -> torch.Tensor:
    """Run the model's body, or another one, on a row: packed, or padded without packed attention; (1, T, hidden)."""
    model, batch = row.model, row.batch
    if body is None:
        body = model.base_model if model.base_model is not model else model.get_decoder()
    if body is model:  # the class names another attribute (Llama 4)
        body = model.model
    if model.config._attn_implementation != attention.NAME:
        return padded.hidden_states(body, batch, row.inputs, row.of_layers)
    with attention.packed_rows():
        output = body(
            input_ids=batch.input_ids,
            # Hides nothing. Without a mask transformers reads the positions' values, and the host would wait for them.
            attention_mask=torch.ones_like(batch.input_ids, dtype=torch.bool),
            position_ids=batch.position_ids,
            layout=batch.layout,
            use_cache=False,
            **row.inputs,
        )
    for name, values in row.of_layers.items():
        values += [each.flatten(0, -2) for each in getattr(output, name, None) or ()]
    states: torch.Tensor = output.last_hidden_state
    return states


def label_values(row: Pass) -> tuple[torch.Tensor, ...]:
    """Compute the labels' log-probabilities and entropies, (N,) each, from the hidden states and the head."""
    hidden, head = row.label_states(), row.model.get_output_embeddings()

    def of_labels(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        how = Head.of(row.model, row.temperature, hidden.device, row.candidates)
        other, bias = None if row.other is None else row.other(row), getattr(head, "bias", None)
        return label_logprobs(hidden, head.weight, bias, row.batch.labels, how, row.entropy_gradient, other)

    with calls(head, of_labels):
        logprobs, entropy, *divergence = head(hidden)
    if divergence:
        (row.values["divergence"],) = divergence
    return logprobs, entropy


@contextmanager
def calls(module: torch.nn.Module, compute: Callable[..., Any]) -> Iterator[None]:
    """Replace ``module``'s forward by ``compute`` while the context lasts; a call still runs the module's hooks."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}  # accelerate may have set one
    module.forward = compute
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Turn dropout off while the context lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def products_in_float32(model: Any) -> None:
    """Compute the logits of the model and of its copies with a float32 product in the head."""
    setattr(unwrap(model).get_output_embeddings(), FLOAT32_PRODUCTS, True)
