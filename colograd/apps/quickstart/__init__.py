"""Tasks to try a machine with: `quickstart` (a model and sums of digits), `calculator` (products, with a tool),
`colours` (pictures, with a model of random weights)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ...runtime import process


def output_folder(task: str, model: str) -> Path:
    """Read ``--output`` from the command line of a task that makes its model, and keep other packages quiet."""
    parser = argparse.ArgumentParser(f"python -m colograd.apps.quickstart.{task}", description="Make the model folder.")
    default = Path("models", model)
    parser.add_argument("--output", type=Path, default=default, metavar="DIR", help="the model folder to make")
    output: Path = parser.parse_args().output
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or deepspeed, which transformers imports, prints its search
    process.quiet_logs(False)
    return output
