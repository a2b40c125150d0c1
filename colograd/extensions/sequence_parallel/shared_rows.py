"""Strategies in which each rank computes some of a row's tokens (`sequence_parallel_size`)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...config import GRPOConfig
from ...parallel.shards import RankGroup, parts_of
from ...policy.lora import unwrap
from ...runtime.sizes import num_experts
from ...sharding.shared_rows import SharedRows
from ...sharding.strategy import ShardingStrategy
from ...sharding.zero import SharedGradients
from .forward import RowGroups, share_rows, whole_rows


class SharedTokens(SharedRows):
    _reach_all = False

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> ShardingStrategy:
        parts = parts_of(unwrap(model))
        share_rows(unwrap(model), RowGroups.of(config.layout, None if parts is None else parts.engine))
        return super().for_run(model, config)

    @property
    def row(self) -> RankGroup:
        return self._groups.row

    @property
    def _groups(self) -> RowGroups:
        groups: RowGroups = unwrap(self.model).row_groups
        return groups

    def share_frozen(self, model: torch.nn.Module) -> None:
        share_rows(unwrap(model), self._groups)
        self._around(model)

    def close(self) -> None:
        super().close()
        whole_rows(unwrap(self.model))

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Return whether the loss reaches the same parameters on all ranks of the row. A collective of the row.

        An expert may get no token of a rank's part. If buckets were reduced during such a backward, a rank that waits
        for a bucket would hold up the exchange of heads that the others wait for. The check visits each node of the
        graph, so it ends once all ranks have reached all parameters of a model that isn't a mixture.
        """
        if self._reach_all:
            return True
        unreached = self.row.gather(_unreached(loss, self.model))
        self._reach_all = not any(unreached) and not num_experts(unwrap(self.model).config)
        return len({*unreached}) == 1

    def describe(self) -> str:
        size = self._groups.sequence.size
        rows = f"sequences: {size} ranks divide each row's tokens, and exchange heads in attention"
        return "; ".join(filter(None, (rows, super().describe())))  # type: ignore[safe-super]


def _unreached(loss: torch.Tensor, model: torch.nn.Module) -> tuple[int, ...]:
    """Return the indices of the trained parameters that a loss's graph doesn't contain."""
    nodes, visited, variables = [loss.grad_fn], set(), set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in visited:
            visited.add(node)
            variables.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return tuple(index for index, parameter in enumerate(trained) if id(parameter) not in variables)


def over_rows(way: type[ShardingStrategy], config: GRPOConfig) -> type[ShardingStrategy]:
    return rows_of(way) if config.sequence_parallel_size > 1 else way


@functools.cache
def rows_of(way: type[ShardingStrategy]) -> type[ShardingStrategy]:
    """Derive from a strategy the one whose ranks divide the tokens of each row."""
    # The backward of ZeRO-2 answers the others' exchanges after a failure itself.
    own: dict[str, Any] = {"backward": SharedGradients.backward} if issubclass(way, SharedGradients) else {}
    return type(f"RowsOf{way.__name__}", (SharedTokens, way), own)
