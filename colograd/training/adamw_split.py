"""AdamW for bfloat16 parameters with exact float32 master weights.

A bfloat16 weight has 8 bits of precision. With RL's learning rates (1e-6) rounding would erase nearly every update. A
float32 master weight is therefore stored as bfloat16 parameter and int16 remainder: two additional bytes per weight,
not four. TransformerEngine's FusedAdam calls this "parameter remainders".
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw
from torch.utils._triton import has_triton

from ..config import GRPOConfig
from ..config.policy import KEEPS_MASTER
from ..parallel.shards import in_buckets
from ..policy.sending import to_device_async
from ..runtime import registry
from ..sharding.strategy import Owned

# Number of master weights in one call of torch's AdamW. On a CPU torch's temporaries then fit into the cache: whole
# tensors of SmolLM2-135M took 2.5 times as long. A GPU is faster with few, large kernels.
CPU_PIECE = 2**18
GPU_PIECE = 2**24
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {**dict.fromkeys(MOMENTS, torch.float32), "remainder": torch.int16}
SETTINGS = ("lr", "betas", "eps", "weight_decay")
# Function that takes one AdamW step in place. Its arguments: bfloat16 parameter, gradient, first and second moment,
# int16 remainder, and the result of `step_constants`.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

logger = logging.getLogger(__name__)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a float32 tensor without loss into a bfloat16 tensor and an int16 remainder.

    The bfloat16 values are rounded to nearest, with ties away from zero. With ties to even, a remainder could be 2^15,
    which doesn't fit into int16."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000).bitwise_right_shift_(16)
    parameter = high.to(torch.int16).view(torch.bfloat16)
    remainder = torch.sub(bits, high.bitwise_left_shift_(16)).to(torch.int16)
    return parameter, remainder


def join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    bits = parameter.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


class Piece(NamedTuple):
    """A parameter with its gradient and AdamW state, or the same slice of each of these tensors."""

    parameter: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None  # `remainder` is None for a float32 parameter.
    step: torch.Tensor  # `step` is the number of optimizer steps, float32 (), of the whole parameter.

    def is_flat(self) -> bool:
        return all(tensor.is_contiguous() for tensor in self[:5] if tensor is not None)

    def cut(self, size: int) -> Iterator[Piece]:
        if not self.is_flat():
            yield self
            return
        for parts in zip(*(tensor.view(-1).split(size) for tensor in self[:5] if tensor is not None), strict=True):
            parameter, grad, exp_avg, exp_avg_sq, *remainder = parts
            yield Piece(parameter, grad, exp_avg, exp_avg_sq, remainder[0] if remainder else None, self.step)


Step = Callable[[Piece], None]
Steps = Callable[[Sequence[Piece]], None]


class AdamWSplit(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) on float32 master weights that are split into bfloat16 parameter and int16 remainder.

    Parameters are written in place, and may be views of larger tensors. The state of a bfloat16 parameter is a step
    count and 10 bytes per weight: an int16 remainder and two float32 moments. Gradients are float32 or bfloat16.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`; lr, betas, eps and weight_decay have torch's meaning.
        compiled: whether to use one fused kernel per tensor (`fused_step`). None means only on a GPU with Triton.
            On a CPU torch.compile doesn't vectorise int16: a step took five times as long as torch's fused AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compiled: bool | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.compiled = compiled
        self._kernels: dict[torch.device, Kernel | None] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if self._gradient(p) is not None and p.numel()]
            for device, members in itertools.groupby(parameters, key=lambda parameter: parameter.device):
                self._update(list(members), device, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], device: torch.device, group: dict[str, Any]) -> None:
        if device not in self._kernels:
            compiles = device.type == "cuda" and has_triton() if self.compiled is None else self.compiled
            self._kernels[device] = make_kernel(device) if compiles else None
        kernel, fused, plain = self._kernels[device], list[Piece](), list[Piece]()
        for parameter in parameters:
            state, grad = self._state(parameter), self._gradient(parameter)
            assert grad is not None
            exp_avg, exp_avg_sq = (state[name] for name in MOMENTS)
            whole = Piece(parameter.detach(), grad, exp_avg, exp_avg_sq, state.get("remainder"), state["step"])
            # One-element tensors use torch's AdamW, because torch.compile would compile a second kernel for them.
            if kernel is not None and whole.remainder is not None and parameter.numel() > 1 and whole.is_flat():
                fused.append(whole)
                whole.step.add_(1)
            else:
                plain.append(whole)
        constants = {
            count: step_constants(count, **{name: group[name] for name in SETTINGS}, device=device)
            for count in {int(whole.step) for whole in fused}
        }

        def in_one_pass(piece: Piece) -> None:
            assert kernel is not None and piece.remainder is not None
            kernel(*piece[:4], piece.remainder, constants[int(piece.step)])

        def by_torch(bucket: Sequence[Piece]) -> None:
            masters = [p.parameter if p.remainder is None else join_master(p.parameter, p.remainder) for p in bucket]
            # torch's AdamW increments step counts in place. The slices of a tensor share a count, so each gets a copy.
            grads, steps = [piece.grad.float() for piece in bucket], [piece.step.clone() for piece in bucket]
            exp_avgs, exp_avg_sqs = [piece.exp_avg for piece in bucket], [piece.exp_avg_sq for piece in bucket]
            adamw(
                masters, grads, exp_avgs, exp_avg_sqs, [], steps, foreach=device.type == "cuda", fused=False,
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            for piece, master in zip(bucket, masters, strict=True):
                if piece.remainder is not None:
                    high, remainder = split_master(master)
                    piece.parameter.copy_(high)
                    piece.remainder.copy_(remainder)

        self._run(device, (fused, in_one_pass), (plain, by_torch))
        for whole in plain:
            whole.step.add_(1)

    def _run(self, device: torch.device, fused: tuple[list[Piece], Step], plain: tuple[list[Piece], Steps]) -> None:
        for whole in fused[0]:
            fused[1](whole)
        size = GPU_PIECE if device.type == "cuda" else CPU_PIECE
        pieces = itertools.chain.from_iterable(whole.cut(size) for whole in plain[0])
        for bucket in in_buckets(pieces, size, lambda piece: piece.parameter.numel()):
            plain[1](bucket)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                state[name] = self._place(parameter, name).zero_()
        if parameter.dtype == torch.bfloat16 and "remainder" not in state:
            state["remainder"] = self._place(parameter, "remainder").zero_()
        return state

    def _place(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return torch.empty_like(parameter, dtype=DTYPES[name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's AdamW. Moments become float32, and remainders int16.

        `torch.optim.Optimizer.load_state_dict` would cast both to the parameter's dtype."""
        known = {*self.param_groups[0], "initial_lr"}
        groups = [{k: v for k, v in group.items() if k in known} for group in state_dict["param_groups"]]
        super().load_state_dict({"state": {}, "param_groups": groups})
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in groups for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if saved := state_dict["state"].get(index):
                self._load(parameter, saved)

    def _load(self, parameter: torch.Tensor, saved: dict[str, Any]) -> None:
        if missing := {"step", *MOMENTS} - saved.keys():
            raise ValueError(
                f"The saved optimizer state ({', '.join(saved)}) lacks values that `optim: adamw_split` needs: "
                f"{', '.join(sorted(missing))}. Resume with the `optim` that the checkpoint was written with."
            )
        state = self.state[parameter]
        state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu")
        for name in DTYPES:
            if name in saved:
                state[name] = self._loaded(parameter, name, saved[name])
        self._state(parameter)

    def _loaded(self, parameter: torch.Tensor, name: str, saved: torch.Tensor) -> torch.Tensor:
        return saved.to(parameter.device, DTYPES[name])


