"""`Engine`: vLLM in this process, which holds weights of one known step, samples with them, and sleeps.

Every rank builds its own engine, or its part of one that it shares with its neighbours, through vLLM's external
launcher. All requests of a round enter the queue at once; `generate` yields each group when its last completion ends.
"""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..batch import Group, ModelInput, Prompt
from ..config import GRPOConfig
from ..parallel import faults, watchdog
from ..parallel.lockstep import Lockstep
from ..policy.lora import Adapter
from ..runtime import process
from . import images
from .arguments import TELLS_EXPERTS, blank_kwargs, computes_float32_heads, engine_kwargs, lora_kwargs
from .building import buffers_stay, build_conditions, check_vllm, told_of_vllm, untested_vllm, usual_algorithms
from .closing import closed_if_it_fails, closes_with
from .kept_tokens import TELLS_KEPT, kept_of, tell_kept_tokens
from .last_outputs import last_outputs
from .leading import follow, leading
from .per_layer_inputs import computed_per_layer_inputs
from .protocol import EngineTensors, Sampled, StaleWeights, T
from .quantized_layers import Parts, ServedLayers, served_layers
from .routed import RouterLog, expect_no_experts, one_prompt
from .sampling import UNKNOWN_TOKENS, Sampling, finish_reason_of, request_seed
from .step_stream import StepStream
from .tensors import VLLMTensors
from .transformers_classes import classes_apart


@dataclass(frozen=True, slots=True)
class Needs:
    """Sizes and features that a run needs of its engine, beside its configuration."""

    end_tokens: tuple[int, ...] = ()  # end a completion, besides those that the checkpoint names
    adapter: Adapter | None = None  # the LoRA to have a slot for; see `load_adapter`
    sequences: int = 0  # the most of one generation; 0: unknown
    trained: int = 0  # the most of one generation in training; 0: ``sequences``
    blank: bool = False  # don't load the checkpoint's weights: all will be written
    # The model's names -> its layers that multiply with the policy's packed weights. Such an engine is blank.
    parts_of: Callable[[EngineTensors], Parts] | None = None
    images: int = 0  # the most of one prompt; 0: it reads none
    tokens: int = 0  # the tokenizer's, of which a model may have more rows; 0: unknown
    text_alone: bool = False  # of a model that could read more: the engine leaves out what it would read that with


