"""Which slice of which engine tensor holds which policy parameter.

vLLM fuses projections (q, k and v become rows of one matrix) and pads vocabularies. The model class names its fusions
in ``packed_modules_mapping`` and its renamings in ``hf_to_vllm_mapper``; shapes decide the rest, also which part of a
parameter a rank of a shared engine has. A mixture's experts are one tensor per kind on both sides, under other names.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.pytorch_utils import Conv1D

from ..engine.protocol import EngineTensors
from ..policy.images import in_tower, read_parameters
from ..policy.lora import base_name, unwrap
from ..policy.quantized_layers import PackedWeight, packed_weights
from ..sharding.weight_files import saved_names

# All experts of a block, (E, 2I, H) and (E, H, I) and their biases, as transformers and as vLLM name them. A policy may
# have them transposed: (E, H, 2I) and (E, I, H).
EXPERTS = {
    "gate_up_proj": "w13_weight", "down_proj": "w2_weight", "gate_up_proj_bias": "w13_bias", "down_proj_bias": "w2_bias"
}  # fmt: skip
WITHIN = ("", "routed_experts.")  # of vLLM's module of the experts, where their tensors are
BLOCKS = (".mlp.", ".block_sparse_moe.")  # transformers calls a mixture's block as any other, vLLM some by the second
# Where transformers and where vLLM have the parts of a SigLIP tower.
TOWER = ("vision_tower.", "vision_tower.vision_model.")


@dataclass(frozen=True, slots=True)
class Slice:
    """A policy parameter, or the part of it that this rank has of its engine, and its place in the engine's storage."""

    name: str  # the policy's name of the parameter
    source: torch.Tensor  # of a quantised one only its shape and dtype, without memory
    destination: torch.Tensor
    cut: tuple[slice, ...] = ()  # the part of the source that ``destination`` holds; empty: all of it
    packed: PackedWeight | None = None  # the policy has it quantised
    through: Callable[[torch.Tensor], torch.Tensor] | None = None  # the engine holds this function of it, elementwise
    again: bool = False  # the engine has the parameter elsewhere too, and reads this copy in other places
    rows: torch.Tensor | None = None  # the source's rows in the order in which ``destination`` has them, see row_order

    @property
    def is_computed(self) -> bool:
        """Whether the engine's values are computed from the policy's, so that no memory can be shared."""
        return self.packed is not None or self.through is not None or self.rows is not None

    @property
    def is_copy(self) -> bool:
        """Whether the engine has all of the parameter a second time, as it is."""
        return self.again and self.destination.shape == self.source.shape

    @property
    def view(self) -> torch.Tensor:
        """The part of the policy's own tensor, which may move; not for a quantised one."""
        return self.source.detach()[self.cut]

    @property
    def held(self) -> torch.Tensor:
        """The values for ``destination``: the `view`, or if `is_computed` a new tensor."""
        return self.part_of(self.source.detach() if self.packed is None else self.packed.values())

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The values for ``destination`` from a tensor that has the parameter's shape."""
        part = whole[self.cut if self.rows is None else self.rows.to(whole.device)]
        return part if self.through is None else self.through(part)

    def equal(self) -> bool:
        """Whether the engine holds the policy's value bit for bit, in the narrower of their two dtypes.

        The engine may keep a value in a wider dtype than the policy, as checkpoints have it. The policy may still be in
        host memory, so its value moves to the engine's device first, and is cast there.
        """
        engine_value = self.destination
        policy_value = self.held.to(engine_value.device)
        narrow = min(policy_value.dtype, engine_value.dtype, key=lambda dtype: dtype.itemsize)
        return torch.equal(engine_value.to(narrow), policy_value.to(narrow))


EXPANDS = "kv_b_proj"  # the layer that does so, in transformers and in vLLM


class UnmappedParameter(ValueError):
    """A parameter of the policy has no place in the engine, or a tensor of the engine no source in the policy."""


