"""`estimate`: the memory plan of one rank. Bytes per parameter on each of N ranks, with T ranks per engine, for a
bfloat16 policy and the optimizer `adamw_split`:

    strategy    engine   policy            gradients   optimizer state   temporary
    none        2/T      0 or 2            4           10                nothing
    optimizer   2/T      0 or 2            4           10/N              buckets of gradients to sum
    gradients   2/T      0 or 2            4/N         10/N              buckets of gradients to sum
    tensor      2/T      0                 4/T         10/T              nothing
     +optimizer 2/T      0                 4/T         10/N              buckets of gradients to sum
     +gradients 2/T      0                 4/N         10/N              buckets of gradients to sum
    fsdp        2/T      2/N               4/N         10/N              weights and gradients of the largest block

The policy takes 0 bytes if its parameters are the engine's tensors. The first three strategies need T = 1 for this.
Each rank of an engine has all norms. If there are fewer key-value heads than T, several ranks have the same head. The
estimate ignores these copies, and divides norms and heads by T.
"""

from __future__ import annotations

import dataclasses

from ..config.sharding import TENSOR
from ..engine.arguments import MOST_SEQUENCES
from ..sharding.zero import ELEMENTS, IN_FLIGHT
from .description import RunDescription
from .shape import Trained, activation_bytes, left_on_device
from .table import MemoryPlan, RankBytes

ENGINE_TOKENS = 16384  # Tokens of one engine step: vLLM's default for `LLM` on large GPUs.
ALIVE = IN_FLIGHT + 2  # Buckets of gradients in memory at once: IN_FLIGHT are summed, one is filled, one flattened.
GATHERED = 4  # Copies of a block's weights with FSDP: gathered and unflattened ones, of two blocks.
SUMMED = 2  # Copies of a block's gradients with FSDP: computed ones, and flattened ones to be summed.


def bytes_per_rank(run: RunDescription, strategy: str) -> RankBytes:
    sizes, ranks, size = run.sizes, run.devices.ranks, run.ranks_per_engine
    served = sizes.elements - (sizes.packed_elements if run.served else 0)
    engine = served * run.engine_itemsize // size if run.samples else 0

    def state(parts: int) -> int:
        own = sizes.optimizer // parts
        return left_on_device().state(own) if run.streams else own

    # Bytes of the buckets of gradients in exchange between ranks, and of this rank's part of the summed gradients.
    def buckets(parts: int, cut: int = 1) -> int:
        largest = sizes.largest // cut
        elements = min(sizes.trained // cut, ALIVE * ELEMENTS + (largest if largest > ELEMENTS else 0))
        return sizes.gradient_itemsize * (elements + elements // parts) if parts > 1 else 0

    if strategy == "fsdp":
        # FSDP gathers blocks (a layer, head or embedding). A bfloat16 block was measured to take 13 to 15.5 bytes per
        # element. It is planned with 16 bytes, the bound in tests/extensions/fsdp/test_fsdp.py.
        block = (GATHERED * sizes.itemsize + SUMMED * sizes.gradient_itemsize) * max(sizes.block, sizes.largest)
        exchange = block + (0 if run.reshard else sizes.itemsize * (sizes.elements - sizes.rest))
        if run.offloads_parts:
            return RankBytes(engine, 0, 0, 0, exchange)
        return RankBytes(engine, sizes.weights // ranks, sizes.gradients // ranks, state(ranks), exchange)
    if strategy in TENSOR:
        # The policy's shard is in the engine's memory. A LoRA adapter is planned whole on each rank, because one of
        # its two matrices isn't split.
        engines, shared_out = ranks // size, strategy.partition("+")[2]
        cut = 1 if 2 * sizes.trained < sizes.elements else size
        return RankBytes(
            engine, policy_weights=sizes.trained * sizes.itemsize if cut == 1 else 0,
            gradients=sizes.gradients // (engines * cut if shared_out == "gradients" else cut),
            optimizer=state(engines * cut if shared_out else cut), exchange=buckets(engines, cut) if shared_out else 0,
        )  # fmt: skip
    # The strategy is none, optimizer, gradients or the user's own. A user's own is planned like none, which needs most.
    divided = strategy in ("optimizer", "gradients")
    parts, on_way = ranks if strategy == "gradients" else 1, 0
    gradients = sizes.gradients // parts
    if run.offloads_gradients:
        on_way = left_on_device().on_way(gradients, sizes.matrix * sizes.gradient_itemsize // parts)
        gradients = on_way + left_on_device().sums(gradients)
    return RankBytes(
        engine, policy_weights=sizes.packed if run.shared and size == 1 else sizes.weights, gradients=gradients,
        optimizer=state(ranks if divided else 1), exchange=buckets(ranks) if divided else 0, on_way=on_way,
    )  # fmt: skip


def estimate(run: RunDescription, strategy: str, tokens: int) -> MemoryPlan:
    devices, parts, itemsize = run.devices, bytes_per_rank(run, strategy), run.sizes.itemsize
    device = "cuda" if devices.on_gpu else "cpu"
    copied = run.lengths.copied_keys(run.shape, tokens, itemsize, device)
    cut = run.ranks_per_engine if strategy in TENSOR else 1
    trained = Trained(
        head=run.sizes.largest >= run.shape.vocabulary * run.shape.hidden, on_way=parts.on_way,
        adapted=2 * run.sizes.trained < run.sizes.elements, inputs_on_host=run.offloads_activations,
    )  # fmt: skip
    activations = activation_bytes(
        run.shape.split(cut).on_row_ranks(run.ranks_per_sequence), -(-tokens // run.ranks_per_sequence), itemsize,
        run.checkpointing, device, copied, trained,
    )  # fmt: skip
    for part in run.further:
        activations += part.bytes(tokens, run.lengths, itemsize, run.checkpointing)
    shares, engine = devices.ranks if strategy == "fsdp" else cut, 0
    # The engine needs one layer's activations, and three float32 tensors of logits.
    if run.samples and devices.on_gpu:
        engine = ENGINE_TOKENS * run.engine_itemsize * (4 * run.shape.hidden + 2 * run.shape.intermediate)
        engine += 3 * 4 * min(run.running, MOST_SEQUENCES) * run.shape.vocabulary
    return MemoryPlan(
        **dataclasses.asdict(parts), run=run, activations=activations, engine=engine, tokens=tokens,
        kv_bytes=run.kv_bytes, reference=run.reference // shares, teacher=run.teacher // shares, strategy=strategy,
    )  # fmt: skip
