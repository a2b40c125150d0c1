"""`LoadedVLLM`: builds vLLM in the trainer's process, stamps its weights with an optimizer step, frees its KV cache."""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..parallel import faults, watchdog
from ..parallel.shards import Lockstep
from . import building
from .arguments import blank_kwargs, computes_float32_heads, engine_kwargs, lora_kwargs
from .closing import closed_if_it_fails, closes_with
from .protocol import EngineFeature, EngineUse, Load, engine_features
from .tensors import VLLMTensors


class LoadedVLLM:
    """The part of `VLLMEngine` that builds vLLM, and manages its weights and memory.

    Args:
        model_path: folder or Hub id of the model that vLLM loads.
        dtype: the policy's dtype. ``vllm_engine_kwargs`` may set another dtype for the engine.
        context: maximum tokens of one sequence, prompt and completion together. None means the model's maximum.
        kv_bytes: bytes of the KV cache. 0 means that vLLM chooses, on a GPU by ``vllm_gpu_memory_utilization``.
        use: facts about the run that ``config`` doesn't hold.
        features: extensions' changes of the engine. None means the features that the run's configuration needs.
    """

    llm: Any  # The vllm.LLM object.
    dtype: torch.dtype

    def __init__(
        self, model_path: str, config: GRPOConfig, dtype: torch.dtype, context: int | None, kv_bytes: int,
        use: EngineUse = EngineUse(), features: Sequence[EngineFeature] | None = None,
    ) -> None:  # fmt: skip
        self.started = time.perf_counter()
        building.check_vllm()
        self.layout, self.end_tokens = config.layout, use.end_tokens
        self.sleeps = config.vllm_enable_sleep_mode and not config.on_cpu
        self.asleep = False
        self.version: int | None = None
        self.after_step: list[Callable[[], None]] = []
        self._adapter: Any = None  # vLLM's LoRARequest, which every request gets
        self._request_count = 0
        self._open: dict[str, ModelInput] = {}  # Prompts of unfinished requests by request name.
        self._unknown_tokens = 0  # number of sampled ids without a token in the tokenizer, since `take_counts`
        self.served: Any = None
        self._features = engine_features(config, use) if features is None else tuple(features)
        self.blank = use.blank or any(feature.blank for feature in self._features)
        self._lockstep = Lockstep(self.layout) if self.layout.ranks_per_engine > 1 else None
        kwargs = engine_kwargs(model_path, config, dtype, context, kv_bytes, use)
        for feature in self._features:
            kwargs |= feature.arguments(kwargs)
        kwargs |= lora_kwargs(model_path, config, use.adapter)
        self._build(kwargs | (blank_kwargs(kwargs) if self.blank else {}), config, use)

    def _build(self, kwargs: dict[str, Any], config: GRPOConfig, use: EngineUse) -> None:
        watchdog.progress("the start of vLLM")
        ranks, adapted = self.layout.ranks_per_engine, use.adapter is not None
        with contextlib.ExitStack() as while_built:
            enter = while_built.enter_context
            enter(closed_if_it_fails())
            enter(building.build_conditions(config.device, self.sleeps, adapted, ranks, self.blank))
            from vllm import LLM

            for feature in self._features:
                enter(feature.while_built())
            enter(building.classes_apart(lambda: self.model))
            with building.explained_errors(kwargs["model"]):
                self.llm = LLM(**kwargs)
            self._close = closes_with(self, self.llm)
            model_config, cache = self.vllm_config.model_config, self.vllm_config.cache_config
            self.vocab_size = int(model_config.hf_text_config.vocab_size)
            for feature in self._features:
                feature.built(self)
        self.dtype = model_config.dtype
        self.head_dtype = model_config.head_dtype if computes_float32_heads() else self.dtype
        self.tokens = min(use.tokens or self.vocab_size, self.vocab_size)  # first token id that the tokenizer lacks
        self.context = int(model_config.max_model_len)
        self.kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        self.max_sequences = int(self.vllm_config.scheduler_config.max_num_seqs)
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        scheduler, preempt = self.scheduler, self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            scheduler.preemptions += 1  # A reference to `self` would keep a dropped engine alive.
            return preempt(*args, **kwargs)

        scheduler.preemptions, scheduler._preempt_request = 0, counted
        self.build_seconds = time.perf_counter() - self.started

    @property
    def core(self) -> Any:
        return self.llm.llm_engine

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> torch.nn.Module:
        return self.runner.model

    @property
    def scheduler(self) -> Any:
        return self.core.engine_core.engine_core.scheduler

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
        yield from building.untested_vllm()
        if config.cast_lm_head_to_fp32 and self.head_dtype != torch.float32:
            yield "engine: this vLLM rounds logits to the model's dtype; cast_lm_head_to_fp32 changes only the policy"

    def invalidate(self) -> None:
        self.version = None

    def stamp(self, version: int) -> None:
        self.invalidate()
        if self.core.has_unfinished_requests():
            raise RuntimeError("Weights were published while requests were unfinished: finish or abort them first.")
        self._forget_prefixes(version)
        self.version = version

    def _forget_prefixes(self, version: int | None) -> None:
        inner = self.core.engine_core.engine_core
        # Only a further step informs vLLM's worker about finished requests. With asynchronous scheduling a batch may
        # still run, and resetting the prefix cache would destroy the batch's record of routed experts.
        while inner.scheduler.has_requests() or inner.batch_queue:
            self.core.step()
        if not self.core.reset_prefix_cache() and self.core.vllm_config.cache_config.enable_prefix_caching:
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
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest("policy", 1, folder)
        if not self.core.add_lora(self._adapter) or not self.adapter_is_active:
            raise RuntimeError(
                f"vLLM didn't activate the adapter of {folder!r} in its first LoRA slot: set `weights: copied`."
            )

    @property
    def adapter_is_active(self) -> bool:
        ids: Any = self.model.lora_manager.lora_index_to_id
        return self._adapter is not None and list(ids[:1]) == [self._adapter.lora_int_id]

    def load(self) -> Load:
        running, waiting = self.scheduler.get_request_counts()
        return Load(running, waiting, float(self.scheduler.kv_cache_manager.usage), self.scheduler.preemptions)

    def sleep(self) -> None:
        if not self.sleeps or self.asleep:
            return
        self._forget_prefixes(self.version)  # Some versions of vLLM don't clear the prefix cache before sleeping.
        if hasattr(self.core, "release_kv_cache_memory"):
            # Level 0 pauses the scheduler. Mode "keep" aborts no requests, because aborting would reset vLLM's record
            # of routed experts.
            self.core.sleep(level=0, mode="keep")
            self.core.release_kv_cache_memory()
        else:
            self.core.sleep(level=1)  # frees only the KV cache, because `weights_stay` keeps weights out of vLLM's pool
        self.asleep = True

    def wake(self) -> None:
        if not self.asleep:
            return
        torch.cuda.empty_cache()  # makes room for vLLM's KV cache outside torch's allocator
        self.core.wake_up(tags=["kv_cache"] if hasattr(self.core, "release_kv_cache_memory") else None)
        if self.core.is_sleeping():
            raise RuntimeError("vLLM's KV cache stayed asleep after wake_up: set vllm_enable_sleep_mode: false.")
        self.asleep = False

    def close(self) -> None:
        self._close()
        for feature in self._features:
            feature.close()
        self._features, self.served = (), None
        self.llm = None


