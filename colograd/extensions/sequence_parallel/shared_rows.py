"""Sharding strategies with sequence parallelism: each rank computes some of a packed row's tokens. Checks of models."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ...config import GRPOConfig
from ...parallel.shards import RankGroup, parts_of
from ...policy.logprobs import install, remove, steps_of
from ...policy.lora import unwrap
from ...policy.supported import ModelFeature, check_shared_rows
from ...runtime.sizes import num_experts
from ...sharding.strategy import ShardingStrategy
from ...sharding.zero import SharedGradients, SharedRows
from .forward import RowGroups, RowStep

if TYPE_CHECKING:
    from ...policy.loading import Policy


class SharedTokens(SharedRows):
    _reach_all = False

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> ShardingStrategy:
        parts = parts_of(unwrap(model))
        install(model, RowStep(RowGroups.of(config.layout, None if parts is None else parts.engine)))
        return super().for_run(model, config)

    @property
    def row(self) -> RankGroup:
        return self._groups.row

    @property
    def _groups(self) -> RowGroups:
        return next(step.groups for step in steps_of(unwrap(self.model)) if isinstance(step, RowStep))

    def share_frozen(self, model: torch.nn.Module) -> None:
        install(model, RowStep(self._groups))
        self._around(model)

    def close(self) -> None:
        super().close()
        remove(self.model, RowStep)

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Return whether the loss reaches the same parameters on all ranks of the row. A collective of these ranks. In
        a mixture an expert may get none of a rank's tokens. If gradient buckets were reduced during such a backward, a
        rank could wait for a bucket while other ranks wait for an exchange of heads. The check visits each node of the
        autograd graph. So it ends once all ranks have reached all parameters of a model without experts."""
        if self._reach_all:
            return True
        unreached = self.row.gather(_unreached(loss, self.model))
        self._reach_all = not any(unreached) and not num_experts(unwrap(self.model).config)
        return len({*unreached}) == 1

    def describe(self) -> str:
        size = self._groups.sequence.size
        rows = f"sequences: {size} ranks divide each row's tokens, and exchange heads in attention"
        return "; ".join(filter(None, (rows, super().describe())))


def _unreached(loss: torch.Tensor, model: torch.nn.Module) -> tuple[int, ...]:
    """Return the indices, among the trained parameters, of those that a loss's autograd graph doesn't contain."""
    nodes, visited, variables = [loss.grad_fn], set(), set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in visited:
            visited.add(node)
            variables.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return tuple(index for index, parameter in enumerate(trained) if id(parameter) not in variables)


def over_rows(way: type[ShardingStrategy], config: GRPOConfig) -> type[ShardingStrategy]:
    return rows_of(way) if config.sequence_parallel_size > 1 else way


@functools.cache
def rows_of(way: type[ShardingStrategy]) -> type[ShardingStrategy]:
    """Return a subclass of a sharding strategy that divides the tokens of each row among ranks."""
    # The backward of ZeRO-2 has its own handling of a failed rank.
    own: dict[str, Any] = {"backward": SharedGradients.backward} if issubclass(way, SharedGradients) else {}
    return type(f"RowsOf{way.__name__}", (SharedTokens, way), own)


class WholeRows(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        text = model.config.get_text_config()
        given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
        ways = [given, *(of_layers for of_layers in given.values() if isinstance(of_layers, dict))]
        kinds = [str(way.get("rope_type") or "") for way in ways]
        if text.model_type == "phimoe" or any(kind == "longrope" or "dynamic" in kind for kind in kinds):
            return f"{type(model).__name__} chooses its rotary frequencies by the row's last position"
        return ""


def check_policy(policy: Policy, config: GRPOConfig, samples: bool) -> Policy:
    check_shared_rows(policy.model, config.sequence_parallel_size, policy.why_padded)
    return policy


def warn_of_own_loss(trainer: Any) -> str:
    """Warn if a subclass overrides `compute_loss`, whose additional terms may count once per rank of a row."""
    if (size := trainer.args.sequence_parallel_size) > 1 and "compute_loss" in trainer.replaced:
        trainer.console.warn(
            f"loss: {size} ranks call compute_loss on each row; a term with a gradient that doesn't come from "
            f"policy_logprobs counts {size} times: divide it by {size}"
        )
    return ""
