"""Becomes a command that dies with the trainer: ``python command_process.py COMMAND ...``.

This runs in a new process, because code between fork and exec can deadlock in a trainer with threads. Imports nothing
from Colograd.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and commands would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
