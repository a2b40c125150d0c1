"""Start the server of `launcher.py`. This module imports nothing large, because pytest's controller uses it."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "COLOGRAD_TESTS_LAUNCHER"  # Environment variable with the server's address.


def start() -> str:
    """Start a server that ends with this process, and return its address. It listens there after its imports."""
    folder = tempfile.mkdtemp(prefix="colograd-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(Path(folder, "launcher"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(Path(__file__).with_name("launcher.py")), address]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    return address
