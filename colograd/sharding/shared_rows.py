"""The base of strategies where several ranks train one row (packed sequences) together, e.g. tensor parallelism.

Each rank has a part of the policy, or of the row's tokens. The ranks communicate in each forward and backward. So a
rank that fails must report the failure to the waiting ranks.
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

PATIENCE = 30.0  # seconds to wait until all ranks of a row have run out of memory at the same operation


@contextmanager
def telling_unless_alike(what: str, row: RankGroup) -> Iterator[None]:
    """Report an error in the context to the ranks of the row, which wait in a collective.

    The ranks do equal work, so all of them may run out of memory at the same operation. Then no rank waits, nothing is
    reported, and all ranks can try again.
    """
    shortage: torch.OutOfMemoryError | None = None
    with telling(what):
        try:
            yield
        except torch.OutOfMemoryError as error:
            forget_frames(error)  # the frames hold activations
            if not row.meets(PATIENCE):
                raise
            shortage = error
    if shortage is not None:
        raise shortage


class SharedRows(ShardingStrategy):
    """A strategy where ranks train each row together. Combine it with a strategy that divides the optimizer state."""

    meets_in_backward = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._around(model)

    @property
    @abstractmethod
    def row(self) -> RankGroup:
        """The group of ranks that train a row together."""

    def share_frozen(self, model: torch.nn.Module) -> None:
        """Report errors in the frozen model's forward. The model is a copy of the divided policy."""
        self._around(model)

    def _around(self, model: torch.nn.Module) -> None:
        # The attribute is set on the model inside a PEFT wrapper, because the check of rows at start runs that model.
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
