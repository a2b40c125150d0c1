"""Which way of sharding a run takes, what its plan is then, and what would fit where it doesn't. Numbers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..sharding import selection
from .shape import CacheNeed, Lengths, Shape, activation_bytes, engine_bytes
from .table import MemoryPlan, gib
from .tower import Tower
from .ways import WAYS, PolicySizes, held

AVAILABLE = tuple(way for way in WAYS if way in selection.WAYS)  # the least sharded first
# Of a policy that lies whole beside its engine: a LoRA's base, which is the engine's, or where `weights` asks for it.
WHOLE = tuple(way for way in AVAILABLE if way != "fsdp")
PLANNED_TOKENS = 16384  # of a micro-batch on a GPU until it is measured: enough to keep any GPU busy
AMPLE = 0.1  # of a GPU: an engine with less for its KV cache decodes too few sequences at once
LORA_RANK = 16  # of the adapter that is proposed where the whole policy doesn't fit
BUSY_TOKENS = 8192  # of a micro-batch that keeps a GPU busy, where more would need more checkpointing
MOST_RANKS = 1024  # that are proposed


@dataclass(frozen=True, slots=True)
class Run:
    """A run in numbers: all that the memory of one of its ranks follows from."""

    device: str
    on_gpu: bool
    total: int  # bytes of the device
    available: int  # bytes of it for this rank
    ranks: int
    ranks_per_engine: int
    shape: Shape
    sizes: PolicySizes
    engine_itemsize: int
    cache_itemsize: int
    length: int  # tokens of the longest sequence that the engine takes
    sequences: int  # completions of one generation in this rank's engine
    running: int  # of them, that the engine has in its KV cache at once
    lengths: Lengths
    tokens: int  # of a micro-batch; 0: as many as fit
    checkpointing: int = 1  # every so many-th layer computes its activations again; 0: none
    shared: bool = True  # the policy's parameters are the engine's tensors, where the way allows it
    served: bool = False  # the engine reads the policy's quantised weights, and has none of its own in their place
    in_layout: bool = False  # the policy is cut as the engine is
    reshard: bool = True  # with FSDP, forget gathered weights after a forward
    offloads_parts: bool = False  # with FSDP, keep what each rank owns on its host
    sleeps: bool = False
    offloads: bool = False
    reference: int = 0  # bytes
    kv_bytes: int = 0  # 0: planned
    overruled: bool = False  # the engine takes a given share of the device
    share: float = 0.0  # that, if it is known
    ways: tuple[str, ...] = AVAILABLE  # of sharding that it may take
    samples: bool = True  # else there is no engine
    tower: Tower | None = None  # that is trained

    @property
    def need(self) -> CacheNeed:
        """Of the KV cache, on this rank."""
        if not self.samples:
            return CacheNeed(0, 0, 0)
        shape = self.shape.split(self.ranks_per_engine)
        return CacheNeed.of(shape, self.cache_itemsize, self.length, self.running)

    @property
    def longest_rows(self) -> list[int]:
        """Tokens that a micro-batch may be planned with, most first. A sequence is never cut, so at least its own."""
        if self.tokens:
            return [max(self.tokens, self.length)]
        sizes = [max(PLANNED_TOKENS, self.length)]
        while sizes[-1] > self.length:
            sizes.append(max(self.length, sizes[-1] // 2))
        return sizes

    def without_engine(self) -> Run:
        """The same training alone."""
        return dataclasses.replace(self, samples=False, shared=False, kv_bytes=0, overruled=False, share=0.0)

    def with_ranks(self, ranks: int) -> Run:
        """The same work on so many ranks: each has its share of the sequences."""
        share = self.ranks / ranks
        sequences, running = (max(1, int(count * share)) for count in (self.sequences, self.running))
        return dataclasses.replace(self, ranks=ranks, sequences=sequences, running=running)


def planned(run: Run, way: str, tokens: int) -> MemoryPlan:
    """The plan of one rank with micro-batches of ``tokens``; its KV cache isn't settled."""
    parts = held(
        way,
        run.sizes,
        run.ranks,
        run.ranks_per_engine,
        run.engine_itemsize,
        run.shared,
        run.in_layout,
        run.reshard,
        run.offloads_parts and run.on_gpu,
        run.served,
    )
    shape = run.shape.split(run.ranks_per_engine) if run.in_layout else run.shape
    device, joined = "cuda" if run.on_gpu else "cpu", run.lengths.joined_keys(tokens)
    itemsize = run.sizes.itemsize
    pictures = 0 if run.tower is None else run.tower.bytes(tokens, run.lengths, itemsize, run.checkpointing)
    return MemoryPlan(
        device=run.device,
        total=run.total,
        available=run.available,
        engine_weights=parts.engine if run.samples else 0,
        policy_weights=parts.policy,
        gradients=parts.gradients,
        optimizer=parts.optimizer,
        activations=activation_bytes(shape, tokens, itemsize, run.checkpointing, device, joined) + pictures,
        engine=engine_bytes(run.shape, run.running, run.engine_itemsize) if run.on_gpu and run.samples else 0,
        tokens=tokens,
        kv_per_token=run.need.per_token,
        kv_bytes=run.kv_bytes,
        sleeps=run.sleeps and run.on_gpu,
        offloads=run.offloads and run.on_gpu,
        reference=run.reference // (run.ranks if way == "fsdp" else 1),
        way=way,
        ranks=run.ranks,
        exchange=parts.exchange,
    )


