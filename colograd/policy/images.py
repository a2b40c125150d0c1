"""Images in a forward: which models take them, and how a row's pictures come into its hidden states.

The features of a row's pictures are computed together and put in the place of their tokens' embeddings. Those places
are known (`Images.places`), never looked for: in a completion the image token is a token like any other.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..batch import PER_TOKEN, Images, MicroBatch
from . import attention
from .sending import to_device_async

# Model types, as transformers names them, whose images can be trained on.
FAMILIES = ("gemma3", "gemma4", "idefics3", "internvl", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm")
TEXT_FIRST = ("gemma4", "internvl", "mistral3", "qwen3_5")  # are trained like text models where a run has no images
TOWERS = ("visual", "vision_model", "vision_tower")  # modules that see; what follows brings it into the text's space
PROJECTORS = ("merger", "deepstack_merger_list", "connector", "multi_modal_projector", "embed_vision")
HEARS = ("audio_tower", "embed_audio")  # of a model that hears, too: it is neither trained nor in the engine


def takes_images(model_config: Any) -> bool:
    return getattr(model_config, "model_type", None) in FAMILIES


def see_both_ways(model_config: Any) -> str:
    """In which layers the tokens of a picture see each other both ways: `all`, those with a `window`, or none (``).

    The model's configuration says so of Gemma 4, whose small ones have none."""
    asked = getattr(model_config.get_text_config(), "use_bidirectional_attention", None)
    return {"gemma3": "all", "gemma4": "window" if asked == "vision" else ""}.get(model_config.model_type, "")


