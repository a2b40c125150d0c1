"""Memory after an exception: what a failed constructor and the tracebacks hold is freed."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., None])


def forget_frames(error: BaseException, but: BaseException | None = None) -> None:
    """Free the objects that only the tracebacks of ``error`` and its causes hold: a notebook keeps the last exception.
    Frames that still run keep their variables. ``but`` was handled before; Python counts it as a cause of ``error``."""
    known = {id(but): but}
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (one := waiting.pop()) is not None and id(one) not in known:
            known[id(one)] = one
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def closes_if_it_fails(init: F) -> F:
    """Give an ``__init__`` an ExitStack, ``self.closing``; close it and free the frames' memory if the method fails."""

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.closing = contextlib.ExitStack()
        handled = sys.exc_info()[1]
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            forget_frames(error, but=handled)
            with contextlib.suppress(Exception):  # the first error counts
                self.closing.close()
            del self, args, kwargs, handled  # this frame is in the traceback, too
            raise

    return run  # type: ignore[return-value]
