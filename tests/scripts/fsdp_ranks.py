"""FSDP2 through the policy's own passes, with failures on one rank. Started by tests/extensions/fsdp/test_fsdp.py.

    torchrun --nproc-per-node N fsdp_ranks.py OUT_DIR [compiled]    # `compiled`: that case alone

Three optimizer steps on the same four rows, dealt out among the ranks. A failure happens once, on rank 1 in `STEP`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.batch import (
    FinishReason,
    Group,
    LossOutput,
    MicroBatch,
    ModelInput,
    PackedRow,
    Rollout,
    ScoredGroup,
    StepBatch,
)
from colograd.extensions.distillation.head import TeacherHead, TeacherStep, label_states
from colograd.extensions.fsdp.strategy import FullySharded
from colograd.parallel.ranks import rank, world_size
from colograd.policy import attention
from colograd.policy.layers import compile_layers
from colograd.policy.logprobs import PolicyForward, policy_logprobs
from colograd.policy.packing import collate, dummy, plan_rows
from colograd.runtime import registry
from colograd.runtime.page_locked import PAGE
from colograd.sharding import ShardingStrategy
from colograd.sharding.zero import WholeCopies
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32
from colograd.training.learner import loss_pass

STEPS, ROWS, STEP = 3, 4, 0
CPU = torch.device("cpu")


def fresh(
    dtype: torch.dtype = torch.float32, layers: int = 3, hidden: int = 32, tied: bool = False, vocabulary: int = 130
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, attn_implementation=attention.NAME,
        initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    accumulate_in_float32(model.parameters())
    return model


def rows() -> list[PackedRow]:
    found = []
    for index in range(ROWS):
        draw = torch.Generator().manual_seed(index)
        asked = ModelInput(tuple(torch.randint(130, (5 + index,), generator=draw).tolist()))
        rollouts = tuple(
            Rollout(
                asked,
                tuple(torch.randint(130, (n,), generator=draw).tolist()),
                -torch.rand(n, generator=draw),
                torch.ones(n, dtype=torch.bool),
                FinishReason.STOP,
                0,
            )
            for n in (4 + index, 7, 3)
        )
        group = Group({}, rollouts, index)
        found += plan_rows([ScoredGroup(group, torch.zeros(3, 1), torch.tensor([1.0, -0.5, 0.25]))], 1000, False, CPU)
    return found


class Offloaded(FullySharded):
    """A policy whose rows are in separate host memory, as on a GPU."""

    _offload = property(lambda self: True, lambda self, value: None)


class Fault:
    """Raises an error once, at the requested place."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.layer = kind if rank() == 1 else "", model.model.layers[1]

    def fail(self, *_: Any) -> None:
        self.kind = ""
        self.hook.remove()
        raise self.error

    def arm(self) -> None:
        place, _, memory = self.kind.partition(" ")
        self.error: Exception = torch.OutOfMemoryError("no room") if memory else RuntimeError("a kernel failed")
        if place == "forward":
            self.hook = self.layer.mlp.register_forward_pre_hook(self.fail)
        elif place == "backward":
            self.hook = self.layer.mlp.register_full_backward_pre_hook(self.fail)
        elif place == "before":
            self.kind = ""
            raise RuntimeError("a loss of one's own failed")


def step_of(mine: list[PackedRow], version: int) -> StepBatch:
    return StepBatch(tuple(mine), 50, 12, {}, (), version)


def backward_pass(
    model: Any, way: ShardingStrategy, mine: list[PackedRow], version: int, fault: Fault | None = None
) -> None:
    def compute_loss(row: MicroBatch) -> LossOutput:
        if fault is not None and fault.kind and version == STEP:
            fault.arm()
        logprobs, _ = policy_logprobs(model, row, 0.9)
        return LossOutput(-(logprobs * row.advantages).sum(), {}, {}, {})

    loss_pass(step_of(mine, version), compute_loss, lambda: torch.autocast("cpu", enabled=False), way)
    way.sum_gradients()
    way.divide_gradients(50.0)


def digest(way: ShardingStrategy) -> str:
    found = hashlib.sha256()
    for name, tensor in (way.state_dict(keep=True) or way.model.state_dict()).items():
        found.update(name.encode() + tensor.detach().float().numpy().tobytes())
    return found.hexdigest()