def hidden_tokens(model_config: Any) -> tuple[int, ...]:
    """Tokens that the model itself reads as padding wherever they stand, written or sampled: Gemma 4's placeholders of
    what isn't text. Here, and in vLLM, those that stand for no picture are tokens like any other."""
    if getattr(model_config, "model_type", None) != "gemma4":
        return ()
    found = (getattr(model_config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    return tuple(int(token) for token in found if token is not None)


def find_processors() -> None:
    """Let Idefics3's image processor be found without torchvision, of which transformers thinks that it needs it."""
    import transformers

    name = "Idefics3ImageProcessorPil"
    package = importlib.import_module("transformers.models.idefics3")
    if getattr(getattr(package, name, None), "is_dummy", False):
        found = getattr(importlib.import_module("transformers.models.idefics3.image_processing_pil_idefics3"), name)
        for place in (package, transformers):
            setattr(place, name, found)


def has_tower(model_config: Any) -> bool:
    """Whether the model reads something else than text."""
    return any(getattr(model_config, name, None) is not None for name in ("vision_config", "audio_config"))


def reads_text_alone(model: Any) -> bool:
    """Whether it is a model that could read more than text, of a family whose images can't be trained on, or of
    `TEXT_FIRST` in a run without any (`set_text_alone`)."""
    config = getattr(model, "config", None)
    return has_tower(config) and (not takes_images(config) or getattr(model, "text_alone", False))


def set_text_alone(model: Any, has_images: bool) -> None:
    """Before a model is trained: whether the run has images, on which `TEXT_FIRST` depend."""
    model.text_alone = not has_images and getattr(model.config, "model_type", None) in TEXT_FIRST


def read_parameters(model: Any) -> set[int] | None:
    """The ids of the parameters that a run's rows go through, of a model that could read more than they have; None:
    they go through all."""
    if reads_text_alone(model):
        head = model.get_output_embeddings()
        return {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    if not hears(getattr(model, "config", None)):
        return None
    return {id(parameter) for name, parameter in model.named_parameters() if not {*name.split(".")} & {*HEARS}}


def hears(model_config: Any) -> bool:
    return getattr(model_config, "audio_config", None) is not None


def freeze_unread(model: Any) -> None:
    """Train no parameter that no row goes through."""
    if (read := read_parameters(model)) is None:
        return
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def freeze_tower(model: Any) -> int:
    """Train nothing of the vision tower; what projects its features goes on being trained. Returns the parameters."""
    frozen = 0
    for name, parameter in model.named_parameters():
        if in_tower(name):
            parameter.requires_grad_(False)
            frozen += parameter.numel()
    keep_gradients_out(tower_layers(model))
    return frozen


def keep_gradients_out(layers: Sequence[torch.nn.Module]) -> None:
    """Let no gradient go through frozen layers, not even where checkpointing has asked for one of what comes in."""

    def detach(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in inputs)

    if layers:
        layers[0].register_forward_pre_hook(detach)


@torch.no_grad()
def load_weights(model: Any, folder: str) -> None:
    """Give a whole model a folder's weights, in place, also under names that older versions of transformers gave them.

    Raises:
        ValueError: some of them aren't there.
    """
    loaded, found = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder!r} lacks {len(missing)} of the policy's weights ({', '.join(missing[:3])}): they are of another "
            "model, or a file is missing."
        )
    for (name, parameter), saved in zip(model.named_parameters(), loaded.parameters(), strict=True):
        if parameter.shape != saved.shape:
            raise ValueError(f"{name} has shape {tuple(saved.shape)} in {folder!r}: it is of another model.")
        parameter.copy_(saved)


def in_tower(name: str) -> bool:
    """Whether a parameter of that name is the vision tower's."""
    parts = {*name.split(".")}
    return bool(parts & {*TOWERS}) and not parts & {*PROJECTORS}


def sees(name: str) -> bool:
    """Whether a parameter of that name is the tower's or what projects its features."""
    return bool({*name.split(".")} & {*TOWERS, *PROJECTORS})


def tower_layers(model: Any) -> list[torch.nn.Module]:
    """Of the tower that sees; empty: the model has none."""
    if not takes_images(model.config):
        return []
    modules = (module for name, module in model.named_modules() if in_tower(name))
    return list(max((each for each in modules if isinstance(each, torch.nn.ModuleList)), key=len, default=()))


def in_each_forward(model: Any) -> bool:
    """Whether rows without pictures go through the tower too, as its sharding strategy asks: ranks meet there."""
    return getattr(model, "tower_in_each_forward", False)


def embeds(model: Any, micro_batch: MicroBatch) -> bool:
    """Whether a row's embeddings are made here: it has pictures, goes through the tower all the same, or has tokens
    that the model would hide."""
    if micro_batch.images is not None or in_each_forward(model):
        return True
    return bool(hidden_tokens(model.config)) and not reads_text_alone(model)


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the language model, and with it that of a vision tower, whose rows are whole images."""
    if takes_images(model.config):
        tower = name if name in ("eager", "sdpa") else _tower_attention(model)
        model.set_attn_implementation({"": name, "text_config": name, "vision_config": tower})
    else:
        model.set_attn_implementation(name)


def _tower_attention(model: Any) -> str:
    """The attention of a tower beside packed rows: transformers' own, but where there are GPUs and its layers are told
    of windows (`cu_seqlens`): in each layer transformers would wait for the GPU to tell how long they are.

    The model's own place isn't asked: it may be put on the GPU later, as a reference that waits in host memory.
    """
    layers = tower_layers(model)
    windows = bool(layers) and "cu_seqlens" in inspect.signature(type(layers[0]).forward).parameters
    return attention.TOWER_NAME if windows and torch.cuda.is_available() else "sdpa"


def own_inputs(images: Images, completion: int) -> dict[str, torch.Tensor]:
    """What the model's own forward takes beside the ids of one sequence: the prompt, and ``completion`` tokens."""
    return {
        name: torch.nn.functional.pad(value, (0, completion)) if name in PER_TOKEN else value
        for name, value in images.inputs.items()
    }


def of_sequence(prompt: Sequence[Images], answers: Sequence[Images], lengths: tuple[int, int]) -> dict[str, Any]:
    """`own_inputs` of a sequence with pictures in its completion, too; ``lengths`` are of prompt and completion."""
    placed = [*((0, of) for of in prompt), *((lengths[0], of) for of in answers)]
    parts = [own_inputs(of, 0) for _, of in placed]
    found: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        if name in PER_TOKEN:
            found[name] = _kinds(placed, sum(lengths)).long()
        else:
            found[name] = _joined([part[name] for part in parts], tiled="pixel_attention_mask" in parts[0])
    return found


def packed_hidden_states(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """The last hidden states of a packed row with pictures, (1, T, hidden)."""
    starts = micro_batch.layout.starts
    placed = [(starts[segment], of) for segment, images in (micro_batch.images or {}).items() for of in images]
    own_positions = hasattr(_body(model), "get_rope_index")
    positions = _row_positions(model, micro_batch) if own_positions else micro_batch.position_ids
    embeds, more = _with_pictures(model, micro_batch.input_ids, placed)
    if placed and (where := see_both_ways(model.config)):
        runs = [(at + first, at + end) for at, of in placed for first, end in _runs(of.places)]
        more["both_ways" if where == "all" else "both_ways_in_window"] = runs
    output = model.get_decoder()(
        inputs_embeds=embeds,
        attention_mask=torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device),
        position_ids=positions,
        layout=micro_batch.layout,
        use_cache=False,
        **more,
    )
    return output.last_hidden_state


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last + 1 of tokens beside each other: a picture's."""
    for _, run in itertools.groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        found = [place for _, place in run]
        yield found[0], found[-1] + 1


def padded_hidden_states(
    model: Any, micro_batch: MicroBatch, ids: torch.Tensor, mask: torch.Tensor, chains: Sequence[tuple[int, ...]]
) -> torch.Tensor:
    """Those of padded rows, (B, L, hidden): ``ids`` and ``mask`` are (B, L), ``chains`` each row's segments."""
    width = ids.shape[1]
    rows = [_placed(micro_batch, chain) for chain in chains]
    placed = [(row * width + at, of) for row, images in enumerate(rows) for at, of in images]
    embeds, more = _with_pictures(model, ids, placed)
    positions = torch.arange(width, device=ids.device).expand_as(ids)
    if hasattr(_body(model), "get_rope_index"):
        positions = positions.expand(3, *ids.shape).clone()
        for row, images in enumerate(rows):
            if images:
                positions[:, row] = to_device_async(_positions(model, ids[row].cpu(), images), ids.device)
    masks: Any = mask.long()
    if see_both_ways(model.config):
        masks = _masks_both_ways(model, embeds, masks, positions, placed)
    more |= {"attention_mask": masks, "position_ids": positions}
    return model.get_decoder()(inputs_embeds=embeds, use_cache=False, **more).last_hidden_state


Placed = Sequence[tuple[int, Images]]  # images, each with the index in the ids that its places count from


def _placed(micro_batch: MicroBatch, chain: Sequence[int]) -> list[tuple[int, Images]]:
    found, at = [], 0
    for segment in chain:
        found += [(at, of) for of in (micro_batch.images or {}).get(segment, ())]
        at += micro_batch.layout.lengths[segment]
    return found


def _with_pictures(model: Any, ids: torch.Tensor, placed: Placed) -> tuple[torch.Tensor, dict[str, Any]]:
    """The embeddings of ``ids`` (B, L) with the pictures' features in their places (``placed`` counts in the flattened
    ids), and what else the language model takes of them. Equal images' features are computed once.

    Raises:
        RuntimeError: there are more or fewer features than places.
    """
    embeds = model.get_input_embeddings()(ids)
    more: dict[str, Any] = _of_each_layer(model, ids, placed)
    if not placed:
        return (_beside_an_unseen_picture(model, embeds) if in_each_forward(model) else embeds), more
    times: dict[Images, list[torch.Tensor]] = {}  # the places of equal ones, which differ
    for at, of in placed:
        times.setdefault(of, []).append(torch.tensor(of.places) + at)
    features, deeper = _features(model, [*times])
    counts = [len(of.places) for of in times]
    if len(features) != sum(counts):
        raise RuntimeError(
            f"The vision tower gives {len(features)} features of pictures that have {sum(counts)} tokens in their "
            "prompts: the processor isn't the model's (give the processor that was saved with it)."
        )

    def repeated(values: torch.Tensor) -> torch.Tensor:
        if len(times) == len(placed):
            return values
        parts = zip(values.split(counts), times.values(), strict=True)
        return torch.cat([part.repeat(len(places), 1) for part, places in parts])

    at = to_device_async(torch.cat([each for places in times.values() for each in places]), ids.device)
    order = at.argsort()
    flat = embeds.flatten(0, 1).index_copy(0, at, repeated(features).to(embeds.dtype))
    if deeper:
        seen = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, at, True)
        more["visual_pos_masks"] = seen.view_as(ids)
        more["deepstack_visual_embeds"] = [repeated(each).index_select(0, order) for each in deeper]
    return flat.view_as(embeds), more


