"""Terms of the objective for a mixture of experts: the load-balancing loss, and the metrics of router replay.

A packed row may contain a prompt once for several completions. `BalanceTerm` counts its tokens once per completion,
`ReplayTerm` counts them once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import MicroBatch, StepBatch
from ...config import GRPOConfig
from ...losses.objective import LossTerm
from ...losses.tokens import Means, Tokens
from ...parallel.ranks import gather
from ...policy.attention import RowPart
from ...policy.logprobs import Compute, ForwardStep, Pass
from ...policy.packing import NOBODY, is_dummy
from ...policy.sending import to_device_async
from .router_replay import APART, UNKNOWN, experts_of

LOGITS = "router_logits"  # Key of the routers' logits in the output of the model below its LM head.


class RoutingStep(ForwardStep):
    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        row.of_layers[LOGITS], row.inputs["output_router_logits"] = [], True
        outputs = inner(row)
        chosen = row.model.config.get_text_config().num_experts_per_tok
        row.values |= routing_of(row.of_layers[LOGITS], chosen, row.batch, row.inputs.get("row_part"))
        return outputs


def routing_of(
    router_logits: Sequence[torch.Tensor], chosen: int, micro_batch: MicroBatch, part: RowPart | None = None
) -> dict[str, torch.Tensor]:
    """Compute a packed row's routing `statistics`.

    Args:
        router_logits: per layer the router's logits, (T, E), in the row's token order.
        chosen: number of experts per token.
        part: this rank's part of the row, if the logits are only of this rank's tokens (sequence parallelism).
    """
    weights = token_weights(micro_batch)
    weights = weights if part is None else part.own_weights(weights)
    loads, probabilities, entropy = [], [], []
    for logits in router_logits:
        logprobs = logits.float().log_softmax(-1)
        of_experts = logprobs.exp()
        probabilities.append(weights @ of_experts)
        with torch.no_grad():
            picked = of_experts.topk(chosen, dim=-1).indices.flatten()
            loads.append(torch.zeros_like(of_experts[0]).index_add(0, picked, weights.repeat_interleave(chosen)))
            entropy.append(weights @ torch.special.entr(of_experts).sum(-1))
    sums = weights.sum(), torch.stack(loads), torch.stack(probabilities).sum(0), torch.stack(entropy).sum()
    return statistics(*(sums if part is None else map(part.sum, sums)))


def statistics(
    tokens: torch.Tensor, loads: torch.Tensor, probabilities: torch.Tensor, entropy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the routing statistics of a packed row as scalars, from sums over tokens in L layers of E experts.

    ``routing/balance_loss`` is E times the sum over experts of (fraction of tokens) times (mean probability), from
    Switch Transformer, arXiv 2101.03961, equations 4 to 6. All layers are pooled, as in transformers'
    `load_balancing_loss_func`. With equal loads of all experts the loss equals the number of experts per token.
    ``routing/largest_load`` is the largest load of an expert in a layer divided by the mean load, averaged over layers.
    ``routing/entropy`` is the mean entropy of a router's distribution over the experts of a layer, per token, in nats.

    Args:
        tokens: number of tokens of all sequences, ().
        loads: number of tokens that each expert got, (L, E).
        probabilities: sum of the routers' probabilities over tokens and layers, (E,).
        entropy: sum of the routers' entropies over tokens and layers in nats, ().
    """
    rows = (tokens * len(loads)).clamp(min=1)
    return {
        "routing/tokens": tokens,
        "routing/balance_loss": loads.shape[1] * (loads.sum(0) / rows * probabilities / rows).sum(),
        "routing/largest_load": (loads.amax(1) / loads.mean(1).clamp(min=torch.finfo(loads.dtype).tiny)).mean(),
        "routing/entropy": entropy / rows,
    }


def token_weights(micro_batch: MicroBatch) -> torch.Tensor:
    """Return the number of sequences that contain each token of a row, (T,) float32. A dummy row has zeros."""
    layout = micro_batch.layout
    counts = [0] * len(layout.lengths)
    within = {segment for seen in layout.attends_to for segment in seen}
    if any(identity.position != NOBODY for identity in micro_batch.rollouts):
        for end in set(range(len(counts))) - within:
            for segment in (*layout.attends_to[end], end):
                counts[segment] += 1
    weights = torch.tensor(counts, dtype=torch.float32).repeat_interleave(torch.tensor(layout.lengths))
    return to_device_async(weights, micro_batch.input_ids.device)


@dataclass(frozen=True, slots=True)
class BalanceTerm(LossTerm):
    """The load-balancing loss of a mixture: each row's ``routing/balance_loss``, averaged over the step's tokens."""

    coefficient: float  # With 0 the term only computes metrics.

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
        tokens = float(max(1, sum(gather(own))))
        constants = [dataclasses.replace(row.step_constants, sequence_tokens=tokens) for row in step.rows]
        pairs = zip(step.rows, constants, strict=True)
        return dataclasses.replace(step, rows=tuple(dataclasses.replace(row, step_constants=c) for row, c in pairs))

    def of_row(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if not self.coefficient:
            return None
        tokens, of_step = values["routing/tokens"], batch.step_constants
        of_all = tokens.clamp(min=1) if of_step.sequence_tokens is None else of_step.sequence_tokens
        return (self.coefficient * of_step.denominator * tokens / of_all) * values["routing/balance_loss"]

    @torch.no_grad()
    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        count = values["routing/tokens"]
        names = {"aux_loss": "balance_loss", "router/load_max": "largest_load", "router/entropy": "entropy"}
        return {metric: (values[f"routing/{name}"] * count, count) for metric, name in names.items()}

    def in_loss(self, metrics: Mapping[str, float]) -> float:
        return self.coefficient * metrics.get("aux_loss", 0.0)


class ReplayTerm(LossTerm):
    """Metrics of router replay: the fraction of tokens with replayed experts, and the fraction of the engine's choices
    (an expert for a token in a layer) that the trainer's router didn't choose."""

    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        batch = tokens.batch
        if all(identity.position == NOBODY for identity in batch.rollouts):
            return {}
        if (experts := experts_of(batch)) is None:
            return {"router/replayed": (0.0, batch.layout.num_tokens)}
        replayed = (experts[:, 0, 0] != UNKNOWN).sum()
        return {"router/replayed": (replayed, batch.layout.num_tokens), "router/disagreement": tuple(values[APART])}


def balance_term(config: GRPOConfig, policy: Any) -> LossTerm | None:
    coefficient = 0.0 if policy is None else policy.router_coef(config)
    return BalanceTerm(coefficient) if policy is not None and policy.tells_routing else None


def replay_term(config: GRPOConfig, policy: Any) -> LossTerm | None:
    return ReplayTerm() if config.router_replay else None
