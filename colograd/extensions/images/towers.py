"""Images in the policy's forward: the vision tower's features replace the embeddings of image tokens."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...batch import MicroBatch
from ...policy import attention
from ...policy.logprobs import ForwardStep, Pass, run_body
from ...policy.merged_attention import Call
from ...policy.padded import PackedSequence, rows_of
from ...policy.sending import to_device_async
from ...policy.towers import has_tower, in_tower, keep_gradients_out, reads_text_alone, takes_images, tower_layers
from .rider import PER_TOKEN, Images

# Attribute of FSDP models. Their vision tower runs also without images: all ranks must gather its weights.
IN_EACH_FORWARD = "tower_in_each_forward"
TOWER_NAME = "colograd_flash_tower"  # with "flash" in the name transformers passes all attention windows in one call


def see_both_ways(model_config: Any) -> str:
    """Return which layers attend both ways in an image: `all`, `window` (sliding-window layers), or "" (none)."""
    asked = getattr(model_config.get_text_config(), "use_bidirectional_attention", None)
    return {"gemma3": "all", "gemma4": "window" if asked == "vision" else ""}.get(model_config.model_type, "")


def hidden_tokens(model_config: Any) -> tuple[int, ...]:
    """Return ids of media placeholders. transformers embeds them as padding in text, vLLM as the token itself."""
    kinds = ("image", "video", "audio") if getattr(model_config, "model_type", None) == "gemma4" else ()
    found = (getattr(model_config, f"{kind}_token_id", None) for kind in kinds)
    return tuple(int(token) for token in found if token is not None)


def find_processors() -> None:
    """Make Idefics3's PIL image processor available without torchvision, which transformers wrongly requires."""
    import transformers

    name = "Idefics3ImageProcessorPil"
    package = importlib.import_module("transformers.models.idefics3")
    if getattr(getattr(package, name, None), "is_dummy", False):
        found = getattr(importlib.import_module("transformers.models.idefics3.image_processing_pil_idefics3"), name)
        for place in (package, transformers):
            setattr(place, name, found)


def freeze_tower(model: Any) -> int:
    """Freeze a model's vision tower, but not the projector. Return the number of elements in the tower."""
    frozen = [parameter.requires_grad_(False) for name, parameter in model.named_parameters() if in_tower(name)]
    keep_gradients_out(tower_layers(model))
    return sum(parameter.numel() for parameter in frozen)


def packed_hidden_states(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    starts = micro_batch.layout.starts
    placed = [(starts[segment], of) for segment, images in (micro_batch.media or {}).items() for of in images]
    own_positions = hasattr(_body(model), "get_rope_index")
    positions = _row_positions(model, micro_batch) if own_positions else micro_batch.position_ids
    embeds, more = _with_pictures(model, micro_batch.input_ids, placed)
    if placed and (where := see_both_ways(model.config)):
        runs = []  # [first, end) of each run of image tokens
        for at, of in placed:
            for _, run in itertools.groupby(enumerate(of.places), lambda pair: pair[1] - pair[0]):
                places = [at + place for _, place in run]
                runs.append((places[0], places[-1] + 1))
        more["both_ways" if where == "all" else "both_ways_in_window"] = attention.ImageRuns(runs)
    output = model.get_decoder()(
        inputs_embeds=embeds,
        attention_mask=torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device),
        position_ids=positions,
        layout=micro_batch.layout,
        use_cache=False,
        **more,
    )
    return output.last_hidden_state


def padded_hidden_states(
    model: Any, micro_batch: MicroBatch, ids: torch.Tensor, mask: torch.Tensor, chains: Sequence[tuple[int, ...]]
) -> torch.Tensor:
    """Compute last hidden states (B, L, hidden) of padded rows. ``chains[b]``: segments of ``micro_batch`` in row b."""
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
        kinds = to_device_async(_kinds(placed, embeds.shape[:2].numel()).view(embeds.shape[:2]).long(), embeds.device)
        theirs = sys.modules[type(_body(model)).__module__]
        masks = theirs.create_masks_for_vision_model(
            block_sequence_ids=theirs.get_block_sequence_ids_for_mask(kinds, device=embeds.device),
            config=model.config.get_text_config(),
            inputs_embeds=embeds,
            attention_mask=masks,
            past_key_values=None,
            position_ids=positions,
        )
    more |= {"attention_mask": masks, "position_ids": positions}
    return model.get_decoder()(inputs_embeds=embeds, use_cache=False, **more).last_hidden_state


