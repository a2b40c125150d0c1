"""`estimate`: the memory plan of one rank with a strategy of sharding. Numbers in, bytes out.

Bytes per parameter on each of N ranks, T of them per engine, of a bfloat16 policy with `adamw_split`:

    strategy    engine   policy            gradients   optimizer state   temporary
    none        2/T      0 (T = 1) or 2    4           10                nothing
    optimizer   2/T      0 or 2            4           10/N              buckets on their way
    gradients   2/T      0 or 2            4/N         10/N              buckets on their way
    tensor      2/T      0                 4/T         10/T              nothing
     +optimizer 2/T      0                 4/T         10/N              buckets on their way
     +gradients 2/T      0                 4/N         10/N              buckets on their way
    fsdp        2/T      2/N               4/N         10/N              the largest block, gathered and summed

With T = 1 the policy's parameters are the engine's tensors; quantised ones take half a byte or one, in addition to the
engine's 2. With T > 1 each rank holds the whole policy and copies it into its part of the engine; with `tensor` its
part of the policy is its part of the engine. (Norms, and key-value heads that are fewer than T, are whole on each rank;
they count as the rest.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.sharding import TENSOR
from ..sharding.buckets import ELEMENTS
from ..sharding.zero import IN_FLIGHT
from .description import RunDescription
from .policy_sizes import PolicySizes
from .shape import OnHost, Trained, activation_bytes, engine_bytes, left_on_device
from .table import MemoryPlan

ALIVE = IN_FLIGHT + 2  # buckets at once: some being summed, one being filled, one being flattened
GATHERED = 4  # copies of a block's weights with FSDP: gathered and unflattened, of this block and the next
SUMMED = 2  # copies of a block's gradients with FSDP: computed, and flattened to be summed


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of a policy on one rank."""

    engine: int  # bytes of the engine's weights
    policy: int  # bytes of the policy's weights; 0: they are the engine's
    gradients: int  # live from a step's first backward to its optimizer step
    optimizer: int
    exchange: int  # temporary: gradients on their way to other ranks, or weights gathered from them


def bytes_per_rank(run: RunDescription, strategy: str) -> RankBytes:
    """Compute the bytes on each rank, with ``strategy`` of `STRATEGIES`."""
    sizes, ranks = run.sizes, run.devices.ranks
    in_engine = sizes.elements - (sizes.packed_elements if run.served else 0)
    engine = in_engine * run.engine_itemsize // run.ranks_per_engine
    if strategy == "fsdp":
        return _fsdp(run, engine)
    if strategy in TENSOR:
        return _tensor(run, strategy, engine)
    return RankBytes(
        engine=engine,
        policy=sizes.packed if run.shared and run.ranks_per_engine == 1 else sizes.weights,
        gradients=_gradients(run, strategy),
        optimizer=_state(run, 1 if strategy == "none" else ranks),
        exchange=0 if strategy == "none" or ranks == 1 else _buckets(sizes, ranks),
    )


def _gradients(run: RunDescription, strategy: str) -> int:
    """Compute the gradients' bytes on each device. Float32 gradients of embedding and head count as activations."""
    own = run.sizes.gradients // (run.devices.ranks if strategy == "gradients" else 1)
    return _on_way(run, strategy) + left_on_device().sums(own) if _leave(run, strategy) else own


def _leave(run: RunDescription, strategy: str) -> bool:
    """Return whether gradients go to the host."""
    return run.offloads_gradients and run.devices.on_gpu and strategy in ("none", "optimizer", "gradients")


