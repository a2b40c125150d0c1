"""The map from the policy's parameters to slices of the engine's tensors.

vLLM fuses projections (q, k and v become rows of one matrix), pads vocabularies and renames tensors. The class of
vLLM's model names its fused layers in ``packed_modules_mapping``, and renamed tensors in ``hf_to_vllm_mapper``. Shapes
show everything else, e.g. which part of a parameter an engine's rank holds.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from ..engine.tensors import VLLMTensors
from ..policy.lora import AdaptedLayer, PackedWeight, base_name, packed_weights, unwrap
from ..policy.towers import in_tower, read_parameters
from ..sharding.weight_files import saved_names

# Names of a block's expert tensors in transformers and in vLLM, for matrices of the shapes (E, 2I, H) and (E, H, I),
# and for their biases. A policy may have the matrices transposed: (E, H, 2I) and (E, I, H).
EXPERTS = {
    "gate_up_proj": "w13_weight", "down_proj": "w2_weight", "gate_up_proj_bias": "w13_bias", "down_proj_bias": "w2_bias"
}  # fmt: skip
WITHIN = ("", "routed_experts.")  # Possible paths of expert tensors inside vLLM's module of experts.
BLOCKS = (".mlp.", ".block_sparse_moe.")  # Name of a mixture's block in transformers, and in some vLLM models.
TOWER = ("vision_tower.", "vision_tower.vision_model.")  # SigLIP vision tower's prefix in transformers and in vLLM.


@dataclass(frozen=True, slots=True)
class Slice:
    """A policy parameter (or this engine rank's part of one) with the view of the engine's tensor that holds it."""

    name: str  # Name of the parameter or buffer in the policy.
    source: torch.Tensor  # The policy's parameter or buffer. For a quantised parameter a meta tensor of its shape.
    destination: torch.Tensor  # A view of the engine's tensor.
    cut: tuple[slice, ...] = ()  # Index into ``source`` of the part in ``destination``. Empty: the whole source.
    packed: PackedWeight | None = None  # The policy's quantised weight. None for other parameters.
    through: Callable[[torch.Tensor], torch.Tensor] | None = None  # Elementwise function from policy to engine values.
    again: bool = False  # Whether ``destination`` is the engine's second copy of the parameter, e.g. for decoding.
    rows: torch.Tensor | None = None  # Row indices of ``source`` in the order of ``destination``. None: same order.
    adapted: AdaptedLayer | None = None  # The LoRA layer to merge into the engine's values. None without merging.

    @property
    def plain_name(self) -> str:
        """The parameter's name in a model without LoRA adapters."""
        return base_name(self.name) or self.name

    @property
    def is_computed(self) -> bool:
        """Whether the policy's values must be converted, e.g. dequantised or reordered. Then memory can't be shared."""
        return any(each is not None for each in (self.packed, self.through, self.rows, self.adapted))

    @property
    def held(self) -> torch.Tensor:
        """The policy's values for ``destination``: a view, or a new tensor if the values must be converted."""
        if self.adapted is not None:
            return self.part_of(self.adapted.merged())
        return self.part_of(self.source.detach() if self.packed is None else self.packed.values())

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Cut the values for ``destination`` out of ``whole`` (a tensor of the parameter's shape), and convert them."""
        part = whole[self.cut if self.rows is None else self.rows.to(whole.device)]
        return part if self.through is None else self.through(part)

    def equal(self) -> bool:
        """Return whether engine and policy have equal values, bit for bit in the narrower of both dtypes."""
        engine_value = self.destination
        policy_value = self.held.to(engine_value.device)
        narrow = min(policy_value.dtype, engine_value.dtype, key=lambda dtype: dtype.itemsize)
        return torch.equal(engine_value.to(narrow), policy_value.to(narrow))


class UnmappedParameter(ValueError):
    """The error of a policy parameter or engine tensor that has no counterpart, or a counterpart in another layout."""


Part = tuple[torch.Tensor, tuple[slice, ...]]  # Pair of `Slice.destination` and `Slice.cut`.
EXPANDS = "kv_b_proj"  # Name of the layer that expands the keys and values of latent attention (MLA).
ABSORBED = ("W_UK_T", "W_UV")  # vLLM's copies of `kv_b_proj` for decoding, one for keys and one for values.


def map_parameters(
    policy: torch.nn.Module, engine: VLLMTensors, place: int = 0, ranks: int = 1,
    served: Collection[PackedWeight] = (),
) -> list[Slice]:  # fmt: skip
    """Pair the policy's parameters (with LoRA, the base model's) with their slices of the engine's tensors. ``place``
    is this rank's index among the ``ranks`` of its engine. Quantised weights in ``served`` get no slices, because the
    engine reads them from the policy's memory."""
    targets: dict[str, torch.Tensor] = dict(engine.parameters())
    packed, read = packed_weights(policy), read_parameters(unwrap(policy))
    policy_names = {base: name for name, _ in policy.named_parameters() if (base := base_name(name)) is not None}
    sources: dict[str, torch.Tensor] = {}
    for base, name in policy_names.items():
        parameter = policy.get_parameter(name)
        if (name not in packed or packed[name] not in served) and (read is None or id(parameter) in read):
            sources[base] = torch.empty(packed[name].shape, device="meta") if name in packed else parameter
    for name, buffer in policy.named_buffers():  # some buffers are parameters in vLLM, e.g. a router's correction
        if (base := base_name(name)) in targets and base not in sources:
            sources[base], policy_names[base] = buffer, name
    slices, missing, saved = [], [], saved_names(unwrap(policy))
    for name, source in sources.items():
        policy_name, parts, copies = policy_names[name], list[Part](), list[Part]()
        module = policy.get_submodule(policy_name.rpartition(".")[0])
        if experts := _experts(name, source, module, targets, engine, place, ranks):
            parts = experts
        elif match := _find(name, saved.get(name, name), sources, targets, engine, ranks):
            target, fused, index = match
            if isinstance(module, Conv1D) and source.dim() == 2:
                parts = [(target.detach().mT, ())]  # GPT-2's projections are transposed
            elif ranks == 1 or name.split(".")[-2] not in engine.fusions:
                parts, last = _split(target, fused, index, place, ranks), len(fused) - 1
                if index < last and fused[index] is fused[last]:  # some layers of Gemma 4 use keys as values
                    copies = _split(target, fused, last, place, ranks)
            else:
                of_engine = next(each for each, tensor in targets.items() if tensor is target)
                thirds = [source.shape[0] // 3] * 3  # a tower's queries, keys and values are three equal parts
                parts = _merged(target, source, place, thirds if in_tower(name) else engine.merged_outputs(of_engine))
        if not parts:
            missing.append(name)
        slices += [Slice(policy_name, source, *part) for part in parts]
        copies += _absorbed(name, parts, targets)
        slices += [Slice(policy_name, source, *part, again=True) for part in copies]
    free = {name: targets[name].detach() for name in _uncovered(slices, targets)}
    other_names = {name: _match_by_shape(name, sources, missing, free) for name in missing}
    for name, other in other_names.items():
        target, source = free[other], sources[name]
        target = target.view(source.shape) if target.numel() == source.numel() else target[: source.shape[0]]
        slices.append(Slice(policy_names[name], source, target))
    # Some parameters of vLLM are buffers of another name in the policy, e.g. a router's correction.
    buffers = {name: b for name, b in policy.named_buffers() if b.is_floating_point() and _layer_of(name)}
    for name in [*_uncovered(slices, targets)]:
        target = targets[name].detach()
        matches = [n for n, b in buffers.items() if b.shape == target.shape and _layer_of(n) == _layer_of(name)]
        if len(matches) == 1:
            slices.append(Slice(matches[0], buffers[matches[0]], target))
    if leftover := sorted(_uncovered(slices, targets)):
        raise UnmappedParameter(
            f"The policy has no parameter for {len(leftover)} engine tensors: {', '.join(leftover[:4])}. Use another "
            "model."
        )
    functions = {own: engine.written_through(name, other_names.get(name)) for name, own in policy_names.items()}
    return [dataclasses.replace(p, packed=packed.get(p.name), through=functions.get(p.name)) for p in slices]


def _match_by_shape(
    name: str, sources: Mapping[str, torch.Tensor], missing: Sequence[str], free: Mapping[str, torch.Tensor]
) -> str:
    expected = [size for size in sources[name].shape if size > 1]

    def is_like(other: str, tensor: torch.Tensor) -> bool:
        sizes = [size for size in tensor.shape if size > 1]
        padded = len(expected) == 2 and not _layer_of(name) and sizes[1:] == expected[1:] and sizes[0] > expected[0]
        return _layer_of(other) == _layer_of(name) and (sizes == expected or padded)

    matches = [other for other, tensor in free.items() if is_like(other, tensor)]
    if len(matches) != 1 or sum(is_like(other, sources[other]) for other in missing) != 1:
        shape = tuple(sources[name].shape)
        raise UnmappedParameter(f"{name} {shape} has no unique counterpart in the engine. Use another model.")
    return matches[0]


def _layer_of(name: str) -> str:
    return next((part for part in name.split(".") if part.isdecimal()), "")


def _find(
    name: str, saved: str, sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], engine: VLLMTensors,
    ranks: int,
) -> tuple[torch.Tensor, list[torch.Tensor], int] | None:  # fmt: skip
    """Return (engine tensor, the parameters that are fused in it, index of ``name`` among them), or None. ``saved`` is
    the parameter's name in checkpoints."""
    for each in dict.fromkeys((name, saved)):
        mapped = engine.renamed(each)
        if mapped.startswith(TOWER[0]) and any(target.startswith(TOWER[1]) for target in targets):
            mapped = mapped.replace(*TOWER, 1)
        for candidate in (mapped, mapped.replace(*BLOCKS)):
            if candidate in targets:
                return targets[candidate], [sources[name]], 0
        for fused, parts in engine.fusions.items():
            for index, part in enumerate(parts):
                target = targets.get(mapped.replace(f".{part}.", f".{fused}."))
                siblings = [name.replace(f".{part}.", f".{other}.") for other in parts]
                if target is None or not sources.keys() >= {*siblings[:index]}:
                    continue
                fused_parts = [sources[sibling] for sibling in siblings if sibling in sources]
                with_values = [*fused_parts, fused_parts[-1]]
                if len(with_values) == len(parts) and sum(_fused_rows(target, with_values, ranks)[0]) == len(target):
                    fused_parts = with_values  # the layer uses keys as values
                return target, fused_parts, index
    return None


def _absorbed(name: str, parts: Sequence[Part], targets: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Yield the slices of a `kv_b_proj` weight in vLLM's copies for decoding (`ABSORBED`): per head a matrix (P, L) for
    keys and a matrix (L, V) for values. P and V are the sizes of a head's keys and values, L is the latent size.
    ``parts`` are the weight's slices in vLLM's `kv_b_proj`, a matrix (H * (P + V), L) on a rank with H heads. Other
    parameters have no copies."""
    module, _, _ = name.rpartition(f".{EXPANDS}.")
    matrices = {end: tensor for place, tensor in targets.items() if place.startswith(f"{module}.") for end in ABSORBED
                if module and place.endswith(f".{end}")}  # fmt: skip
    if len(matrices) < 2 or not parts:
        return
    start = (parts[0][1] or (slice(0, 0),))[0].start
    for key, value in zip(*(matrices[end].detach() for end in ABSORBED), strict=True):
        for place in (key, value.T):
            yield place, (slice(start, start + len(place)),)
            start += len(place)


def _experts(
    name: str, source: torch.Tensor, module: Any, targets: dict[str, torch.Tensor], engine: VLLMTensors, place: int,
    ranks: int,
) -> list[Part]:  # fmt: skip
    """Return the slices of a parameter that stacks all experts of a block; [] for other parameters. Ranks split the
    gate and up projections by rows, and the down projection by columns."""
    head, _, last = name.rpartition(".")
    if not head.endswith(".experts") or last not in EXPERTS:
        return []
    head = engine.renamed(f"{head}.weight").removesuffix("weight")
    places = (f"{block}{within}{EXPERTS[last]}" for block in (head, head.replace(*BLOCKS)) for within in WITHIN)
    in_engine = next((each for each in places if each in targets), None)
    if in_engine is None:
        return []
    if layout := engine.expert_layout(in_engine):
        raise UnmappedParameter(
            f"The engine's kernel for experts ({layout}) has {in_engine} in another layout than checkpoints. Don't "
            "choose a kernel for experts in vllm_engine_kwargs or by an environment variable."
        )
    target = targets[in_engine].detach()
    expected, axis = [*source.shape], 1 if last == "gate_up_proj" else 2
    if ranks == 1:
        is_transposed = getattr(module, "is_transposed", False)
        if target.dim() == 3 and (is_transposed or target.shape != source.shape == target.mT.shape):
            target = target.mT
    else:
        expected[axis] //= ranks
    if [*target.shape] != expected:
        raise UnmappedParameter(
            f"{name} has the shape {tuple(target.shape)} in vLLM, not {tuple(expected)}: the engine's kernel for "
            "experts has another layout than checkpoints. Choose no kernel in vllm_engine_kwargs, or use another model."
        )
    if ranks == 1:
        return [(target, ())]
    halves = 3 - axis  # Number of stacked projections: gate and up, or down alone.
    return _chunks(target, [source.shape[axis] // halves] * halves, place, ranks, axis)


def _split(target: torch.Tensor, parts: list[torch.Tensor], index: int, place: int, ranks: int) -> list[Part]:
    target, source = target.detach(), parts[index]
    if target.dim() != source.dim():
        return []
    if len(parts) == 1 and target.shape == source.shape:
        return [(target, ())]
    if len(parts) == 1 and target.dim() == 2 and target.shape[0] == source.shape[0]:  # The matrix is split by columns.
        total = source.shape[1]
        return _chunks(target, [total], place, ranks, axis=1) if target.shape[1] * ranks == total else []
    if target.shape[1:] != source.shape[1:]:
        return []
    if len(parts) == 1:  # The last rows of a padded vocabulary have no source.
        start = min(place * target.shape[0], source.shape[0])
        stop = min(start + target.shape[0], source.shape[0])
        fits = target.shape[0] * ranks >= source.shape[0]
        return [(target[: stop - start], _rows(start, stop, source))] if fits else []
    if sum(part.shape[0] for part in parts) == target.shape[0]:  # each rank has the whole layer, e.g. in a vision tower
        ranks = 1
    rows, repeated = _fused_rows(target, parts, ranks)
    if sum(rows) != target.shape[0]:
        return []
    offset, start = sum(rows[:index]), place % ranks // repeated[index] * rows[index]
    return [(target[offset : offset + rows[index]], _rows(start, start + rows[index], source))]


def _merged(target: torch.Tensor, source: torch.Tensor, place: int, outputs: Sequence[int]) -> list[Part]:
    """Return a rank's slices of a layer that checkpoint and engine both fuse, e.g. a short convolution's input and
    gates. ``outputs`` are the sizes of the fused parts."""
    target = target.detach()
    if target.shape == source.shape:
        return [(target, ())]
    ranks = source.shape[0] // target.shape[0]
    fits = sum(outputs) == source.shape[0] == len(target) * ranks and target.shape[1:] == source.shape[1:]
    if not fits or any(size % ranks for size in outputs):
        return []
    return _chunks(target, outputs, place, ranks, axis=0)


def _chunks(target: torch.Tensor, sizes: Sequence[int], place: int, ranks: int, axis: int) -> list[Part]:
    """Return a rank's slices of a tensor with fused parts along ``axis``. ``sizes``: sizes of the undivided parts."""
    parts: list[Part] = []
    before = [slice(None)] * axis
    start = 0
    for total in sizes:
        size = total // ranks
        first = start + place * size
        parts.append((target.narrow(axis, start // ranks, size), (*before, slice(first, first + size))))
        start += total
    return parts


def _fused_rows(target: torch.Tensor, parts: list[torch.Tensor], ranks: int) -> tuple[list[int], list[int]]:
    """Return two lists with one number per fused part: how many rows a rank has, how many ranks have the same rows."""
    rows = [part.shape[0] // ranks for part in parts]
    first, others = rows[0], sum(rows[1:])
    times = (target.shape[0] - first) // others if others else 1
    if times > 1 and first + times * others == target.shape[0]:  # fewer key-value heads than ranks: vLLM repeats heads
        return [first, *(times * size for size in rows[1:])], [1, *(times for _ in rows[1:])]
    return rows, [1 for _ in rows]


def _rows(start: int, stop: int, source: torch.Tensor) -> tuple[slice, ...]:
    return () if stop - start == source.shape[0] else (slice(start, stop),)


def _uncovered(slices: list[Slice], targets: dict[str, torch.Tensor]) -> Iterator[str]:
    filled: dict[int, int] = defaultdict(int)
    for part in slices:
        filled[part.destination.untyped_storage().data_ptr()] += part.destination.numel()
    for name, target in targets.items():
        if not target.numel():  # empty: the engine's layer reads the policy's packed weight
            continue
        vocabulary = "embed" in name or "lm_head" in name or "wte" in name  # A vocabulary may be padded.
        storage = target.untyped_storage().data_ptr()
        if storage not in filled or (filled[storage] < target.numel() and not vocabulary):
            yield name


# Largest accepted distance of a weight from its quantised copy, relative to the weight's norm. A 4-bit copy of normal
# weights has a distance of 0.1, and unrelated weights have 1.4.
QUANTISED = 0.5


def is_near(part: Slice) -> bool:
    policy_value = part.held.to(part.destination.device).float()
    distance = torch.linalg.vector_norm(part.destination.float() - policy_value)
    return bool(distance <= QUANTISED * torch.linalg.vector_norm(policy_value))


def with_row_orders(slices: Sequence[Slice], policy: torch.nn.Module, place: int = 0, ranks: int = 1) -> list[Slice]:
    """Return ``slices``, with `Slice.rows` set where vLLM reorders rows, e.g. if a checkpoint interleaves queries, keys
    and values by head (BLOOM, GPT-NeoX). The order is inferred from values. A bias gets the order of its layer's
    weight, because a bias of zeros shows no order."""
    config = policy.config.get_text_config()
    queries = int(getattr(config, "num_attention_heads", 0) or 1)
    keys = int(getattr(config, "num_key_value_heads", 0) or queries)
    row_orders: dict[str, torch.Tensor] = {}  # Row indices by layer name.
    for part in slices:
        layer = part.name.rpartition(".")[0]
        if part.source.dim() != 2 or layer in row_orders or part.again or part.equal() or is_near(part):
            continue
        for order in _orders(part.source.shape[0], queries, keys):
            of_rank = []
            if all(len(rows) % ranks == 0 for rows in order):  # each rank has a part of each tensor in `order`
                of_rank.append(torch.cat([rows.chunk(ranks)[place] for rows in order]))
            if ranks > 1 and len(order) == 1:  # neighbouring ranks may hold the same key heads
                of_rank.append(order[0][part.cut[0]] if part.cut else order[0])
            for rows in of_rank:
                if len(rows) == len(part.destination) and is_near(dataclasses.replace(part, rows=rows, cut=())):
                    row_orders.setdefault(layer, rows.to(part.destination.device))
    pairs = ((part, row_orders.get(part.name.rpartition(".")[0])) for part in slices)
    return [part if rows is None else dataclasses.replace(part, rows=rows, cut=()) for part, rows in pairs]


def _orders(total: int, queries: int, keys: int) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the known row orders of a weight with ``total`` rows, ``queries`` query heads and ``keys`` key heads.

    An order is a list of index tensors. Element i of their concatenation is the index of the policy's row that is row i
    in the engine. A fused weight has three tensors (queries, keys, values): ranks divide each of them separately."""
    rows, group = torch.arange(total), queries // keys
    if total % (keys * (group + 2)) == 0:  # checkpoint rows: query heads of a group, their key head, their value head
        by_head = rows.view(keys, group + 2, -1)
        yield [part.flatten() for part in (by_head[:, :group], by_head[:, group], by_head[:, group + 1])]
    for number in {queries, keys}:
        if total % (2 * number) == 0:
            yield [rows.view(number, -1, 2).mT.flatten()]
            yield [rows.view(number, 2, -1).mT.flatten()]
