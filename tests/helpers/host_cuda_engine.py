"""vLLM's CPU build with tensors on the device of `host_cuda`: the GPU's model runner with the CPU's attention.

The runner is V1's; with VLLM_USE_V2_MODEL_RUNNER=1 (see `model_runner_v2`) it is V2's, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import host_cuda


def prepare() -> None:
    """Change vLLM's CPU platform, before the process builds its first engine."""
    record = host_cuda.install()
    import torch

    sys.modules["vllm.v1.worker.cpu.shm"] = types.ModuleType("shm")  # would replace streams, events and pinned memory
    from vllm.platforms import cpu

    cpu.CpuPlatform.device_type = "cuda"
    cpu.CpuPlatform.dispatch_key = "CUDA"  # vLLM's operators in Python, which read their layers' weights
    cpu.CpuPlatform.is_pin_memory_available = classmethod(lambda cls: True)
    check_config = cpu.CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        from vllm.config import CompilationMode

        config.compilation_config.mode = CompilationMode.NONE
        config.device_config.device_type = "cpu"
        check_config(cls, config)
        config.device_config.device_type = "cuda"

    cpu.CpuPlatform.check_and_update_config = classmethod(check)
    _keep_weights(record)
    from vllm.v1.worker import cpu_worker, gpu_model_runner
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))

    class Runner(CPUModelRunner):
        def __init__(self, config: Any, _: Any) -> None:
            gpu_model_runner.GPUModelRunner.__init__(self, config, device)
            self.use_cuda_graph = self.cascade_attn_enabled = False

        _to_list = gpu_model_runner.GPUModelRunner._to_list
        _sync_device = gpu_model_runner.GPUModelRunner._sync_device

    cpu_worker.CPUModelRunner = Runner
    _sleep_by_storage(cpu.CpuPlatform, cpu_worker.CPUWorker)
    from vllm.utils import torch_utils
    from vllm.v1.worker.cpu import model_runner as second_version
    from vllm.v1.worker.gpu import buffer_utils

    for module in (torch_utils, buffer_utils):
        module.get_accelerator_view_from_cpu_tensor = torch.ops.host_cuda.device_view_of_host

    class SecondRunner(second_version.CPUModelRunner):
        def __init__(self, config: Any, _: Any) -> None:
            super().__init__(config, device)

    second_version.CPUModelRunner = SecondRunner
    if os.environ.get("TRITON_INTERPRET") == "1":  # it copies a kernel's arguments to the host, and all of them back
        from triton.runtime import interpreter

        interpreter.GridExecutor.__call__ = record.as_kernel(interpreter.GridExecutor.__call__, "triton")


def _sleep_by_storage(platform: Any, worker: Any) -> None:
    """Let vLLM release its KV cache and map it again, as its allocator for CUDA does."""
    sizes: dict[Any, int] = {}  # bytes of each storage that was released

    def discard(self: Any, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache",), tags
        for cache in self.model_runner.kv_caches:
            storage = cache.untyped_storage()
            sizes.setdefault(storage._cdata, storage.nbytes())  # layers may share one
            storage.resize_(0)

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        for cache in self.model_runner.kv_caches:
            storage = cache.untyped_storage()
            if size := sizes.pop(storage._cdata, 0):
                storage.resize_(size)
                storage.fill_(0)  # the CPU's attention multiplies unwritten places by 0

    platform.is_sleep_mode_available = lambda self: True
    worker.discard, worker.wake_up, worker.sleep = discard, wake_up, lambda self, level=1: None


def _keep_weights(record: host_cuda.Record) -> None:
    """Leave linear layers and experts as they were loaded, as on a GPU."""
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from colograd.engine.building import mend_cpu_layers
    from colograd.extensions.experts.engine.kernels import apply_experts

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def keep_experts(self: Any, layer: Any) -> None:
        self.apply = record.as_kernel(functools.partial(apply_experts, self), "experts")

    unquantized.map_unquantized_backend = lambda name: unquantized.UnquantizedMoeBackend.CPU
    mend_cpu_layers()
    utils.dispatch_cpu_unquantized_gemm = keep
    CPUUnquantizedExperts.process_weights_after_loading = keep_experts
