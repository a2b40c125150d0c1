"""Quantised bases where a model is checked and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from ...config import GRPOConfig
from ...policy.packed_weights import packed_weights
from ...policy.supported import ModelFeature, Wanted
from .checkpoints import Quantization, asked_for, check_fits, check_quantized, load_arguments, saved_in
from .layers import settle

if TYPE_CHECKING:
    from ...policy.loading import Policy


class Quantized(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        check_quantized(wanted.model_config, wanted.config, wanted.name, wanted.has_adapter)

    def load_arguments(self, saved_config: Any, config: GRPOConfig, name: str) -> dict[str, Any]:
        asked, packed = asked_for(config, name), saved_in(saved_config) is not None
        return load_arguments(None if packed else asked, config.device) if packed or asked is not None else {}

    def on_load(self, model: Any, path: str, config: GRPOConfig) -> None:
        """Record how the model is quantised, and make it multiply with its dequantised weights (`settle`)."""
        if not packed_weights(model):
            return
        settle(model)
        given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
        trust = given.get("trust_remote_code", config.trust_remote_code)
        on_disk = AutoConfig.from_pretrained(path, revision=given.get("revision"), trust_remote_code=trust)
        in_checkpoint = saved_in(on_disk) is not None
        model.quantization = Quantization(saved_in(model.config) or {}, in_checkpoint)

    def check_adapter(self, policy: Policy, folder: str) -> None:
        check_fits(policy.quantization, folder)

    def notes(self, policy: Policy, config: GRPOConfig) -> Iterator[str]:
        if policy.quantization is not None:
            packed = packed_weights(policy.model).values()
            size = sum(weight.nbytes for weight in packed) / 2**20
            yield f"base: {len(packed)} matrices quantised to {policy.quantization.name}, {size:,.1f} MiB"