Placed = Sequence[tuple[int, Images]]  # (index of the token where `Images.places` count from, images)


def _placed(micro_batch: MicroBatch, chain: Sequence[int]) -> list[tuple[int, Images]]:
    starts = itertools.accumulate((micro_batch.layout.lengths[segment] for segment in chain), initial=0)
    media = micro_batch.media or {}
    return [(at, of) for at, segment in zip(starts, chain, strict=False) for of in media.get(segment, ())]


def _with_pictures(model: Any, ids: torch.Tensor, placed: Placed) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return embeddings of ``ids`` (B, L) with image features inserted, and keyword arguments of the decoder."""
    embeds, decoder = model.get_input_embeddings()(ids), model.get_decoder()
    more: dict[str, Any] = {}
    if getattr(decoder, "hidden_size_per_layer_input", None):  # only Gemma 4 has per-layer embeddings
        read = ids.flatten()
        for at, of in placed:  # per-layer embeddings of image tokens are the padding token's
            places = to_device_async(torch.tensor(of.places) + at, ids.device)
            read = read.index_fill(0, places, decoder.config.pad_token_id)
        more["per_layer_inputs"] = decoder.get_per_layer_inputs(read.view_as(ids), None)
    if not placed:
        if getattr(model, IN_EACH_FORWARD, False):  # FSDP: all ranks must gather the tower's weights
            features, deeper = _features(model, [_unseen_picture(model.config)])
            embeds = _Beside.apply(embeds, features, *deeper)
        return embeds, more
    times: dict[Images, list[torch.Tensor]] = {}  # images -> per occurrence, their tokens' indices in ``ids``
    for at, of in placed:
        times.setdefault(of, []).append(torch.tensor(of.places) + at)
    features, deeper = _features(model, [*times])
    counts = [len(of.places) for of in times]
    if len(features) != sum(counts):
        raise RuntimeError(
            f"The vision tower computes {len(features)} features for {sum(counts)} image tokens, so the processor "
            "doesn't fit the model. Use the processor that was saved with the model."
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


class _Beside(torch.autograd.Function):
    """Identity of ``first`` that gives ``others`` (image features) zero gradients, so the tower's backward runs."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)


def _unseen_picture(config: Any) -> Images:
    """Make a vision tower's inputs for the smallest white image that it takes. Some towers read black as padding."""
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
        height, width = (size, size) if isinstance(size, int) else size  # InternVL's image_size is a pair
        inputs = {"pixel_values": torch.ones(1, vision.num_channels, height, width)}
    return Images("", (), (), inputs, ())


