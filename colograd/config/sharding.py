"""Sharding, as requested by the configuration, accelerate's FSDP2 files and DeepSpeed's configurations.

Neither accelerate's wrapping nor DeepSpeed runs: a stage of ZeRO is a sharding strategy, which keeps the policy's
weights where the engine reads them.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..runtime import process
from .knob import knob

FSDP, DEEPSPEED, MEGATRON = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"
# The variable that hides the launcher's request from accelerate and transformers, which would wrap the policy
# themselves and load it on one rank only.
KEPT = "COLOGRAD_LAUNCHED"
STAGES = ("none", "optimizer", "gradients", "fsdp")  # the index is the stage of ZeRO
# A policy that is cut as the engine's ranks cut it. Ranks with the same part share out nothing, ZeRO-1's or ZeRO-2's
# part.
TENSOR = ("tensor", "tensor+optimizer", "tensor+gradients")
# Sections of a DeepSpeed configuration, and Colograd's keys for the same setting.
OWN_KEYS = {"optimizer": "optim", "scheduler": "lr_scheduler_type"}


@dataclass(frozen=True, slots=True)
class Launched:
    """The sharding that a launcher or a DeepSpeed configuration requests."""

    sharding: str
    name: str  # the method's name, such as FSDP2
    reshard_after_forward: bool | None = None  # None: not set
    offload_params: bool | None = None
    offload_optimizer: bool | None = None

    def describe(self) -> str:
        """Format a line for the start of a run."""
        return f"sharding: {self.name}, as it was asked for, is sharding: {self.sharding} here"


def take_launcher() -> None:
    """Move the launcher's request from its variables to `KEPT`. Called first.

    Raises:
        ValueError: the request has no counterpart here.
    """
    if _is_on(MEGATRON):
        raise ValueError(
            f"{MEGATRON} is set, but Megatron-LM isn't available: launch with `--config_file "
            "recipes/accelerate_configs/ddp.yaml` or `torchrun`, and set sharding."
        )
    requests = [read() for variable, read in ((FSDP, _fsdp), (DEEPSPEED, _deepspeed)) if _is_on(variable)]
    if len(requests) > 1:
        raise ValueError(f"{FSDP} and {DEEPSPEED} are both set, but a policy is sharded in one way: unset one of them.")
    for request in requests:
        os.environ[KEPT] = json.dumps(asdict(request))
        os.environ[FSDP] = os.environ[DEEPSPEED] = "false"


def launched() -> Launched | None:
    """Return the launcher's request, if there is one."""
    text = os.environ.get(KEPT)
    return Launched(**json.loads(text)) if text else None


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on")


def _fsdp() -> Launched:
    version = os.environ.get("FSDP_VERSION") or "1"
    if version != "2":
        raise ValueError(
            f"FSDP_VERSION is {version}, but only FSDP2 is available: set fsdp_version: 2 in accelerate's "
            "configuration, as recipes/accelerate_configs/fsdp2.yaml has it."
        )

    def flag(variable: str) -> bool | None:
        return _is_on(variable) if os.environ.get(variable) else None

    return Launched("fsdp", "FSDP2", flag("FSDP_RESHARD_AFTER_FORWARD"), flag("FSDP_OFFLOAD_PARAMS"))


def _deepspeed() -> Launched:
    prefix = "ACCELERATE_DEEPSPEED_"
    if (path := os.environ.get(f"{prefix}CONFIG_FILE", "none")).lower() not in ("", "none"):
        return from_deepspeed(path)
    zero: dict[str, Any] = {"stage": os.environ.get(f"{prefix}ZERO_STAGE") or 2}
    for part in ("optimizer", "param"):
        if device := os.environ.get(f"{prefix}OFFLOAD_{part.upper()}_DEVICE"):
            zero[f"offload_{part}"] = {"device": device}
    return from_deepspeed({"zero_optimization": zero})


def from_deepspeed(source: str | dict[str, Any]) -> Launched:
    """Convert a DeepSpeed configuration, a file or a mapping.

    Raises:
        ValueError: it can't be read, or has settings that belong to other keys or aren't supported.
    """
    config, origin = (source, "deepspeed") if isinstance(source, dict) else (_read(source), source)
    for section, key in OWN_KEYS.items():
        if config.get(section):
            raise ValueError(
                f"{origin} has a section {section!r}, but it is {key} that says which is used: remove the section and "
                f"set {key}."
            )
    if (config.get("fp16") or {}).get("enabled") in (True, "true"):
        raise ValueError(f"{origin} enables fp16, but policies train in bfloat16 or float32: remove the section.")
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if str(stage) not in ("0", "1", "2", "3"):
        raise ValueError(f"{origin} has the ZeRO stage {stage!r}, but it must be 0, 1, 2 or 3: change it.")
    offload = {part: str((zero.get(f"offload_{part}") or {}).get("device", "none")) for part in ("optimizer", "param")}
    for part, device in offload.items():
        if device not in ("none", "cpu"):
            raise ValueError(
                f"{origin} has offload_{part} on {device!r}, but only host memory is available: set its device to cpu "
                "or none."
            )
    sharding = STAGES[int(stage)]
    if offload["param"] == "cpu" and sharding != "fsdp":
        raise ValueError(f"{origin} has offload_param with ZeRO stage {stage}, but it goes with stage 3: remove it.")
    return Launched(
        sharding,
        f"DeepSpeed's ZeRO-{stage}",
        offload_params=offload["param"] == "cpu" if sharding == "fsdp" else None,
        offload_optimizer=offload["optimizer"] == "cpu" or None,
    )


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The DeepSpeed configuration {path!r} can't be read ({error}): give a JSON file.") from None
    if not isinstance(config, dict):
        raise ValueError(f"The DeepSpeed configuration {path!r} is no mapping: give one with zero_optimization.")
    return config