def step_constants(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, device: torch.device
) -> torch.Tensor:
    """Compute the constants of an AdamW step for `fused_step`.

    Returns:
        [7] float32: the decay factor 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2**step), eps,
        and the step size lr / (1 - beta1**step).
    """
    beta1, beta2 = betas
    root, size = (1 - beta2**step) ** 0.5, lr / (1 - beta1**step)
    numbers = [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, root, eps, size]
    return to_device_async(torch.tensor(numbers, dtype=torch.float32), device)


def fused_step(
    high: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, remainder: torch.Tensor,
    constants: torch.Tensor,
) -> None:  # fmt: skip
    """Take an AdamW step (arXiv 1711.05101) in place, on contiguous 1-D tensors of equal length.

    Args:
        high: int16, the bits of the bfloat16 parameter.
        remainder: int16; `join_master` joins it with ``high`` to the float32 master weight.
        constants: [7] float32, the result of `step_constants`.
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
    try:
        kernel = compiled_step()
        parameter, remainder = (torch.zeros(4096, dtype=each, device=device) for each in (torch.bfloat16, torch.int16))
        grad, exp_avg, exp_avg_sq = (torch.zeros(4096, device=device) for _ in range(3))
        constants = step_constants(1, lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, device=device)
        kernel(parameter, grad, exp_avg, exp_avg_sq, remainder, constants)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("adamw_split: its step can't be compiled for %s (%s); it runs uncompiled", device, reason)
        return None
    return kernel


def compiled_step() -> Kernel:
    compiled = torch.compile(fused_step, dynamic=True, fullgraph=True)

    def run(parameter: torch.Tensor, *others: torch.Tensor) -> None:
        *state, constants = others
        # `.data` of a view has no reference to the base tensor. Dynamo may recompile for a new shape of a base tensor.
        compiled(parameter.view(-1).view(torch.int16).data, *(tensor.view(-1).data for tensor in state), constants)

    return run


@torch.no_grad()
def adopt_masters(optimizer: AdamWSplit, owned: Iterable[Owned], masters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Set bfloat16 parameters and their remainders to the float32 weights of a checkpoint."""
    pieces: dict[str, list[Owned]] = {}
    for piece in owned:
        if piece.part.dtype == torch.bfloat16:
            pieces.setdefault(piece.name, []).append(piece)
    for name, master in masters:
        for piece in pieces.get(name, ()):
            high, remainder = split_master(piece.of(master).to(piece.part.device))
            piece.part.copy_(high)
            optimizer._state(piece.part)["remainder"].copy_(remainder)