def _features(model: Any, images: Sequence[Images]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return image features (image tokens, hidden), and a list of further features for decoder layers."""
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
    """Pad tensors of several images, such as pixels, to one size, and join them. ``tiled``: shapes (1, tiles, ...)."""
    if parts[0].dim() > 2 and (tiled or len({part.shape[1:] for part in parts}) > 1):
        height, width = (max(part.shape[axis] for part in parts) for axis in (-2, -1))
        pad = torch.nn.functional.pad
        parts = [pad(part, (0, width - part.shape[-1], 0, height - part.shape[-2])) for part in parts]
    return torch.cat([*parts], dim=1 if tiled else 0)


def _row_positions(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the rotary positions (time, height, width) of a packed row, (3, 1, T)."""
    layout, starts = micro_batch.layout, micro_batch.layout.starts
    positions = micro_batch.position_ids.cpu().expand(3, 1, -1).clone()
    segments = micro_batch.input_ids[0].cpu().split(layout.lengths)
    for segment, seen in enumerate(layout.attends_to):
        chain, length = (*seen, segment), layout.lengths[segment]
        here = slice(starts[segment], starts[segment] + length)
        if segment in (micro_batch.media or {}):
            ids = torch.cat([segments[each] for each in chain])
            positions[:, 0, here] = _positions(model, ids, _placed(micro_batch, chain))[:, -length:]
        elif seen and seen[0] in (micro_batch.media or {}):
            before = positions[:, 0, starts[seen[0]] : starts[seen[0]] + layout.lengths[seen[0]]]
            positions[:, 0, here] = torch.arange(length) + int(before.max()) + 1
    return to_device_async(positions, micro_batch.input_ids.device)


def _positions(model: Any, ids: torch.Tensor, placed: Placed) -> torch.Tensor:
    """Return the rotary positions (3, L) of a sequence with images."""
    grids = torch.cat([of.inputs["image_grid_thw"] for _, of in placed])
    kinds = _kinds(placed, len(ids)).int()
    found: torch.Tensor = _body(model).get_rope_index(ids[None], mm_token_type_ids=kinds, image_grid_thw=grids)[0]
    return found[:, 0]


def _kinds(placed: Placed, length: int) -> torch.Tensor:
    """Return a mask (1, L) that is true for image tokens."""
    kinds = torch.zeros(1, length, dtype=torch.bool)
    for at, of in placed:
        kinds[0, torch.tensor(of.places) + at] = True
    return kinds


def _body(model: Any) -> Any:
    return model.base_model if model.base_model is not model else model.model


class ImageStep(ForwardStep):
    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        model, batch = row.model, row.batch
        text_alone = reads_text_alone(model)
        hides = hidden_tokens(model.config) and not text_alone
        if batch.media is None and not getattr(model, IN_EACH_FORWARD, False) and not hides:
            return run_body(row, model.get_decoder()) if text_alone else inner(row)
        if model.config._attn_implementation == attention.NAME:
            with attention.packed_rows():
                return packed_hidden_states(model, batch)
        rows = rows_of(batch.layout, batch.input_ids.device)
        ids = rows.of_tokens(batch.input_ids[0])
        return rows.packed(padded_hidden_states(model, batch, ids, rows.mask, rows.chains))

    def attention(self, model: Any, name: str) -> str | dict[str, str]:
        """Return the attention function's name. If the model takes images: a dict of names by sub-configuration."""
        if not takes_images(model.config):
            return name
        tower = name
        if name not in ("eager", "sdpa"):
            # With windows (`cu_seqlens`) transformers' sdpa would wait in each layer for their lengths from the GPU.
            layers = tower_layers(model)
            windows = bool(layers) and "cu_seqlens" in inspect.signature(type(layers[0]).forward).parameters
            tower = TOWER_NAME if windows and torch.cuda.is_available() else "sdpa"
        return {"": name, "text_config": name, "vision_config": tower}

    def own_inputs(self, part: PackedSequence) -> dict[str, Any]:
        prompt, tokens = len(part.prompt_ids), len(part.prompt_ids) + len(part.completion_ids)
        placed = [*((0, of) for of in part.images), *((prompt, of) for of in part.answers)]
        inputs = [of.inputs for _, of in placed]
        return {
            name: _kinds(placed, tokens).long()
            if name in PER_TOKEN
            else _joined([each[name] for each in inputs], tiled="pixel_attention_mask" in inputs[0])
            for name in dict.fromkeys(name for each in inputs for name in each)
        }

    def misreads(self, model: Any, part: PackedSequence) -> bool:
        """Return whether transformers would treat a text token of ``part`` as an image token or as padding."""
        if hidden := hidden_tokens(model.config):
            places = {len(part.prompt_ids) + place for answer in part.answers for place in answer.places}
            places |= {place for image in part.images for place in image.places}
            ids = torch.cat([part.prompt_ids, part.completion_ids]).tolist()
            return any(token in hidden for place, token in enumerate(ids) if place not in places)
        if not (part.images or part.answers):
            return False
        known = {place for answer in part.answers for place in answer.places}
        found = (part.completion_ids == model.config.image_token_id).nonzero().flatten().tolist()
        return not known.issuperset(found)


def step_of(model: Any) -> ForwardStep | None:
    return ImageStep() if has_tower(model.config) else None


def tower_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Return attention inside each window, (1, T, H, D). ``cu_seq_lens_q``: the windows' borders, from 0 to T."""
    scaling, dropout = options.pop("scaling", None), options.pop("dropout", 0.0)
    for name in ("cu_seq_lens_k", "max_length_k"):
        options.pop(name, None)
    query, key, value = attention.in_one_dtype(query, key, value)
    if cu_seq_lens_q is not None and max_length_q is not None and dropout == 0.0 and attention.flash_takes(query):
        longest = int(max_length_q)
        call = Call(None, None, False, None, (cu_seq_lens_q, cu_seq_lens_q, longest, longest))
        return attention.run_merged(query, key, value, (call,), scaling), None
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    windows = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    parts = [own(module, *each, attention_mask, scaling=scaling, dropout=dropout, **options)[0] for each in windows]
    return torch.cat(parts, dim=1), None


AttentionInterface.register(TOWER_NAME, tower_attention)