@dataclass
class ShardingKnobs(TrainingArguments):
    """Sharding."""

    sharding: str = knob(
        "none",
        "What ranks share out: `none` (each rank holds all), `optimizer` (each holds a part of the optimizer's state: "
        "ZeRO-1), `gradients` (and of the gradients, each exchanged as soon as the backward has made it: ZeRO-2), "
        "`tensor` (with `vllm_tensor_parallel_size`: each rank has the part of the policy that its engine's rank has, "
        "in the same memory, and the ranks of an engine train each row together; `tensor+optimizer` and "
        "`tensor+gradients` share out the rest among engines) or `fsdp` (and of the weights, which are gathered block "
        "by block: FSDP2); `auto`: the first of these that leaves room for the planned KV cache and micro-batch. "
        "accelerate's files for FSDP2 and DeepSpeed, and `deepspeed`, mean the way that does the same. See "
        "docs/scaling.md.",
        one_of=("none", "optimizer", "gradients", *TENSOR, "fsdp", "auto"),
        note=" in this version",
        extension=dict.fromkeys(TENSOR, "tensor_parallel"),
    )
    fsdp_reshard_after_forward: bool = knob(
        True,
        "With `sharding: fsdp`, forget a block's weights after its forward and gather them again for its backward: "
        "without, ranks exchange less and hold the whole policy meanwhile.",
    )
    fsdp_offload_params: bool = knob(
        False,
        "With `sharding: fsdp` on a GPU, keep this rank's part of weights, gradients and optimizer state in host "
        "memory, where the optimizer then runs too. Does nothing on a CPU.",
    )

    offload_gradients: bool = knob(
        False,
        "On a GPU, add each gradient to float32 sums in page-locked host memory as soon as a backward has made it, and "
        "free it: the GPU never holds all of them. The optimizer (`adamw_split`) takes them from there, to the same "
        "bits. Does nothing on a CPU.",
        extension="offload",
    )

    sequence_parallel_size: int = knob(
        1,
        "Ranks that share out the tokens of each row, neighbours on one machine: each computes its part of a "
        "micro-batch's tokens, and in attention (as in the layers with a state of LFM2, Qwen3.5 and Granite 4) all "
        "tokens for a part of the heads. A rank's activations are then of "
        "that part, for sequences that no GPU has room for. Each samples for itself as ever. With `sharding: none`, "
        "`optimizer`, `gradients` or the three of `tensor`, whose ranks of an engine have a part of the policy each. "
        "See docs/scaling.md.",
        extension="sequence_parallel",
    )

    def _take_sharding(self) -> None:
        """Apply the request of a launcher's file or ``deepspeed``, before transformers acts on it. Idempotent.

        Raises:
            ValueError: the request contradicts ``sharding``, or the other request.
        """
        take_launcher()
        sources = (launched(), from_deepspeed(self.deepspeed) if self.deepspeed else None)
        requests = [request for request in sources if request is not None and request.sharding != "none"]
        for request in requests:
            if self.sharding not in ("none", "auto", request.sharding):
                raise ValueError(
                    f"sharding is {self.sharding!r}, but {request.name}, which the launcher or deepspeed asks for, is "
                    f"{request.sharding!r}: remove one of them (recipes/accelerate_configs/ddp.yaml asks for nothing)."
                )
            self.sharding = request.sharding
            for name in ("fsdp_reshard_after_forward", "fsdp_offload_params", "offload_optimizer"):
                if (value := getattr(request, name.removeprefix("fsdp_"))) is not None:
                    setattr(self, name, value)
        self.deepspeed: Any = None  # DeepSpeed itself doesn't run
        self.sharding_note = requests[0].describe() if requests else ""

    def _check_sequences(self) -> None:
        """Check the settings that sharing out a row's tokens requires."""
        size = self.sequence_parallel_size
        if size == 1:
            return
        parts = self.vllm_tensor_parallel_size if self.tensor_parallel else 1
        per_node = process.local_world_size()
        for ranks, where in ((self.world_size, "the number of ranks"), (per_node, "the ranks of a machine")):
            if size < 1 or ranks % (size * parts):
                of_parts = f" times vllm_tensor_parallel_size ({parts})" if parts > 1 else ""
                both = math.gcd(self.world_size, per_node)
                able = [str(n) for n in range(1, both + 1) if not both % (n * parts)]
                raise ValueError(
                    f"sequence_parallel_size is {size}, but it{of_parts} must divide {where}, {ranks}: choose one of "
                    f"{', '.join(able)}."
                )

    def resolve_sharding(self, strategy: str) -> None:
        """Resolve ``auto``, once the policy and the prompts are known."""
        self.sharding: str = strategy

    @property
    def offloads_gradients(self) -> bool:
        """Whether the sums of gradients are in host memory."""
        return self.offload_gradients and self.device.type != "cpu"

    @property
    def cuts_weights(self) -> bool:
        """Whether each rank holds some rows of the policy's weights; each pass gathers them."""
        return self.sharding == "fsdp" and self.world_size > 1

    @property
    def tensor_parallel(self) -> bool:
        """Whether the policy is cut as the engine's ranks cut it; these ranks train each row together."""
        return self.sharding in TENSOR