def map_parameters(
    policy: torch.nn.Module,
    engine: EngineTensors,
    place: int = 0,
    ranks: int = 1,
    served: Collection[PackedWeight] = (),
) -> list[Slice]:
    """Pair every parameter of the policy, or of a LoRA policy's base, with its slice of the engine's tensors.

    Args:
        place: of this rank among the ``ranks`` of its engine.
        served: the policy's packed weights that the engine reads where they are.

    Raises:
        UnmappedParameter: naming what is left over on either side.
    """
    targets: dict[str, torch.Tensor] = dict(engine.parameters())
    sources = _base_parameters(policy)
    own_names = {base_name(name): name for name, _ in policy.named_parameters()}
    packed = packed_weights(policy)
    for name in [base_name(name) for name, weight in packed.items() if weight in served]:
        sources.pop(str(name))
    for name, buffer in policy.named_buffers():  # what the engine has as a parameter: a router's correction, say
        if (base := base_name(name)) in targets and base not in sources:
            sources[base], own_names[base] = buffer, name
    slices, missing, others, saved = [], [], dict[str, str](), saved_names(unwrap(policy))
    for name, source in sources.items():
        own, parts, twice = own_names[name], [], list[Part]()
        if (experts := _experts(name, targets, engine)) is not None:
            split = ranks > 1
            parts = _parts(experts, source, place, ranks, own) if split else _turned(experts, source, policy, own)
        elif found := _whereabouts(name, saved.get(name, name), sources, targets, engine, ranks):
            if isinstance(policy.get_submodule(own.rpartition(".")[0]), Conv1D) and source.dim() == 2:
                parts = [(found[0].detach().mT, ())]  # as GPT-2's projections
            elif ranks == 1 or name.split(".")[-2] not in engine.fusions:
                parts, twice = _split(*found, place, ranks), _as_values(*found, place, ranks)
            elif in_tower(name):  # any other that the checkpoint has fused: where its parts end, no shape tells
                parts = _thirds(found[0], source, place, ranks)
            else:
                parts = _merged(found[0], source, place, _outputs(found[0], targets, engine))
        if not parts:
            missing.append(name)
        slices += [Slice(own, source, *part) for part in parts]
        twice += absorbed(name, source, parts, targets)
        slices += [Slice(own, source, *part, again=True) for part in twice]
    if missing:
        free = {name: targets[name] for name in _uncovered(slices, targets)}
        others = {name: _alike(name, sources, missing, free) for name in missing}
        slices += [Slice(own_names[n], sources[n], _within(free[other], sources[n])) for n, other in others.items()]
    slices += _of_buffers(policy, {name: targets[name] for name in _uncovered(slices, targets)})
    bare = sorted(_uncovered(slices, targets))
    if bare:
        raise UnmappedParameter(f"The policy has no source for {len(bare)} engine tensors: {', '.join(bare[:4])}.")
    functions = {
        own: engine.written_through(name, others.get(name)) for name, own in own_names.items() if name is not None
    }
    return [dataclasses.replace(p, packed=packed.get(p.name), through=functions.get(p.name)) for p in slices]


