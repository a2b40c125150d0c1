"""Inputs of checkpointed layers in host memory (`gradient_checkpointing: offload`).

A checkpointed layer saves only its input. The input of layer n is copied to the host while later layers run, and
back during the backward of layer n + 1. So the device holds the inputs of only a few layers."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ...config import GRPOConfig
from ...policy.lora import unwrap
from ...runtime import process
from ...runtime.page_locked import host_empty
from .host_stream import HostStream

KEPT = 2  # Number of layer inputs that stay on the device during a forward, while they are copied to the host.


class LayerInputs(HostStream):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.free: list[tuple[torch.Tensor, Any]] = []  # unused host memory, with the event of its last copy
        self._largest = 0
        self._on_way: collections.deque[weakref.ref[_Input]] = collections.deque()
        self._last: Callable[[], _Input | None] = lambda: None

    def __deepcopy__(self, memo: Any) -> LayerInputs:
        return self  # copies of the model share the host memory

    def checkpoint(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(function, *args, **options)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point() or tensor.device.type != self.device.type:
            return tensor
        kept = _Input(self, tensor.detach(), self._last)
        self._last = weakref.ref(kept)
        self._on_way.append(self._last)
        while len(self._on_way) > KEPT:
            if (earlier := self._on_way.popleft()()) is not None:
                earlier.leave()
        return kept

    def _unpack(self, kept: Any) -> Any:
        if not isinstance(kept, _Input):
            return kept
        kept.fetch()
        (kept.come or kept.sent).wait(self.torch.current_stream())
        if (before := kept.before()) is not None:
            before.fetch()
        return kept.tensor

    def take_place(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Return a host block of at least ``nbytes``, and the event of its last copy (None for a new block).

        Smaller blocks in `free` may be released."""
        self._largest = max(self._largest, nbytes)
        while self.free:
            place, read = self.free.pop()
            if place.nbytes >= nbytes:
                return place, read
            read.synchronize()
        if self._largest > psutil.virtual_memory().available // process.local_world_size():
            raise torch.OutOfMemoryError(f"no host memory for the {self._largest:,} bytes of a layer's input")
        return host_empty(torch.Size([self._largest]), torch.uint8, self.device), None


class _Input:
    """Input of one checkpointed layer, on the host and for a time also on the device."""

    def __init__(self, owner: LayerInputs, tensor: torch.Tensor, before: Callable[[], _Input | None]) -> None:
        self.owner, self.shape, self.dtype = owner, tensor.shape, tensor.dtype
        self.tensor: torch.Tensor | None = tensor.contiguous()
        self.stream = owner.torch.current_stream()  # the stream that may reuse the tensor's memory on the device
        self.before = before
        self.whole_place, readable = owner.take_place(tensor.nbytes)
        self.place = self.whole_place[: tensor.nbytes]
        self.sent = owner.copy(self.place, self.tensor.view(-1).view(torch.uint8), owner.emptying, readable)
        self.come: Any = None  # event of the copy to the device

    def leave(self) -> None:
        self.sent.wait(self.owner.torch.current_stream())
        self.tensor = None

    def fetch(self) -> None:
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype, device=self.owner.device)
            flat = self.tensor.view(-1).view(torch.uint8)
            self.come = self.owner.copy(flat, self.place, self.owner.filling, self.sent)

    def __del__(self) -> None:
        """Add the host block to `owner.free`. The next copy into the block waits for the block's last copy."""
        if (last := getattr(self, "come", None) or getattr(self, "sent", None)) is not None:
            last.wait(self.stream)
            self.owner.free.append((self.whole_place, last))


def inputs_of_run(model: Any, config: GRPOConfig) -> AbstractContextManager[None]:
    inputs = LayerInputs(config.device) if config.offloads_activations and not config.on_cpu else None
    return inputs_on_host(unwrap(model), inputs) if config.offloads_activations else nullcontext()


@contextmanager
def inputs_on_host(model: Any, inputs: LayerInputs | None) -> Iterator[None]:
    """Make transformers' gradient checkpointing keep layers' inputs on the host.

    On a CPU ``inputs`` is None, and layers are checkpointed as usual."""
    usual = model._set_gradient_checkpointing

    def enable(enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **options: Any) -> None:
        # Drop `offload`, because transformers' own copies to the host would make the computation wait.
        given = {k: v for k, v in getattr(gradient_checkpointing_func, "keywords", {}).items() if k != "offload"}
        function = functools.partial(checkpoint if inputs is None else inputs.checkpoint, **given)
        usual(enable=enable, gradient_checkpointing_func=function, **options)

    model._set_gradient_checkpointing = enable
    try:
        yield
    finally:
        del model._set_gradient_checkpointing
        for module in model.modules():
            own: Any = getattr(module, "_gradient_checkpointing_func", None)
            if inputs is not None and getattr(own, "func", None) == inputs.checkpoint:
                module._gradient_checkpointing_func = functools.partial(checkpoint, **own.keywords)