def _of_each_layer(model: Any, ids: torch.Tensor, placed: Placed) -> dict[str, torch.Tensor]:
    """The embeddings of ``ids`` that each layer adds, of models that have some (Gemma 4): a picture's tokens have those
    of padding."""
    decoder = model.get_decoder()
    if not getattr(decoder, "hidden_size_per_layer_input", None):
        return {}
    for at, of in placed:
        places = to_device_async(torch.tensor(of.places) + at, ids.device)
        ids = ids.flatten().index_fill(0, places, decoder.config.pad_token_id).view_as(ids)
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids, None)}


def _beside_an_unseen_picture(model: Any, embeds: torch.Tensor) -> torch.Tensor:
    """The embeddings as they are, after the tower has seen a picture that isn't in them: its gradient is zero."""
    features, deeper = _features(model, [_unseen_picture(model.config)])
    beside: torch.Tensor = _Beside.apply(embeds, features, *deeper)
    return beside


class _Beside(torch.autograd.Function):
    """The first tensor, of which the others are said to be a part."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)


def _unseen_picture(config: Any) -> Images:
    """The smallest picture that the family's tower takes, white: a black one is padding to some."""
    vision = config.vision_config
    if hasattr(vision, "pooling_kernel_size"):
        axis = torch.arange(vision.pooling_kernel_size)
        places = torch.cartesian_prod(axis, axis)[None].flip(-1)
        inputs = {"pixel_values": torch.ones(1, len(axis) ** 2, 3 * vision.patch_size**2), "image_position_ids": places}
    elif hasattr(vision, "spatial_merge_size"):
        side, area = vision.spatial_merge_size, vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.ones(side**2, vision.in_channels * area)
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    elif hasattr(config, "scale_factor"):
        side = config.scale_factor * vision.patch_size
        mask = torch.ones(1, 1, side, side, dtype=torch.long)
        inputs = {"pixel_values": torch.ones(1, 1, vision.num_channels, side, side), "pixel_attention_mask": mask}
    elif hasattr(config, "spatial_merge_size"):
        side = config.spatial_merge_size * vision.patch_size
        pixels = torch.ones(1, vision.num_channels, side, side)
        inputs = {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]])}
    else:
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size  # InternVL's is a pair
        inputs = {"pixel_values": torch.ones(1, vision.num_channels, height, width)}
    return Images("", (), (), inputs, ())


