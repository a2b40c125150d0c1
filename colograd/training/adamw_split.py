"""AdamW for bfloat16 parameters with an exact float32 master and float32 gradients.

A bfloat16 weight keeps 8 bits of precision: with RL's learning rates (1e-6) nearly every update would round to nothing.
The master is therefore kept as *bfloat16 parameter + 16-bit remainder*. Together they are the float32 value bit for
bit, with two extra bytes instead of four. (TransformerEngine's FusedAdam has the same idea: "parameter remainders".)
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
from ..parallel.gradients import in_buckets
from ..runtime import registry
from ..sharding.strategy import Owned
from .adamw_fused import Kernel, make_kernel, step_constants

# Elements of float32 masters that exist at one time. On a CPU a piece and torch's temporaries stay in the cache
# (whole tensors of SmolLM2-135M took 2.5 times as long); a GPU wants few, large kernels.
CPU_PIECE = 2**18
GPU_PIECE = 2**24
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {**dict.fromkeys(MOMENTS, torch.float32), "remainder": torch.int16}
SETTINGS = ("lr", "betas", "eps", "weight_decay")

logger = logging.getLogger(__name__)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into bfloat16 (rounded to nearest, ties away from zero) and an int16 remainder, without loss. Ties
    go away from zero, not to even, because then the remainder always fits 16 bits. `join_master` is the inverse."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000).bitwise_right_shift_(16)
    parameter = high.to(torch.int16).view(torch.bfloat16)
    remainder = torch.sub(bits, high.bitwise_left_shift_(16)).to(torch.int16)
    return parameter, remainder


def join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 master of a bfloat16 parameter and its int16 remainder, as a new tensor."""
    bits = parameter.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


class Piece(NamedTuple):
    """A parameter with its gradient and optimizer state, or the same slice of each tensor."""

    parameter: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    remainder: torch.Tensor | None  # None for a float32 parameter
    step: torch.Tensor  # () float32, step count of the whole parameter

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self[:5] if tensor is not None]

    def can_be_fused(self) -> bool:
        """Return whether the compiled kernel can take this piece. One element would be compiled for its size only."""
        return self.remainder is not None and self.parameter.numel() > 1 and self.is_flat()

    def is_flat(self) -> bool:
        """Return whether 1-D views of all tensors name the same elements in the same order."""
        return all(tensor.is_contiguous() for tensor in self.tensors())

    def cut(self, size: int) -> Iterator[Piece]:
        """Yield slices of at most ``size`` elements as 1-D views, or the piece itself if it has no such views."""
        if not self.is_flat():
            yield self
            return
        for parts in zip(*(tensor.view(-1).split(size) for tensor in self.tensors()), strict=True):
            parameter, grad, exp_avg, exp_avg_sq, *remainder = parts
            yield Piece(parameter, grad, exp_avg, exp_avg_sq, remainder[0] if remainder else None, self.step)


Step = Callable[[Piece], None]
Steps = Callable[[Sequence[Piece]], None]


class AdamWSplit(torch.optim.Optimizer):
    """AdamW (decoupled decay, arXiv 1711.05101) on a split float32 master.

    Each step is torch's own AdamW on the joined master, piece by piece (`CPU_PIECE`, `GPU_PIECE`), so a float32 copy of
    the whole model never exists. On a GPU the pieces of a bucket go through torch's multi-tensor kernels. The compiled
    step is one pass over each tensor, with equal results up to rounding. Parameters are written in place, so they may
    be views of larger tensors. State per parameter: int16 remainder, two float32 moments (10 bytes besides the
    parameter), and a step count per tensor. Float32 parameters in the same model are updated by plain AdamW. Gradients
    are float32 or bfloat16.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`; lr, betas, eps and weight_decay have torch's meaning.
        compiled: use one fused kernel per tensor (see `adamw_fused`). None: on a GPU with Triton. If compiling fails,
            a line is logged and torch's steps are taken.
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if self._gradient(p) is not None and p.numel()]
            for device, members in itertools.groupby(parameters, key=lambda parameter: parameter.device):
                self._update(list(members), device, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], device: torch.device, group: dict[str, Any]) -> None:
        kernel, wholes = self._kernel(device), [self._whole(parameter) for parameter in parameters]
        fused = [whole for whole in wholes if kernel is not None and whole.can_be_fused()]
        plain = [whole for whole in wholes if kernel is None or not whole.can_be_fused()]
        for whole in fused:
            whole.step.add_(1)
        constants = {
            count: step_constants(count, **{name: group[name] for name in SETTINGS}, device=device)
            for count in {int(whole.step) for whole in fused}
        }

        def in_one_pass(piece: Piece) -> None:
            assert kernel is not None and piece.remainder is not None
            kernel(*piece[:4], piece.remainder, constants[int(piece.step)])

        def by_torch(bucket: Sequence[Piece]) -> None:
            _torch_step(bucket, group, foreach=device.type == "cuda")

        self._run(device, (fused, in_one_pass), (plain, by_torch))
        for whole in plain:
            whole.step.add_(1)

    def _run(self, device: torch.device, fused: tuple[list[Piece], Step], plain: tuple[list[Piece], Steps]) -> None:
        """Update whole parameters: the first ones one by one, the others cut, in buckets of several pieces."""
        for whole in fused[0]:
            fused[1](whole)
        size = GPU_PIECE if device.type == "cuda" else CPU_PIECE
        pieces = itertools.chain.from_iterable(whole.cut(size) for whole in plain[0])
        for bucket in in_buckets(pieces, size, lambda piece: piece.parameter.numel()):
            plain[1](bucket)

    def _whole(self, parameter: torch.Tensor) -> Piece:
        state, grad = self._state(parameter), self._gradient(parameter)
        assert grad is not None
        exp_avg, exp_avg_sq = (state[name] for name in MOMENTS)
        return Piece(parameter.detach(), grad, exp_avg, exp_avg_sq, state.get("remainder"), state["step"])

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

    def _kernel(self, device: torch.device) -> Kernel | None:
        if device not in self._kernels:
            wanted = device.type == "cuda" and has_triton() if self.compiled is None else self.compiled
            self._kernels[device] = make_kernel(device) if wanted else None
        return self._kernels[device]

    @torch.no_grad()
    def set_master(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Set a bfloat16 parameter to ``master`` (float32, the parameter's shape) and keep the moments."""
        high, remainder = split_master(master.to(parameter.device))
        parameter.copy_(high)
        self._state(parameter)["remainder"].copy_(remainder)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with moments in float32 and remainders in int16 (torch casts to the parameter's dtype). A state
        of torch's AdamW is accepted too. Settings that this class lacks (amsgrad, fused, ...) are dropped."""
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
                f"The saved optimizer state has {', '.join(saved)}, but adamw_split needs {', '.join(sorted(missing))} "
                "too: resume with the optim that the checkpoint was written with."
            )
        state = self.state[parameter]
        state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu")
        for name in DTYPES:
            if name in saved:
                state[name] = self._loaded(parameter, name, saved[name])
        self._state(parameter)

    def _loaded(self, parameter: torch.Tensor, name: str, saved: torch.Tensor) -> torch.Tensor:
        return saved.to(parameter.device, DTYPES[name])


