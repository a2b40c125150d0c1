"""`LoadedVLLM`: vLLM in this process, built with the features of a run; its weights' step, and its memory.

Every rank builds its own engine, or its part of an engine shared with neighbouring ranks, through vLLM's external
launcher.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..parallel import watchdog
from ..parallel.lockstep import Lockstep
from .arguments import blank_kwargs, computes_float32_heads, engine_kwargs, lora_kwargs
from .building import buffers_stay, build_conditions, check_vllm, explained_errors, untested_vllm
from .closing import closed_if_it_fails, closes_with
from .feature import EngineFeature, EngineUse, engine_features
from .model_classes import classes_apart, computed_per_layer_inputs
from .protocol import ServedWeights
from .tensors import VLLMTensors


class LoadedVLLM:
    """vLLM in this process with its weights and memory; `VLLMEngine` samples with it.

    Args:
        model_path: folder or Hub id of the model that vLLM loads.
        dtype: the policy's dtype. The engine uses it too unless ``vllm_engine_kwargs`` sets another.
        context: maximum tokens of one sequence, prompt and completion together; None: the model's maximum.
        kv_bytes: bytes of the KV cache; 0: on a GPU the memory that ``vllm_gpu_memory_utilization`` leaves for it.
        use: further facts of the run.
        features: optional parts; None: the extensions' features that the run uses.
    """

    llm: Any  # vllm.LLM
    dtype: torch.dtype  # dtype of weights and activations

    def __init__(
        self, model_path: str, config: GRPOConfig, dtype: torch.dtype, context: int | None, kv_bytes: int,
        use: EngineUse = EngineUse(), features: Sequence[EngineFeature] | None = None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        check_vllm()
        self.layout, self.end_tokens = config.layout, use.end_tokens
        self.sleeps = config.vllm_enable_sleep_mode and not config.on_cpu  # whether `sleep` frees the KV cache
        self.asleep = False
        self.version: int | None = None  # step of the weights; only `stamp` and `invalidate` write it
        self.after_step: list[Callable[[], None]] = []  # called after each step
        self._adapter: Any = None  # LoRARequest of every request
        self._requests = 0  # number of requests so far
        self._open: dict[str, ModelInput] = {}  # prompts of the requests in flight, by name
        self._written: list[tuple[str, Sequence[int]]] = []
        self._unknown_tokens = 0  # number of sampled unknown tokens since `take_counts`
        self.served = ServedWeights()
        self._features = engine_features(config, use) if features is None else tuple(features)
        self.blank = use.blank or any(feature.blank for feature in self._features)
        ranks = self.layout.ranks_per_engine
        self._lockstep = Lockstep(self.layout, config.ddp_timeout) if ranks > 1 else None
        kwargs = engine_kwargs(model_path, config, dtype, context, kv_bytes, use.sequences, use.trained)
        for feature in self._features:
            kwargs |= feature.arguments(kwargs)
        kwargs |= lora_kwargs(model_path, config, use.adapter)
        if self.blank:
            kwargs |= blank_kwargs(kwargs)
        watchdog.progress("the start of vLLM")
        with contextlib.ExitStack() as while_built:
            while_built.enter_context(closed_if_it_fails())
            while_built.enter_context(build_conditions(config.device, self.sleeps, use.adapter is not None, ranks))
            from vllm import LLM

            if self.blank:
                while_built.enter_context(buffers_stay())
            for feature in self._features:
                while_built.enter_context(feature.while_built())
            while_built.enter_context(classes_apart(lambda: self.model))
            while_built.enter_context(computed_per_layer_inputs())
            with explained_errors(model_path):
                self.llm = LLM(**kwargs)
            self._close = closes_with(self, self.llm)
            model_config, cache = self.vllm_config.model_config, self.vllm_config.cache_config
            self.vocab_size = int(model_config.hf_text_config.vocab_size)  # of the checkpoint
            for feature in self._features:
                feature.built(self)
        self.dtype = model_config.dtype
        head_dtype: torch.dtype = getattr(model_config, "head_dtype", self.dtype)
        self.head_dtype = head_dtype if computes_float32_heads() else self.dtype
        self.tokens = min(use.tokens or self.vocab_size, self.vocab_size)  # in the tokenizer
        self.context = int(model_config.max_model_len)  # maximum tokens of a sequence, with its prompt
        self.kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)  # capacity of the cache in tokens
        self.max_sequences = int(self.vllm_config.scheduler_config.max_num_seqs)  # decoded at once; others wait
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())  # each parameter counted once
        self.build_seconds = time.perf_counter() - started

    def check_processor(self, processor: Any) -> None:
        for feature in self._features:
            feature.check_processor(processor)

    @property
    def core(self) -> Any:
        """vLLM's LLMEngine."""
        return self.llm.llm_engine

    @property
    def model(self) -> torch.nn.Module:
        return self.core.model_executor.driver_worker.worker.model_runner.model

    @property
    def vllm_config(self) -> Any:
        return self.core.vllm_config

    def describe(self) -> str:
        from vllm import __version__ as vllm_version

        config = self.vllm_config.model_config
        mode = "eager" if config.enforce_eager else "compiled"
        ranks, engines = self.layout.ranks_per_engine, self.layout.data_size
        where = "in this process" if ranks == 1 else f"on {ranks} ranks ({engines} such engine(s))"
        return (
            f"engine: vLLM {vllm_version} {where}, {config.model}, {str(self.dtype).removeprefix('torch.')}, {mode}, "
            f"context {self.context:,} tokens, KV cache {self.kv_tokens:,} tokens, weights "
            f"{self.weight_bytes / 2**30:.2f} GiB, ready in {self.build_seconds:.0f} s"
        )

    def warnings(self, config: GRPOConfig) -> Iterator[str]:
        yield from untested_vllm()
        if config.cast_lm_head_to_fp32 and self.head_dtype != torch.float32:
            yield "engine: this vLLM rounds logits to the model's dtype; cast_lm_head_to_fp32 is the policy's"

    # -- weights

    def invalidate(self) -> None:
        self.version = None

    def stamp(self, version: int) -> None:
        self.invalidate()
        if self.core.has_unfinished_requests():
            raise RuntimeError("Weights were published while completions were being decoded: drain the engine first.")
        self._forget_prefixes(version)
        self.version = version

    def _forget_prefixes(self, version: int | None) -> None:
        inner = self.core.engine_core.engine_core
        # After the last output, the worker still has to be notified of finished requests. Asynchronous scheduling may
        # have a batch in flight, and vLLM's record of routed experts wouldn't survive a reset during that batch.
        while inner.scheduler.has_requests() or getattr(inner, "batch_queue", None):
            self.core.step()
        if not self.core.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM could not reset its prefix cache at step {version}: keys and values of old weights would be "
                "reused. Set vllm_engine_kwargs: {enable_prefix_caching: false}."
            )
        for feature in self._features:
            feature.forget()

    @property
    def tensors(self) -> VLLMTensors:
        return VLLMTensors(self.model)

    def load_adapter(self, folder: str) -> None:
        """Let vLLM load an adapter in peft's format into its first slot. Every later request uses it."""
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest("policy", 1, folder)
        if not self.core.add_lora(self._adapter) or not self.adapter_is_active:
            raise RuntimeError(f"vLLM loaded the adapter of {folder!r}, but didn't activate it in its first slot.")

    @property
    def adapter_is_active(self) -> bool:
        ids: Any = self.model.lora_manager.lora_index_to_id
        return self._adapter is not None and list(ids[:1]) == [self._adapter.lora_int_id]

    # -- memory

    def sleep(self) -> None:
        if not self.sleeps or self.asleep:
            return
        self._forget_prefixes(self.version)  # older versions of vLLM don't do it themselves
        if hasattr(self.core, "release_kv_cache_memory"):  # older ones sleep at level 1
            # The release needs a paused scheduler. Aborting requests would reset vLLM's record of routed experts.
            self.core.sleep(level=0, mode="keep")
            self.core.release_kv_cache_memory()
        else:
            self.core.sleep(level=1)  # frees only the KV cache, see `weights_stay`
        self.asleep = True

    def wake(self) -> None:
        if not self.asleep:
            return
        torch.cuda.empty_cache()  # vLLM maps the cache outside torch's allocator, so cached memory must be free
        self.core.wake_up(tags=["kv_cache"] if hasattr(self.core, "release_kv_cache_memory") else None)
        if self.core.is_sleeping():
            raise RuntimeError("vLLM stayed asleep after wake_up: set vllm_enable_sleep_mode: false.")
        self.asleep = False

    def close(self) -> None:
        self._close()
        for feature in self._features:
            feature.close()
        self._features, self.served = (), ServedWeights()
        self.llm = None
