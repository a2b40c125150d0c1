"""Free memory after an exception: tracebacks and a failed constructor would keep large objects alive."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., None])


def forget_frames(error: BaseException, but: BaseException | None = None) -> None:
    """Clear the local variables in the tracebacks of ``error`` and its causes, because a notebook keeps the last
    exception. Keep the variables of ``but``, an exception that the caller was already handling."""
    known = {id(but): but}
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (one := waiting.pop()) is not None and id(one) not in known:
            known[id(one)] = one
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def closes_if_it_fails(init: F) -> F:
    """Decorate an ``__init__``: set ``self.closing`` to an ExitStack, which is closed if ``__init__`` fails."""

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.closing = contextlib.ExitStack()
        handled = sys.exc_info()[1]
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            forget_frames(error, but=handled)
            with contextlib.suppress(Exception):  # Report the constructor's error, not one of closing.
                self.closing.close()
            del self, args, kwargs, handled  # The traceback would keep this frame's variables alive.
            raise

    return run  # type: ignore[return-value]
