"""Record of the experts that the engine's routers chose for each token of a sequence, for `router_replay`.

vLLM's Model Runner V2, used on a GPU, returns them itself (``enable_return_routed_experts``). With V1, as on a CPU,
each router passes its choice to a function, and the model runner knows each token's request. A token in the prefix
cache is in no step of its sequence. It has the experts that its cached keys and values were computed with.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ....batch import ModelInput
from ....config import GRPOConfig
from ....engine.arguments import accepted, runs_v2
from ....engine.feature import BuiltEngine, EngineFeature, EngineUse
from ....engine.protocol import Sampled
from ..rider import UNKNOWN, RoutedExperts, filled

TELLS_EXPERTS = "enable_return_routed_experts"  # vLLM's argument; not on a CPU

# vLLM's name of one completion's request: "1_request-7-a06c1b92" is the second completion of our "request-7".
NAME = re.compile(r"(?:(\d+)_)?(request-\d+)(?:-[0-9a-f]{8})?$")


class _Sequence:
    """Experts of a request's tokens so far: ``rows`` [n, L, K], allocated for more tokens than there are."""

    def __init__(self, start: int, chosen: torch.Tensor) -> None:
        self.cached = start  # number of tokens that came from the prefix cache
        self.rows = chosen.new_empty((0, *chosen.shape[1:]))

    def put(self, start: int, chosen: torch.Tensor) -> None:
        end = start + len(chosen)
        if end > len(self.rows):
            rows = self.rows.new_full((max(end, 2 * len(self.rows)), *self.rows.shape[1:]), UNKNOWN)
            rows[: len(self.rows)] = self.rows
            self.rows = rows
        self.rows[start:end] = chosen