@contextlib.contextmanager
def leading(core: Any, group: Lockstep) -> Iterator[None]:
    """Send the first rank's requests, aborts and steps of ``core`` (vLLM's LLMEngine) to the engine's other ranks. All
    schedulers must get the same calls between two steps, but the calls depend on clocks, rewards and the user's
    code, which may differ by rank."""
    calls: list[bytes] = []  # Pickled calls of ``core`` since the last step.

    def told(name: str, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        as_given = pickle.dumps((name, args, kwargs))  # Pickled first, because vLLM may modify arguments.
        result = own(*args, **kwargs)  # A call that fails on this rank isn't sent to the other ranks.
        calls.append(as_given)
        return result

    def step(own: Callable[[], Any]) -> Any:
        group.tell((calls, True))
        calls.clear()
        with faults.telling("a step of the engine"):
            return own()

    with (
        building.replaced(core, "add_request", functools.partial(told, "add_request", core.add_request)),
        building.replaced(core, "abort_request", functools.partial(told, "abort_request", core.abort_request)),
        building.replaced(core, "step", functools.partial(step, core.step)),
    ):
        try:
            yield
        finally:
            group.tell((calls, False))


def follow(core: Any, group: Lockstep) -> None:
    goes_on = True
    while goes_on:
        calls, goes_on = group.listen()
        with faults.telling("a step of the engine"):
            for name, args, kwargs in map(pickle.loads, calls):
                getattr(core, name)(*args, **kwargs)
            if goes_on:
                core.step()