def _torch_step(bucket: Sequence[Piece], group: dict[str, Any], foreach: bool) -> None:
    """Run torch's AdamW on the bucket's masters. Step counts don't change, because a tensor's pieces share one."""
    masters = [p.parameter if p.remainder is None else join_master(p.parameter, p.remainder) for p in bucket]
    adamw(
        masters,
        [piece.grad.float() for piece in bucket],
        [piece.exp_avg for piece in bucket],
        [piece.exp_avg_sq for piece in bucket],
        [],
        [piece.step.clone() for piece in bucket],
        foreach=foreach,
        fused=False,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for piece, master in zip(bucket, masters, strict=True):
        if piece.remainder is not None:
            high, remainder = split_master(master)
            piece.parameter.copy_(high)
            piece.remainder.copy_(remainder)


# -- checkpoints of float32 training for split training, and the reverse


def adopt_masters(optimizer: AdamWSplit, owned: Iterable[Owned], masters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give the optimizer's bfloat16 parameters the exact values of a float32 model. Call it after model and state are
    loaded: the model then holds these values rounded, with ties to even."""
    wanted: dict[str, list[Owned]] = {}
    for piece in owned:
        if piece.part.dtype == torch.bfloat16:
            wanted.setdefault(piece.name, []).append(piece)
    for name, master in masters:
        for piece in wanted.get(name, ()):
            optimizer.set_master(piece.part, piece.of(master))


@torch.no_grad()
def join_remainders(optimizer: torch.optim.Optimizer) -> None:
    """Remove the remainders from an optimizer that loaded the state of `AdamWSplit`. Float32 parameters, with the saved
    bfloat16 values, become the exact masters. The state loses ``remainder``, and the groups get back the settings that
    AdamWSplit's groups don't have (``fused``, ``foreach``, ...)."""
    if isinstance(optimizer, AdamWSplit):
        foreign = [p for p in optimizer.state if p.dtype != torch.bfloat16]
    else:
        foreign = list(optimizer.state)
    found = [p for p in foreign if "remainder" in optimizer.state[p]]
    for parameter in found:
        remainder = optimizer.state[parameter].pop("remainder")  # torch may have cast it to float32, which is exact
        if parameter.dtype == torch.float32:
            parameter.copy_(join_master(parameter.bfloat16(), remainder.to(torch.int16)))
    if not found or isinstance(optimizer, AdamWSplit):
        return
    for group in optimizer.param_groups:
        group.update({k: v for k, v in optimizer.defaults.items() if k not in SETTINGS})
        if group.get("fused") or group.get("capturable"):
            for parameter in set(group["params"]).intersection(found):
                optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].to(parameter.device)


# -- for the trainer


def accumulate_in_float32(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Let gradients of bfloat16 parameters accumulate in float32.

    Returns:
        False if this torch can't (before 2.10). Gradients then accumulate in the parameters' dtype.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            if not hasattr(parameter, "grad_dtype"):
                return False
            parameter.grad_dtype = torch.float32
    return True


def optimizer_of(args: GRPOConfig, model: torch.nn.Module) -> tuple[Any, dict[str, Any]] | None:
    """Return class and arguments of an optimizer of ours; None: transformers makes the optimizer. Extensions offer
    functions at the seam "optimizer". Each takes the same two arguments, and returns a class derived from `AdamWSplit`
    with further arguments, or None."""
    if args.optim not in KEEPS_MASTER:
        return None
    text = (args.optim_args or "").replace(" ", "").lower()
    if text not in ("", "compiled=true", "compiled=false"):
        raise ValueError(
            f"optim_args is {args.optim_args!r}, but {args.optim} takes `compiled=true` or `compiled=false` only: "
            "remove the rest (learning rate, betas, epsilon and decay are keys of their own)."
        )
    compiled = text == "compiled=true" if text else None
    if args.on_cpu and compiled:
        logger.warning("optim_args: compiled=true has no effect on a CPU, where torch's own step is faster")
        compiled = None
    offers = (offer(args, model) for offer in registry.hooks("optimizer"))
    kind, further = next(filter(None, offers), (AdamWSplit, {}))
    return kind, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "compiled": compiled,
        **further,
    }