def plan_of(run: Run, way: str) -> MemoryPlan:
    """The plan with the longest micro-batches beside which training and an ample KV cache fit; if none do, with the
    shortest, as these leave most for the cache."""
    for tokens in run.longest_rows:
        plan = planned(run, way, tokens)
        if plan.takes(_ample(run)):
            break
    return plan


def _ample(run: Run) -> CacheNeed:
    """The need of a generation, or what is enough of it."""
    need = run.need
    return dataclasses.replace(need, least=max(need.least, min(need.wanted, int(AMPLE * run.total))))


def fits(run: Run, way: str) -> bool:
    """Whether the run can be had in this way: what is known and, unless it was overruled, what is estimated."""
    plan = plan_of(run, way)
    if run.on_gpu and not (run.overruled or run.kv_bytes):
        return plan.takes(run.need)
    return _known_fits(run, plan)


def _known_fits(run: Run, plan: MemoryPlan) -> bool:
    """Whether weights, gradients, optimizer and the cache fit, be activations and margin what they may. On a CPU no
    more is asked: pages can be swapped and others' caches dropped."""
    cache = _given_cache(run, plan) or (0 if run.on_gpu else run.need.least)
    return dataclasses.replace(plan, kv_bytes=cache).known <= run.available


def _given_cache(run: Run, plan: MemoryPlan) -> int:
    """Bytes of a KV cache that is given, or that a given share of the device leaves for it; 0: neither, or unknown."""
    return run.kv_bytes or max(int(run.share * run.total) - plan.engine_weights, 0)


def taken(run: Run, way: str) -> MemoryPlan:
    """The plan that a run takes, with its KV cache.

    Raises:
        ValueError: on a GPU, no room for training, or for the KV cache of one sequence beside it.
    """
    found = plan_of(run, way)
    if not fits(run, way):
        found = dataclasses.replace(found, remedies=remedies(run, way))
        if run.on_gpu:
            raise ValueError(too_large(run, found))
    if run.kv_bytes or (run.on_gpu and run.overruled):
        return found
    return found.with_cache(run.need) if run.on_gpu else found.with_cpu_cache(run.need)


def auto(run: Run, ways: Sequence[str] = ()) -> str:
    """The least sharded way that leaves room for the planned KV cache and micro-batch.

    The cache is that of a whole generation, or `AMPLE` of the GPU if that is less; the micro-batch has the given tokens
    or `PLANNED_TOKENS`. Where no way leaves so much, it is the one that leaves most. On a CPU the first in which
    weights, gradients, optimizer and the cache of one sequence fit into the memory.

    Args:
        ways: that can be had, the least sharded first; default: the run's.
    """
    ways = ways or run.ways
    if run.ranks == 1:
        return ways[0]
    return next((way for way in ways if _is_ample(run, way)), None) or max(ways, key=lambda way: _left(run, way))


def least_checkpointing(run: Run, way: str, able: Sequence[int]) -> int:
    """Every how many-th layer has to compute its activations again so that training and an ample KV cache fit; 0: none.

    The micro-batch is that of the run, or one that keeps a GPU busy. Longer ones would need more checkpointing, and be
    no faster for it.

    Args:
        able: what the model can do, least computed again first; the last where none of it leaves room.
    """
    tokens = run.tokens or max(BUSY_TOKENS, run.length)
    plans = ((every, planned(dataclasses.replace(run, checkpointing=every), way, tokens)) for every in able)
    return next((every for every, plan in plans if _leaves_room(run, plan)), able[-1])


