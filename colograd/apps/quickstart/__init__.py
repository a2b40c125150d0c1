"""Small tasks to try a machine. Three tasks share the model that `quickstart` makes: sums (`quickstart`), products with
a tool (`calculator`), orders with an agent (`shop`). `colours` has images, and a tiny model with random weights."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ...runtime import process


def output_folder(task: str, model: str) -> Path:
    """Return the folder that ``--output`` names on a task's command line. Also hide other packages' log lines."""
    parser = argparse.ArgumentParser(f"python -m colograd.apps.quickstart.{task}", description="Make the model folder.")
    default = Path("models", model)
    parser.add_argument("--output", type=Path, default=default, metavar="DIR", help="the model folder to make")
    output: Path = parser.parse_args().output
    os.environ["TQDM_DISABLE"] = "1"  # tqdm reads TQDM_DISABLE when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Without DS_ACCELERATOR deepspeed prints how it looks for a GPU.
    process.quiet_logs(False)
    return output
