"""The reference policy of the KL term: where it lives, how it follows. One of the `second_models`.

    the policy is trained whole         a frozen copy of it, made when it is in its place and before it is trained
    a new adapter on a model            the model with the adapter disabled: nothing is kept
    an adapter that came with the       its initial values, put in the place of the trained ones while the reference
    model (or trains biases of it)      is asked

Its log-probabilities come from the same packed rows, temperature and kernels as the policy's, so that the divergence of
the first step is exactly 0; of compiled layers, which have other kernels where no gradient is wanted, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from ..config import GRPOConfig
from .frozen import FrozenModel, offloads, values_in_place
from .loading import Policy
from .logprobs import evaluation_mode
from .lora import base_name

FILE = "reference.safetensors"  # in a checkpoint, where the reference follows the policy


class FrozenCopy(FrozenModel):
    """A second model: the weights of the policy (``model``) as they are now, in memory of its own, equal on all ranks.

    Args:
        offload: keep the weights in host memory, pinned where there is a GPU, but while they are asked.
        follows: how it will be mixed with the policy, so that a checkpoint has to hold it; empty: it won't.
        place: where it is made; default: where it will be.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, offload: bool, follows: str = "",
        place: torch.device | None = None,
    ) -> None:  # fmt: skip
        place = torch.device("cpu") if offload else place or device
        super().__init__(_frozen_copy(model, place, pin=offload and device.type == "cuda"), device, offload)
        self.follows = follows
        self._changes = bool(follows)

    def describe(self) -> str:
        said = f"reference: a frozen copy of the policy {self.where()}"
        return f"{said}, {self.follows}" if self.follows else said

    @torch.no_grad()
    def mix(self, policy: torch.nn.Module, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv 2404.09656, eq. 5)."""
        for own, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            own.copy_(torch.lerp(own.to(theirs.device), theirs.detach(), alpha))

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None:
        """Write the weights into a checkpoint, if they may differ from what the next start finds."""
        if self._changes:
            weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            if write is save_file:
                weights = {name: value.cpu() for name, value in weights.items()}
            write(weights, str(Path(checkpoint) / FILE))

    @torch.no_grad()
    def load(self, checkpoint: str | Path) -> None:
        """Take a checkpoint's weights, if it has some."""
        path = Path(checkpoint) / FILE
        if not path.is_file():
            return
        self._changes = True
        with safe_open(path, framework="pt", device="cpu") as weights:
            for name, parameter in self.model.named_parameters():
                if name not in weights.keys() or weights.get_slice(name).get_shape() != list(parameter.shape):  # noqa: SIM118
                    raise ValueError(f"{str(path)!r} has no {name} of shape {list(parameter.shape)}.")
                parameter.copy_(weights.get_tensor(name))


class _OfAdapter:
    """Both kinds that borrow the policy's model: nothing to save, as the next start finds the same again."""

    of_policy = True
    head = None

    def __init__(self, model: Any) -> None:
        self.model = model

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None:
        pass

    def load(self, checkpoint: str | Path) -> None:
        pass


class WithoutAdapter(_OfAdapter):
    """The model below a new adapter (a PeftModel's)."""

    def describe(self) -> str:
        return "reference: the policy with its adapter disabled, no second model"

    @contextmanager
    def present(self) -> Iterator[Any]:
        with evaluation_mode(self.model), self.model.disable_adapter():
            yield self.model


class InitialAdapter(_OfAdapter):
    """A PeftModel as it was given: copies of all that is trained, put in place while the reference is asked."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.initial = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]

    def describe(self) -> str:
        nbytes = sum(values.nbytes for _, values in self.initial)
        return f"reference: the policy with its adapter's initial values, {nbytes / 2**20:,.1f} MiB of copies"

    @contextmanager
    def present(self) -> Iterator[Any]:
        with values_in_place(self.initial), evaluation_mode(self.model):
            yield self.model


def _frozen_copy(model: torch.nn.Module, device: torch.device, pin: bool) -> torch.nn.Module:
    """The model once more, with parameters of its own on ``device`` and buffers where they are; nothing is trained."""
    # `deepcopy` finds each tensor's copy made, so that none exists twice on the way.
    made: dict[int, Any] = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    for parameter in model.parameters():
        place = torch.empty_like(parameter, device=device, pin_memory=pin)
        made[id(parameter)] = torch.nn.Parameter(place.copy_(parameter.detach()), requires_grad=False)
    return copy.deepcopy(model, made).eval()


def check_reference(config: GRPOConfig, policy: Policy) -> None:
    """Raise a ValueError if the reference is to follow, and there is no second model that could."""
    if config.sync_ref_model and config.cuts_weights:
        raise ValueError(
            "sync_ref_model is true and sharding is 'fsdp', but a rank has a part of the policy only and can't mix it "
            "into the reference: set sharding: gradients, or sync_ref_model: false."
        )
    if config.sync_ref_model and policy.adapter is not None:
        raise ValueError(
            "sync_ref_model is true, but the policy trains an adapter, whose reference is the model below it: there is "
            "no second model to mix. Set sync_ref_model: false, or train the whole model."
        )


def _keeps_no_copy(policy: Policy) -> bool:
    """Whether disabling the adapter gives the reference: it is new, and nothing below it is trained."""
    trained = (name for name, parameter in policy.model.named_parameters() if parameter.requires_grad)
    return policy.new_adapter and all(base_name(name) is None for name in trained)


def reference_bytes(config: GRPOConfig, policy: Policy) -> int:
    """What the reference will hold on the policy's device, before it is cut. Offloaded weights come there while there
    are no gradients, in whose place they fit."""
    parameters = [*policy.model.parameters()]
    if policy.adapter is None:
        return 0 if offloads(config, config.offload_reference) else sum(parameter.nbytes for parameter in parameters)
    return 0 if _keeps_no_copy(policy) else sum(p.nbytes for p in parameters if p.requires_grad)


def reference_of(config: GRPOConfig, policy: Policy) -> FrozenCopy | WithoutAdapter | InitialAdapter:
    """The reference of a policy that hasn't been trained yet and is in its place."""
    if policy.adapter is not None:
        return WithoutAdapter(policy.model) if _keeps_no_copy(policy) else InitialAdapter(policy.model)
    alpha, steps = config.ref_model_mixup_alpha, config.ref_model_sync_steps
    follows = f"mixed with {alpha:g} of it every {steps} steps" if config.sync_ref_model else ""
    waiting = torch.device("cpu") if config.cuts_weights else None  # until it is cut like the policy
    return FrozenCopy(policy.model, config.device, offloads(config, config.offload_reference), follows, waiting)


class FollowPolicy(TrainerCallback):
    """Mixes the reference with the policy every so many steps, on each rank alike."""

    def __init__(self, reference: FrozenCopy, policy: torch.nn.Module) -> None:
        self.reference, self.policy = reference, policy

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self.reference.mix(self.policy, args.ref_model_mixup_alpha)
