"""Bytes that one rank of many exchanges in a step, and the host's cost of their number: counted without the others.

    python tests/benchmarks/many_ranks.py [--model 8B] [--engine 8] [--ranks 64,256,1024] [--tokens 16384] [--rows 2]
        [--out F.json]

torch's fake process group stands for the other ranks: collectives send nothing and wait for nobody. Weights,
activations and gradients have shapes and no numbers (`FakeTensorMode`), so that any model fits. One rank's policy is
cut as vLLM cuts Llama among the ranks of an engine, and goes forward and backward over packed rows, with the product's
own strategies. Each call of a collective is counted, with the bytes of the tensor that all its ranks have, and by
whether the ranks are of one engine. The groups that are made at start are counted and timed. Nothing of a network is
seen, nor of how long a step takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from colograd.runtime import process

process.prepare_threads()  # OpenMP reads how to wait when torch is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from figures import GB, table, write  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from colograd.extensions.tensor_parallel.layers import split  # noqa: E402
from colograd.memory.token_budget import dummy_row  # noqa: E402
from colograd.parallel.layout import RankLayout  # noqa: E402
from colograd.parallel.shards import RankGroup, Shard  # noqa: E402
from colograd.policy import attention  # noqa: E402
from colograd.policy.logprobs import policy_logprobs  # noqa: E402
from colograd.policy.packing import collate  # noqa: E402
from colograd.runtime import registry  # noqa: E402
from colograd.sharding import zero  # noqa: E402
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32  # noqa: E402

# Llama 3.1's hidden and inner size, layers, attention heads and key-value heads.
MODELS = {"8B": (4096, 14336, 32, 32, 8), "70B": (8192, 28672, 80, 64, 8)}
VOCABULARY = 128256
SHAPE = (1024, 1024, 7)  # tokens of a prompt and of a completion, and completions per group
WAYS = ("tensor", "tensor+optimizer", "tensor+gradients")
COLLECTIVES = ((dist, "all_reduce"), (dist, "broadcast"), (zero, "reduce_scatter"), (zero, "all_gather"))


class Counted:
    """Counts calls of collectives, and the bytes of their larger tensors: within an engine, and between engines."""

    def __init__(self, per_engine: int) -> None:
        self.per_engine = per_engine
        self.calls, self.bytes = {"within": 0, "between": 0}, {"within": 0, "between": 0}
        self.groups, self.seconds = 0, 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for place, name in COLLECTIVES:
                stack.enter_context(mock.patch.object(place, name, self._noting(getattr(place, name))))
            yield

    def _noting(self, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            ranks = dist.get_process_group_ranks(kwargs.get("group"))
            kind = "within" if ranks == [*range(self.per_engine)] else "between"
            self.calls[kind] += 1
            self.bytes[kind] += max(one.nbytes for one in args if isinstance(one, torch.Tensor))
            return own(*args, **kwargs)

        return call

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        own, before = dist.new_group, time.process_time()

        def made(*args: Any, **kwargs: Any) -> Any:
            self.groups += 1
            return own(*args, **kwargs | {"backend": "fake"})

        with mock.patch.object(dist, "new_group", made):
            yield
        self.seconds = time.process_time() - before


def part_of(name: str, shape: tuple[int, ...], place: int, ranks: int, keys: int) -> Shard:
    """Return the shape that vLLM's rank at ``place`` has of a parameter. The vocabulary must be a multiple of 512."""
    layer = name.split(".")[-2]
    if layer in ("o_proj", "down_proj"):
        own = shape[1] // ranks
        return Shard.of_cuts(shape, [(slice(None), slice(place * own, (place + 1) * own))])
    if "norm" in layer:
        return Shard.of_cuts(shape, [()])
    parts = min(ranks, keys) if layer in ("k_proj", "v_proj") else ranks
    own, at = shape[0] // parts, place * parts // ranks
    return Shard.of_cuts(shape, [(slice(at * own, (at + 1) * own),)])


def one_step(way: str, options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the bytes and calls that the first of ``ranks`` exchanges in one step."""
    hidden, inner, layers, heads, keys = MODELS[options.model]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=131072,
        attn_implementation=attention.NAME, dtype=torch.bfloat16,
    )  # fmt: skip
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    layout, counted = RankLayout(0, ranks, options.engine, options.engine), Counted(options.engine)
    row = collate(dummy_row(options.tokens, SHAPE, torch.device("cpu")))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(config)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
            every = tuple(
                {
                    name: part_of(name, tuple(p.shape), place, options.engine, keys)
                    for name, p in model.named_parameters()
                }
                for place in range(options.engine)
            )
            for name, parameter in model.named_parameters():
                parameter.data = torch.empty(every[0][name].local_shape, dtype=parameter.dtype)
            with counted.making_groups(), mock.patch.object(RankGroup, "gather", lambda self, value: every):
                split(model, every[0], layout)
            accumulate_in_float32(model.parameters())
            strategy = registry.hooks(f"sharding:{way}")[0](model)
            strategy.share(AdamWSplit(model.parameters(), lr=1e-6))
            with counted.counting():
                for _ in range(options.rows):
                    strategy.backward(policy_logprobs(model, row, 1.0)[0].sum())
                strategy.sum_gradients()
        with counted.counting():
            strategy._counted = set()
            strategy.sum_of_squares()  # exchanges a number for the norm
            with FakeTensorMode(allow_non_fake_inputs=True):
                strategy.gather_weights()
        own = sum(p.numel() for p in model.parameters())
    finally:
        dist.destroy_process_group()
    return {"way": way, "ranks": ranks, "own": own, "calls": counted.calls, "bytes": counted.bytes,
            "groups": counted.groups, "seconds": counted.seconds}  # fmt: skip


def report(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    rows = [
        [one["way"], f"{one['ranks']:,}", f"{one['calls']['within']:,}", f"{one['bytes']['within'] / GB:.1f}",
         f"{one['calls']['between']:,}", f"{one['bytes']['between'] / GB:.1f}", f"{one['groups']:,}",
         f"{one['seconds']:.2f}"]
        for one in found
    ]  # fmt: skip
    head = ["`sharding`", "ranks", "within an engine: calls", "GB", "between engines: calls", "GB", "groups at start"]
    return (
        f"Llama {options.model} in bfloat16, engines of {options.engine} ranks, {options.rows} micro-batches of "
        f"{options.tokens:,} tokens a step, {found[0]['own'] / 1e6:,.0f} M parameters on a rank\n\n"
        f"{table([*head, 'processor s'], rows)}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="many_ranks.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="8B", help="a Llama 3.1 (8B)")
    parser.add_argument("--engine", type=int, default=8, choices=(2, 4, 8), help="ranks that share one (8)")
    parser.add_argument("--ranks", default="64,256,1024", help="of a run, each by itself (64,256,1024)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch (16384)")
    parser.add_argument("--rows", type=int, default=2, help="micro-batches per step (2)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
    if wrong := [ranks for ranks in options.ranks if ranks % options.engine]:
        parser.error(f"--ranks has {wrong[0]}, but --engine ({options.engine}) must divide it")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    found = [one_step(way, options, ranks) for way in WAYS for ranks in options.ranks]
    print(report(found, options), flush=True)
    write(options.out, vars(options) | {"out": None, "found": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
