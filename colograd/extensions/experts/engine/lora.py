"""Check whether vLLM can serve a mixture of experts with an adapter, without repacking the experts' weights."""

from __future__ import annotations

import dataclasses

from ....config import GRPOConfig
from ....policy.loading import Policy
from ....reporting.console import Console
from ....runtime.sizes import num_experts


def merged_beside_experts(policy: Policy, args: GRPOConfig, samples: bool = True) -> Policy:
    """Return the policy. If its model is a mixture that vLLM can't serve with an adapter, set the adapter's
    `why_merged`, so that the engine gets merged weights. ``samples``: whether the run has an engine."""
    adapter = policy.adapter
    if not samples or adapter is None or adapter.why_merged or not num_experts(policy.model.config):
        return policy
    why = why_no_slots(args.on_cpu)
    if why and args.layout.is_main:
        Console(enabled=True, bars=False).warn(
            f"adapter: the engine gets merged copies of the weights that it adapts, not its matrices: {why}"
        )
    return dataclasses.replace(policy, adapter=dataclasses.replace(adapter, why_merged=why))


def why_no_slots(on_cpu: bool) -> str:
    """Return why vLLM can't serve an adapter of a mixture, so that its engine gets merged weights. Empty: vLLM can."""
    if on_cpu:
        return "on a CPU vLLM has no experts beside a LoRA"
    try:
        from vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe import TrtLlmBf16LoRAExperts as Kernel
    except ImportError:  # An older vLLM always uses Triton's kernel for experts with LoRA.
        return ""
    if not Kernel._supports_current_device():
        return ""
    # vLLM uses this kernel for every engine with LoRA, whatever `moe_backend` is.
    return f"beside a LoRA vLLM permutes the experts' weights on this GPU ({Kernel.__name__})"
