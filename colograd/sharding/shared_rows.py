"""Strategies with ranks that train each row together: with parts of the policy, or of the row's tokens.

These ranks exchange in each forward and backward. So a rank that fails there must report it to the waiting ranks.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ..parallel.faults import telling
from ..parallel.ranks import on_all_ranks
from ..parallel.shards import RankGroup
from ..policy.lora import unwrap
from ..runtime.failures import forget_frames
from .strategy import ShardingStrategy, drop_graph

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

    def agree(self, what: str) -> AbstractContextManager[None]:
        return on_all_ranks(what)

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
