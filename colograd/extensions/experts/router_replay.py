"""Router replay (R3, arXiv 2510.11370): the trainer sends a token to the experts that the engine's router chose.

Trainer and engine round differently, so that their routers could choose different experts for nearly equal scores. Only
the choice is replayed. The trainer's router computes the factors of the experts' outputs, so that it gets gradients.
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

UNKNOWN = -1  # Stands for an unknown expert: the trainer's router chooses.
ROUTED = "routed_experts"  # Keyword argument of decoder layers: the recorded experts of a row's tokens.
APART = "experts/apart"  # Key of counts (2,): the engine's choices that the trainer didn't make, and all its choices.
# Columns of a table, one row per rollout. Without experts all are null. A `prompt` equal to the one before is null.
ROWS = pa.schema([("prompt", pa.binary()), ("completion", pa.binary()), ("shape", pa.list_(pa.int32()))])


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts(Rider):
    """The experts that the engine's routers chose: K per token in each of L layers, int8 (int16 above 128 experts).
    The experts of the last token are unknown, because the engine never read that token."""

    prompt: torch.Tensor  # Experts of the prompt's tokens, [P, L, K].
    completion: torch.Tensor  # Experts of the completion's tokens, [C, L, K].

    MARK = b"\xff\xff\xff\xff"  # Any Arrow message begins with these bytes. Older records have no other mark.

    @classmethod
    def of_turns(cls, parts: Sequence[tuple[Self | None, int]], prompt: int) -> Self | None:
        last = next((part for part, _ in reversed(parts) if part is not None), None)
        if last is None:
            return None
        # The last request's prompt contains all earlier tokens, so that its experts are enough.
        whole = filled(torch.cat([last.prompt, last.completion]), prompt + sum(length for _, length in parts))
        return cls(whole[:prompt].clone(), whole[prompt:].clone())

    @classmethod
    def shared(cls, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Let rollouts with equal prompts share the tensor `prompt`, to save memory."""
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
        carriers: list[Rollout] = []
        prompt: torch.Tensor | None = None
        for rollout, row in zip(rollouts, read_table(reader, b"", ROWS).to_pylist(), strict=True):
            if row["shape"] is not None:
                if row["prompt"] is not None:
                    prompt = _numbers(row["prompt"], len(rollout.input), *row["shape"])
                assert prompt is not None and len(prompt) == len(rollout.input), "the prompt's experts are missing"
                own = cls(prompt, _numbers(row["completion"], len(rollout.completion_ids), *row["shape"]))
                rollout = rollout.carrying(own)
            carriers.append(rollout)
        return carriers


@dataclass(frozen=True, slots=True, eq=False)
class RowExperts(RowRider):
    experts: torch.Tensor  # Experts of the row's tokens, (T, L, K).

    OF_POLICY = True

    def part(self, tokens: slice, labels: torch.Tensor) -> RowExperts:
        return RowExperts(self.experts[tokens])

    def padded(self, tokens: int) -> RowExperts:
        return RowExperts(torch.nn.functional.pad(self.experts, (0, 0, 0, 0, 0, tokens), value=UNKNOWN))


def filled(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a copy of ``rows``, cut or extended to [tokens, L, K]. Added rows are UNKNOWN."""
    rows = rows[:tokens]
    return torch.cat([rows, rows.new_full((tokens - len(rows), *rows.shape[1:]), UNKNOWN)])


def _numbers(content: bytes, tokens: int, layers: int, chosen: int, width: int) -> torch.Tensor:
    kind = {1: np.int8, 2: np.int16}[width]
    return torch.tensor(np.frombuffer(content, dtype=kind).reshape(tokens, layers, chosen))


def softmax_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    shares = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
    return shares / shares.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else shares


def sigmoid_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the factors of the experts' outputs. A router's correction bias influences only the choice of experts."""
    shares = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * router.routed_scaling_factor


# Per model type: function of (router, logits (T, E), chosen experts (T, K)). Returns factors of their outputs, (T, K).
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
                    f"A {type(router).__name__} of this version of transformers computes the factors of the experts' "
                    "outputs in an unknown way, so that router_replay can't compute them: set router_replay: false."
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
    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        outputs = inner(row)
        if experts_of(row.batch) is not None:
            with torch.no_grad():
                row.values[APART] = torch.stack([router.apart for router in routers_of(row.model)]).sum(0)
        return outputs

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        if (routed := experts_of(row.batch)) is not None:
            if row.model.config._attn_implementation != attention.NAME:  # Other implementations read padded rows.
                routed = rows_of(row.batch.layout, routed.device).of_tokens(routed, UNKNOWN).flatten(0, 1)
            row.inputs[ROUTED] = routed
        return inner(row)


def experts_of(micro_batch: MicroBatch) -> torch.Tensor | None:
    rider = micro_batch.get(RowExperts)
    return None if rider is None else rider.experts


def _hand_out(routers: list[Any], place: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Set the experts that a layer's router replays. This pre-forward hook also runs when the layer is recomputed."""
    routed = kwargs.pop(ROUTED, None)
    for router in routers:
        router.replayed = None if routed is None else routed[:, place]
        router.apart = None
    return args, kwargs


def _replay(share: Callable[..., torch.Tensor], router: Any, args: Any, output: Any) -> Any:
    if router.replayed is None:
        return None
    logits, shares, own = output
    known = router.replayed[:, :1] != UNKNOWN
    chosen = torch.where(known, router.replayed.long(), own)
    with torch.no_grad():
        strange = (chosen[:, :, None] != own[:, None, :]).all(-1)
        router.apart = torch.stack([strange.sum(), known.sum() * chosen.shape[1]])
    return logits, share(router, logits, chosen).to(shares.dtype), chosen
