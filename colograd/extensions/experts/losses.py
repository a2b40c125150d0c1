"""Terms of the objective for a mixture of experts: the load-balancing loss, and the metrics of router replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import MicroBatch, StepBatch
from ...config import GRPOConfig
from ...losses.objective import LossTerm
from ...losses.tokens import Means
from ...parallel.ranks import gather
from ...policy.logprobs import Compute, ForwardStep, Pass
from ...policy.packing import NOBODY, is_dummy
from .rider import UNKNOWN
from .router_replay import APART, experts_of
from .routing import Routing, routing_of

LOGITS = "router_logits"  # Key of the routers' logits in the output of the model without its head.
FIELDS = tuple(field.name for field in dataclasses.fields(Routing))


class RoutingStep(ForwardStep):
    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        row.of_layers[LOGITS], row.inputs["output_router_logits"] = [], True
        found = inner(row)
        chosen = row.model.config.get_text_config().num_experts_per_tok
        routing = routing_of(row.of_layers[LOGITS], chosen, row.batch, row.inputs.get("row_part"))
        row.values |= {f"routing/{name}": getattr(routing, name) for name in FIELDS}
        return found


def routing_in(values: Mapping[str, torch.Tensor]) -> Routing:
    """Return the routing statistics (`Routing`) from the values of a forward that ran with a `RoutingStep`."""
    return Routing(*(values[f"routing/{name}"] for name in FIELDS))


@dataclass(frozen=True, slots=True)
class BalanceTerm(LossTerm):
    """The load-balancing loss of a mixture: `Routing.balance_loss` of each row, averaged over the step's tokens."""

    coefficient: float  # Factor of the loss in the objective. With 0 the term only computes metrics.

    @property
    def every_group(self) -> bool:
        return self.coefficient != 0

    @property
    def waits(self) -> str:
        return "the load-balancing loss is weighted by the step's tokens" if self.coefficient else ""

    def steps(self, second_models: Mapping[str, Any]) -> tuple[ForwardStep, ...]:
        return (RoutingStep(),)

    def with_constants(self, step: StepBatch) -> StepBatch:
        if not self.coefficient:
            return step
        own = sum(row.sequence_tokens for row in step.rows if step.counted and not is_dummy(row))
        tokens, rows = float(max(1, sum(gather(own)))), []
        for row in step.rows:
            constants = dataclasses.replace(row.step_constants, sequence_tokens=tokens)
            rows.append(dataclasses.replace(row, step_constants=constants))
        return dataclasses.replace(step, rows=tuple(rows))

    def of_row(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if not self.coefficient:
            return None
        routing, of_step = routing_in(values), batch.step_constants
        of_all = routing.tokens.clamp(min=1) if of_step.sequence_tokens is None else of_step.sequence_tokens
        return (self.coefficient * of_step.denominator * routing.tokens / of_all) * routing.balance_loss

    @torch.no_grad()
    def observe(self, old: torch.Tensor, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Means:
        """Compute the routing metrics of a micro-batch, weighted by its number of tokens."""
        routing, tokens = routing_in(values), values["routing/tokens"]
        return {
            "aux_loss": (routing.balance_loss * tokens, tokens),
            "router/load_max": (routing.largest_load * tokens, tokens),
            "router/entropy": (routing.mean_entropy * tokens, tokens),
        }

    def in_loss(self, metrics: Mapping[str, float]) -> float:
        return self.coefficient * metrics.get("aux_loss", 0.0)


class ReplayTerm(LossTerm):
    """Metrics of router replay: the fraction of tokens with replayed experts, and the fraction of the engine's choices
    (an expert for a token in a layer) that the trainer's router didn't choose."""

    def observe(self, old: torch.Tensor, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Means:
        if all(identity.position == NOBODY for identity in batch.rollouts):
            return {}
        if (experts := experts_of(batch)) is None:
            return {"router/replayed": (0.0, batch.layout.num_tokens)}
        told = (experts[:, 0, 0] != UNKNOWN).sum()
        return {"router/replayed": (told, batch.layout.num_tokens), "router/disagreement": tuple(values[APART])}


def balance_term(config: GRPOConfig, policy: Any) -> LossTerm | None:
    """Return the load-balancing term if the policy's forward can return its routers' logits. Otherwise return None."""
    coefficient = 0.0 if policy is None else policy.router_coef(config)
    return BalanceTerm(coefficient) if policy is not None and policy.tells_routing else None


def replay_term(config: GRPOConfig, policy: Any) -> LossTerm | None:
    return ReplayTerm() if config.router_replay else None
