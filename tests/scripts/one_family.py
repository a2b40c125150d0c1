"""Two steps of a decoder family's tiny random model; what came of it goes to FOLDER/outcome.json.

python one_family.py MODEL_TYPE FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import decoder_families
import tiny

from colograd import GRPOTrainer

BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch"}


def trained(model: Path, folder: Path, dtype: str) -> dict[str, Any]:
    changes = BFLOAT16 if dtype == "bfloat16" else {}
    config = tiny.config(folder / "run", max_steps=2, max_completion_length=8, disable_dropout=True, **changes)
    trainer = GRPOTrainer(str(model), tiny.vowels, config, tiny.prompts())
    trainer.train()
    name = "sampling/sampling_logp_difference/mean"
    difference = max(entry[name] for entry in trainer.state.log_history if name in entry)
    rows = trainer.policy.model.config._attn_implementation
    return {"status": "trained", "difference": difference, "dtype": dtype, "rows": rows}


def main() -> None:
    model_type, folder = sys.argv[1], Path(sys.argv[2])
    model = decoder_families.make_model(folder / "model", model_type)
    try:
        try:
            found = trained(model, folder, "float32")
        except (ValueError, RuntimeError) as error:
            if "bfloat16" not in str(error) and "BF16" not in str(error):
                raise
            found = trained(model, folder, "bfloat16")
    except (ValueError, RuntimeError, TypeError) as error:  # as `colograd.train.start` tells them
        kind = "RuntimeError" if isinstance(error, RuntimeError) else "ValueError"
        found = {"status": kind, "message": str(error)}
    (folder / "outcome.json").write_text(json.dumps({"type": model_type, **found}))


if __name__ == "__main__":
    main()
