"""What a trainer is given, in the forms that TRL takes: models."""

from __future__ import annotations

import pytest
import tiny
from transformers import AutoModelForCausalLM

from colograd.inputs import begin
from colograd.policy import load_policy


def test_without_a_configuration_the_output_folder_has_the_model_s_name(tiny_model, tmp_path, monkeypatch) -> None:
    """TRL's rule, for a model given as an object too."""
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert begin(None, model).output_dir == begin(None, f"{tiny_model}/").output_dir == "tiny-llama-GRPO"


@pytest.mark.parametrize("asked", [{"load_in_4bit": True}, {"quantization_config": {"load_in_8bit": True}}])
def test_a_quantised_policy_is_refused(tiny_model, tmp_path, asked) -> None:
    with pytest.raises(ValueError, match=f"model_init_kwargs has '?{next(iter(asked))}'?, but quantised policies"):
        load_policy(tiny_model, None, tiny.config(tmp_path, model_init_kwargs=asked))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.is_loaded_in_8bit = True  # as transformers marks it
    with pytest.raises(ValueError, match=r"tiny-llama' is quantised, but quantised policies aren't available"):
        load_policy(model, None, tiny.config(tmp_path, model_init_kwargs=None))
