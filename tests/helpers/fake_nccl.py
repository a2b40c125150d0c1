"""One rank's part of a step, with collectives between GPUs that don't exist.

    python tests/helpers/fake_nccl.py RANKS WAY ...    # with the guard of `fake_gpu.run`; prints a dictionary per case

torch's fake process group returns at once, without data. Every way of sharding runs two micro-batches and an optimizer
step, on the first and on the last rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import fake_gpu_cases as cases
import torch
import torch.distributed as dist
from fake_gpu import FakeGPU
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM

from colograd.policy.logprobs import PolicyForward
from colograd.runtime import registry
from colograd.sharding.strategy import ShardingStrategy
from colograd.sharding.zero import SharedGradients, SharedOptimizer, WholeCopies
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32

WAYS: dict[str, type[ShardingStrategy]] = {
    "none": WholeCopies, "optimizer": SharedOptimizer, "gradients": SharedGradients,
}  # fmt: skip
WAYS |= dict(zip(["fsdp"], registry.hooks("sharding:fsdp"), strict=False))  # the extension may be missing
# Sizes that ranks don't divide.
SHAPE: dict[str, Any] = {
    "vocab_size": 1003, "hidden_size": 1152, "intermediate_size": 2500, "num_hidden_layers": 3,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": False,
}  # fmt: skip
COLLECTIVES = {
    "allreduce_": "all_reduce", "_reduce_scatter_base_": "reduce_scatter", "_allgather_base_": "all_gather",
}  # fmt: skip


class FakeNCCL(FakeGPU):
    """`FakeGPU` that records collectives: name, bytes of the whole tensor, dtype, device."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [part for arg in args[:2] for part in (arg if isinstance(arg, list) else [arg])]
        whole = max((t for t in tensors if isinstance(t, torch.Tensor)), key=lambda tensor: tensor.nbytes)
        dtype = str(whole.dtype).removeprefix("torch.")
        self.collectives.append((COLLECTIVES.get(name, name), whole.nbytes, dtype, whole.device.type))
        return args[0], FakeWork().boxed()


@contextlib.contextmanager
def among(ranks: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    agreed = mock.patch("colograd.parallel.ranks.gather", lambda value: [value] * ranks)
    try:
        with agreed, mock.patch("torch.cuda.current_device", lambda: 0), mock.patch("torch.cuda.set_device"):
            yield
    finally:
        dist.destroy_process_group()


def step(way: str, ranks: int, rank: int) -> dict[str, Any]:
    with FakeNCCL() as gpu, among(ranks, rank):
        model = cases.bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
        accumulate_in_float32(model.parameters())
        elements = sum(parameter.numel() for parameter in model.parameters())
        strategy = WAYS[way](model)
        gpu.collectives.clear()
        optimizer = AdamWSplit(model.parameters(), compiled=False)
        strategy.share(optimizer)
        phases: dict[str, list[Any]] = {}

        def ends(phase: str) -> None:
            phases[phase] = gpu.collectives[:]
            gpu.collectives.clear()

        with gpu.watched() as seen:
            for number in range(2):
                logprobs = PolicyForward(model, 1.0)(cases.collate(cases.row()))[0]
                ends(f"forward {number}")
                strategy.backward(logprobs.sum())
                ends(f"backward {number}")
            strategy.sum_gradients()
            ends("sum")
            optimizer.step()
            ends("optimizer")
        state = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.dim())
        return {
            "way": way, "ranks": ranks, "rank": rank, "elements": elements, "state": state, "phases": phases,
            "traffic": strategy.traffic.take(), **cases.figures(seen),
        }  # fmt: skip


def main(ranks: int, ways: Sequence[str]) -> None:
    for way in ways:
        for rank in (0, ranks - 1):
            try:
                found = step(way, ranks, rank)
            except Exception:
                found = {"way": way, "ranks": ranks, "rank": rank, "error": traceback.format_exc()}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
