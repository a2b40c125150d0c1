"""Files of accelerate's FSDP2 and DeepSpeed, and the `deepspeed` command, choose one of our sharding strategies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from paths import RECIPES

from colograd.config import GRPOConfig
from colograd.extensions.launchers.launched import (
    DEEPSPEED,
    FSDP,
    KEPT,
    MEGATRON,
    from_deepspeed,
    requests,
)

FILES = RECIPES / "accelerate_configs"
WAYS = {"ddp": "none", "fsdp2": "fsdp", "zero2": "gradients", "zero3": "fsdp"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in (FSDP, DEEPSPEED, MEGATRON, KEPT):  # undoes the tested code's writes
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield monkeypatch


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**({"output_dir": "unused", "report_to": "none", "use_cpu": True} | changes))


def variables(path: Path) -> dict[str, str]:
    """Variables that `accelerate launch --config_file` sets for a file, by accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "--num_processes", "2", "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return prepare_deepspeed_cmd_env(arguments)[1]
    return prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize("name", WAYS)
def test_each_file_of_accelerate_s_means_a_way(name: str, environment: pytest.MonkeyPatch) -> None:
    assert ClusterConfig.from_yaml_file(str(FILES / f"{name}.yaml"))
    for variable, value in variables(FILES / f"{name}.yaml").items():
        if variable.startswith(("ACCELERATE_", "FSDP_")):
            environment.setenv(variable, value)
    made = config()
    assert made.sharding == WAYS[name] and bool(made.sharding_note) == (name != "ddp")
    assert config().sharding == WAYS[name], "and again, as accelerate must not see it the first time"
    assert made.distributed_state.distributed_type.value in ("NO", "MULTI_CPU") and not made.fsdp and not made.deepspeed
    head = (FILES / f"{name}.yaml").read_text().split("\ncompute_environment")[0]
    assert (f"sharding: {WAYS[name]}" in head) == (name != "ddp")


def test_what_a_file_says_of_fsdp_is_taken(environment: pytest.MonkeyPatch) -> None:
    for name, value in {FSDP: "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}.items():
        environment.setenv(name, value)
    made = config()
    assert (made.sharding, made.fsdp_reshard_after_forward, made.fsdp_offload_params) == ("fsdp", False, False)
    assert config(sharding="auto").sharding == "fsdp"
    with pytest.raises(ValueError, match="sharding is 'optimizer', but the launcher or `deepspeed` requests FSDP2"):
        config(sharding="optimizer")


def test_a_variable_that_says_false_is_no_sharding(environment: pytest.MonkeyPatch) -> None:
    for name in (FSDP, DEEPSPEED, MEGATRON):
        environment.setenv(name, "false")
    assert config().sharding == "none" and requests(None) == []


@pytest.mark.parametrize(
    ("stage", "way"), [(0, "none"), (1, "optimizer"), (2, "gradients"), ("3", "fsdp")], ids=lambda value: str(value)
)
def test_a_stage_of_deepspeed_s_is_a_way(stage: Any, way: str, tmp_path: Path) -> None:
    given = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    for deepspeed in (given, str(path)):
        made = config(deepspeed=deepspeed)
        assert made.sharding == way and made.deepspeed is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp16": {"enabled": True}}, "enables fp16, but policies train in bfloat16 or float32"),
        ({"optimizer": {"type": "Adam"}}, "has a section 'optimizer', but only the setting optim has an effect"),
        ({"zero_optimization": {"stage": 4}}, "has the ZeRO stage 4: set zero_optimization.stage to 0"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "has offload_param on 'nvme', but only host memory is supported",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "has offload_param, but ZeRO stage 2: set stage: 3",
        ),
        ("nowhere.json", "'nowhere.json' can't be read"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_deepspeed(given)


@pytest.mark.parametrize(
    ("set_to", "said"),
    [
        ({FSDP: "true"}, "FSDP_VERSION is 1, but only FSDP2 is supported: set fsdp_version: 2"),
        ({MEGATRON: "true"}, "Megatron-LM isn't supported"),
        ({FSDP: "true", "FSDP_VERSION": "2", DEEPSPEED: "true"}, "are both set, but a policy is sharded in one way"),
    ],
)
def test_a_launcher_that_asks_for_something_else_is_refused(
    set_to: dict[str, str], said: str, environment: pytest.MonkeyPatch
) -> None:
    for name, value in set_to.items():
        environment.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        requests(None)
