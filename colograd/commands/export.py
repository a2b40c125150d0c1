"""``colograd export CHECKPOINT FOLDER``: an ordinary model folder from a checkpoint, without what goes on with a run.

A checkpoint's weights are whole however its run was sharded; they are copied. An adapter is merged into its base.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime import process

ADAPTER = "adapter_config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; the exit status."""
    parser = argparse.ArgumentParser(prog="colograd export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint-N, or a run's output_dir for its newest one")
    parser.add_argument("folder", type=Path, help="where the model goes; it must not be there yet")
    options = parser.parse_args(argv)
    process.quiet_logs(verbose=False)
    try:
        source = export(options.checkpoint, options.folder)
    except (OSError, ValueError) as error:
        print(f"colograd export: {error}", file=sys.stderr)
        return 2
    print(f"exported {source} to {options.folder}")
    return 0


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint into a new folder, which is there whole or not at all.

    Returns:
        The checkpoint: the newest one where a run's folder is given.

    Raises:
        ValueError: there is no checkpoint, or a damaged one, or there is something at the folder's place.
    """
    from ..training.checkpoints import STATE, check, find_resume

    newest = find_resume("auto", str(checkpoint))
    source = Path(newest) if newest else checkpoint
    if not (source / "trainer_state.json").is_file():
        raise ValueError(f"{checkpoint} is neither a checkpoint nor a run's folder with one in it.")
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a folder that isn't.")
    check(source)
    aside = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    if (source / ADAPTER).is_file():
        _merge(source, aside)
    else:
        shutil.copytree(source, aside, ignore=shutil.ignore_patterns(*STATE))
    aside.rename(folder)
    return source


def _merge(source: Path, folder: Path) -> None:
    """The base with the adapter in it, added in float32 and rounded once, in the base's own dtype."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    model: Any = AutoPeftModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    base = model.peft_config["default"].base_model_name_or_path
    merged = model.merge_and_unload().to(AutoConfig.from_pretrained(base).dtype)
    merged.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
