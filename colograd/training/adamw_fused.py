"""AdamW as one compiled kernel per tensor, for float32 masters split into bfloat16 parameter and int16 remainder.

The kernel is the default on a GPU only. On a CPU, torch.compile doesn't vectorise int16, so the compiled loop takes
about five times as long as torch's fused AdamW.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..policy.sending import to_device_async

# AdamW step in place: (bfloat16 parameter, grad, exp_avg, exp_avg_sq, int16 remainder, constants) -> None. All tensors
# except the constants are contiguous and have equal shapes.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

TRIAL = 4096  # number of elements of the tensors that `make_kernel` tests a kernel with

logger = logging.getLogger(__name__)


def step_constants(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, device: torch.device
) -> torch.Tensor:
    """Compute the constants of an AdamW step as a tensor, because a new Python number would trigger a compilation.

    Returns:
        [7] float32, computed in float64: decay factor, 1 - beta1, beta2, 1 - beta2, root of the second moment's bias
        correction, eps, and the step size lr / (1 - beta1^step).
    """
    beta1, beta2 = betas
    root, size = (1 - beta2**step) ** 0.5, lr / (1 - beta1**step)
    numbers = [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, root, eps, size]
    return to_device_async(torch.tensor(numbers, dtype=torch.float32), device)


def fused_step(
    high: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    remainder: torch.Tensor,
    constants: torch.Tensor,
) -> None:
    """Take an AdamW step (arXiv 1711.05101) in place, on contiguous 1-D tensors of equal length.

    Args:
        high: int16, the bits of the bfloat16 parameter.
        grad: float32 or bfloat16 gradient.
        exp_avg, exp_avg_sq: float32 moments.
        remainder: int16. ``high`` and ``remainder`` together are the float32 master, see `adamw_split.join_master`.
        constants: learning rate, betas, eps and decay, as `step_constants` returns them.
    """
    decay, weight1, beta2, weight2, root, eps, size = constants.unbind()
    grad = grad.float()
    master = (high.int() * 65536 + remainder.int()).view(torch.float32)
    first = exp_avg + weight1 * (grad - exp_avg)
    second = exp_avg_sq * beta2 + weight2 * grad * grad
    bits = (master * decay - size * first / (second.sqrt() / root + eps)).view(torch.int32)
    rounded = (bits + 0x8000) >> 16
    high.copy_(rounded.to(torch.int16))
    remainder.copy_((bits - rounded * 65536).to(torch.int16))
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)


def make_kernel(device: torch.device) -> Kernel | None:
    """Compile the AdamW kernel for a device and test it on small tensors. If this fails, log a warning, return None."""
    try:
        kernel = compiled_step()
        parameter = torch.zeros(TRIAL, dtype=torch.bfloat16, device=device)
        remainder = torch.zeros(TRIAL, dtype=torch.int16, device=device)
        grad, exp_avg, exp_avg_sq = (torch.zeros(TRIAL, device=device) for _ in range(3))
        constants = step_constants(1, lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, device=device)
        kernel(parameter, grad, exp_avg, exp_avg_sq, remainder, constants)
    except Exception as error:  # e.g. no compiler: AdamW then runs uncompiled, which is slower
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("adamw_split: its step can't be compiled for %s (%s); it runs uncompiled", device, reason)
        return None
    return kernel


def compiled_step() -> Kernel:
    """Compile `fused_step` (AdamW in place) into one kernel for tensors of all lengths."""
    compiled = torch.compile(fused_step, dynamic=True, fullgraph=True)

    def run(parameter: torch.Tensor, *others: torch.Tensor) -> None:
        *state, constants = others
        # `.data` removes a view's reference to its base tensor. Otherwise Dynamo would compile for each base shape.
        compiled(parameter.view(-1).view(torch.int16).data, *(tensor.view(-1).data for tensor in state), constants)

    return run
