"""Check whether vLLM can have LoRA slots for a mixture and keep the experts' weights as in the checkpoint."""

from __future__ import annotations


def why_no_slots(on_cpu: bool) -> str:
    """Return why a mixture's engine gets merged weights, not an adapter on its attention; empty: it can have slots."""
    if on_cpu:
        return "on a CPU vLLM has no experts beside a LoRA"
    try:
        from vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe import TrtLlmBf16LoRAExperts as Kernel
    except ImportError:  # an older vLLM: with LoRA it always uses Triton's experts
        return ""
    if not Kernel._supports_current_device():
        return ""
    # vLLM uses this kernel for every engine with slots, whatever `moe_backend` is.
    return f"beside a LoRA vLLM permutes the experts' weights on this GPU ({Kernel.__name__})"
