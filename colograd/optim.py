"""AdamW for bfloat16 parameters with an exact float32 master, and the float32 gradients it wants.

A bfloat16 weight keeps 8 bits of precision: with RL's learning rates (1e-6) nearly every update would round to nothing.
The master is therefore kept as *bfloat16 parameter + 16-bit remainder*, which together are the float32 value bit for
bit: two extra bytes instead of four. (The idea is that of "parameter remainders" in TransformerEngine's FusedAdam.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from .config import GRPOConfig


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (bfloat16 rounded to nearest, ties away from zero; int16 remainder). Exact: see `join_master`.

    Ties go away from zero and not to even, because then the remainder always fits 16 bits.
    """
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    remainder = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master of a bfloat16 parameter and its int16 remainder, as a new tensor."""
    high = parameter.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


class AdamWSplit(torch.optim.Optimizer):
    """AdamW (decoupled decay, arXiv 1711.05101) on a split float32 master.

    Each step is torch's own AdamW on the joined master, one parameter at a time, so at no moment is there a float32
    copy of the whole model. State per parameter: int16 remainder, two float32 moments (10 bytes besides the parameter).
    Float32 parameters in the same model are updated by plain AdamW.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`; lr, betas, eps, weight_decay likewise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        split = parameter.dtype == torch.bfloat16
        master = join_master(parameter, state["remainder"]) if split else parameter
        adamw(
            [master],
            [parameter.grad.float()],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if split:
            high, remainder = split_master(master)
            parameter.copy_(high)
            state["remainder"].copy_(remainder)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but the state keeps its own dtypes (torch casts it to the parameter's, which would round "
        "it)."""
        kept = {index: dict(state) for index, state in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in kept.get(index, {}).items():
                device = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = value.to(device) if isinstance(value, torch.Tensor) else value


def accumulate_in_float32(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Let gradients of bfloat16 parameters accumulate in float32.

    Returns:
        False where this torch can't (before 2.10): gradients then accumulate in the parameters' dtype.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            if not hasattr(parameter, "grad_dtype"):
                return False
            parameter.grad_dtype = torch.float32
    return True


def optimizer_class(args: GRPOConfig) -> tuple[Any, dict[str, Any]] | None:
    """AdamWSplit where it is asked for; None: transformers makes the optimizer that ``optim`` names."""
    if args.optim != "adamw_split":
        return None
    return AdamWSplit, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
