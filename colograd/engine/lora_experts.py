"""Whether vLLM can have slots for an adapter in a mixture of experts, whose weights stay as the checkpoint has them."""

from __future__ import annotations


def why_no_slots(on_cpu: bool) -> str:
    """Why a mixture's engine gets merged weights instead of an adapter on its attention; empty: it can have slots."""
    if on_cpu:
        return "on a CPU vLLM has no experts beside a LoRA"
    try:
        from vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe import TrtLlmBf16LoRAExperts as Kernel
    except ImportError:  # of an older vLLM, whose experts beside a LoRA are always Triton's
        return ""
    if not Kernel._supports_current_device():
        return ""
    # vLLM takes it for every engine with slots, whichever `moe_backend` it is given.
    return f"beside a LoRA vLLM permutes the experts' weights on this GPU ({Kernel.__name__})"
