"""Forward of a packed row: from a `MicroBatch` to the log-probability and entropy of each label."""

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
from .packing import collate
from .padded import PackedSequence


@dataclass(slots=True)
class Pass:
    """Data of one forward of a row. A `ForwardStep` may change the data before the forward, and add to `values`."""

    model: Any  # The transformers model, never a PeftModel.
    batch: MicroBatch
    temperature: float
    entropy_gradient: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)  # Additional keyword arguments of the model's body.
    # Lists of tensors (T, ...), one per layer. Keys: fields of the body's output. A `ForwardStep` requests a field by
    # adding an empty list, which the forward fills.
    of_layers: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    candidates: Candidates | None = None  # Tokens that the softmax is over. None: the whole vocabulary.
    other: Callable[[Pass], OtherDistribution] | None = None  # Makes a teacher's distribution, for a KL divergence.
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # Additional results of the forward, by name.

    def label_states(self) -> torch.Tensor:  # Hidden states that predict the N labels, (N, hidden).
        run: Callable[[Pass], torch.Tensor] = run_body
        for step in steps_of(self.model):
            run = functools.partial(step.states, run)
        return run(self)[0].index_select(0, self.batch.logit_positions)


Compute = Callable[[Pass], tuple[torch.Tensor, ...]]


class ForwardStep:
    """An extension's wrapper around a model's forward of packed rows. A subclass overrides the methods it needs."""

    of_rows = False  # Whether reference and teacher models need this step as well, because of data in the rows.

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        """Wrap the whole forward: return the tensors of ``inner(row)``. The model's hooks run around this method."""
        return inner(row)

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        """Wrap the computation of the hidden states: return the result of ``inner(row)``, (1, T, hidden)."""
        return inner(row)

    def attention(self, model: Any, name: str) -> str | dict[str, str]:
        """Return the `set_attn_implementation` argument that gives the model's text layers the attention ``name``."""
        return name

    def own_inputs(self, part: PackedSequence) -> dict[str, Any]:
        """Return additional inputs for transformers' own forward of one sequence, which `row_proof` runs."""
        return {}

    def misreads(self, model: Any, part: PackedSequence) -> bool:
        """Return whether transformers' own forward would misread sampled tokens, e.g. as placeholders of images."""
        return False


def steps_of(model: Any) -> tuple[ForwardStep, ...]:
    """Return the `ForwardStep`s installed on a model. A later step wraps the earlier steps."""
    return getattr(model, "forward_steps", ())


def install(model: Any, step: ForwardStep) -> None:
    """Install a `ForwardStep` on a model, in place of an installed step of the same class."""
    remove(model, type(step))
    unwrap(model).forward_steps = (*steps_of(unwrap(model)), step)


def remove(model: Any, kind: type[ForwardStep]) -> None:
    unwrap(model).forward_steps = tuple(step for step in steps_of(unwrap(model)) if type(step) is not kind)


@dataclass(frozen=True, slots=True)
class PolicyForward:
    """Forward of the policy. All computation runs inside calls of the model and its head.

    The reason: hooks of these modules gather sharded weights. If sharding gives the model a method `around_forward`,
    the call of the model runs in that method's context.
    """

    model: torch.nn.Module  # The transformers model, or a PeftModel around it.
    temperature: float
    entropy_gradient: bool = False
    steps: tuple[ForwardStep, ...] = ()  # Steps of loss terms, which wrap the steps installed on the model.

    def __call__(self, micro_batch: MicroBatch, last: Compute | None = None) -> tuple[Any, ...]:
        """Return the tensors that ``last`` computes (by default `label_values`), followed by the dict `Pass.values`."""
        watchdog.progress()
        names: list[str] = []

        def compute(batch: MicroBatch) -> tuple[torch.Tensor, ...]:
            model, run = unwrap(self.model), last or label_values
            for step in (*steps_of(model), *self.steps):
                run = functools.partial(step.around, run)
            row = Pass(model, batch, self.temperature, self.entropy_gradient)
            results = run(row)
            names.extend(row.values)
            return *results, *row.values.values()  # A sharded model's hooks need a flat tuple of tensors.

        with calls(self.model, compute), getattr(self.model, "around_forward", nullcontext)():
            results: tuple[torch.Tensor, ...] = self.model(micro_batch)
        first = len(results) - len(names)
        return *results[:first], dict(zip(names, results[first:], strict=True))


def policy_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each label's log-probability and the entropy of its distribution, at ``temperature``: two tensors (N,) in
    nats, float32 (float64 models: float64). The entropy has a gradient only with ``entropy_gradient``."""
    return PolicyForward(model, temperature, entropy_gradient)(micro_batch)[:2]


@torch.no_grad()
def with_old_logprobs(model: torch.nn.Module, step: StepBatch, temperature: float) -> StepBatch:
    """Return ``step`` with `old_logprobs` in every row: the log-probabilities with the present weights.

    Dropout is off, because the sampler has no dropout, and a resumed run must compute equal values.
    """
    forward = PolicyForward(model, temperature)
    with evaluation_mode(model):
        rows = tuple(row.with_scores("old_logprobs", forward(collate(row))[0]) for row in step.rows)
    return dataclasses.replace(step, rows=rows)


def run_body(row: Pass, body: Any = None) -> torch.Tensor:
    """Run ``body``, by default the model without its head, on a row. Return hidden states (1, T, hidden)."""
    model, batch = row.model, row.batch
    if body is None:
        body = model.base_model if model.base_model is not model else model.get_decoder()
    if body is model:  # Llama 4's `get_decoder` returns the whole model.
        body = model.model
    if model.config._attn_implementation != attention.NAME:
        return padded.hidden_states(body, batch, row.inputs, row.of_layers)
    with attention.packed_rows():
        output = body(
            input_ids=batch.input_ids,
            # Without a mask transformers would read position ids on the host, which then waits for the device.
            attention_mask=torch.ones_like(batch.input_ids, dtype=torch.bool),
            position_ids=batch.position_ids,
            layout=batch.layout,
            use_cache=False,
            **row.inputs,
        )
    for name, values in row.of_layers.items():
        values += [each.flatten(0, -2) for each in getattr(output, name, None) or ()]
    return output.last_hidden_state


def label_values(row: Pass) -> tuple[torch.Tensor, ...]:
    """Return the labels' log-probabilities (N,) and entropies (N,)."""
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
    """Replace the ``forward`` of ``module`` by ``compute`` inside the context. Hooks of the module still run."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}  # accelerate may set `forward`.
    module.forward = compute
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def products_in_float32(model: Any) -> None:
    """Mark the model's head for `cast_lm_head_to_fp32`: products of 16-bit weights give float32 logits."""
    setattr(unwrap(model).get_output_embeddings(), FLOAT32_PRODUCTS, True)
