"""Record of the experts that the engine's routers chose for each token of a sequence, for `router_replay`.

vLLM's Model Runner V2, which GPUs use, returns the experts. With V1, the default on a CPU, each router passes its
choice to `RouterLog`. With V1 the prefix cache is off, because routers don't run for cached tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from ....batch import ModelInput
from ....config import GRPOConfig
from ....engine.arguments import accepted, runs_v2
from ....engine.protocol import EngineFeature, EngineUse, Sampled
from ..router_replay import RoutedExperts, filled

TELLS_EXPERTS = "enable_return_routed_experts"  # vLLM's engine argument.

# vLLM's request id of a completion: "1_request-7-a06c1b92" is the second completion of our "request-7".
NAME = re.compile(r"(?:(\d+)_)?(request-\d+)(?:-[0-9a-f]{8})?$")


def _problem(problem: str) -> RuntimeError:
    from vllm import __version__

    return RuntimeError(f"With vLLM {__version__}, {problem}: set router_replay: false, or install vLLM 0.31.")


class RouterLog(EngineFeature):
    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        self.itself = False  # Whether vLLM returns the experts itself.
        # Request's name -> completion's index -> experts [n, L, K], with spare rows at the end.
        self._seen: dict[str, dict[int, torch.Tensor]] = {}

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.itself = runs_v2(self._config, "router_replay is true", "router_replay: false")
        if not self.itself:
            return {"enable_prefix_caching": False}
        if arguments.get("enable_prefix_caching") is False:
            raise ValueError(
                "router_replay is true and vllm_engine_kwargs has `enable_prefix_caching: false`, but vLLM's Model "
                "Runner V2 stores the experts by blocks of the prefix cache: remove one of the two settings."
            )
        if not accepted(TELLS_EXPERTS):
            raise _problem("the engine can't return the experts that it chooses, but router_replay needs them")
        return {TELLS_EXPERTS: True}

    def built(self, engine: Any) -> None:
        from vllm.model_executor.layers.fused_moe import layer as fused

        if engine.layout.engine_place > 0:
            if self.itself:  # Only an engine's first rank returns experts. Other ranks' schedulers would fail.
                engine.scheduler.aux_output_connector = None
            return
        runner = engine.runner
        kind = getattr(fused, "MoERunner", ())  # Some versions of vLLM have no `MoERunner` in that module.
        layers = [module for module in runner.model.modules() if isinstance(module, kind)]
        self._layers = sorted(layers, key=lambda layer: int(layer.layer_id))
        experts = int(engine.vllm_config.model_config.get_num_experts())
        self.dtype = torch.int8 if experts <= 128 else torch.int16
        self._step: list[torch.Tensor | None] = [None] * len(self._layers)
        routers = [getattr(layer, "router", None) for layer in self._layers]
        if not routers or not (self.itself or all(hasattr(router, "set_capture_fn") for router in routers)):
            raise _problem("the model's routers don't report their choice of experts, but router_replay needs them")
        if not self.itself:
            for place, router in enumerate(routers):
                router.set_capture_fn(functools.partial(self._keep, place))  # type: ignore[union-attr]
            self._execute = runner.execute_model
            runner.execute_model = functools.partial(self._watched, runner)

    def _keep(self, place: int, chosen: torch.Tensor) -> None:
        self._step[place] = chosen.to(self.dtype)  # Experts (T, K) of an engine step's T tokens.

    def _watched(self, runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(scheduled, *args, **kwargs)
        counts = scheduled.num_scheduled_tokens
        if not counts:
            return result
        chosen = torch.stack([part for part in self._step if part is not None], 1)
        batch, at = runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            start, own = int(batch.num_computed_tokens_cpu[row]), chosen[at : at + counts[name]]
            at += counts[name]
            if (ours := NAME.fullmatch(name)) is None:  # Not a completion's request.
                continue
            of_request, index, end = self._seen.setdefault(ours[2], {}), int(ours[1] or 0), start + len(own)
            rows = of_request.get(index, own[:0])
            if end > len(rows):
                rows = filled(rows, max(end, 2 * len(rows)))
            rows[start:end] = own
            of_request[index] = rows
        return result

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        outputs = sorted(output.outputs, key=lambda completion: int(completion.index))
        parts, shared, start = [], None, len(prompt.ids)
        for completion, one in zip(outputs, sampled, strict=True):
            rows = filled(self._take(request, completion), start + len(one.ids))
            # Copies, because a view would keep the whole tensor. All completions share the prompt's tensor.
            shared = rows[:start].clone() if shared is None else shared
            rider = RoutedExperts(shared, rows[start:].clone())
            parts.append(dataclasses.replace(one, riders=(*one.riders, rider)))
        return parts

    def _take(self, request: str, completion: Any) -> torch.Tensor:
        if self.itself:
            experts = getattr(completion, "routed_experts", None)  # Array (tokens - 1, number of layers, K).
            if experts is None:
                raise _problem("the engine returned no experts for a completion, but router_replay needs them")
            layers = [int(layer.layer_id) for layer in self._layers]
            return torch.from_numpy(experts[:, layers].astype("int16")).to(self.dtype)
        rows = self._seen.get(request, {}).pop(completion.index, None)
        if rows is None:
            why = "so that router_replay can't find the request's experts"
            raise _problem(f"the engine ran the request {request!r} under another name, {why}")
        return rows

    def drop(self, request: str) -> None:
        self._seen.pop(request, None)

    def forget(self) -> None:
        self._seen.clear()


def router_log(config: GRPOConfig, use: EngineUse) -> RouterLog | None:
    return RouterLog(config) if config.router_replay else None
