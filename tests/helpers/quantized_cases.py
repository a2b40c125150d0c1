"""Runs of an adapter on a quantised base, and their checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launcher
import tiny
from paths import SCRIPTS

from colograd import GRPOTrainer

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NESTED = {**NF4, "bnb_4bit_use_double_quant": True}
FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
INT8 = {"load_in_8bit": True}
KINDS = {"NF4": NF4, "nested": NESTED, "FP4": FP4, "int8": INT8}
RANKS = SCRIPTS / "quantized_ranks.py"


def config(folder: Path, settings: dict[str, Any] | None = None, dtype: str = "float32", **changes: Any) -> Any:
    asked = {} if settings is None else {"quantization_config": settings}
    given = {"learning_rate": 1e-2, "max_steps": 3, "model_init_kwargs": {"dtype": dtype, **asked}}
    return tiny.config(folder, **(given | changes))


def steps(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def adapter_bytes(trainer: GRPOTrainer) -> int:
    return sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)


def same_on_both_sides(trainer: GRPOTrainer) -> None:
    found = [step["sampling/sampling_logp_difference/mean"] for step in steps(trainer)]
    assert len(found) == 3 and max(found) < 1e-5, found


def check_two_ranks(model: Path, folder: Path, *arguments: str) -> None:
    """Check that two ranks have one base, one adapter, and equal log-probabilities of the sampler."""
    done = launcher.run(RANKS, model, folder / "run", folder, *arguments, ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["base"] == second["base"] and first["adapter"] == second["adapter"]
    assert all(difference < 1e-5 for rank in (first, second) for difference in rank["differences"])
    assert len(first["differences"]) == 3 and not first["differing"] and not second["differing"]
