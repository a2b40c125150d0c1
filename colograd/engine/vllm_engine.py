"""`VLLMEngine`: samples with vLLM in the trainer's process. `generate` queues all its prompts at once.

Every rank builds an engine through vLLM's external launcher, or with tensor parallelism its part of an engine.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..batch import Group, ModelInput, Prompt, Rollout
from ..config import GRPOConfig
from ..parallel import faults, watchdog
from ..parallel.shards import Lockstep
from ..riders import with_shared_riders
from ..runtime import cpu_products, process
from . import building
from .arguments import blank_kwargs, computes_float32_heads, engine_kwargs, lora_kwargs
from .closing import closed_if_it_fails, closes_with
from .protocol import EngineFeature, EngineUse, Sampled, ServedWeights, StaleWeights, T, engine_features
from .sampling import UNKNOWN_TOKENS, Sampling, finish_reason_of, request_seed
from .tensors import VLLMTensors


class VLLMEngine:
    """The `Engine` that samples with vLLM in the trainer's process.

    Args:
        model_path: folder or Hub id of the model that vLLM loads.
        dtype: the policy's dtype. The engine uses this dtype unless ``vllm_engine_kwargs`` sets a dtype.
        context: maximum tokens of one sequence, prompt and completion together. None means the model's maximum.
        kv_bytes: bytes of the KV cache. On a GPU 0 means the memory that ``vllm_gpu_memory_utilization`` leaves.
        use: facts about the run that the configuration doesn't hold.
        features: extensions' changes of the engine. None means the features that the run's configuration needs.
    """

    llm: Any  # The vllm.LLM object.
    dtype: torch.dtype  # Dtype of the engine's weights and activations.

    def __init__(
        self, model_path: str, config: GRPOConfig, dtype: torch.dtype, context: int | None, kv_bytes: int,
        use: EngineUse = EngineUse(), features: Sequence[EngineFeature] | None = None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        building.check_vllm()
        self.layout, self.end_tokens = config.layout, use.end_tokens
        self.sleeps = config.vllm_enable_sleep_mode and not config.on_cpu
        self.asleep = False
        self.version: int | None = None  # Optimizer step of the weights. Only `stamp` and `invalidate` write it.
        self.after_step: list[Callable[[], None]] = []  # Listeners that are called after each engine step.
        self._adapter: Any = None  # vLLM's LoRARequest that every request gets; None without an adapter.
        self._requests = 0  # Number of requests since the engine was built.
        self._open: dict[str, ModelInput] = {}  # Prompts of unfinished requests by request name.
        self._written: list[tuple[str, Sequence[int]]] = []
        self._unknown_tokens = 0  # number of sampled ids without a token in the tokenizer, since the last `take_counts`
        self.served = ServedWeights()
        self._features = engine_features(config, use) if features is None else tuple(features)
        self.blank = use.blank or any(feature.blank for feature in self._features)
        ranks = self.layout.ranks_per_engine
        self._lockstep = Lockstep(self.layout) if ranks > 1 else None
        kwargs = engine_kwargs(model_path, config, dtype, context, kv_bytes, use.sequences, use.trained)
        for feature in self._features:
            kwargs |= feature.arguments(kwargs)
        kwargs |= lora_kwargs(model_path, config, use.adapter)
        if self.blank:
            kwargs |= blank_kwargs(kwargs)
        watchdog.progress("the start of vLLM")
        with contextlib.ExitStack() as while_built:
            enter = while_built.enter_context
            enter(closed_if_it_fails())
            enter(building.build_conditions(config.device, self.sleeps, use.adapter is not None, ranks, self.blank))
            from vllm import LLM

            for feature in self._features:
                enter(feature.while_built())
            enter(building.classes_apart(lambda: self.model))
            with building.explained_errors(model_path):
                self.llm = LLM(**kwargs)
            self._close = closes_with(self, self.llm)
            model_config, cache = self.vllm_config.model_config, self.vllm_config.cache_config
            self.vocab_size = int(model_config.hf_text_config.vocab_size)
            for feature in self._features:
                feature.built(self)
        self.dtype = model_config.dtype
        self.head_dtype = self.dtype
        if computes_float32_heads():
            self.head_dtype = getattr(model_config, "head_dtype", self.dtype)
        self.tokens = min(use.tokens or self.vocab_size, self.vocab_size)  # number of the tokenizer's tokens
        self.context = int(model_config.max_model_len)
        self.kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        self.max_sequences = int(self.vllm_config.scheduler_config.max_num_seqs)
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        self.build_seconds = time.perf_counter() - started

    def check_processor(self, processor: Any) -> None:
        for feature in self._features:
            feature.check_processor(processor)

    @property
    def core(self) -> Any:
        """The `LLMEngine` of vLLM that schedules and decodes requests in this process."""
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
        yield from building.untested_vllm()
        if config.cast_lm_head_to_fp32 and self.head_dtype != torch.float32:
            yield "engine: this vLLM rounds logits to the model's dtype; cast_lm_head_to_fp32 is the policy's"

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
        # vLLM's worker learns of finished requests only in a further step. Asynchronous scheduling may have a batch in
        # flight, and resetting the prefix cache during a batch would destroy vLLM's record of routed experts.
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
        """Let vLLM load a LoRA adapter in peft's format into its first slot. Every later request uses the adapter."""
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest("policy", 1, folder)
        if not self.core.add_lora(self._adapter) or not self.adapter_is_active:
            raise RuntimeError(
                f"vLLM loaded the adapter of {folder!r}, but didn't activate the adapter in its first LoRA slot."
            )

    @property
    def adapter_is_active(self) -> bool:
        ids: Any = self.model.lora_manager.lora_index_to_id
        return self._adapter is not None and list(ids[:1]) == [self._adapter.lora_int_id]

    def sleep(self) -> None:
        if not self.sleeps or self.asleep:
            return
        self._forget_prefixes(self.version)  # Some versions of vLLM don't clear the prefix cache before sleeping.
        if hasattr(self.core, "release_kv_cache_memory"):
            # Level 0 pauses the scheduler, because releasing the KV cache needs a paused scheduler. Mode "keep" doesn't
            # abort requests, because aborting would reset vLLM's record of routed experts.
            self.core.sleep(level=0, mode="keep")
            self.core.release_kv_cache_memory()
        else:
            self.core.sleep(level=1)  # frees only the KV cache, because `weights_stay` keeps weights out of the pool
        self.asleep = True

    def wake(self) -> None:
        if not self.asleep:
            return
        torch.cuda.empty_cache()  # frees torch's cached memory, because vLLM doesn't use torch's allocator
        self.core.wake_up(tags=["kv_cache"] if hasattr(self.core, "release_kv_cache_memory") else None)
        if self.core.is_sleeping():
            raise RuntimeError("vLLM's KV cache stayed asleep after wake_up: set vllm_enable_sleep_mode: false.")
        self.asleep = False

    def close(self) -> None:
        self._close()
        for feature in self._features:
            feature.close()
        self._features, self.served = (), ServedWeights()
        self.llm = None

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        """Run ``work`` on the engine's first rank. Outside ``work`` all ranks of an engine make equal calls of vLLM."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(building.nondeterminism_allowed())
            stack.enter_context(process.collector_at_rest())
            stack.enter_context(cpu_products.constant_weights())
            for feature in self._features:
                stack.enter_context(feature.while_generating())
            if self._lockstep is not None:
                stack.enter_context(faults.ends_together("the generation"))
                if not self._lockstep.leads:
                    follow(self.core, self._lockstep)
                    return others
                stack.enter_context(leading(self.core, self._lockstep))
            try:
                return work()
            finally:  # Requests are aborted here, because an error's traceback may keep generators open.
                with contextlib.suppress(Exception):  # An error of the abort would hide the engine's first error.
                    self.abort([*self._open])

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Sample ``sampling.n`` completions per prompt, and yield each finished `Group`. Closing aborts requests."""
        self.require(version)
        seeds = [request_seed(seed, prompt.position, purpose) for prompt in prompts]
        waiting = {
            self._enqueue(prompt.input, self.parameters(prompt.input.ids, sampling, own, sampling.n)): prompt
            for prompt, own in zip(prompts, seeds, strict=True)
        }
        try:
            while waiting:
                for request, completions in self.advance():
                    prompt = waiting.pop(request)
                    rollouts = tuple(
                        Rollout(
                            prompt.input, each.ids, torch.frombuffer(each.logprobs, dtype=torch.float32),
                            torch.ones(len(each.ids), dtype=torch.bool), each.finish_reason, version,
                            riders=each.riders,
                        )
                        for each in completions
                    )  # fmt: skip
                    if rollouts[0].riders:
                        rollouts = with_shared_riders(rollouts)
                    yield Group(prompt.example, rollouts, prompt.position)
        finally:
            self.abort(waiting)

    def check(self, sampling: Sampling) -> None:
        """Let vLLM validate ``sampling``, and sample nothing. Settings that vLLM refuses raise a ValueError."""
        try:
            self.abort([self.submit((0,), sampling, seed=0)])
        except Exception as error:  # in some versions vLLM's validation errors are no ValueErrors
            raise ValueError(f"The sampling settings aren't valid for vLLM: {error}") from None

    def take_counts(self) -> dict[str, float]:
        counts = {name: count for feature in self._features for name, count in feature.take_counts().items()}
        if self._unknown_tokens:
            counts[UNKNOWN_TOKENS], self._unknown_tokens = float(self._unknown_tokens), 0
        return counts

    def require(self, version: int) -> None:
        assert not self.asleep, "the engine has no KV cache: wake it first"
        if self.version != version:
            held = "no known step" if self.version is None else f"step {self.version}"
            raise StaleWeights(
                f"The engine holds the weights of {held}, but the trainer is at step {version}: call `publish` of the "
                "weight sync first."
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
        """Add a request for completions of ``prompt`` to vLLM's queue, and return the request's name."""
        if prompt.media is None and max(prompt.ids, default=0) >= self.vocab_size:  # vLLM would read rows of padding
            raise ValueError(
                f"A prompt has the token id {max(prompt.ids)}, but the model's embedding has {self.vocab_size:,} rows, "
                "numbered from 0. Use the tokenizer of the model."
            )
        self._requests += 1
        request = f"request-{self._requests}"
        prompts = [made for feature in self._features if (made := feature.request(prompt)) is not None]
        in_vllm = prompts[0] if prompts else {"prompt_token_ids": list(prompt.ids)}
        self.core.add_request(request, in_vllm, params, lora_request=self._adapter)
        self._open[request] = prompt
        return request

    def parameters(self, ids: Sequence[int], sampling: Sampling, seed: int, n: int, spent: int = 0) -> Any:
        """Return vllm.SamplingParams for ``n`` completions of the prompt ``ids``. See `Engine.submit`."""
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
            logprobs=0,  # Only log-probabilities of sampled tokens are returned.
            flat_logprobs=True,  # One list per completion, because an object per token would take most of the time.
            detokenize=bool(options.get("stop")),  # Only stop strings need decoded text.
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
        completions = []
        for output in finished:
            name = output.request_id
            completions.append((name, self._sampled(output, self._open[name])))
            self._drop(name)
        return completions

    def written(self) -> list[tuple[str, Sequence[int]]]:
        return self._written

    def _sampled(self, output: Any, prompt: ModelInput) -> list[Sampled]:
        """Convert a vLLM RequestOutput into its completions, in the order of their index."""
        sampled = []
        for one in sorted(output.outputs, key=lambda completion: completion.index):
            if self.tokens < self.vocab_size:
                self._unknown_tokens += sum(token >= self.tokens for token in one.token_ids)
            flat: Any = one.logprobs
            assert len(flat.logprobs) == len(one.token_ids), "vLLM returns one log-probability per sampled token"
            logprobs = array("f", flat.logprobs)
            if math.isnan(sum(logprobs)):  # the trainer would read NaN as an unknown log-probability
                raise FloatingPointError(
                    "vLLM sampled a completion from logits that aren't numbers (NaN). Run `colograd doctor` on the "
                    "recipe, or change the engine's dtype or attention backend, e.g. `vllm_engine_kwargs: {dtype: "
                    "float32}`."
                )
            sampled.append(Sampled(array("i", one.token_ids), logprobs, finish_reason_of(one.finish_reason)))
        for feature in self._features:
            sampled = feature.completions(output.request_id, prompt, output, sampled)
        return sampled

    def _drop(self, request: str) -> None:
        """Drop the prompt and the features' data of a request that has ended."""
        del self._open[request]
        for feature in self._features:
            feature.drop(request)

    def abort(self, requests: Iterable[str]) -> None:
        """Drop unfinished ``requests``. If the engine has no further requests, step vLLM until it is idle."""
        if names := [name for name in requests if name in self._open]:
            self.core.abort_request(names)
            for name in names:
                self._drop(name)
            while not self._open and self.core.has_unfinished_requests():
                self.core.step()

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        prompts = {name: self._open[name] for name in requests if name in self._open}
        outputs: dict[str, Any] = {}  # The last output of each request. It has all tokens that the request has sampled.
        # vLLM makes outputs of aborted requests only for streaming clients of its server. So each request gets a
        # stand-in for a client's stream.
        stream = SimpleNamespace(put=lambda output: outputs.update({output.request_id: output}))
        for state in self.core.output_processor.request_states.values():
            if state.external_req_id in prompts:
                state.queue = stream
        self.abort(prompts)
        if lacking := prompts.keys() - outputs.keys():
            raise RuntimeError(
                f"vLLM returned no output for {len(lacking)} of {len(prompts)} requests that were stopped: "
                "`carry_over` doesn't work with this version of vLLM. Remove the setting."
            )
        return [(name, self._sampled(outputs[name], prompt)) for name, prompt in prompts.items()]

    def prompt_logprobs(self, prompt: ModelInput | Sequence[int]) -> torch.Tensor:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # With a temperature above 0 vLLM would spend seconds on compiling its sampler for requests without a seed.
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)
        prompt = prompt if isinstance(prompt, ModelInput) else ModelInput(tuple(prompt))
        request = self._enqueue(prompt, params)
        outputs: list[Any] = []
        with building.nondeterminism_allowed(), building.explained_errors(self.vllm_config.model_config.model):
            while self.core.has_unfinished_requests():
                outputs += self.core.step()
        self._drop(request)
        for feature in self._features:
            feature.scored(prompt, outputs[-1])
        entries = outputs[-1].prompt_logprobs[1:]
        return torch.tensor([entry[token].logprob for entry, token in zip(entries, prompt.ids[1:], strict=True)])


@contextlib.contextmanager
def leading(core: Any, group: Lockstep) -> Iterator[None]:
    """Send the first rank's requests, aborts and steps of ``core`` (vLLM's LLMEngine) to the engine's other ranks.

    Each rank has a vLLM with a scheduler, and all schedulers must get the same calls between steps. The calls of a
    generation depend on clocks, rewards, tools and the user's code. So this code runs on the first rank only.
    """
    calls: list[bytes] = []  # pickled calls of vLLM since the last step

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
    """Repeat the first rank's calls of vLLM on another rank, until the first rank leaves its `leading` context."""
    goes_on = True
    while goes_on:
        calls, goes_on = group.listen()
        with faults.telling("a step of the engine"):
            for name, args, kwargs in map(pickle.loads, calls):
                getattr(core, name)(*args, **kwargs)
            if goes_on:
                core.step()
