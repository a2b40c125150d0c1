"""A published configuration's dropout: reported at start, and turned off in every layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import tiny
import torch
from row_cases import make_groups
from transformers import AutoConfig

from colograd.policy.loading import Policy, load_policy
from colograd.policy.logprobs import PolicyForward
from colograd.policy.packing import collate, plan_rows


def loaded(folder: Path, tmp_path: Path, disable: bool) -> tuple[Policy, list[str]]:
    shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
    AutoConfig.from_pretrained(folder, attention_dropout=0.25).save_pretrained(tmp_path / "model")
    args = tiny.config(tmp_path, disable_dropout=disable)
    policy = load_policy(str(tmp_path / "model"), None, args)
    return policy, [line for line in policy.warnings(args) if "dropout" in line]


def test_dropout_of_the_configuration_is_named_and_can_be_turned_off(tiny_model: Path, tmp_path: Path) -> None:
    (row,) = plan_rows(make_groups()[:1], 1000, False, torch.device("cpu"))
    for disable in (False, True):
        policy, lines = loaded(tiny_model, tmp_path, disable)
        policy.model.train()
        with torch.no_grad():
            first, second = (PolicyForward(policy.model, 1.0)(collate(row))[0] for _ in range(2))
        assert torch.equal(first, second) == disable
        assert bool(lines) == (not disable)
        assert disable or "up to 0.25, from its configuration" in lines[0]
