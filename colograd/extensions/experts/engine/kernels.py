"""Changes to vLLM while an engine of a mixture of experts is built.

On a CPU vLLM would repack the experts' weights, and weight syncs couldn't write them. Here the experts are plain matrix
products with the weights as loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import gelu, linear, silu

from ....config import GRPOConfig
from ....engine.building import patched
from ....engine.protocol import EngineFeature, EngineUse
from ....policy.loading import Policy
from ....reporting.console import Console
from ....runtime.sizes import num_experts

SLOPE, LIMIT = 1.702, 7.0  # Constants of gpt-oss's activation. Its input has gate and up values in turn.
ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": functools.partial(gelu, approximate="tanh"),
}  # fmt: skip


@torch.no_grad()
def apply_experts(
    kernel: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, *unused: Any, **options: Any,
) -> None:  # fmt: skip
    """Write the weighted sum of each token's experts into ``output``. Has the signature of vLLM's expert kernels.

    Args:
        output, hidden_states: outputs and inputs of T tokens, (T, H).
        w1: gate and up projection of each expert, (E, 2I, H).
        w2: output projection of each expert, (E, H, I).
        topk_weights, topk_ids: weights and indices of each token's K experts, (T, K).
    """
    count, (tokens, chosen) = len(w1), topk_ids.shape
    activate = functools.partial(_activated, str(activation.value))
    experts, order = topk_ids.flatten().sort(stable=True)
    inputs = hidden_states[order // chosen].split(torch.bincount(experts, minlength=count).tolist())
    of_experts = hidden_states.new_empty(tokens * chosen, w2.shape[1])

    biases1, biases2 = ([None] * count if of_all is None else of_all for of_all in (kernel.w1_bias, kernel.w2_bias))
    products = zip(inputs, w1, biases1, w2, biases2, strict=True)
    of_experts[order] = torch.cat([linear(activate(linear(x, u, b)), v, c) for x, u, b, v, c in products])
    shares = torch.ones_like(topk_weights) if options.get("apply_router_weight_on_input") else topk_weights
    output.copy_((of_experts.view(tokens, chosen, -1) * shares[..., None]).sum(1))


def _activated(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "swigluoai":
        gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(SLOPE * gate)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


class MixtureBuild(EngineFeature):
    def __init__(self, config: GRPOConfig) -> None:
        self.config = config

    @contextlib.contextmanager
    def while_built(self) -> Iterator[None]:
        from vllm.distributed import parallel_state as vllm_groups

        # vLLM creates its process groups once per process. After a dense model the experts' group is missing.
        if vllm_groups._WORLD is not None and vllm_groups._EP is None:
            world, ranks = vllm_groups._WORLD, torch.arange(torch.distributed.get_world_size())
            engines = ranks.view(-1, self.config.vllm_tensor_parallel_size).tolist()
            backend = torch.distributed.get_backend(world.device_group)
            make = vllm_groups.init_model_parallel_group
            vllm_groups._EP = make(engines, world.local_rank, backend, group_name="ep")
        with live_experts() if self.config.on_cpu else contextlib.nullcontext():
            yield


def mixture_build(config: GRPOConfig, use: EngineUse) -> MixtureBuild | None:
    model_config = use.model_config if use.policy is None else use.policy.model.config
    experts = None if model_config is None else num_experts(model_config)
    check_experts(experts or 0, config.on_cpu)
    return None if experts == 0 else MixtureBuild(config)


def check_experts(experts: int, on_cpu: bool) -> None:
    """Raise a RuntimeError on a CPU if `live_experts` can't replace the experts of the installed vLLM."""
    if not experts or not on_cpu:
        return
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as _  # noqa: F401
    except ImportError:
        from vllm import __version__ as found

        raise RuntimeError(
            f"The model is a mixture of experts, whose weights vLLM {found} repacks on a CPU, so that they can't be "
            "updated: install vLLM 0.31, or train the model on a GPU."
        ) from None


def live_experts() -> contextlib.AbstractContextManager[None]:
    def keep(theirs: Any, self: Any, layer: torch.nn.Module) -> None:
        self.apply = functools.partial(apply_experts, self)

    cpu_moe = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
    return patched(f"{cpu_moe}:CPUUnquantizedExperts.process_weights_after_loading", keep)


def merged_beside_experts(policy: Policy, args: GRPOConfig, samples: bool = True) -> Policy:
    """Return the policy, with `why_merged` set in its adapter if the engine can't use the adapter next to experts."""
    adapter = policy.adapter
    if not samples or adapter is None or adapter.why_merged or not num_experts(policy.model.config):
        return policy
    why = why_no_slots(args.on_cpu)
    if why and args.layout.is_main:
        Console(enabled=True, bars=False).warn(f"adapter: the engine gets merged copies of the adapted weights: {why}")
    return dataclasses.replace(policy, adapter=dataclasses.replace(adapter, why_merged=why))


def why_no_slots(on_cpu: bool) -> str:
    if on_cpu:
        return "on a CPU vLLM has no experts beside a LoRA"
    try:
        from vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe import TrtLlmBf16LoRAExperts as Kernel
    except ImportError:  # An older vLLM uses Triton's kernel for experts with LoRA, which permutes no weights.
        return ""
    if not Kernel._supports_current_device():
        return ""
    # vLLM uses this kernel for every engine with LoRA, whatever `moe_backend` is.
    return f"beside a LoRA vLLM permutes the experts' weights on this GPU ({Kernel.__name__})"
