"""Reads the requested sharding from accelerate's FSDP2 files and DeepSpeed's configurations.

Neither accelerate's wrapping nor DeepSpeed runs: the request becomes one of Colograd's sharding strategies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FSDP, DEEPSPEED, MEGATRON = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"
# Variable for the launcher's request. With accelerate's own variables transformers would wrap the policy.
KEPT = "COLOGRAD_LAUNCHED"
STAGES = ("none", "optimizer", "gradients", "fsdp")  # Value of `sharding` for ZeRO's stages 0 to 3.
OWN_KEYS = {"optimizer": "optim", "scheduler": "lr_scheduler_type"}  # DeepSpeed's section -> setting that replaces it.

Request = tuple[str, dict[str, Any]]  # Name of a requested method, such as FSDP2, and the settings that replace it.


def launched_settings(config: Any) -> tuple[dict[str, Any], str]:
    """Return the settings for the requested sharding, and a log line. Without a request, return {} and ""."""
    made, settings = requests(config.deepspeed), dict[str, Any]()
    for name, request in made:
        sharding, requested = settings.get("sharding", config.sharding), request["sharding"]
        if sharding not in ("none", "auto", requested):
            raise ValueError(
                f"sharding is {sharding!r}, but the launcher or `deepspeed` requests {name}, which is `sharding: "
                f"{requested}`: remove one of the two (recipes/accelerate_configs/ddp.yaml requests no sharding)."
            )
        settings |= request
    return settings, f"sharding: {made[0][0]}, as requested, is sharding: {settings['sharding']} here" if made else ""


def requests(deepspeed: str | dict[str, Any] | None) -> list[Request]:
    """Return the sharding requests of the launcher and of ``deepspeed``.

    Move the launcher's request from accelerate's environment variables to the variable `KEPT`."""
    if _is_on(MEGATRON):
        raise ValueError(
            f"{MEGATRON} is set, but Megatron-LM isn't supported: launch with `torchrun`, and set `sharding`."
        )
    if _is_on(FSDP) and _is_on(DEEPSPEED):
        raise ValueError(f"{FSDP} and {DEEPSPEED} are both set, but a policy is sharded in one way: unset one.")
    if _is_on(FSDP) or _is_on(DEEPSPEED):
        os.environ[KEPT] = json.dumps(_launched())
        os.environ[FSDP] = os.environ[DEEPSPEED] = "false"
    made = [json.loads(text)] if (text := os.environ.get(KEPT)) else []
    made += [from_deepspeed(deepspeed)] if deepspeed else []
    return [(name, request) for name, request in made if request["sharding"] != "none"]


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on")


def _launched() -> Request:
    if _is_on(FSDP):
        if (version := os.environ.get("FSDP_VERSION") or "1") != "2":
            raise ValueError(
                f"FSDP_VERSION is {version}, but only FSDP2 is supported: set fsdp_version: 2 in accelerate's file."
            )
        names = ("FSDP_RESHARD_AFTER_FORWARD", "FSDP_OFFLOAD_PARAMS")
        return "FSDP2", {"sharding": "fsdp"} | {name.lower(): _is_on(name) for name in names if os.environ.get(name)}
    prefix = "ACCELERATE_DEEPSPEED_"
    if (path := os.environ.get(f"{prefix}CONFIG_FILE", "none")).lower() not in ("", "none"):
        return from_deepspeed(path)
    zero: dict[str, Any] = {"stage": os.environ.get(f"{prefix}ZERO_STAGE") or 2}
    for part in ("optimizer", "param"):
        if device := os.environ.get(f"{prefix}OFFLOAD_{part.upper()}_DEVICE"):
            zero[f"offload_{part}"] = {"device": device}
    return from_deepspeed({"zero_optimization": zero})


def from_deepspeed(source: str | dict[str, Any]) -> Request:
    config, origin, named = source, "deepspeed", f"The DeepSpeed configuration {source!r}"
    if not isinstance(config, dict):
        origin = str(source)
        try:
            config = json.loads(Path(origin).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{named} can't be read ({error}): give a JSON file.") from None
        if not isinstance(config, dict):
            raise ValueError(f"{named} isn't a mapping: give one with zero_optimization.")
    for section, key in OWN_KEYS.items():
        if config.get(section):
            raise ValueError(
                f"{origin} has a section {section!r}, but only the setting {key} has an effect: remove the section, "
                f"and set {key}."
            )
    if (config.get("fp16") or {}).get("enabled") in (True, "true"):
        raise ValueError(f"{origin} enables fp16, but policies train in bfloat16 or float32: remove its section fp16.")
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if str(stage) not in ("0", "1", "2", "3"):
        raise ValueError(f"{origin} has the ZeRO stage {stage!r}: set zero_optimization.stage to 0, 1, 2 or 3.")
    offload = {part: str((zero.get(f"offload_{part}") or {}).get("device", "none")) for part in ("optimizer", "param")}
    for part, device in offload.items():
        if device not in ("none", "cpu"):
            raise ValueError(
                f"{origin} has offload_{part} on {device!r}, but only host memory is supported: set device "
                "to cpu or none."
            )
    sharding = STAGES[int(stage)]
    if offload["param"] == "cpu" and sharding != "fsdp":
        raise ValueError(f"{origin} has offload_param, but ZeRO stage {stage}: set stage: 3, or remove offload_param.")
    settings: dict[str, Any] = {"sharding": sharding}
    if sharding == "fsdp":
        settings["fsdp_offload_params"] = offload["param"] == "cpu"
    if offload["optimizer"] == "cpu":
        settings["offload_optimizer"] = True
    return f"DeepSpeed's ZeRO-{stage}", settings
