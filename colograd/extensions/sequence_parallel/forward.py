"""Forward and sharding strategies with sequence parallelism: ranks divide the tokens of a packed row.

Before attention the ranks exchange queries, keys and values, so that each rank has all tokens for some of the heads.
After attention the ranks exchange the outputs back (DeepSpeed-Ulysses, arXiv 2309.14509). Every rank computes the same
loss from the values of all labels (target tokens). A rank's backward uses only the values of the rank's own labels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ...batch import MicroBatch, SegmentLayout
from ...config import GRPOConfig
from ...parallel.layout import RankLayout
from ...parallel.shards import RankGroup, group_of, parts_of
from ...policy import attention
from ...policy.logprobs import Compute, ForwardStep, Pass, install, remove, steps_of
from ...policy.lora import unwrap
from ...policy.sending import leave, to_device_async
from ...policy.supported import ModelFeature, check_shared_rows
from ...runtime.sizes import num_experts
from ...sharding.strategy import ShardingStrategy
from ...sharding.zero import SharedGradients, SharedRows
from . import recurrent_heads

if TYPE_CHECKING:
    from ...policy.loading import Policy

Send = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class RowPart:
    """Division of a packed row's tokens and labels (target tokens) among ranks, from this rank's point of view.

    A rank has the labels that its tokens predict. Example: on 2 ranks, a prompt of 2 tokens with completions of 2 and 3
    tokens (separated by ``|``):

        tokens           (4, 3)          numbers of tokens: ranks have the tokens 0 to 3, and 4 to 6
        logit_positions  1 2 | 1 4 5     for each label, the token that predicts the label
        labels           (3, 2)          numbers of labels
        own              0 1   2         the first rank's labels
                                 3 4     the second rank's labels
    """

    group: RankGroup
    tokens: tuple[int, ...]  # Number of tokens of each rank.
    labels: tuple[int, ...]  # Number of labels of each rank.
    own: torch.Tensor  # Indices of this rank's n labels among the row's N labels, (n,).
    own_on_host: torch.Tensor
    places: torch.Tensor  # Index of each label in the gathered labels, which are ordered by rank, (N,).
    fillers: int = 0  # Number of padding tokens at the row's end.

    @classmethod
    def of(
        cls, group: RankGroup, num_tokens: int, positions: torch.Tensor, device: torch.device, fillers: int = 0
    ) -> RowPart:
        """Divide a row's tokens into nearly equal ranges, one per rank. ``positions``: the row's
        `MicroBatch.logit_positions`, (N,), in host memory. ``fillers``: number of padding tokens at the row's end."""
        size = group.size
        tokens = tuple(num_tokens // size + (place < num_tokens % size) for place in range(size))
        ends = torch.tensor([*itertools.accumulate(tokens)])
        owner = torch.bucketize(positions, ends, right=True)
        counts = tuple(torch.bincount(owner, minlength=size).tolist())
        places = to_device_async(owner.argsort(stable=True).argsort(), device)
        own = (owner == group.place).nonzero().flatten()
        return cls(group, tokens, counts, to_device_async(own, device), own, places, fillers)

    @property
    def range(self) -> slice:
        start = sum(self.tokens[: self.group.place])
        return slice(start, start + self.tokens[self.group.place])

    def cut(self, row: MicroBatch) -> MicroBatch:
        """Return the row with only this rank's tokens and labels. The field ``layout`` still describes the whole row,
        because attention and recurrent layers compute all of the row's tokens for some of the heads."""
        tokens, own = self.range, self.own
        return dataclasses.replace(
            row,
            input_ids=row.input_ids[:, tokens],
            position_ids=row.position_ids[:, tokens],
            logit_positions=row.logit_positions.index_select(0, own) - tokens.start,
            labels=row.labels.index_select(0, own),
            riders=tuple(rider.part(tokens, self.own_on_host) for rider in row.riders),
        )

    def gather(self, of_labels: torch.Tensor) -> Any:
        """Return the values of all labels of the row, (N, ...), given the values of this rank's labels, (n, ...)."""
        return _Gather.apply(of_labels, self)

    def own_weights(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return the weights of this rank's tokens, given weights (T,) of the row's tokens. Padding gets weight 0."""
        return F.pad(of_tokens[: len(of_tokens) - self.fillers], (0, self.fillers))[self.range]

    def sum(self, of_tokens: torch.Tensor) -> torch.Tensor:
        return leave(of_tokens, self.group)

    def mix(self, mixer: Any, hidden: torch.Tensor, run: recurrent_heads.Run) -> torch.Tensor:
        """Run a recurrent layer: (1, own tokens, hidden) -> the same shape. A rank runs some heads, for all tokens."""
        return recurrent_heads.way_of(mixer)(mixer, hidden, self, run)  # type: ignore[misc]  # `check_policy` refuses None

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange queries, keys and values: (1, heads, own tokens, size) -> (1, own heads, all tokens, size)."""
        size, heads, keys = self.group.size, query.shape[1], key.shape[1]
        if heads % size or keys % size:
            if heads % size == 0 and size % keys == 0:  # several ranks need the same key-value head
                index = torch.arange(size) // (size // keys)
            else:  # add query heads of zeros
                filled = -(-heads // size) * size
                query = F.pad(query, (0, 0, 0, 0, 0, filled - heads))
                index = torch.arange(filled).clamp(max=heads - 1) // (heads // keys)
            index = to_device_async(index, key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
        inputs = [x[0].unflatten(0, (size, -1)).transpose(1, 2) for x in (query, key, value)]
        if query.shape[-1] == value.shape[-1]:
            found = self._to_heads(torch.cat(inputs, dim=2)).split([x.shape[2] for x in inputs], dim=1)
        else:
            found = tuple(map(self._to_heads, inputs))
        q, k, v = (x.transpose(0, 1)[None] for x in found)
        return q, k, v

    def _to_heads(self, tokens: torch.Tensor) -> Any:
        return _Exchange.apply(tokens, self.send_heads, self.send_tokens)

    def to_all_tokens(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Convert (1, own tokens, heads, D) to (1, T, own heads, D): all tokens of the row, for this rank's heads."""
        filled = -of_tokens.shape[2] % self.group.size
        by_rank = F.pad(of_tokens[0], (0, 0, 0, filled)).unflatten(1, (self.group.size, -1)).transpose(0, 1)
        return self._to_heads(by_rank)[None]

    def own_heads(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Return a parameter's rows for this rank's heads: (heads, ...) -> (own heads, ...), as in `to_all_tokens`."""
        each = -(-len(of_heads) // self.group.size)
        behind = (0, 0) * (of_heads.dim() - 1) + (0, each * self.group.size - len(of_heads))
        return F.pad(of_heads, behind).split(each)[self.group.place]

    def to_tokens(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """Undo `to_all_tokens`: (1, T, own heads, D) -> (1, own tokens, heads, D). Padding heads are dropped."""
        found: torch.Tensor = _Exchange.apply(output[0], self.send_tokens, self.send_heads)
        return found.transpose(0, 1).flatten(1, 2)[None, :, :heads]

    def send_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """All-to-all: send entry s of (S, own tokens, heads, D) to rank s of S ranks. Return (T, heads, D)."""
        size, count = tokens.shape[:2]
        return self.group.all_to_all(tokens.flatten(0, 1), [count] * size, self.tokens)

    def send_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """All-to-all: send each of S ranks its tokens of (T, heads, D). Return (S, own tokens, heads, D)."""
        size, count = self.group.size, self.tokens[self.group.place]
        return self.group.all_to_all(heads, self.tokens, [count] * size).unflatten(0, (size, count))


@dataclass(frozen=True, eq=False)
class RowStep(ForwardStep):
    """Forward step that computes this rank's tokens of a packed row, and gathers the values of all labels."""

    sequence: RankGroup  # Ranks that divide a row's tokens. All have this rank's (tensor-parallel) part of the policy.
    row: RankGroup  # All ranks that train the row. This group can compare its ranks' numbers of exchanges.

    @classmethod
    def of(cls, layout: RankLayout, engine: RankGroup | None) -> RowStep:
        """Make this rank's step with its process groups. A collective. ``engine``: tensor-parallel ranks, if any."""
        sequence = group_of(layout, lambda rank: rank.sequence_group, meets=engine is None)
        if engine is None:
            return cls(sequence, sequence)
        row = group_of(layout, lambda rank: rank.row_group, meets=True, exchanges=False)
        counted = engine.exchanged  # One counter of exchanges for all groups of a row's ranks.
        return cls(dataclasses.replace(sequence, exchanged=counted), dataclasses.replace(row, exchanged=counted))

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        if row.model.config._attn_implementation != attention.NAME:  # not packed: each rank computes all tokens
            return inner(row)
        batch, group = row.batch, self.sequence
        positions = batch.logit_positions.cpu() if batch.host_positions is None else batch.host_positions
        missing = max(0, group.size - batch.layout.num_tokens)
        if missing:  # Layers of some models take no empty input: add a segment of padding that nothing attends to.
            padded = {name: F.pad(getattr(batch, name), (0, missing)) for name in ("input_ids", "position_ids")}
            riders = tuple(rider.padded(missing) for rider in batch.riders)
            layout = SegmentLayout((*batch.layout.lengths, missing), (*batch.layout.attends_to, ()))
            batch = dataclasses.replace(batch, layout=layout, riders=riders, **padded)
        part = RowPart.of(group, batch.layout.num_tokens, positions, batch.input_ids.device, missing)
        row.batch, row.inputs["row_part"] = part.cut(batch), part
        return tuple(map(part.gather, inner(row)))


class _Exchange(torch.autograd.Function):
    """Differentiable all-to-all: the forward calls ``there``, and the backward calls ``back`` with the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Send, back: Send) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, part: RowPart) -> torch.Tensor:
        ctx.part, size = part, part.group.size
        gathered = part.group.all_to_all(own.repeat(size, *[1] * (own.dim() - 1)), [len(own)] * size, part.labels)
        return gathered.index_select(0, part.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.part.own), None


class SharedTokens(SharedRows):
    _reach_all = False

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> ShardingStrategy:
        parts = parts_of(unwrap(model))
        install(model, RowStep.of(config.layout, None if parts is None else parts.engine))
        return super().for_run(model, config)

    @property
    def row(self) -> RankGroup:
        return self._step.row

    @property
    def _step(self) -> RowStep:
        return next(step for step in steps_of(unwrap(self.model)) if isinstance(step, RowStep))

    def share_frozen(self, model: torch.nn.Module) -> None:
        install(model, self._step)
        self._around(model)

    def close(self) -> None:
        super().close()
        remove(self.model, RowStep)

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Return whether the loss reaches the same parameters on all ranks of the row. Otherwise a deadlock is
        possible: ranks that use an expert wait to sum its gradient, while the other ranks wait to exchange heads."""
        if self._reach_all:
            return True
        # The check takes time, because it visits the whole autograd graph. A model without experts isn't checked again
        # once all ranks have reached all parameters.
        unreached = self.row.gather(_unreached(loss, self.model))
        self._reach_all = not any(unreached) and not num_experts(unwrap(self.model).config)
        return len({*unreached}) == 1

    def describe(self) -> str:
        size = self._step.sequence.size
        rows = f"sequences: {size} ranks divide each row's tokens, and exchange heads in attention"
        return "; ".join(filter(None, (rows, super().describe())))


def _unreached(loss: torch.Tensor, model: torch.nn.Module) -> tuple[int, ...]:
    nodes, visited, variables = [loss.grad_fn], set(), set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in visited:
            visited.add(node)
            variables.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return tuple(index for index, parameter in enumerate(trained) if id(parameter) not in variables)


def over_rows(way: type[ShardingStrategy], config: GRPOConfig) -> type[ShardingStrategy]:
    if config.sequence_parallel_size == 1:
        return way
    # Keep ZeRO-2's backward, which handles a failed rank.
    own: dict[str, Any] = {"backward": SharedGradients.backward} if issubclass(way, SharedGradients) else {}
    return type(f"RowsOf{way.__name__}", (SharedTokens, way), own)


class WholeRows(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        text = model.config.get_text_config()
        given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
        ways = [given, *(of_layers for of_layers in given.values() if isinstance(of_layers, dict))]
        kinds = [str(way.get("rope_type") or "") for way in ways]
        if text.model_type == "phimoe" or any(kind == "longrope" or "dynamic" in kind for kind in kinds):
            return f"{type(model).__name__} chooses its rotary frequencies by the row's last position"
        return ""


def check_policy(policy: Policy, config: GRPOConfig, samples: bool) -> Policy:
    check_shared_rows(policy.model, config.sequence_parallel_size, policy.why_padded)
    return policy


def warn_of_own_loss(trainer: Any) -> str:
    if (size := trainer.args.sequence_parallel_size) > 1 and "compute_loss" in trainer.replaced:
        trainer.console.warn(
            f"loss: {size} ranks call compute_loss on each row; a term with a gradient that doesn't come from "
            f"policy_logprobs counts {size} times: divide it by {size}"
        )
    return ""
