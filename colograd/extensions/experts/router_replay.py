"""Router replay: in the trainer's forward a token goes to the experts that the engine's router chose for the token.

Trainer and engine round differently. So for nearly equal scores the trainer's router could choose other experts than
the engine's router (rollout routing replay, R3, arXiv 2510.11370). Only the choice is replayed. The experts' weights
come from the trainer's router logits, so that the router gets its gradient. If the engine's choice for a token is
unknown, the policy's router chooses the experts. Riders (data that travels with a rollout or a packed row) carry the
engine's choices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ...batch import MicroBatch, PackedRow, Rollout
from ...config import GRPOConfig
from ...policy import attention
from ...policy.layers import decoder_layers
from ...policy.logprobs import Compute, ForwardStep, Pass, install
from ...policy.lora import unwrap
from ...policy.padded import rows_of
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider
from ...rollout.record_file import read_table, table_bytes

UNKNOWN = -1  # Value in place of an expert's index, if the engine didn't record the expert.
ROUTED = "routed_experts"  # Name of a layer's keyword argument with the experts of its tokens.
APART = "experts/apart"  # Key of two counts (2,): the engine's choices that the policy's routers didn't make, and all.
# Columns of a group's table, with one row per rollout. A null `prompt` means the last row's `prompt`.
ROWS = pa.schema([("prompt", pa.binary()), ("completion", pa.binary()), ("shape", pa.list_(pa.int32()))])


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts(Rider):
    """Rider (per-token data of a rollout): the experts that the engine's routers chose, K per token in each of L
    layers. The experts of the last token are unknown, because the engine never read that token. The tensors are int8
    (int16 above 128 experts): a token takes L * K or 2 * L * K bytes. A group's rollouts share the tensor `prompt`."""

    prompt: torch.Tensor  # Experts of the prompt's tokens, [P, L, K].
    completion: torch.Tensor  # Experts of the completion's tokens, [C, L, K].

    MARK = b"\xff\xff\xff\xff"  # First bytes of any Arrow message, because older records have no marker bytes.

    @classmethod
    def of_turns(cls, parts: Sequence[tuple[Self | None, int]], prompt: int) -> Self | None:
        """Return the experts of a completion that several requests wrote. The experts of the last request cover all
        earlier tokens, because the last request's prompt contains them."""
        last = next((part for part, _ in reversed(parts) if part is not None), None)
        if last is None:
            return None
        whole = filled(torch.cat([last.prompt, last.completion]), prompt + sum(length for _, length in parts))
        return cls(whole[:prompt].clone(), whole[prompt:].clone())

    @classmethod
    def shared(cls, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Give a group's rollouts with equal prompts one tensor of the prompt's experts, to save memory."""
        first = rollouts[0].get(cls)
        if first is None:
            return rollouts

        def sharing(rollout: Rollout) -> Rollout:
            riders = (cls(first.prompt, r.completion) if isinstance(r, cls) else r for r in rollout.riders)
            return dataclasses.replace(rollout, riders=tuple(riders))

        return tuple(sharing(each) if each.input == rollouts[0].input else each for each in rollouts)

    @classmethod
    def of_row(cls, row: PackedRow) -> RowExperts:
        recorded = next(e for part in row.parts for r in part.rollouts if (e := r.get(cls)) is not None)
        pieces: list[torch.Tensor] = []
        for part in row.parts:
            first = part.rollouts[0].get(cls)
            pieces.append(first.prompt if first else filled(recorded.prompt[:0], len(part.rollouts[0].input)))
            for rollout in part.rollouts:
                own = rollout.get(cls)
                pieces.append(own.completion if own else filled(recorded.prompt[:0], len(rollout.completion_ids)))
        return RowExperts(to_device_async(torch.cat(pieces), row.device))

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        prompt: torch.Tensor | None = None
        rows: list[tuple[Any, Any, Any]] = []
        for experts in (rollout.get(cls) for rollout in rollouts):
            if experts is None:
                rows.append((None, None, None))
                continue
            last, prompt, own = prompt, experts.prompt, experts.completion
            first = None if last is not None and torch.equal(last, prompt) else prompt.numpy().tobytes()
            rows.append((first, own.numpy().tobytes(), [*own.shape[1:], own.element_size()]))
        return table_bytes(b"", rows, ROWS)

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        found: list[Rollout] = []
        prompt: torch.Tensor | None = None
        for rollout, row in zip(rollouts, read_table(reader, b"", ROWS).to_pylist(), strict=True):
            if row["shape"] is not None:
                if row["prompt"] is not None:
                    prompt = _numbers(row["prompt"], len(rollout.input), *row["shape"])
                assert prompt is not None and len(prompt) == len(rollout.input), "the prompt's experts are missing"
                own = cls(prompt, _numbers(row["completion"], len(rollout.completion_ids), *row["shape"]))
                rollout = rollout.carrying(own)
            found.append(rollout)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RowExperts(RowRider):
    experts: torch.Tensor  # Experts of a packed row's tokens, (T, L, K). `UNKNOWN` for tokens without recorded experts.

    OF_POLICY = True

    def part(self, tokens: slice, labels: torch.Tensor) -> RowExperts:
        return RowExperts(self.experts[tokens])

    def padded(self, tokens: int) -> RowExperts:
        return RowExperts(torch.nn.functional.pad(self.experts, (0, 0, 0, 0, 0, tokens), value=UNKNOWN))


def filled(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Copy the first ``tokens`` rows of experts into a new tensor [tokens, L, K], filled up with UNKNOWN."""
    rows = rows[:tokens]
    return torch.cat([rows, rows.new_full((tokens - len(rows), *rows.shape[1:]), UNKNOWN)])


def _numbers(content: bytes, tokens: int, layers: int, chosen: int, width: int) -> torch.Tensor:
    kind = {1: np.int8, 2: np.int16}[width]
    return torch.tensor(np.frombuffer(content, dtype=kind).reshape(tokens, layers, chosen))


def softmax_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights of the chosen experts: softmax over all experts. Their sum is normalised to 1
    unless the router's `norm_topk_prob` is false."""
    shares = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
    return shares / shares.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else shares


def sigmoid_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights of the chosen experts: the sigmoid of each logit, without the router's correction bias. With
    `norm_topk_prob` their sum is normalised to 1. Then all weights are multiplied by `routed_scaling_factor`."""
    shares = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * router.routed_scaling_factor


# Per model type: a function of router, logits (T, E) and chosen experts (T, K). It returns the experts' weights (T, K).
SHARES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), sigmoid_shares),
    "gpt_oss": lambda router, logits, chosen: logits.gather(1, chosen).softmax(1, dtype=logits.dtype),
    **dict.fromkeys(("flex_olmo", "mellum", "mixtral", "olmoe"), softmax_shares),
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"), softmax_shares),
}


def set_up(model: Any, config: GRPOConfig) -> None:
    if config.router_replay:
        make_replaying(model)


def make_replaying(model: Any) -> None:
    """Let the model's layers take chosen experts as keyword argument `ROUTED`. Without it the routers choose experts.
    Raise a ValueError if a router computes the experts' weights in an unknown way, or transformers recomputes layers
    without keyword arguments."""
    if "__call__" not in vars(GradientCheckpointingLayer):
        raise ValueError(
            "router_replay is true, but with transformers 5.23 or later a checkpointed layer is computed again without "
            "the experts of its row: install transformers below 5.23, or set router_replay: false."
        )
    model, place = unwrap(model), 0
    share = SHARES[model.config.get_text_config().model_type]
    for layer in decoder_layers(model):
        routers = routers_of(layer)
        for router in routers:
            weight: torch.Tensor = router.weight
            states = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
            with torch.no_grad():
                logits, shares, own = router(states)
                is_same = torch.equal(share(router, logits, own).to(shares.dtype), shares)
            if not is_same:
                raise ValueError(
                    f"A {type(router).__name__} of this version of transformers computes the experts' weights in an "
                    "unknown way, so that router_replay can't compute them: set router_replay: false."
                )
            router.replayed, router.apart = None, None
            router.register_forward_hook(functools.partial(_replay, share))
        assert len(routers) <= 1, "a layer has one router"
        layer.register_forward_pre_hook(functools.partial(_hand_out, routers, place), with_kwargs=True)
        place += len(routers)
    install(model, ReplayStep())


def routers_of(module: torch.nn.Module) -> list[Any]:
    return [part for part in module.modules() if type(part).__name__.lower().endswith("topkrouter")]


class ReplayStep(ForwardStep):
    """Forward step that replays the engine's experts for rows with a `RowExperts` rider."""

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        found, routed = inner(row), experts_of(row.batch)
        if routed is not None:
            with torch.no_grad():
                row.values[APART] = torch.stack([router.apart for router in routers_of(row.model)]).sum(0)
        return found

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        if (routed := experts_of(row.batch)) is not None:
            packed = row.model.config._attn_implementation == attention.NAME
            if not packed:
                routed = rows_of(row.batch.layout, routed.device).of_tokens(routed, UNKNOWN).flatten(0, 1)
            row.inputs[ROUTED] = routed
        return inner(row)


def experts_of(micro_batch: MicroBatch) -> torch.Tensor | None:
    """Return the experts that a forward replays, (T, L, K). None means that the model's routers choose the experts."""
    rider = micro_batch.get(RowExperts)
    return None if rider is None else rider.experts


def _hand_out(routers: list[Any], place: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Pre-forward hook of a layer: pass the layer's experts, taken from all layers' (T, L, K), to the layer's router.
    The hook also runs when gradient checkpointing recomputes the layer."""
    routed = kwargs.pop(ROUTED, None)
    for router in routers:
        router.replayed = None if routed is None else routed[:, place]
        router.apart = None
    return args, kwargs


def _replay(share: Callable[..., torch.Tensor], router: Any, args: Any, output: Any) -> Any:
    """Forward hook of a router: replace the chosen experts by the engine's experts, where these are known."""
    if router.replayed is None:
        return None
    logits, shares, own = output
    known = router.replayed[:, :1] != UNKNOWN
    chosen = torch.where(known, router.replayed.long(), own)
    with torch.no_grad():
        strange = (chosen[:, :, None] != own[:, None, :]).all(-1)
        router.apart = torch.stack([strange.sum(), known.sum() * chosen.shape[1]])
    return logits, share(router, logits, chosen).to(shares.dtype), chosen