def _on_way(run: RunDescription, strategy: str) -> int:
    """Compute the largest number of bytes of gradients on their way to the host."""
    parts = run.devices.ranks if strategy == "gradients" else 1
    largest = run.sizes.matrix * run.sizes.gradient_itemsize
    return left_on_device().on_way(run.sizes.gradients // parts, largest // parts) if _leave(run, strategy) else 0


def _state(run: RunDescription, ranks: int) -> int:
    """Compute the bytes of the optimizer's state on each device."""
    own = run.sizes.optimizer // ranks
    return left_on_device().state(own) if run.streams and run.devices.on_gpu else own


def _buckets(sizes: PolicySizes, ranks: int) -> int:
    """Compute the bytes of buckets being summed, and of this rank's part of the sums."""
    large = sizes.largest if sizes.largest > ELEMENTS else 0
    elements = min(sizes.trained, ALIVE * ELEMENTS + large)
    return sizes.gradient_itemsize * (elements + elements // ranks)


def _tensor(run: RunDescription, strategy: str, engine: int) -> RankBytes:
    """Compute the bytes for a T-th of the policy in the engine's memory; ranks with the same part share out the
    rest."""
    sizes, size, ranks = run.sizes, run.ranks_per_engine, run.devices.ranks
    engines, shared_out = ranks // size, strategy.partition("+")[2]
    # Each rank has one of an adapter's two matrices whole, so the adapter counts as whole.
    cut = 1 if 2 * sizes.trained < sizes.elements else size
    part = replace(sizes, trained=sizes.trained // cut, largest=sizes.largest // cut)
    return RankBytes(
        engine=engine,
        policy=sizes.trained * sizes.itemsize if cut == 1 else 0,
        gradients=sizes.gradients // (engines * cut if shared_out == "gradients" else cut),
        optimizer=_state(run, engines * cut if shared_out else cut),
        exchange=_buckets(part, engines) if shared_out and engines > 1 else 0,
    )


def _fsdp(run: RunDescription, engine: int) -> RankBytes:
    """Compute the bytes with FSDP: each rank, or its host, owns a part of everything, and the largest block (a layer,
    the head, the embedding) is gathered. Measured: 13 to 15.5 bytes per element of a bfloat16 block
    (tests/extensions/fsdp/test_fsdp.py)."""
    sizes, ranks = run.sizes, run.devices.ranks
    on_host = run.offloads_parts and run.devices.on_gpu
    largest = max(sizes.block, sizes.largest)
    kept = 0 if run.reshard else sizes.itemsize * (sizes.elements - sizes.rest)
    return RankBytes(
        engine=engine,
        policy=0 if on_host else sizes.weights // ranks,
        gradients=0 if on_host else sizes.gradients // ranks,
        optimizer=0 if on_host else _state(run, ranks),
        exchange=kept + (GATHERED * sizes.itemsize + SUMMED * sizes.gradient_itemsize) * largest,
    )


def estimate(run: RunDescription, strategy: str, tokens: int) -> MemoryPlan:
    """Plan one rank with micro-batches of ``tokens``, before its KV cache is sized."""
    devices, parts, itemsize = run.devices, bytes_per_rank(run, strategy), run.sizes.itemsize
    device = "cuda" if devices.on_gpu else "cpu"
    copied = run.lengths.copied_keys(run.shape, tokens, itemsize, device)
    own_tokens = -(-tokens // run.ranks_per_sequence)
    trains_head = run.sizes.largest >= run.shape.vocabulary * run.shape.hidden
    adapted = 2 * run.sizes.trained < run.sizes.elements  # else most parameters are trained
    cut = run.ranks_per_engine if strategy in TENSOR else 1
    sizes = run.shape.split(cut).on_row_ranks(run.ranks_per_sequence), own_tokens, itemsize, run.checkpointing
    trained = Trained(trains_head, adapted)
    on_host = OnHost(run.offloads_activations and devices.on_gpu, _on_way(run, strategy))
    activations = activation_bytes(*sizes, device, copied, trained, on_host)
    for part in run.further:
        activations += part.bytes(tokens, run.lengths, itemsize, run.checkpointing)
    steps, shares = run.samples and devices.on_gpu, devices.ranks if strategy == "fsdp" else cut
    return MemoryPlan(
        device=devices.name,
        total=devices.total,
        available=devices.available,
        engine_weights=parts.engine if run.samples else 0,
        policy_weights=parts.policy,
        gradients=parts.gradients,
        optimizer=parts.optimizer,
        activations=activations,
        engine=engine_bytes(run.shape, run.running, run.engine_itemsize) if steps else 0,
        tokens=tokens,
        kv_per_token=run.need.per_token,
        kv_bytes=run.kv_bytes,
        sleeps=run.sleeps and devices.on_gpu,
        offloads=(run.offloads or run.streams) and devices.on_gpu,
        streams=run.streams and devices.on_gpu,
        reference=run.reference // shares,
        teacher=run.teacher // shares,
        strategy=strategy,
        ranks=devices.ranks,
        exchange=parts.exchange,
        offloads_gradients=run.offloads_gradients and devices.on_gpu,
    )
