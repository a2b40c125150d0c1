"""Two steps of a decoder family's tiny random model, and the second one again from a checkpoint.

Plain transformers loads the saved folder. FOLDER/outcome.json gets the outcome, with transformers' log-probabilities of
some tokens.

python one_family.py MODEL_TYPE FOLDER
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import decoder_families
import tiny
import torch
from transformers import AutoModelForCausalLM

from colograd import GRPOTrainer

BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch"}


def trained(model: Path, folder: Path, dtype: str) -> dict[str, Any]:
    changes = BFLOAT16 if dtype == "bfloat16" else {}
    found: list[dict[str, torch.Tensor]] = []
    for resumed in (None, str(folder / "run" / "checkpoint-1")):
        config = tiny.config(
            folder / "run", max_steps=2, max_completion_length=8, disable_dropout=True, save_strategy="steps",
            save_steps=1, full_determinism=True, **changes,
        )  # fmt: skip
        with contextlib.closing(GRPOTrainer(str(model), tiny.vowels, config, tiny.prompts())) as trainer:
            trainer.train(resume_from_checkpoint=resumed)
            found.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
            rows = trainer.policy.model.config._attn_implementation
            history = trainer.state.log_history
    plain = AutoModelForCausalLM.from_pretrained(folder / "run" / "checkpoint-2", dtype=dtype)
    name = "sampling/sampling_logp_difference/mean"
    ids = torch.randint(3, 250, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = plain.eval()(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return {
        "status": "trained",
        "difference": max(entry[name] for entry in history if name in entry),
        "dtype": dtype,
        "rows": rows,
        "resumed": same(*found),
        "plain": same(found[1], dict(plain.named_parameters())),
        "ids": ids.tolist(),
        "logprobs": logprobs.gather(1, ids[1:, None])[:, 0].tolist(),
    }


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


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
    except (ValueError, RuntimeError, TypeError) as error:  # as `colograd.train.start` prints them
        kind = "RuntimeError" if isinstance(error, RuntimeError) else "ValueError"
        found = {"status": kind, "message": str(error)}
    (folder / "outcome.json").write_text(json.dumps({"type": model_type, **found}))


if __name__ == "__main__":
    main()