def _leaves_room(run: Run, plan: MemoryPlan) -> bool:
    """Whether training fits beside the KV cache that there will be; no, where that can't be known."""
    if not (run.overruled or run.kv_bytes):
        return plan.takes(_ample(run))
    cache = _given_cache(run, plan)
    return cache > 0 and dataclasses.replace(plan, kv_bytes=cache).remains("training") >= 0


def _is_ample(run: Run, way: str) -> bool:
    if not run.on_gpu or run.overruled or run.kv_bytes:
        return fits(run, way)
    return planned(run, way, run.longest_rows[0]).takes(_ample(run))


def _left(run: Run, way: str) -> int:
    plan = planned(run, way, run.longest_rows[-1])
    return min(plan.room, plan.remains("training"))


# -- what would fit


def remedies(run: Run, way: str) -> str:
    """The changes each of which would make the run fit, as one sentence without its end."""
    found = [*_changes(run, way)]
    if not found:
        return "no single change of it would fit this device: take a smaller model or larger GPUs"
    return f"what would fit: {'; or '.join(found)}"


def _changes(run: Run, way: str) -> Iterator[str]:
    """Least costly first: settings, sharding among these ranks, an adapter, a shorter context, more ranks."""
    switches = [("gradient_checkpointing", dataclasses.replace(run, checkpointing=1))]
    if run.on_gpu:
        switches += [
            ("vllm_enable_sleep_mode", dataclasses.replace(run, sleeps=True)),
            ("offload_optimizer", dataclasses.replace(run, offloads=True)),
            ("offload_reference", dataclasses.replace(run, reference=0)),
        ]
    yield from (f"{name}: true" for name, changed in switches if changed != run and fits(changed, way))
    if run.sizes.packed and not run.served and fits(dataclasses.replace(run, served=True), way):
        yield "weights: shared (the engine reads the quantised base too)"
    if run.tokens > run.length and fits(dataclasses.replace(run, tokens=run.length), way):
        yield f"max_tokens_per_microbatch: {run.length}"
    if run.ranks > 1:
        others = (other for other in WAYS[WAYS.index(way) + 1 :] if other in run.ways and fits(run, other))
        if (other := next(others, None)) is not None:
            yield f"sharding: {other} over the {run.ranks} ranks"
    if run.sizes.trained == run.sizes.elements:
        adapted = run.sizes.with_adapter(adapter_elements(run.shape, LORA_RANK))
        if fits(dataclasses.replace(run, sizes=adapted, reference=0), "none"):
            yield f"use_peft: true (LoRA, rank {LORA_RANK})"
    if (length := _shorter(run, way)) is not None:
        yield f"vllm_max_model_length: {length}, with completions and prompts shorter alike"
    if run.on_gpu and (more := _more_ranks(run)) is not None:
        yield f"{more[0]} ranks with sharding: {more[1]}"


def adapter_elements(shape: Shape, rank: int) -> int:
    """Of a LoRA on the linear layers of every block: A and B have ``rank`` of each input and output."""
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.intermediate))


def _shorter(run: Run, way: str) -> int | None:
    """The longest of half, a quarter ... of the context that fits."""
    length = run.length // 2
    while length >= 256:
        part = length / run.length
        lengths = dataclasses.replace(
            run.lengths, prompt=int(run.lengths.prompt * part), completion=int(run.lengths.completion * part)
        )
        if fits(dataclasses.replace(run, length=length, lengths=lengths), way):
            return length
        length //= 2
    return None


def _more_ranks(run: Run) -> tuple[int, str] | None:
    """The fewest ranks, in doublings, over which some way fits, and that way."""
    ranks = 2 * run.ranks
    while ranks <= MOST_RANKS:
        more = run.with_ranks(ranks)
        for way in run.ways[1:]:
            if fits(more, way):
                return ranks, way
        ranks *= 2
    return None


def too_large(run: Run, plan: MemoryPlan) -> str:
    """What is said of a plan that doesn't fit: how much is missing, what would fit, and the table."""
    need, missing = run.need, -plan.remains("training")
    if missing > 0:
        what = f"Training takes {gib(missing)} GiB more than the {gib(plan.total)} GiB of {plan.device}"
    else:
        what = (
            f"The KV cache of one full sequence takes {gib(need.least)} GiB, but {gib(max(plan.room, 0))} of "
            f"{gib(plan.total)} GiB are left beside the rest: at least one must fit"
        )
    overrule = ""
    if _known_fits(run, plan):
        overrule = ". Should this be estimated too high, vllm_gpu_memory_utilization overrules it"
    return "\n".join([f"{what}; {plan.remedies}{overrule}.", *plan.lines()])