def _features(model: Any, images: Sequence[Images]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Features of all pictures in their order (F, hidden), and those for the language model's first layers."""
    body = _body(model)
    taken = inspect.signature(body.get_image_features).parameters
    given = {name for of in images for name in of.inputs if name in taken}
    dtype, device = model.dtype, next(body.parameters()).device
    tiled = "pixel_attention_mask" in given
    inputs: dict[str, torch.Tensor] = {}
    for name in sorted(given):
        value = _joined([of.inputs[name] for of in images], tiled)
        inputs[name] = to_device_async(value.to(dtype) if value.is_floating_point() else value, device)
    output = body.get_image_features(**inputs, return_dict=True)
    pooled = output.pooler_output
    features = torch.cat([*pooled]) if isinstance(pooled, (list, tuple)) else pooled.flatten(0, -2)
    return features, [*(getattr(output, "deepstack_features", None) or ())]


def _joined(parts: Sequence[torch.Tensor], tiled: bool) -> torch.Tensor:
    """Texts' inputs one after the other, pictures (..., height, width) filled up to one size. Those with a pixel mask
    are (1, tiles, ...)."""
    if parts[0].dim() > 2 and (tiled or len({part.shape[1:] for part in parts}) > 1):
        height, width = (max(part.shape[axis] for part in parts) for axis in (-2, -1))
        pad = torch.nn.functional.pad
        parts = [pad(part, (0, width - part.shape[-1], 0, height - part.shape[-2])) for part in parts]
    return torch.cat([*parts], dim=1 if tiled else 0)


def _row_positions(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Positions (3, 1, T) of a packed row. The model is asked for those of segments with pictures, which are the same
    before whatever follows them; all else goes on behind its prompt."""
    layout, starts = micro_batch.layout, micro_batch.layout.starts
    positions = micro_batch.position_ids.cpu().expand(3, 1, -1).clone()
    segments = micro_batch.input_ids[0].cpu().split(layout.lengths)
    for segment, seen in enumerate(layout.attends_to):
        chain, length = (*seen, segment), layout.lengths[segment]
        here = slice(starts[segment], starts[segment] + length)
        if segment in (micro_batch.images or {}):
            ids = torch.cat([segments[each] for each in chain])
            positions[:, 0, here] = _positions(model, ids, _placed(micro_batch, chain))[:, -length:]
        elif seen and seen[0] in (micro_batch.images or {}):
            before = positions[:, 0, starts[seen[0]] : starts[seen[0]] + layout.lengths[seen[0]]]
            positions[:, 0, here] = torch.arange(length) + int(before.max()) + 1
    return to_device_async(positions, micro_batch.input_ids.device)


def _positions(model: Any, ids: torch.Tensor, placed: Placed) -> torch.Tensor:
    """(3, L) positions of a sequence with pictures: of time, height and width."""
    grids = [of.inputs["image_grid_thw"] for _, of in placed]
    kinds = _kinds(placed, len(ids))
    found: torch.Tensor = _body(model).get_rope_index(
        ids[None], mm_token_type_ids=kinds.int(), image_grid_thw=torch.cat(grids)
    )[0]
    return found[:, 0]


def _kinds(placed: Placed, length: int) -> torch.Tensor:
    """(1, L) bool: the tokens that are pictures."""
    kinds = torch.zeros(1, length, dtype=torch.bool)
    for at, of in placed:
        kinds[0, torch.tensor(of.places) + at] = True
    return kinds


def _masks_both_ways(
    model: Any, embeds: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, placed: Placed
) -> Any:
    """Gemma's masks: causal, but within a picture."""
    kinds = _kinds(placed, embeds.shape[:2].numel()).view(embeds.shape[:2]).long()
    kinds = to_device_async(kinds, embeds.device)
    theirs = sys.modules[type(_body(model)).__module__]
    return theirs.create_masks_for_vision_model(
        block_sequence_ids=theirs.get_block_sequence_ids_for_mask(kinds, device=embeds.device),
        config=model.config.get_text_config(),
        inputs_embeds=embeds,
        attention_mask=mask,
        past_key_values=None,
        position_ids=positions,
    )


def _body(model: Any) -> Any:
    """All of the model but its head."""
    return model.base_model if model.base_model is not model else model.model