@torch.no_grad()
def join_remainders(optimizer: torch.optim.Optimizer) -> None:
    """Remove int16 remainders from loaded state, for parameters that ``optimizer`` doesn't split.

    A remainder of a float32 parameter is added to the parameter."""
    splits = isinstance(optimizer, AdamWSplit)
    saved_split = [
        parameter
        for parameter, state in optimizer.state.items()
        if "remainder" in state and not (splits and parameter.dtype == torch.bfloat16)
    ]
    for parameter in saved_split:
        remainder = optimizer.state[parameter].pop("remainder")  # torch may load remainders as float32, so cast below
        if parameter.dtype == torch.float32:
            parameter.copy_(join_master(parameter.bfloat16(), remainder.to(torch.int16)))
    if not saved_split or splits:
        return
    for group in optimizer.param_groups:
        group.update({k: v for k, v in optimizer.defaults.items() if k not in SETTINGS})
        if group.get("fused") or group.get("capturable"):
            for parameter in set(group["params"]).intersection(saved_split):
                optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].to(parameter.device)


def accumulate_in_float32(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32


def optimizer_of(args: GRPOConfig, model: torch.nn.Module) -> tuple[Any, dict[str, Any]] | None:
    """Return class and keyword arguments of the optimizer, or None if transformers chooses them.

    Call hooks ``optimizer(args, model)`` until one returns a class to replace `AdamWSplit`, and keyword arguments."""
    if args.optim not in KEEPS_MASTER:
        return None
    choices: dict[str, bool | None] = {"": None, "compiled=true": True, "compiled=false": False}
    if (text := (args.optim_args or "").replace(" ", "").lower()) not in choices:
        raise ValueError(
            f"`optim_args` is {args.optim_args!r}, which `optim: {args.optim}` doesn't know: set `optim_args` to "
            "`compiled=true` or `compiled=false`, or remove it."
        )
    compiled = choices[text]
    if args.on_cpu and compiled:
        logger.warning("optim_args: compiled=true has no effect on a CPU, where torch's own step is faster")
        compiled = None
    offers = (offer(args, model) for offer in registry.hooks("optimizer"))
    kind, further = next(filter(None, offers), (AdamWSplit, {}))
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return kind, {**settings, "compiled": compiled, **further}
