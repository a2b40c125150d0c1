"""Settings that can't be combined with `sharding: tensor`, where the policy has the engine's tensor-parallel layout."""

from __future__ import annotations

import functools

from ...config.conflicts import ANY, SET, Conflict, equal, other_than
from ...config.sharding import TENSOR

refused = functools.partial(Conflict, "sharding", equal(*TENSOR))
UNSUPPORTED = (
    "torch_compile", "use_liger_kernel", "sync_ref_model", "router_replay", "teacher_model_name_or_path",
    "offload_gradients",
)  # fmt: skip
CONFLICTS = (
    refused(
        "vllm_tensor_parallel_size", equal(1), "the policy is divided among the ranks of an engine",
        "set vllm_tensor_parallel_size to 2 or more, or sharding to none, optimizer or gradients",
    ),
    refused(
        "weights", other_than("auto", "shared", "adapter"),
        "a policy in the engine's layout shares the engine's weights", "set weights: auto",
    ),
    refused(
        "vllm_model_impl", equal("transformers"), "vLLM's transformers backend may divide layers otherwise",
        "set vllm_model_impl: auto",
    ),
    refused(
        "vllm_engine_kwargs.dtype", ANY, "the policy shares the engine's tensors, and has another dtype", "remove it",
        lambda settings: str(settings.vllm_engine_kwargs["dtype"]).removeprefix("torch.") != settings.policy_dtype,
    ),
    *(
        refused(name, SET, "this version doesn't support both", f"remove {name}, or set sharding: gradients")
        for name in UNSUPPORTED
    ),
)  # fmt: skip
