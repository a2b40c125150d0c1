"""`VLLMEngine`: vLLM in this process as an `Engine`. It holds weights of one known step, samples, and sleeps.

Every rank builds its own engine, or its part of an engine shared with neighbouring ranks, through vLLM's external
launcher. All requests of a round enter the queue at once; `generate` yields each group when its last completion ends.
"""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..batch import Group, ModelInput, Prompt, with_shared_riders
from ..config import GRPOConfig
from ..parallel import faults, watchdog
from ..parallel.lockstep import Lockstep
from ..runtime import process
from .arguments import blank_kwargs, computes_float32_heads, engine_kwargs, lora_kwargs
from .building import (
    buffers_stay,
    build_conditions,
    check_vllm,
    explained_errors,
    nondeterminism_allowed,
    untested_vllm,
)
from .closing import closed_if_it_fails, closes_with
from .feature import EngineFeature, EngineUse, Features, engine_features
from .leading import follow, last_outputs, leading
from .model_classes import classes_apart, computed_per_layer_inputs
from .protocol import Sampled, ServedWeights, StaleWeights, T
from .sampling import UNKNOWN_TOKENS, Sampling, finish_reason_of, request_seed
from .tensors import VLLMTensors


class VLLMEngine:
    """vLLM in this process, as an `Engine`.

    Args:
        model_path: folder or Hub id of the model that vLLM loads.
        dtype: the policy's dtype. The engine uses it too unless ``vllm_engine_kwargs`` sets another.
        context: maximum tokens of one sequence, prompt and completion together; None: the model's maximum.
        kv_bytes: bytes of the KV cache; 0: on a GPU the memory that ``vllm_gpu_memory_utilization`` leaves for it.
        use: further facts of the run.
        features: optional parts; None: the extensions' features that the run uses.

    Raises:
        RuntimeError: vLLM is missing, has an unsupported version, or can't sleep although the configuration sets it.
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
        self._features = Features(engine_features(config, use) if features is None else features)
        self.blank = use.blank or any(feature.blank for feature in self._features.every)
        shared = self.layout.ranks_per_engine > 1
        self._lockstep = Lockstep(self.layout, config.ddp_timeout) if shared else None
        kwargs = engine_kwargs(model_path, config, dtype, context, kv_bytes, use.sequences, use.trained)
        self._build(kwargs, config, use)
        self._measure(use.tokens)
        self.build_seconds = time.perf_counter() - started

    def _build(self, kwargs: dict[str, Any], config: GRPOConfig, use: EngineUse) -> None:
        """Build vLLM with the features' changes."""
        model_path: str = kwargs["model"]
        for feature in self._features.every:
            kwargs |= feature.arguments(kwargs)
        kwargs |= lora_kwargs(model_path, config, use.adapter)
        if self.blank:
            kwargs |= blank_kwargs(kwargs)
        watchdog.progress("the start of vLLM")
        ranks = self.layout.ranks_per_engine
        with contextlib.ExitStack() as while_built:
            while_built.enter_context(closed_if_it_fails())
            while_built.enter_context(build_conditions(config.device, self.sleeps, use.adapter is not None, ranks))
            from vllm import LLM

            if self.blank:
                while_built.enter_context(buffers_stay())
            for feature in self._features.every:
                while_built.enter_context(feature.while_built())
            while_built.enter_context(classes_apart(lambda: self.model))
            while_built.enter_context(computed_per_layer_inputs())
            with explained_errors(model_path):
                self.llm = LLM(**kwargs)
            self._close = closes_with(self, self.llm)
            self.vocab_size = int(self.vllm_config.model_config.hf_text_config.vocab_size)  # of the checkpoint
            for feature in self._features.every:
                feature.built(self)

    def _measure(self, tokens: int) -> None:
        """Read vLLM's sizes. ``tokens`` is the number of tokens in the tokenizer; 0: unknown."""
        found, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        self.dtype = found.dtype
        asked: torch.dtype = getattr(found, "head_dtype", self.dtype)
        self.head_dtype = asked if computes_float32_heads() else self.dtype
        self.tokens = min(tokens or self.vocab_size, self.vocab_size)
        self.context = int(found.max_model_len)  # maximum tokens of a sequence, with its prompt
        self.kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)  # capacity of the cache in tokens
        self.max_sequences = int(self.vllm_config.scheduler_config.max_num_seqs)  # decoded at once; others wait
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())  # each parameter counted once

    def check_processor(self, processor: Any) -> None:
        for feature in self._features.every:
            feature.check_processor(processor)

    @property
    def core(self) -> Any:
        """vLLM's LLMEngine."""
        return self.llm.llm_engine

    @property
    def _runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> torch.nn.Module:
        return self._runner.model

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
        """See `Engine.stamp`.

        Raises:
            RuntimeError: requests are in flight, or the prefix cache refused to be reset.
        """
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
        for forget in self._features.forget:
            forget()

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
        if self._releases:
            # The release needs a paused scheduler. Aborting requests would reset vLLM's record of routed experts.
            self.core.sleep(level=0, mode="keep")
            self.core.release_kv_cache_memory()
        else:
            self.core.sleep(level=1)  # frees only the KV cache, see `weights_stay`
        self.asleep = True

    def wake(self) -> None:
        """See `Engine.wake`.

        Raises:
            RuntimeError: vLLM stayed asleep.
        """
        if not self.asleep:
            return
        torch.cuda.empty_cache()  # vLLM maps the cache outside torch's allocator, so cached memory must be free
        self.core.wake_up(tags=["kv_cache"] if self._releases else None)
        if self.core.is_sleeping():
            raise RuntimeError("vLLM stayed asleep after wake_up: set vllm_enable_sleep_mode: false.")
        self.asleep = False

    @property
    def _releases(self) -> bool:
        """Whether this vLLM can release the KV cache by name; older ones sleep at level 1."""
        return hasattr(self.core, "release_kv_cache_memory")

    # -- sampling

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        """See `Engine.on_engine_leader`. Calls of the engine may depend on clocks and on this rank only in ``work``.

        Raises:
            Exception: an error of ``work`` on the first rank; on the other ranks an error in a repeated call.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(nondeterminism_allowed())
            stack.enter_context(process.collector_at_rest())
            for context in self._features.while_generating:
                stack.enter_context(context())
            if self._lockstep is not None:
                stack.enter_context(faults.waiting("the generation"))
                if not self._lockstep.leads:
                    follow(self.core, self._lockstep)
                    return others
                stack.enter_context(leading(self.core, self._lockstep))
            try:
                return work()
            finally:  # an error's traceback may keep generators open, so their requests are aborted here
                with contextlib.suppress(Exception):  # if the engine has failed, its first error counts
                    self.abort([*self._open])

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Sample ``sampling.n`` completions of each prompt, and yield each `Group` when it finishes.

        Closing the generator early aborts its requests in flight.

        Raises:
            StaleWeights: the engine's weights are not from step ``version``.
        """
        self.require(version)
        seeds = [request_seed(seed, prompt.position, purpose) for prompt in prompts]
        waiting = {self.submit(p.input, sampling, own): p for p, own in zip(prompts, seeds, strict=True)}
        try:
            while waiting:
                for request, completions in self.advance():
                    prompt = waiting.pop(request)
                    rollouts = tuple(completion.rollout(prompt.input, version) for completion in completions)
                    yield Group(prompt.example, with_shared_riders(rollouts), prompt.position)
        finally:
            self.abort(waiting)

    def check(self, sampling: Sampling) -> None:
        """Let vLLM validate a request with these settings: patterns, schemas, token ids. Nothing is sampled.

        Raises:
            ValueError: vLLM refuses the request.
        """
        try:
            self.abort([self.submit((0,), sampling, seed=0)])
        except Exception as error:  # in some versions vLLM's validation errors are no ValueErrors
            raise ValueError(f"The sampling settings aren't valid for vLLM: {error}") from None

    def take_counts(self) -> dict[str, float]:
        counts = {name: count for take in self._features.take_counts for name, count in take().items()}
        if self._unknown_tokens:
            counts[UNKNOWN_TOKENS], self._unknown_tokens = float(self._unknown_tokens), 0
        return counts

    def require(self, version: int) -> None:
        assert not self.asleep, "the engine has no KV cache: wake it first"
        if self.version != version:
            held = "no known step" if self.version is None else f"step {self.version}"
            raise StaleWeights(
                f"The engine holds the weights of {held}, but the trainer is at step {version}: publish first."
            )

    def submit(
        self, prompt: ModelInput | Sequence[int], sampling: Sampling, seed: int, *, n: int | None = None,
        spent: int = 0, streams: bool = False,
    ) -> str:  # fmt: skip
        from vllm.sampling_params import RequestOutputKind

        prompt = prompt if isinstance(prompt, ModelInput) else ModelInput(tuple(prompt))
        params = self.parameters(prompt.ids, sampling, seed, n or sampling.n, spent)
        if streams:
            params.output_kind = RequestOutputKind.CUMULATIVE
        return self._enqueue(prompt, params)

    def _enqueue(self, prompt: ModelInput, params: Any) -> str:
        """Add a request to vLLM's queue, and return its name."""
        if prompt.images is None and max(prompt.ids, default=0) >= self.vocab_size:  # vLLM would read padding rows
            raise ValueError(
                f"a prompt has the token id {max(prompt.ids)}, but the model's embedding has {self.vocab_size:,} rows, "
                "numbered from 0: use the tokenizer of the model."
            )
        self._requests += 1
        request = f"request-{self._requests}"
        prompts = [made for make in self._features.request if (made := make(prompt)) is not None]
        in_vllm = prompts[0] if prompts else {"prompt_token_ids": list(prompt.ids)}
        self.core.add_request(request, in_vllm, params, lora_request=self._adapter)
        self._open[request] = prompt
        return request

    def parameters(self, ids: Sequence[int], sampling: Sampling, seed: int, n: int, spent: int = 0) -> Any:
        """Return a request's vllm.SamplingParams; see `submit`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = sampling.options
        ends = [*(options.get("stop_token_ids") or ())]
        if not options.get("ignore_eos"):
            ends += self.end_tokens
        return SamplingParams(
            n=n,
            max_tokens=min(sampling.max_tokens - spent, self.context - len(ids)),
            temperature=sampling.temperature,
            seed=seed,
            logprobs=0,  # only the sampled token's
            flat_logprobs=True,  # one list per completion: an object per token would take most of the time
            detokenize=bool(options.get("stop")),  # only stop strings need text
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(options | {"stop_token_ids": ends}),
        )

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        watchdog.progress("a step of the engine")
        outputs = self.core.step()
        finished = [output for output in outputs if output.finished]
        self._written = [(each.request_id, each.outputs[0].token_ids) for each in outputs if not each.finished]
        watchdog.progress("what follows a step of the engine")
        for listener in self.after_step:
            listener()
        return [(output.request_id, self._finished(output)) for output in finished]

    def written(self) -> list[tuple[str, Sequence[int]]]:
        return self._written

    def _finished(self, output: Any) -> list[Sampled]:
        """Convert vLLM's finished request into completions, and forget the request."""
        sampled = self._sampled(output, self._open.pop(output.request_id))
        for drop in self._features.drop:
            drop(output.request_id)
        return sampled

    def _sampled(self, output: Any, prompt: ModelInput) -> list[Sampled]:
        """Convert a request's output into completions."""
        sampled = []
        for one in sorted(output.outputs, key=lambda completion: completion.index):
            if self.tokens < self.vocab_size:
                self._unknown_tokens += sum(token >= self.tokens for token in one.token_ids)
            sampled.append(Sampled(array("i", one.token_ids), _logprobs(one), finish_reason_of(one.finish_reason)))
        for complete in self._features.completions:
            sampled = complete(output.request_id, prompt, output, sampled)
        return sampled

    def abort(self, requests: Iterable[str]) -> None:
        """Drop the ``requests`` that are in flight. If no others are left, drain the engine."""
        if names := [name for name in requests if name in self._open]:
            self.core.abort_request(names)
            for name in names:
                del self._open[name]
                for drop in self._features.drop:
                    drop(name)
            while not self._open and self.core.has_unfinished_requests():
                self.core.step()

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        prompts = {name: self._open[name] for name in requests if name in self._open}
        with last_outputs(self.core, prompts) as outputs:
            self.abort(prompts)
        return [(name, self._sampled(outputs[name], prompt)) for name, prompt in prompts.items()]

    def prompt_logprobs(self, prompt: ModelInput | Sequence[int]) -> torch.Tensor:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # With a temperature vLLM would compile its sampler for requests without a seed, which takes seconds.
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)
        prompt = prompt if isinstance(prompt, ModelInput) else ModelInput(tuple(prompt))
        request = self._enqueue(prompt, params)
        outputs: list[Any] = []
        with nondeterminism_allowed(), explained_errors(self.vllm_config.model_config.model):
            while self.core.has_unfinished_requests():
                outputs += self.core.step()
        del self._open[request]
        for drop in self._features.drop:
            drop(request)
        for scored in self._features.scored:
            scored(prompt, outputs[-1])
        entries = outputs[-1].prompt_logprobs[1:]
        return torch.tensor([entry[token].logprob for entry, token in zip(entries, prompt.ids[1:], strict=True)])

    def close(self) -> None:
        self._close()
        for feature in self._features.every:
            feature.close()
        self._features, self.served = Features(), ServedWeights()
        self.llm = None


def _logprobs(completion: Any) -> array[float]:
    flat: Any = completion.logprobs
    assert len(flat.logprobs) == len(completion.token_ids), "vLLM returns one log-probability per sampled token"
    logprobs = array("f", flat.logprobs)
    if math.isnan(sum(logprobs)):  # the trainer would take NaN for a value that nobody knows
        raise FloatingPointError(
            "vLLM sampled a completion from logits that aren't numbers (NaN). Run `colograd doctor` on the recipe, or "
            "give the engine another dtype or attention backend: vllm_engine_kwargs: {dtype: float32}."
        )
    return logprobs
