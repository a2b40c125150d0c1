"""C++ libraries for tests, built against the installed torch once per machine, user, source and torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def why_not() -> str:
    """Return why no library can be built or loaded here. An empty text means that one can."""
    if runpy.run_path(str(torch_folder() / "version.py"))["cuda"] is not None:
        return "this torch is built for CUDA, and calls a real driver"
    return "" if compiler() else "there is no C++ compiler"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def build(name: str, source: str, *libraries: str) -> Path:
    """Compile ``source``, which takes up to a minute, or return the library of an earlier call."""
    if reason := why_not():
        raise RuntimeError(f"{name}: {reason}")
    torch = torch_folder()
    version = runpy.run_path(str(torch / "version.py"))["__version__"]
    key = hashlib.sha256(f"{source}{version}{torch}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"colograd-tests-{os.getuid()}" / f"{name}-{key}.so"
    library.parent.mkdir(mode=0o700, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            code, output = Path(folder) / "source.cpp", Path(folder) / "library.so"
            code.write_text(source)
            options = ["-std=c++20", "-shared", "-fPIC", "-O1", f"-I{torch / 'include'}", "-o", str(output)]
            options += [f"-L{torch / 'lib'}", *libraries, f"-Wl,-rpath,{torch / 'lib'}"]
            done = subprocess.run([str(compiler()), str(code), *options], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
            output.replace(library)
    return library
