"""Muon (https://kellerjordan.github.io/posts/muon/) for the matrices of the policy's decoder layers.

Muon's steps are scaled to the root mean square of AdamW's steps (arXiv 2502.16982, eq. 4). So one learning rate serves
matrices and other parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim._muon import muon

from ...config import GRPOConfig
from ...policy.layers import decoder_layers
from ...policy.lora import is_adapted
from ...training.adamw_split import AdamWSplit, join_master, split_master

MOMENTUM = "momentum_buffer"
COEFFICIENTS, ITERATIONS, EPSILON = (3.4445, -4.775, 2.0315), 5, 1e-7  # torch's defaults for Muon's iteration.


def matrices_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained 2-D parameters of the decoder's layers. Stacked experts are 3-D, so they are left out."""
    inside = (parameter for layer in decoder_layers(model) for parameter in layer.parameters())
    return [parameter for parameter in inside if parameter.requires_grad and parameter.dim() == 2]


class MuonSplit(AdamWSplit):
    """Optimizer that runs torch's Muon on ``matrices``, and `AdamWSplit` on all other parameters. The state of a
    bfloat16 matrix has 6 bytes per element: a float32 momentum, and a 16-bit remainder of the float32 weight."""

    def __init__(
        self, params: Iterable[Any], matrices: Collection[torch.Tensor], momentum: float = 0.95, **given: Any
    ) -> None:
        self.matrices, self.momentum = frozenset(matrices), momentum
        super().__init__(params, **given)

    def _update(self, parameters: list[torch.Tensor], device: torch.device, group: dict[str, Any]) -> None:
        rest = [parameter for parameter in parameters if parameter not in self.matrices]
        super()._update(rest, device, group)
        for parameter in (p for p in parameters if p in self.matrices):
            state, grad = self._state(parameter), parameter.grad
            assert grad is not None
            remainder = state.get("remainder")
            master = parameter.detach() if remainder is None else join_master(parameter.detach(), remainder)
            muon(
                [master], [grad.float()], [state[MOMENTUM]], lr=group["lr"], weight_decay=group["weight_decay"],
                momentum=self.momentum, nesterov=True, ns_coefficients=COEFFICIENTS, ns_steps=ITERATIONS, eps=EPSILON,
                adjust_lr_fn="match_rms_adamw", has_complex=False,
            )  # fmt: skip
            if remainder is not None:
                high, low = split_master(master)
                parameter.detach().copy_(high)
                remainder.copy_(low)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self.matrices:
            return super()._state(parameter)
        state: dict[str, Any] = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.dtype == torch.bfloat16 and "remainder" not in state:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _load(self, parameter: torch.Tensor, saved: dict[str, Any]) -> None:
        if parameter not in self.matrices:
            super()._load(parameter, saved)
            return
        if MOMENTUM not in saved:
            raise ValueError(
                f"The checkpoint's optimizer state of a matrix has {', '.join(saved)}, but `optim: muon` needs "
                f"{MOMENTUM}: set `optim` as in the run that wrote the checkpoint."
            )
        for name, dtype in ((MOMENTUM, torch.float32), ("remainder", torch.int16)):
            if name in saved:  # In a float32 run, `join_remainders` adds a bfloat16 run's remainder to the weight.
                self.state[parameter][name] = saved[name].to(parameter.device, dtype)
        self._state(parameter)


def muon_of(args: GRPOConfig, model: torch.nn.Module) -> tuple[type[AdamWSplit], dict[str, Any]] | None:
    if args.optim != "muon":
        return None
    if is_adapted(model):
        raise ValueError(
            "optim is 'muon', which orthogonalises the update of a whole matrix, but this run trains an adapter, which "
            "has two factors of each matrix: set optim: adamw_split, or train the policy in full."
        )
    return MuonSplit, {"matrices": matrices_of(model)}
