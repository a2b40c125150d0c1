"""Every decoder family that transformers and vLLM both have, tiny and random: trained, or refused in a line."""

from __future__ import annotations

import json
from pathlib import Path

import decoder_families
import launcher
import pytest
from paths import SCRIPTS

pytestmark = pytest.mark.engine
SCRIPT = SCRIPTS / "one_family.py"
# Of those whose names or layouts differ between transformers and vLLM: transposed projections, routers of other names.
# Convolutions with a state, a configuration of vLLM's own. Latent attention, which vLLM has absorbed for decoding.
QUICK = ("gpt2", "granitemoe", "lfm2_moe", "deepseek_v3")
# transformers can't build or run its own random model of them; its Trainer refuses a tokenizer without a first token.
BROKEN = ("dbrx", "qwen4_exp_text", "cwm")
TRAINED = 1e-3  # nats, mean: float32; bfloat16 where a kernel of the engine wants it


def outcome(model_type: str, folder: Path) -> dict[str, object]:
    done = launcher.run(SCRIPT, model_type, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads((folder / "outcome.json").read_text())
    return found


@pytest.mark.parametrize("model_type", QUICK)
def test_other_names_and_layouts_are_found_and_proved(model_type: str, tmp_path: Path) -> None:
    found = outcome(model_type, tmp_path)
    assert found["status"] == "trained" and float(str(found["difference"])) < 1e-5, found
    assert found["resumed"] and found["plain"], found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*decoder_families.model_types()} - {*QUICK, *BROKEN}))
def test_a_family_is_trained_or_refused_in_a_line(model_type: str, tmp_path: Path) -> None:
    """A refusal is an error that the command prints as a line: see `colograd.train.start`."""
    found = outcome(model_type, tmp_path)
    if found["status"] == "trained":
        assert float(str(found["difference"])) < (TRAINED if found["dtype"] == "float32" else 0.1), found
        assert found["resumed"] and found["plain"], found
    else:
        assert found["status"] in ("ValueError", "RuntimeError") and len(str(found["message"])) > 40, found
