"""A trainer's arguments in all forms of TRL: models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
from transformers import AutoModelForCausalLM

from colograd.config import GRPOConfig
from colograd.policy import attention, row_proof
from colograd.policy.loading import load_policy
from colograd.training.preparation import prepared_config, train_prompts_of
from colograd.training.transformers_seam import SeamTrainer


def test_without_a_configuration_the_output_folder_has_the_model_s_name(tiny_model, tmp_path, monkeypatch) -> None:
    """TRL's rule, for a model given as an object too."""
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for given in (model, f"{tiny_model}/"):
        assert prepared_config(None, given).output_dir == "tiny-llama-GRPO"


def test_arguments_of_a_quantisation_that_nobody_asks_for_may_stay(tiny_model, tmp_path) -> None:
    """TRL's example scripts always pass these arguments, and the dtype by its old name."""
    asked = {"quantization_config": None, "device_map": None, "torch_dtype": "float32", "attn_implementation": None}
    policy = load_policy(tiny_model, None, tiny.config(tmp_path, model_init_kwargs=asked))
    assert str(policy.model.dtype) == "torch.float32"


@pytest.mark.parametrize("keep", [True, False])
def test_images_are_refused_before_their_column_is_gone(tiny_model, tmp_path, keep) -> None:
    config = tiny.config(tmp_path, remove_unused_columns=not keep)
    policy = load_policy(tiny_model, None, config)
    with pytest.raises(ValueError, match="train has the column 'image'"):
        train_prompts_of(tiny.prompts().add_column("image", [None] * 16), policy, config)


@pytest.mark.parametrize(
    ("argument", "setting", "expected"),
    [(None, "auto", "auto"), (None, True, True), (None, None, None), (False, "auto", False), ("run/x", True, "run/x")],
)
def test_train_resumes_as_the_configuration_says(argument, setting, expected) -> None:
    class Searched(Exception):
        pass

    def find(wanted) -> None:
        raise Searched(wanted)

    trainer = SimpleNamespace(
        args=SimpleNamespace(resume_from_checkpoint=setting), checkpointer=SimpleNamespace(find=find)
    )
    with pytest.raises(Searched) as search:
        SeamTrainer._begin_training(trainer, argument)
    assert search.value.args == (expected,)


def test_no_row_is_proved_on_a_gpu_s_host(tiny_model, tmp_path, monkeypatch) -> None:
    """The policy is still in host memory then, where a large model's forward takes minutes."""
    monkeypatch.setattr(row_proof, "differences", lambda *row, **options: pytest.fail("a forward"))
    monkeypatch.setattr(GRPOConfig, "on_cpu", False)
    policy = load_policy(tiny_model, None, tiny.config(tmp_path))
    assert policy.why_padded == "" and policy.model.config._attn_implementation == attention.NAME
