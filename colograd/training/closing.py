"""Whatever a trainer builds is closed: by `close`, or at once where its start fails."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..runtime import process

F = TypeVar("F", bound=Callable[..., None])


def closes_if_it_fails(init: F) -> F:
    """Decorate an ``__init__`` that tells ``self.closing``, an ExitStack that is there, how what it builds is closed.

    If it fails, all of that is closed when the error arrives, and nothing of it stays in memory with the exception:
    another trainer may then be made in the same process.
    """

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.closing = contextlib.ExitStack()
        handled = sys.exc_info()[1]
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            process.forget_frames(error, but=handled)
            with contextlib.suppress(Exception):  # what failed first counts
                self.closing.close()
            del self, args, kwargs, handled  # this frame is in the traceback, too
            raise

    return run  # type: ignore[return-value]
