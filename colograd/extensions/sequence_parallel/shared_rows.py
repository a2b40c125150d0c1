"""Strategies with ranks that train each row together: with parts of the policy (`tensor`), or of the row's tokens.

These ranks exchange in each forward and backward. So a rank that fails there must report it to the waiting ranks.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...config import GRPOConfig
from ...parallel.faults import telling
from ...parallel.ranks import on_all_ranks
from ...parallel.shards import RankGroup
from ...policy.lora import unwrap
from ...runtime.process import forget_frames
from ...runtime.sizes import num_experts
from ...sharding.strategy import ShardingStrategy, drop_graph
from ...sharding.whole import WholeCopies
from ...sharding.zero import SharedGradients, SharedOptimizer
from ..tensor_parallel.layers import parts_of
from .forward import RowGroups, share_rows, whole_rows

PATIENCE = 30.0  # seconds within which all ranks of a row run out of memory, if they do so at the same place


@contextmanager
def telling_unless_alike(what: str, row: RankGroup) -> Iterator[None]:
    """Run a body in which the ranks of a row exchange, and report a failure to the waiting ranks.

    The ranks do the same work, so all of them may run out of memory at the same place. Then no rank waits, nothing is
    reported, and all ranks can try again.
    """
    shortage: torch.OutOfMemoryError | None = None
    with telling(what):
        try:
            yield
        except torch.OutOfMemoryError as error:
            forget_frames(error)  # they hold activations
            if not row.meets(PATIENCE):
                raise
            shortage = error
    if shortage is not None:
        raise shortage


class SharedRows(ShardingStrategy):
    """The common part of these strategies, to be combined with another strategy."""

    meets_in_backward = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._around(model)

    @property
    @abstractmethod
    def row(self) -> RankGroup:
        """The ranks of a row."""

    def share_frozen(self, model: torch.nn.Module) -> None:
        """Report failures in the second model's forward. It is a copy of the policy, and is already cut."""
        self._around(model)

    def _around(self, model: torch.nn.Module) -> None:
        # Set on the model below an adapter's wrapper: the wrapper reads it there, and the row proof runs that model.
        unwrap(model).around_forward = functools.partial(telling_unless_alike, "the forward", self.row)

    def close(self) -> None:
        super().close()
        del unwrap(self.model).around_forward

    @contextmanager
    def agree(self, what: str) -> Iterator[None]:
        with on_all_ranks(what):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        try:
            super().backward(loss)
        except BaseException as error:
            drop_graph(loss, error)
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        with contextlib.suppress(BaseException), telling_unless_alike("the backward", self.row):
            raise error


class SharedTokens(SharedRows):
    """A strategy in which each rank computes some of a row's tokens, see `policy.sequence_parallel`."""

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


class RowsOfWholeCopies(SharedTokens, WholeCopies):
    """With `sharding: none`."""


class RowsOfSharedOptimizer(SharedTokens, SharedOptimizer):
    """With `sharding: optimizer`."""


class RowsOfSharedGradients(SharedTokens, SharedGradients):
    """With `sharding: gradients`. Its backward answers the others' exchanges after a failure."""

    backward = SharedGradients.backward