class VLLMEngine:
    """vLLM in this process, as an `Engine`.

    Args:
        model_path: folder or Hub id that vLLM loads.
        dtype: the policy's dtype; the engine's unless ``vllm_engine_kwargs`` says otherwise.
        context: tokens that one sequence may need, prompt and completion together; None: the model's own.
        kv_bytes: of the KV cache; 0: on a GPU what ``vllm_gpu_memory_utilization`` leaves for it.

    Raises:
        RuntimeError: vLLM is missing, of an unsupported version, or can't sleep as asked.
    """

    def __init__(
        self, model_path: str, config: GRPOConfig, dtype: torch.dtype, context: int | None, kv_bytes: int,
        needs: Needs = Needs(),
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        check_vllm()
        self.sleeps = config.vllm_enable_sleep_mode and not config.on_cpu  # gives its KV cache back when told to
        self.asleep = False
        self.end_tokens = needs.end_tokens
        self.version: int | None = None  # the step of the weights, written by `stamp` and `invalidate` alone
        self._adapter: Any = None  # the LoRARequest that every request carries
        self._requests = 0  # so far
        self._open: dict[str, tuple[int, ...]] = {}  # requests in flight, and what they read
        self._written: list[tuple[str, Sequence[int]]] = []
        self.after_step: Callable[[], None] | None = None  # somebody watches: see `load.watched`
        self.layout = config.layout
        ranks = self.layout.ranks_per_engine
        self._lockstep = Lockstep(self.layout, config.ddp_timeout) if ranks > 1 else None
        self._reads_images, self._on_cpu = needs.images > 0, config.on_cpu
        self._seen: dict[str, ModelInput] = {}  # what requests in flight with images were to read
        gives_way = config.overlap != "off" and not (config.on_cpu or config.why_not_between_steps)
        self._stream = StepStream() if gives_way else None  # None: as all else
        numbers = needs.sequences, needs.images, needs.trained
        kwargs = engine_kwargs(model_path, config, dtype, context, kv_bytes, *numbers)
        if needs.text_alone:
            kwargs["language_model_only"] = True
        kwargs |= lora_kwargs(model_path, config, needs.adapter)
        parts_of = needs.parts_of
        self.blank, self.served = needs.blank or parts_of is not None, ServedLayers()
        if self.blank:
            kwargs |= blank_kwargs(kwargs)
        watchdog.progress("the start of vLLM")
        conditions = build_conditions(config.device, self.sleeps, needs.adapter is not None, ranks, self._reads_images)
        with contextlib.ExitStack() as while_built:
            while_built.enter_context(closed_if_it_fails())
            while_built.enter_context(conditions)
            from vllm import LLM

            if self._stream is not None:  # after the import, from which on vLLM notes which stream is current
                while_built.enter_context(self._stream.building())
            if self.blank:
                while_built.enter_context(buffers_stay())
            if parts_of is not None:
                self.served = while_built.enter_context(served_layers(parts_of))
            if self._reads_images:
                images.find_gemma3()
            while_built.enter_context(classes_apart(lambda: self.model))
            while_built.enter_context(computed_per_layer_inputs())
            with told_of_vllm(model_path):
                self.llm: Any = LLM(**kwargs)
            self._close = closes_with(self, self.llm)
            if self._stream is not None:
                self._stream.take_steps(self.core)
            leads = self._lockstep is None or self._lockstep.leads
            tells = TELLS_EXPERTS in kwargs
            self._routed = RouterLog(self.core, tells) if config.router_replay and leads else None
            if config.replays_truncation:
                tell_kept_tokens(self.core, self._runner, TELLS_KEPT in kwargs)
            if tells and not leads:
                expect_no_experts(self.core)
            from .speculation import sample_as_without_drafts

            self._speculation = sample_as_without_drafts(self._runner)
        found, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        self.dtype: torch.dtype = found.dtype  # of the weights and activations
        asked: torch.dtype = getattr(found, "head_dtype", self.dtype)
        self.head_dtype = asked if computes_float32_heads() else self.dtype
        self.vocab_size = int(found.hf_text_config.vocab_size)  # tokens that the loaded checkpoint knows
        self.tokens = min(needs.tokens or self.vocab_size, self.vocab_size)
        self._unknown_tokens = 0  # sampled since `take_counts`
        self.context = int(found.max_model_len)  # longest sequence in tokens, prompt and completion together
        self.kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)  # that the KV cache holds
        self.max_sequences = int(self.vllm_config.scheduler_config.max_num_seqs)  # decoded at once; others wait
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())  # each counted once
        self.build_seconds = time.perf_counter() - started

    def check_processor(self, processor: Any) -> None:
        """Whether vLLM makes of images what the trainer's ``processor`` makes, and anew when weights change.

        Raises:
            ValueError: vLLM's processor has other settings.
            RuntimeError: this vLLM can't forget features.
        """
        images.check_forgets(self.core)
        images.check_reads_as_the_model(self.core, self._on_cpu)
        images.check_same_processor(self.vllm_config.model_config, processor)

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
        # After the last output its finished requests are still to be told to the worker, and asynchronous scheduling
        # may have a batch in flight, which what tells of routed experts wouldn't survive.
        while inner.scheduler.has_requests() or getattr(inner, "batch_queue", None):
            self.core.step()
        if self._routed is not None:
            self._routed.forget()
        if not self.core.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM could not reset its prefix cache at step {version}: keys and values of old weights would be "
                "reused. Set vllm_engine_kwargs: {enable_prefix_caching: false}."
            )
        if self._reads_images:
            images.forget_features(self.core)

    @property
    def tensors(self) -> VLLMTensors:
        return VLLMTensors(self.model)

    def load_adapter(self, folder: str) -> None:
        """Let vLLM load an adapter, as peft saves it, into its first slot; every request uses it from now on."""
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
        self._forget_prefixes(self.version)  # older versions leave that to the caller
        if self._releases:
            # Pauses the scheduler, which the release asks for. Aborting would reset what tells of routed experts.
            self.core.sleep(level=0, mode="keep")
            self.core.release_kv_cache_memory()
        else:
            self.core.sleep(level=1)  # which reaches the KV cache only: see `weights_stay`
        self.asleep = True

    def wake(self) -> None:
        """See `Engine.wake`.

        Raises:
            RuntimeError: vLLM stayed asleep.
        """
        if not self.asleep:
            return
        torch.cuda.empty_cache()  # the cache is mapped past torch's allocator, which must not keep what it needs
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
        """See `Engine.on_engine_leader`. Only in ``work`` may calls of the engine depend on clocks and on this rank.

        Raises:
            Exception: what ``work`` raises, on its rank only; of the others, what fails there.
        """
        apart = contextlib.nullcontext() if self._stream is None else self._stream.apart()
        with usual_algorithms(), process.collector_at_rest(), apart:
            return self._led(work, others)

    def _led(self, work: Callable[[], T], others: T) -> T:
        if self._lockstep is None:
            return self._tidily(work)
        with faults.waiting("the generation"):
            if not self._lockstep.leads:
                follow(self.core, self._lockstep)
                return others
            with leading(self.core, self._lockstep):
                return self._tidily(work)

    def _tidily(self, work: Callable[[], T]) -> T:
        """Leave nothing in flight, though an error's traceback may keep generators open."""
        try:
            return work()
        finally:
            with contextlib.suppress(Exception):  # of an engine that has failed, what it raised first counts
                self.abort([*self._open])

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Sample ``sampling.n`` completions of each prompt; yield each `Group` as it finishes. A generator that is
        closed early aborts what is in flight.

        Raises:
            StaleWeights: the engine's weights are not of ``version``.
        """
        self.require(version)
        seeds = [request_seed(seed, prompt.position, purpose) for prompt in prompts]
        waiting = {self.submit(p.input, sampling, own): p for p, own in zip(prompts, seeds, strict=True)}
        try:
            while waiting:
                for request, completions in self.advance():
                    prompt = waiting.pop(request)
                    rollouts = tuple(completion.rollout(prompt.input, version) for completion in completions)
                    yield Group(prompt.example, one_prompt(rollouts), prompt.position)
        finally:
            self.abort(waiting)

    def check(self, sampling: Sampling) -> None:
        """Let vLLM judge a request with these settings: patterns and schemas, token ids. Nothing is sampled.

        Raises:
            ValueError: vLLM refuses it.
        """
        try:
            self.abort([self.submit((0,), sampling, seed=0)])
        except Exception as error:  # vLLM's validation errors are no ValueErrors in every version
            raise ValueError(f"The sampling settings aren't valid for vLLM: {error}") from None

    def take_counts(self) -> dict[str, float]:
        counts = self._speculation.take_counts() if self._speculation else {}
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
        """Give vLLM a request. Returns its name."""
        if prompt.images is None and max(prompt.ids, default=0) >= self.vocab_size:  # vLLM would read rows that fill up
            raise ValueError(
                f"a prompt has the token id {max(prompt.ids)}, but the model's embedding has {self.vocab_size:,} rows, "
                "numbered from 0: use the tokenizer of the model."
            )
        self._requests += 1
        request = f"request-{self._requests}"
        given: Any = {"prompt_token_ids": list(prompt.ids)}
        if prompt.images is not None:
            given, self._seen[request] = images.prompt_with_images(self.core, prompt), prompt
        self.core.add_request(request, given, params, lora_request=self._adapter)
        self._open[request] = prompt.ids
        return request

    def parameters(self, ids: Sequence[int], sampling: Sampling, seed: int, n: int, spent: int = 0) -> Any:
        """A request's vllm.SamplingParams; see `submit`."""
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
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # in one list per completion: an object per token would take most of the time
            detokenize=bool(options.get("stop")),  # text is needed only to find stop strings
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(options | {"stop_token_ids": ends}),
        )

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        watchdog.progress("a step of the engine")
        outputs = self.core.step()
        finished = [output for output in outputs if output.finished]
        self._written = [(each.request_id, each.outputs[0].token_ids) for each in outputs if not each.finished]
        watchdog.progress("what follows a step of the engine")
        if self.after_step is not None:
            self.after_step()
        return [(output.request_id, self._sampled(output)) for output in finished]

    def written(self) -> list[tuple[str, Sequence[int]]]:
        return self._written

    def _sampled(self, output: Any) -> list[Sampled]:
        """vLLM's finished request -> its completions."""
        request, read, found = output.request_id, self._open.pop(output.request_id, ()), []
        if (asked := self._seen.pop(request, None)) is not None:
            images.check_expanded(asked, output.prompt_token_ids)
        for completion in sorted(output.outputs, key=lambda c: c.index):
            one = self._completion(completion)
            if self._routed is not None:
                one = replace(one, experts=self._routed.take(request, completion, read, one.ids))
            found.append(one)
        if self._routed is not None:
            self._routed.drop(request)
        return found

    def _completion(self, output: Any) -> Sampled:
        """vLLM's completion, without experts."""
        if self.tokens < self.vocab_size:
            self._unknown_tokens += sum(token >= self.tokens for token in output.token_ids)
        kept, reason = kept_of(output, self.vocab_size), finish_reason_of(output.finish_reason)
        return Sampled(array("i", output.token_ids), _logprobs(output), reason, kept=kept)

    def abort(self, requests: Iterable[str]) -> None:
        """Drop those of the requests that are in flight. When there are no others, drain the engine."""
        if names := [name for name in requests if name in self._open]:
            self.core.abort_request(names)
            for name in names:
                del self._open[name]
                if self._routed is not None:
                    self._routed.drop(name)
                self._seen.pop(name, None)
            while not self._open and self.core.has_unfinished_requests():
                self.core.step()

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        names = [name for name in requests if name in self._open]
        with last_outputs(self.core, names) as outputs:
            self.abort(names)
        return [(name, [self._completion(each) for each in outputs[name].outputs]) for name in names]

    def prompt_logprobs(self, prompt: ModelInput | Sequence[int]) -> torch.Tensor:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # With a temperature vLLM's sampler for requests without a seed would be compiled: seconds.
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)
        prompt = prompt if isinstance(prompt, ModelInput) else ModelInput(tuple(prompt))
        request = self._enqueue(prompt, params)
        outputs: list[Any] = []
        with usual_algorithms(), told_of_vllm(self.vllm_config.model_config.model):
            while self.core.has_unfinished_requests():
                outputs += self.core.step()
        del self._open[request]
        if self._routed is not None:
            self._routed.drop(request)
        if self._seen.pop(request, None) is not None:
            images.check_expanded(prompt, outputs[-1].prompt_token_ids)
            images.forget_features(self.core)
        entries = outputs[-1].prompt_logprobs[1:]
        return torch.tensor([entry[token].logprob for entry, token in zip(entries, prompt.ids[1:], strict=True)])

    def close(self) -> None:
        self._close()
        self.served.close()
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