def train(
    model: Any, way: ShardingStrategy, fault: str = "", checkpointing: bool = False, compiled: bool = False
) -> dict[str, Any]:
    if compiled:
        compile_layers(model, "eager")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = AdamWSplit(model.parameters(), lr=1e-3)
    way.share(optimizer)
    mine, failing, said = rows()[rank() :: world_size()], Fault(fault, model), ""
    for version in range(STEPS):
        try:
            backward_pass(model, way, mine, version, failing)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            way.discard()
            model.zero_grad()
            if world_size() == 1:
                raise
            backward_pass(model, way, mine, version)
        way.clip(1.0)
        optimizer.step()
        model.zero_grad()
    return {"said": said, "weights": digest(way)}


class Live(TorchDispatchMode):
    """Most bytes of tensors alive at once, with the tensors that exist at the start."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak, self._storages = 0, weakref.WeakSet[Any]()
        self.add(tensors)

    def add(self, tensors: list[torch.Tensor]) -> None:
        self._storages |= {tensor.untyped_storage() for tensor in tensors}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add([x for x in tree_leaves(result) if isinstance(x, torch.Tensor)])
        return result


def memory(layers: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    """Measure the peak of a bfloat16 policy's passes. Its weights take much more than its activations."""
    model = fresh(torch.bfloat16, layers, 128, tied, vocabulary)
    parameters = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    way = FullySharded(model) if world_size() > 1 else WholeCopies(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = AdamWSplit(model.parameters(), lr=1e-3)
    way.share(optimizer)
    for step in range(2):
        held = [value for state in optimizer.state.values() for value in state.values()]
        held += [piece.part.data for piece in way.owned()] + list(model.buffers())
        with Live(held) as live:
            backward_pass(model, way, [dummy(CPU), dummy(CPU)], step)
        optimizer.step()
        model.zero_grad()
    return {"peak": live.peak, "parameters": parameters, "block": block, "head": head}


def frozen(model: Any, way: ShardingStrategy) -> float:
    """Return the difference between a second model, cut in the same way, and the policy with equal weights."""
    reference = fresh().eval()
    way.share_frozen(reference)
    row = collate(rows()[rank()])
    with torch.no_grad():
        return float((policy_logprobs(model, row, 1.0)[0] - policy_logprobs(reference, row, 1.0)[0]).abs().max())


def taught(model: Any, way: ShardingStrategy) -> float:
    """Return the error that cutting adds to the divergence from a teacher of another size, which is cut too."""

    teacher, row = fresh(layers=4, hidden=64).eval(), collate(rows()[rank()])
    head = TeacherHead.of(teacher, CPU)  # before it is cut, as `teacher_of` does
    found = []
    for policy in (fresh(), model):
        if policy is model:
            way.share_frozen(teacher)
        with torch.no_grad():
            states, _ = PolicyForward(teacher, 1.0)(row, label_states)
            seen = dataclasses.replace(row, scores={"teacher_states": states})
            said = policy_logprobs(teacher, row, 1.0)[0]
            forward = PolicyForward(policy, 1.0, steps=(TeacherStep(head),))
            found.append(torch.cat([said, forward(seen)[2]["divergence"]]))
    return float((found[0] - found[1]).abs().max())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out, results, compiled = Path(sys.argv[1]), {}, sys.argv[2:] == ["compiled"]
    cases: dict[str, dict[str, Any]] = {"plain": {}, "checkpointing": {"checkpointing": True}, "kept": {}, "tied": {}}
    cases |= {"offloaded": {}} if world_size() > 1 else {}
    faults = ("before", "forward", "backward", "forward memory", "backward memory")
    cases |= {fault: {"fault": fault} for fault in faults} if world_size() > 1 else {}
    if compiled:
        cases = {"compiled": {"compiled": True}}
    for name, settings in cases.items():
        model = fresh(tied=name == "tied")
        kind = Offloaded if name == "offloaded" else FullySharded
        way = kind(model, reshard=name != "kept") if world_size() > 1 else WholeCopies(model)
        results[name] = train(model, way, **settings)
        weights = way.state_dict(keep=rank() == 0) or model.state_dict()
        if rank() == 0:
            torch.save(weights, out / f"{name.replace(' ', '-')}-of-{world_size()}.pt")
        if name == "offloaded":
            results[name]["in pages"] = all(one.local.data_ptr() % PAGE == 0 for one in way.cuts)
    if rank() == 0:
        torch.save({tied: fresh(tied=tied).state_dict() for tied in (False, True)}, out / "start.pt")
    if world_size() > 1 and not compiled:
        model = fresh()
        way = FullySharded(model)
        results["frozen"] = frozen(model, way)
        if "distillation" in registry.installed():
            results["taught"] = taught(model, way)
    if not compiled:
        results["memory"] = [memory(6, 130, False), memory(2, 6000, False), memory(2, 6000, True)]
    (out / f"rank{rank()}-of-{world_size()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