def _alike(
    name: str, sources: Mapping[str, torch.Tensor], missing: Sequence[str], free: Mapping[str, torch.Tensor]
) -> str:
    """The engine's other name for a parameter: that of the only tensor left of its layer and its shape, but for a
    filled-up vocabulary. (That it holds the parameter's value and is read, the proof shows as of any.)

    Raises:
        UnmappedParameter: there is none, or more than one.
    """

    source = sources[name]

    def fits(tensor: torch.Tensor) -> bool:
        sizes, own = ([size for size in each.shape if size > 1] for each in (tensor, source))
        return sizes == own or (len(own) == 2 and not _layer_of(name) and sizes[1:] == own[1:] and sizes[0] > own[0])

    def like(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [each for each in names if _layer_of(each) == _layer_of(name) and fits(tensors[each])]

    found, rivals = like(free, free), like(missing, sources)
    if len(found) != 1 or len(rivals) != 1:
        every = ", ".join(f"{each} {tuple(sources[each].shape)}" for each in missing[:4])
        raise UnmappedParameter(f"The engine has no place for {len(missing)} parameters: {every}.")
    return found[0]


def _of_buffers(policy: torch.nn.Module, free: Mapping[str, torch.Tensor]) -> Iterator[Slice]:
    """What the engine has as a parameter and the policy as a buffer of another name: a router's correction, say."""
    buffers = {name: b for name, b in policy.named_buffers() if b.is_floating_point() and _layer_of(name)}
    for place, target in free.items():
        found = [n for n, b in buffers.items() if b.shape == target.shape and _layer_of(n) == _layer_of(place)]
        if len(found) == 1:
            yield Slice(found[0], buffers[found[0]], target.detach())


def _within(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The view of an engine's tensor that holds a parameter of another number of dimensions, or of fewer rows."""
    target = target.detach()
    return target.view(source.shape) if target.numel() == source.numel() else target[: source.shape[0]]


def _layer_of(name: str) -> str:
    return next((part for part in name.split(".") if part.isdecimal()), "")


def _base_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by the names they have in a model without adapters; of quantised ones, what they amount to."""
    dense = {name: torch.empty(packed.shape, device="meta") for name, packed in packed_weights(model).items()}
    read = read_parameters(unwrap(model))
    named = ((n, base_name(n), p) for n, p in model.named_parameters() if read is None or id(p) in read)
    return {base: dense.get(name, p) for name, base, p in named if base is not None}


def _whereabouts(
    name: str,
    saved: str,
    sources: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    engine: EngineTensors,
    ranks: int,
) -> tuple[torch.Tensor, list[torch.Tensor], int] | None:
    """The engine's tensor that holds a parameter, the parameters that are fused in it, and which of them it is; asked
    for by the policy's name, and by the one that files have, ``saved``."""
    for each in {name: 0, saved: 0}:
        mapped = engine.renamed(each)
        if mapped.startswith(TOWER[0]) and any(target.startswith(TOWER[1]) for target in targets):
            mapped = mapped.replace(*TOWER, 1)
        if (found := _place(name, mapped, sources, targets, engine, ranks)) is not None:
            return found
    return None


def _place(
    name: str,
    mapped: str,
    sources: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    engine: EngineTensors,
    ranks: int,
) -> tuple[torch.Tensor, list[torch.Tensor], int] | None:
    for found in (mapped, mapped.replace(*BLOCKS)):
        if found in targets:
            return targets[found], [sources[name]], 0
    for fused, parts in engine.fusions.items():
        for index, part in enumerate(parts):
            target = targets.get(mapped.replace(f".{part}.", f".{fused}."))
            if target is not None:
                siblings = [name.replace(f".{part}.", f".{other}.") for other in parts]
                if not sources.keys() >= {*siblings[:index]}:
                    return None
                fused_parts = [sources[sibling] for sibling in siblings if sibling in sources]
                twice = [*fused_parts, fused_parts[-1]]
                if len(twice) == len(parts) and sum(_fused_rows(target, twice, ranks)[0]) == len(target):
                    fused_parts = twice  # see `_as_values`
                return target, fused_parts, index
    return None


Part = tuple[torch.Tensor, tuple[slice, ...]]  # a view of an engine's tensor, and the part of a parameter that it holds
ABSORBED = ("W_UK_T", "W_UV")  # a head's (P, L) and (L, V) of what expands latent attention's keys and values


def absorbed(
    name: str, source: torch.Tensor, parts: Sequence[Part], targets: Mapping[str, torch.Tensor]
) -> Iterator[Part]:
    """What the decoding of latent attention has of a rank's rows (H * (P + V), L), whose places are ``parts``."""
    module, _, _ = name.rpartition(f".{EXPANDS}.")
    found = {end: tensor for place, tensor in targets.items() if place.startswith(f"{module}.") for end in ABSORBED
             if module and place.endswith(f".{end}")}  # fmt: skip
    if len(found) < 2 or not parts:
        return
    keys, values = (found[end].detach() for end in ABSORBED)
    start = (parts[0][1] or (slice(0, 0),))[0].start
    for key, value in zip(keys, values, strict=True):
        for place in (key, value.T):
            yield place, (slice(start, start + len(place)),)
            start += len(place)


def _experts(name: str, targets: dict[str, torch.Tensor], engine: EngineTensors) -> torch.Tensor | None:
    """The engine's tensor of a block's experts; None: the parameter is none of a mixture's experts."""
    head, _, last = name.rpartition(".")
    if not head.endswith(".experts") or last not in EXPERTS:
        return None
    head = engine.renamed(f"{head}.weight").removesuffix("weight")
    places = (f"{block}{within}{EXPERTS[last]}" for block in (head, head.replace(*BLOCKS)) for within in WITHIN)
    place = next((place for place in places if place in targets), None)
    if place is None:
        return None
    if layout := engine.expert_layout(place):
        raise UnmappedParameter(
            f"The engine keeps {place} as its kernel for experts ({layout}) wants it, in another layout than a "
            "checkpoint's: leave what chooses kernels for experts out of vllm_engine_kwargs and the environment."
        )
    return targets[place]


def _turned(target: torch.Tensor, source: torch.Tensor, policy: torch.nn.Module, name: str) -> list[Part]:
    """All experts of a block."""
    target = target.detach()
    turned = getattr(policy.get_submodule(name.rpartition(".")[0]), "is_transposed", False)
    if target.dim() == 3 and (turned or target.shape != source.shape == target.mT.shape):
        target = target.mT
    if target.shape != source.shape:
        raise UnmappedParameter(
            f"The engine keeps {name} as {tuple(target.shape)}, the policy as {tuple(source.shape)}: its kernel for "
            "experts has a layout of its own."
        )
    return [(target, ())]


def _parts(target: torch.Tensor, source: torch.Tensor, place: int, ranks: int, name: str) -> list[Part]:
    """A rank's part of all experts: some gates and the ups that belong to them, or some columns."""
    target, everything = target.detach(), slice(None)
    halves = 2 if name.endswith(".gate_up_proj") else 1
    size = source.shape[1 if halves == 2 else 2] // halves  # I, of all ranks
    own = size // ranks
    shape = (source.shape[0], 2 * own, source.shape[2]) if halves == 2 else (*source.shape[:2], own)
    if tuple(target.shape) != shape:
        raise UnmappedParameter(f"The engine's rank keeps {name} as {tuple(target.shape)}, and not as {shape}.")
    if halves == 1:
        return [(target, (everything, everything, slice(place * own, (place + 1) * own)))]
    return [
        (target[:, half * own : (half + 1) * own], (everything, slice(start, start + own)))
        for half, start in enumerate((place * own, size + place * own))
    ]


def _split(target: torch.Tensor, parts: list[torch.Tensor], index: int, place: int, ranks: int) -> list[Part]:
    """What ``target`` holds of ``parts[index]``; empty: the shapes don't fit.

    As vLLM splits: a matrix whose outputs are added up by columns, any other by rows, each fused part by itself;
    key-value heads that are fewer than the ranks are repeated; the last rows of a filled-up vocabulary are nobody's;
    what has the whole shape (a norm) every rank has.
    """
    target, source = target.detach(), parts[index]
    if target.dim() != source.dim():
        return []
    if len(parts) == 1 and target.shape == source.shape:
        return [(target, ())]
    if len(parts) == 1 and target.dim() == 2 and target.shape[0] == source.shape[0]:
        columns = target.shape[1]
        cut = slice(place * columns, (place + 1) * columns)
        return [(target, (slice(None), cut))] if columns * ranks == source.shape[1] else []
    if target.shape[1:] != source.shape[1:]:
        return []
    if len(parts) == 1:  # rows, and perhaps a filled-up vocabulary
        start = min(place * target.shape[0], source.shape[0])
        stop = min(start + target.shape[0], source.shape[0])
        fits = target.shape[0] * ranks >= source.shape[0]
        return [(target[: stop - start], _rows(start, stop, source))] if fits else []
    if sum(part.shape[0] for part in parts) == target.shape[0]:  # of a tower that each rank has whole
        ranks = 1
    rows, repeated = _fused_rows(target, parts, ranks)
    if sum(rows) != target.shape[0]:
        return []
    offset, start = sum(rows[:index]), place % ranks // repeated[index] * rows[index]
    return [(target[offset : offset + rows[index]], _rows(start, start + rows[index], source))]


def _as_values(target: torch.Tensor, parts: list[torch.Tensor], index: int, place: int, ranks: int) -> list[Part]:
    """The second place of keys that are values, too (in some layers of Gemma 4): vLLM has them twice in ``target``."""
    last = len(parts) - 1
    return _split(target, parts, last, place, ranks) if index < last and parts[index] is parts[last] else []


def _outputs(target: torch.Tensor, targets: Mapping[str, torch.Tensor], engine: EngineTensors) -> Sequence[int]:
    return engine.merged_outputs(next(name for name, tensor in targets.items() if tensor is target))


def _merged(target: torch.Tensor, source: torch.Tensor, place: int, outputs: Sequence[int]) -> list[Part]:
    """A rank's part of each of the ``outputs`` that the checkpoint has in one layer, as vLLM has them (a short
    convolution's input and gates); empty: the shapes don't fit."""
    target = target.detach()
    ranks = source.shape[0] // target.shape[0]
    if sum(outputs) != source.shape[0] or any(size % ranks for size in outputs) or sum(outputs) // ranks != len(target):
        return []
    found: list[Part] = []
    start = at = 0
    for size in outputs:
        own = size // ranks
        first = start + place * own
        found.append((target[at : at + own], (slice(first, first + own),)))
        start, at = start + size, at + own
    return found


def _thirds(target: torch.Tensor, source: torch.Tensor, place: int, ranks: int) -> list[Part]:
    """A rank's part of a tower's queries, keys and values, which are fused in the checkpoint and equally many."""
    target = target.detach()
    if target.shape == source.shape:
        return [(target, ())]
    size, own = source.shape[0] // 3, target.shape[0] // 3
    if own * ranks != size or target.shape[1:] != source.shape[1:]:
        raise UnmappedParameter(
            f"The engine's rank keeps {tuple(target.shape)} of a tower's fused queries, keys and values of "
            f"{tuple(source.shape)}, and not a part of each."
        )
    starts = (part * size + place * own for part in range(3))
    return [(target[part * own : (part + 1) * own], (slice(start, start + own),)) for part, start in enumerate(starts)]


def _fused_rows(target: torch.Tensor, parts: list[torch.Tensor], ranks: int) -> tuple[list[int], list[int]]:
    """Of each of a fused layer's parts: the rows that a rank has, and how many neighbours have the same ones."""
    rows = [part.shape[0] // ranks for part in parts]
    first, others = rows[0], sum(rows[1:])
    times = (target.shape[0] - first) // others if others else 1
    if times > 1 and first + times * others == target.shape[0]:  # of queries, keys and values, the latter are repeated
        return [first, *(times * own for own in rows[1:])], [1, *(times for _ in rows[1:])]
    return rows, [1 for _ in rows]


def _rows(start: int, stop: int, source: torch.Tensor) -> tuple[slice, ...]:
    return () if stop - start == source.shape[0] else (slice(start, stop),)


def _uncovered(slices: list[Slice], targets: dict[str, torch.Tensor]) -> Iterator[str]:
    """Engine tensors that the slices don't fill. A padded vocabulary's last rows are nobody's."""
    filled: dict[int, int] = defaultdict(int)
    for part in slices:
        filled[part.destination.untyped_storage().data_ptr()] += part.destination.numel()
    for name, target in targets.items():
        if not target.numel():  # of a layer that reads the policy's
            continue
        vocabulary = "embed" in name or "lm_head" in name or "wte" in name
        storage = target.untyped_storage().data_ptr()
        if storage not in filled or (filled[storage] < target.numel() and not vocabulary):
            yield name


def packed_parts(policy: torch.nn.Module, engine: EngineTensors) -> dict[str, list[PackedWeight]]:
    """By the names of vLLM's linear layers, the packed weights that each would multiply with, in their order; a layer
    some of whose parts aren't packed has none."""
    own = {base_name(name): weight for name, weight in packed_weights(policy).items()}
    packed = {engine.renamed(str(name)).removesuffix(".weight"): weight for name, weight in own.items()}
    packed |= {name.replace(*TOWER, 1): weight for name, weight in packed.items() if name.startswith(TOWER[0])}
    found = {name: [weight] for name, weight in packed.items()}
    for name in packed:
        head, _, last = name.rpartition(".")
        for fused, parts in engine.fusions.items():
            names = [f"{head}.{part}" for part in parts]
            if last in parts and all(part in packed for part in names):
                found[f"{head}.{fused}"] = [packed[part] for part in names]
    return found