class RouterLog(EngineFeature):
    """Experts of an engine's sequences, all of one version of the weights."""

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        self.itself = False  # whether vLLM returns the experts; otherwise its routers are watched
        self._cached: dict[bytes, torch.Tensor] = {}  # [block, L, K], by digest of all tokens up to the block's end
        self._seen: dict[str, dict[int, _Sequence]] = {}  # experts by request name and completion index
        self._prompts: dict[str, list[bytes]] = {}  # block digests of a request's prompt, by vLLM's request name

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `EngineFeature.arguments`."""
        from vllm import __version__ as found

        self.itself = runs_v2(self._config, "router_replay is true", "router_replay: false")
        if not self.itself:
            return {}
        if arguments.get("enable_prefix_caching") is False:
            raise ValueError(
                "router_replay is true and vllm_engine_kwargs sets enable_prefix_caching: false, but vLLM's Model "
                "Runner V2 keeps the experts by the prefix cache's blocks: remove one of them."
            )
        if not accepted(TELLS_EXPERTS):
            raise RuntimeError(
                f"router_replay is true, but vLLM {found} doesn't tell which experts it chooses: install 0.31, or set "
                "router_replay: false."
            )
        return {TELLS_EXPERTS: True}

    def built(self, engine: BuiltEngine) -> None:
        """Start the record on the engine's first rank."""
        from vllm import __version__ as found

        core = engine.core
        if engine.layout.engine_place > 0:
            if self.itself:  # vLLM's worker returns experts on the first rank only, and other schedulers would fail
                core.engine_core.engine_core.scheduler.aux_output_connector = None
            return
        runner, cache = core.model_executor.driver_worker.worker.model_runner, core.vllm_config.cache_config
        self.version = found
        try:
            from vllm.model_executor.layers.fused_moe.layer import MoERunner
        except ImportError:  # a version with them in another module
            layers: list[Any] = []
        else:
            layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        self._layers = sorted(layers, key=lambda layer: int(layer.layer_id))
        experts = int(core.vllm_config.model_config.get_num_experts())
        self.dtype = torch.int8 if experts <= 128 else torch.int16
        self._block = int(cache.block_size) if cache.enable_prefix_caching else 0
        self._step: list[torch.Tensor | None] = [None] * len(self._layers)
        routers = [getattr(layer, "router", None) for layer in self._layers]
        if not routers or not (self.itself or all(hasattr(router, "set_capture_fn") for router in routers)):
            raise RuntimeError(
                f"router_replay is true, but vLLM {found} has no routers for this model that tell which experts they "
                "choose: set router_replay: false, or install vLLM 0.31."
            )
        if not self.itself:
            for place, router in enumerate(routers):
                router.set_capture_fn(functools.partial(self._keep, place))  # type: ignore[union-attr]
            self._execute = runner.execute_model
            runner.execute_model = functools.partial(self._watched, runner)

    def _keep(self, place: int, chosen: torch.Tensor) -> None:
        self._step[place] = chosen.to(self.dtype)  # one router's choice for a step, (tokens of the step, K)

    def _watched(self, runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the model runner, then add the experts of its tokens to their sequences."""
        result = self._execute(scheduled, *args, **kwargs)
        counts = scheduled.num_scheduled_tokens
        if not counts:
            return result
        for new in scheduled.scheduled_new_reqs if self._block else ():
            self._prompts[new.req_id] = list(self._digests(new.prompt_token_ids or ()))
        chosen = torch.stack([part for part in self._step if part is not None], 1)
        batch, at = runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            start, own = int(batch.num_computed_tokens_cpu[row]), chosen[at : at + counts[name]]
            at += counts[name]
            if (ours := NAME.fullmatch(name)) is not None:  # not a foreign request
                of_request, index = self._seen.setdefault(ours[2], {}), int(ours[1] or 0)
                if index not in of_request:
                    of_request[index] = _Sequence(start, own)
                of_request[index].put(start, own)
                self._put_blocks(self._prompts.get(name, ()), start, own)
        for name in scheduled.finished_req_ids:
            self._prompts.pop(name, None)
        return result

    def _put_blocks(self, digests: Sequence[bytes], start: int, chosen: torch.Tensor) -> None:
        """Cache each whole block of a prompt or sequence that lies within ``chosen``."""
        if not self._block:
            return
        end = start + len(chosen)
        for place in range(-(-start // self._block), min(end // self._block, len(digests))):
            first = place * self._block - start
            if digests[place] not in self._cached:
                self._cached[digests[place]] = chosen[first : first + self._block].clone()

    def _digests(self, ids: Sequence[int]) -> Iterator[bytes]:
        """Yield a digest for each whole block: of its tokens and all tokens before."""
        digest = b""
        for end in range(self._block, len(ids) + 1, self._block):
            block = array("i", ids[end - self._block : end]).tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            yield digest

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        """Add the experts of each completion. All completions of a request share the prompt's tensor."""
        outputs = sorted(output.outputs, key=lambda completion: int(completion.index))
        experts = [
            self._take(request, completion, prompt.ids, one.ids)
            for completion, one in zip(outputs, sampled, strict=True)
        ]
        return [
            dataclasses.replace(one, riders=(*one.riders, RoutedExperts(experts[0].prompt, chosen.completion)))
            for one, chosen in zip(sampled, experts, strict=True)
        ]

    def _take(self, request: str, completion: Any, prompt: Sequence[int], ids: Sequence[int]) -> RoutedExperts:
        """Return and remove the experts of a finished ``completion`` of vLLM's."""
        tokens = len(prompt) + len(ids)
        if self.itself:
            told = getattr(completion, "routed_experts", None)  # (tokens, all layers, K); no row for the last token
            if told is None:
                raise RuntimeError(
                    f"router_replay is true, but vLLM {self.version} told no experts of a completion: set "
                    "router_replay: false, or install vLLM 0.31."
                )
            layers = [int(layer.layer_id) for layer in self._layers]
            rows = torch.from_numpy(told[:tokens, layers].astype("int16")).to(self.dtype)
            return _split(filled(rows, tokens), len(prompt))
        seen = self._seen.get(request, {}).pop(completion.index, None)
        if seen is None:
            raise RuntimeError(
                f"router_replay is true, but vLLM {self.version} stepped under another name than {request!r}, so that "
                "its experts aren't known: set router_replay: false, or install vLLM 0.31."
            )
        whole = filled(seen.rows, tokens)
        digests = list(self._digests([*prompt, *ids])) if self._block else []
        for place, digest in enumerate(digests[: seen.cached // (self._block or 1)]):
            if (known := self._cached.get(digest)) is not None:
                whole[place * self._block : (place + 1) * self._block] = known
        self._put_blocks(digests, 0, whole[: tokens - 1])  # the next turn's prompt begins with these tokens
        return _split(whole, len(prompt))

    def drop(self, request: str) -> None:
        self._seen.pop(request, None)

    def forget(self) -> None:
        """Drop all experts. Called when the weights change and the prefix cache is emptied."""
        self._cached.clear()
        self._seen.clear()
        self._prompts.clear()


def router_log(config: GRPOConfig, use: EngineUse) -> RouterLog | None:
    """Offer a `RouterLog` for `router_replay`."""
    return RouterLog(config) if config.router_replay else None


def _split(whole: torch.Tensor, prompt: int) -> RoutedExperts:
    """Copy the experts of prompt and completion into separate tensors.

    A group shares the prompt's tensor, and each tensor may be sent to another rank.
    """
    return RoutedExperts(whole[:prompt].clone(), whole[prompt:].clone())
