"""`VLLMEngine`: samples with vLLM in the trainer's process. `generate` queues all prompts of a call at once."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..batch import Group, ModelInput, Prompt, Rollout
from ..parallel import faults, watchdog
from ..riders import with_shared_riders
from ..runtime import cpu_products, process
from . import building
from .loaded import LoadedVLLM, follow, leading
from .protocol import Sampled, StaleWeights, T
from .sampling import UNKNOWN_TOKENS, Sampling, finish_reason_of, request_seed


class VLLMEngine(LoadedVLLM):
    """The `Engine` that samples with vLLM in the trainer's process. See `LoadedVLLM` for its arguments."""

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
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
            finally:  # Abort requests here, because an error's traceback may keep a generator of `generate` open.
                with contextlib.suppress(Exception):  # Errors of the abort would hide the first error.
                    self.abort([*self._open])

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
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
        try:
            self.abort([self.submit((0,), sampling, seed=0)])
        except Exception as error:  # vLLM's validation errors aren't ValueErrors in some versions
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
        spent: int = 0,
    ) -> str:  # fmt: skip
        prompt = prompt if isinstance(prompt, ModelInput) else ModelInput(tuple(prompt))
        return self._enqueue(prompt, self.parameters(prompt.ids, sampling, seed, n or sampling.n, spent))

    def parameters(self, ids: Sequence[int], sampling: Sampling, seed: int, n: int, spent: int = 0) -> Any:
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
            logprobs=0,  # Log-probabilities of sampled tokens only.
            flat_logprobs=True,  # One list of log-probabilities is faster than one object per token.
            detokenize=bool(options.get("stop")),  # vLLM decodes text only to find stop strings.
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(options | {"stop_token_ids": ends}),
        )

    def _enqueue(self, prompt: ModelInput, params: Any) -> str:
        if prompt.media is None and max(prompt.ids, default=0) >= self.vocab_size:
            raise ValueError(
                f"A prompt has the token id {max(prompt.ids)}, but the model's embedding has {self.vocab_size:,} rows, "
                "numbered from 0. Use the tokenizer of the model."
            )
        self._request_count += 1
        request = f"request-{self._request_count}"
        inputs = (feature.request(prompt) for feature in self._features)
        in_vllm = next((each for each in inputs if each is not None), {"prompt_token_ids": list(prompt.ids)})
        self.core.add_request(request, in_vllm, params, lora_request=self._adapter)
        self._open[request] = prompt
        return request

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        watchdog.progress("a step of the engine")
        finished = [output for output in self.core.step() if output.finished]
        watchdog.progress("what follows a step of the engine")
        for listener in self.after_step:
            listener()
        completions = []
        for output in finished:
            name = output.request_id
            completions.append((name, self._sampled(output, self._open[name])))
            self._drop(name)
        return completions

    def _sampled(self, output: Any, prompt: ModelInput) -> list[Sampled]:
        sampled = []
        entries = zip(output.prompt_logprobs or (), prompt.ids, strict=False)
        of_prompt = [(entry[token].logprob, entry[token].rank) if entry else None for entry, token in entries]
        for one in sorted(output.outputs, key=lambda completion: completion.index):
            if self.tokens < self.vocab_size:
                self._unknown_tokens += sum(token >= self.tokens for token in one.token_ids)
            flat: Any = one.logprobs
            assert len(flat.logprobs) == len(one.token_ids), "vLLM must return one log-probability per sampled token"
            logprobs = array("f", flat.logprobs)
            if math.isnan(sum(logprobs)):  # in a `Rollout`, NaN means an unknown log-probability
                raise FloatingPointError(
                    "vLLM sampled a completion from logits that aren't numbers (NaN). Run `colograd doctor` on the "
                    "recipe, or change the engine's dtype or attention backend, e.g. `vllm_engine_kwargs: {dtype: "
                    "float32}`."
                )
            reason = finish_reason_of(one.finish_reason)
            sampled.append(Sampled(array("i", one.token_ids), logprobs, reason, prompt=of_prompt))
        for feature in self._features:
            sampled = feature.completions(output.request_id, prompt, output, sampled)
        return sampled

    def _drop(self, request: str) -> None:
        del self._open[request]
        for feature in self._features:
            feature.drop(request)

    def abort(self, requests: Iterable[str]) -> None:
        if names := [name for name in requests if name in self._open]:
            self.core.abort_request(names)
            for name in names:
                self._drop(name)
            while not self._open and self.core.has_unfinished_requests():
                self.core.step()

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        prompts = {name: self._open[name] for name in requests if name in self._open}
        outputs: dict[str, Any] = {}  # Last output of each request by name.
        # vLLM makes outputs of aborted requests only for its server's streaming clients. `stream` acts as a client.
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

        # With a temperature above 0 vLLM would compile its sampler for requests without a seed, which takes seconds.
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
