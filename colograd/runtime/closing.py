"""Cleanup of everything that a trainer has built, if its start fails."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from . import process

F = TypeVar("F", bound=Callable[..., None])


def closes_if_it_fails(init: F) -> F:
    """Give an ``__init__`` an ExitStack, ``self.closing``; close it and free the frames' memory if the method fails."""

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.closing = contextlib.ExitStack()
        handled = sys.exc_info()[1]
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            process.forget_frames(error, but=handled)
            with contextlib.suppress(Exception):  # the first error counts
                self.closing.close()
            del self, args, kwargs, handled  # this frame is in the traceback, too
            raise

    return run  # type: ignore[return-value]
