"""Ranks that train each row together: with parts of the policy (`tensor`), or of the row's tokens. They exchange in
each forward and backward, so one that fails there must tell those who wait for it."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..config import GRPOConfig
from ..parallel.faults import telling
from ..parallel.ranks import on_all_ranks
from ..parallel.shards import RankGroup
from ..policy.lora import unwrap
from ..policy.routing import num_experts
from ..policy.sequence_parallel import RowGroups, share_rows, whole_rows
from ..policy.tensor_parallel import parts_of
from ..runtime.process import forget_frames
from .strategy import ShardingStrategy, drop_graph
from .whole import WholeCopies
from .zero import SharedGradients, SharedOptimizer

PATIENCE = 30.0  # seconds in which ranks of a row that lack memory alike do so


@contextmanager
def telling_unless_alike(what: str, row: RankGroup) -> Iterator[None]:
    """The ranks of a row exchange in the body. One that fails there leaves the others waiting, and tells them. Their
    work being alike, all may run out of memory at the same place: nobody waits then, and all can try again."""
    lack: torch.OutOfMemoryError | None = None
    with telling(what):
        try:
            yield
        except torch.OutOfMemoryError as error:
            forget_frames(error)  # which hold activations
            if not row.meets(PATIENCE):
                raise
            lack = error
    if lack is not None:
        raise lack


class SharedRows(ShardingStrategy):
    """What such strategies have in common. The rest is another strategy's."""

    meets_in_backward = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._around(model)

    @property
    @abstractmethod
    def row(self) -> RankGroup:
        """The ranks of a row."""

    def share_frozen(self, model: torch.nn.Module) -> None:
        """It is a copy of the policy, and cut already: its ranks meet in a forward, too."""
        self._around(model)

    def _around(self, model: torch.nn.Module) -> None:
        # Below an adapter's wrapper, which finds it there, as the rows' proof runs the model itself.
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
    """Each rank computes some of a row's tokens, see `policy.sequence_parallel`."""

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
        found: RowGroups = unwrap(self.model).row_groups
        return found

    def share_frozen(self, model: torch.nn.Module) -> None:
        share_rows(unwrap(model), self._groups)
        self._around(model)

    def close(self) -> None:
        super().close()
        whole_rows(unwrap(self.model))

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Whether the row's ranks reach the same parameters: an expert may have no token of one's part. Amid the
        backward a rank that waits for the others' bucket would keep from them the exchange of heads that they wait for.
        A collective of the row. That looks at each node of a graph, so where no part of a model can be left out (it
        is no mixture), and all ranks have reached all of it once, they do so from then on."""
        if self._reach_all:
            return True
        unreached = self.row.gather(_unreached(loss, self.model))
        self._reach_all = not any(unreached) and not num_experts(unwrap(self.model).config)
        return len({*unreached}) == 1

    def describe(self) -> str:
        size = self._groups.sequence.size
        rows = f"sequences: {size} ranks share out each row's tokens, and exchange heads in attention"
        return "; ".join(filter(None, (rows, super().describe())))  # type: ignore[safe-super]


def _unreached(loss: torch.Tensor, model: torch.nn.Module) -> tuple[int, ...]:
    """Which of the trained parameters, in their order, are nowhere in a loss's graph."""
    nodes, seen, reached = [loss.grad_fn], set(), set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return tuple(index for index, parameter in enumerate(trained) if id(parameter) not in reached)


class RowsOfWholeCopies(SharedTokens, WholeCopies):
    """With `sharding: none`."""


class RowsOfSharedOptimizer(SharedTokens, SharedOptimizer):
    """With `sharding: optimizer`."""


class RowsOfSharedGradients(SharedTokens, SharedGradients):
    """With `sharding: gradients`, whose backward answers the others' exchanges after a failure."""

    backward = SharedGradients.backward
