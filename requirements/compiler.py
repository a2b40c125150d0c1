"""Exit with a message if this Python can't build pycosat, a C extension without a wheel (reasoning_gym needs it).
`make setup` runs this before it installs anything. On a GPU, Triton needs the compiler and the headers in every run."""

import os
import shlex
import shutil
import sys
import sysconfig

COMPILERS = (*shlex.split(os.environ.get("CC", ""))[:1], "cc", "gcc", "clang")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
lacking = []
if not any(shutil.which(name) for name in COMPILERS):
    lacking.append("a C compiler (cc)")
if not os.path.isfile(header):
    lacking.append(f"Python's headers ({header})")
if lacking:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.exit(
        f"setup: {' and '.join(lacking)} missing: pycosat is compiled with them, and on a GPU Triton's kernels. Install"
        f" them (Debian, Ubuntu: apt-get install gcc {version}-dev; Fedora, RHEL: dnf install gcc {version}-devel), or "
        "name a Python that has its headers: make setup PYTHON=..."
    )
