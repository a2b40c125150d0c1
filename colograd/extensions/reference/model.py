"""Reference policy of the KL term. It depends on the weights that the run trains:

a model without an adapter             a frozen copy of the model, made before training
a new adapter                          the policy with the adapter disabled
an adapter that was loaded, or an      the policy with the initial values of all trained weights. They replace the
adapter and biases of the base model   trained values while the reference runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from ...config import GRPOConfig
from ...policy.loading import Policy
from ...policy.logprobs import evaluation_mode
from ...policy.lora import base_name
from ...policy.second_models import FrozenModel, Kind, SecondModel, offloads, values_in_place

FILE = "reference.safetensors"


class FrozenCopy(FrozenModel, TrainerCallback):
    """Frozen copy of the policy.

    Args:
        offload: whether the copy's weights are in host memory while the copy doesn't compute.
        follows: text for the log that says how the policy is mixed into the copy. "": the copy stays constant.
        place: device to make the copy on if ``offload`` is false. None: the device that the copy computes on.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, offload: bool, follows: str = "",
        place: torch.device | None = None,
    ) -> None:  # fmt: skip
        place, pin = torch.device("cpu") if offload else place or device, offload and device.type == "cuda"
        # Copy parameters to `place` first: `deepcopy` would copy them on the policy's device.
        made: dict[int, Any] = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        for parameter in model.parameters():
            values = torch.empty_like(parameter, device=place, pin_memory=pin).copy_(parameter.detach())
            made[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
        super().__init__(copy.deepcopy(model, made).eval(), device, offload)
        self.follows = follows
        self._changes = bool(follows)

    def describe(self) -> str:
        return ", ".join(filter(None, (f"reference: a frozen copy of the policy {self.where()}", self.follows)))

    def callback(self, policy: torch.nn.Module) -> TrainerCallback | None:
        self._policy = policy
        return self if self.follows else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self.mix(self._policy, args.ref_model_mixup_alpha)

    @torch.no_grad()
    def mix(self, policy: torch.nn.Module, alpha: float) -> None:
        """Set reference = alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv 2404.09656, eq. 5)."""
        for reference, trained in zip(self.model.parameters(), policy.parameters(), strict=True):
            reference.copy_(torch.lerp(reference.to(trained.device), trained.detach(), alpha))

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None:
        if self._changes:  # A copy without changes isn't saved, as a resumed run makes it again.
            weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            if write is save_file:
                weights = {name: value.cpu() for name, value in weights.items()}
            write(weights, str(Path(checkpoint) / FILE))

    @torch.no_grad()
    def load(self, checkpoint: str | Path) -> None:
        path = Path(checkpoint) / FILE
        if not path.is_file():
            return
        self._changes = True
        with safe_open(path, framework="pt", device="cpu") as weights:
            for name, parameter in self.model.named_parameters():
                if name not in weights.keys() or weights.get_slice(name).get_shape() != list(parameter.shape):  # noqa: SIM118
                    raise ValueError(
                        f"{str(path)!r} has no {name} of shape {list(parameter.shape)}, but the policy has: resume "
                        "from a checkpoint of the same model."
                    )
                parameter.copy_(weights.get_tensor(name))


class OfAdapter(SecondModel):
    """Reference policy of a run with an adapter: the policy without the adapter, or with the adapter's initial values.

    Checkpoints don't store this reference. A resumed run makes it again, before the checkpoint's weights are loaded."""

    def __init__(self, model: Any, is_new: bool) -> None:
        self.model = model
        trained = () if is_new else (p for p in model.parameters() if p.requires_grad)
        self.initial = [(parameter, parameter.detach().clone()) for parameter in trained]

    def describe(self) -> str:
        if not self.initial:
            return "reference: the policy with its adapter disabled, no second model"
        nbytes = sum(values.nbytes for _, values in self.initial)
        return f"reference: the policy with its adapter's initial values, {nbytes / 2**20:,.1f} MiB of copies"

    @contextmanager
    def present(self) -> Iterator[Any]:
        disabled = nullcontext() if self.initial else self.model.disable_adapter()
        with values_in_place(self.initial), evaluation_mode(self.model), disabled:
            yield self.model


def check_reference(policy: Policy, config: GRPOConfig, samples: bool = True) -> Policy:
    if config.sync_ref_model and config.cuts_weights:
        raise ValueError(
            "sync_ref_model is true and sharding is 'fsdp', but this version can't mix an FSDP-sharded policy into the "
            "reference: set `sharding: gradients` or `sync_ref_model: false`."
        )
    if config.sync_ref_model and policy.adapter is not None:
        raise ValueError(
            "sync_ref_model is true, but the policy trains an adapter. The reference is the policy without the "
            "adapter, or with the adapter's initial values: there is no second model to mix. Set "
            "`sync_ref_model: false`, or train the whole model."
        )
    return policy


def _keeps_no_copy(policy: Policy) -> bool:
    trained = (name for name, parameter in policy.model.named_parameters() if parameter.requires_grad)
    return policy.new_adapter and all(base_name(name) is None for name in trained)


def reference_bytes(config: GRPOConfig, policy: Policy) -> int:
    """Return the bytes that the reference takes on the policy's device, before FSDP divides its weights among ranks.

    Offloaded weights count as 0: they are on the device only while the reference computes, before gradients exist.
    """
    parameters = [*policy.model.parameters()]
    if policy.adapter is None:
        return 0 if offloads(config, config.offload_reference) else sum(parameter.nbytes for parameter in parameters)
    return 0 if _keeps_no_copy(policy) else sum(p.nbytes for p in parameters if p.requires_grad)


def reference_of(config: GRPOConfig, policy: Policy) -> FrozenCopy | OfAdapter:
    if policy.adapter is not None:
        return OfAdapter(policy.model, is_new=_keeps_no_copy(policy))
    alpha, steps = config.ref_model_mixup_alpha, config.ref_model_sync_steps
    follows = f"mixed with {alpha:g} of it every {steps} steps" if config.sync_ref_model else ""
    waiting = torch.device("cpu") if config.cuts_weights else None  # The copy is on the CPU until FSDP divides it.
    return FrozenCopy(policy.model, config.device, offloads(config, config.offload_reference), follows, waiting)


REFERENCE = Kind("ref_logprobs", "reference", reference_of, reference_bytes)
