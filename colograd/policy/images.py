"""Images in a forward: which models take them, and how a row's pictures come into its hidden states.

The features of a row's pictures are computed together, once per prompt, and put in the place of their tokens'
embeddings. Those places are known from the prompt (`Images.places`), never looked for among the row's tokens: a
completion may contain the image token, which is a token like any other there, as it is in the engine.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..batch import Images, MicroBatch
from .sending import sent

# Model types, as transformers names them, whose images can be trained on.
FAMILIES = ("gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
BOTH_WAYS = ("gemma3",)  # the tokens of a picture see each other both ways
TOWERS = ("visual", "vision_model", "vision_tower")  # modules that see; what follows brings it into the text's space
PROJECTORS = ("merger", "deepstack_merger_list", "connector", "multi_modal_projector")
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")  # inputs with an entry per token of the prompt, 0 in a completion


def takes_images(model_config: Any) -> bool:
    """Whether it is a model of one of the families above, with its vision tower."""
    return getattr(model_config, "model_type", None) in FAMILIES


def find_processors() -> None:
    """Let Idefics3's image processor be found where torchvision isn't installed.

    transformers has one that needs PIL alone, but takes it for one of torchvision's, which its source mentions.
    """
    import transformers

    name = "Idefics3ImageProcessorPil"
    package = importlib.import_module("transformers.models.idefics3")
    if getattr(getattr(package, name, None), "is_dummy", False):
        found = getattr(importlib.import_module("transformers.models.idefics3.image_processing_pil_idefics3"), name)
        setattr(package, name, found)
        setattr(transformers, name, found)


def has_tower(model_config: Any) -> bool:
    """Whether the model reads something else than text."""
    return any(getattr(model_config, name, None) is not None for name in ("vision_config", "audio_config"))


def freeze_tower(model: Any) -> int:
    """Train nothing of the vision tower; what projects its features goes on being trained. Returns the parameters."""
    frozen = 0
    for name, parameter in model.named_parameters():
        if in_tower(name):
            parameter.requires_grad_(False)
            frozen += parameter.numel()
    return frozen


@torch.no_grad()
def load_weights(model: Any, folder: str) -> None:
    """Give a whole model a folder's weights, in place. Files may name them as older versions of transformers did, which
    its loading understands and its Trainer doesn't.

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


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the language model; a vision tower keeps transformers' own, whose rows are whole images."""
    if takes_images(model.config):
        tower = name if name in ("eager", "sdpa") else "sdpa"
        model.set_attn_implementation({"": name, "text_config": name, "vision_config": tower})
    else:
        model.set_attn_implementation(name)


def own_inputs(images: Images, completion: int) -> dict[str, torch.Tensor]:
    """What the model's own forward takes beside the ids of one sequence: the prompt, and ``completion`` tokens."""
    return {
        name: torch.nn.functional.pad(value, (0, completion)) if name in PER_TOKEN else value
        for name, value in images.inputs.items()
    }


def packed_hidden_states(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """The last hidden states of a packed row with pictures, (1, T, hidden)."""
    layout, starts = micro_batch.layout, micro_batch.layout.starts
    images = dict(sorted((micro_batch.images or {}).items()))
    places = torch.cat([torch.tensor(of.places) + starts[segment] for segment, of in images.items()])
    device = micro_batch.input_ids.device
    positions = micro_batch.position_ids
    if hasattr(_body(model), "get_rope_index"):
        positions = _row_positions(model, micro_batch, images)
    embeds, more = _with_pictures(model, micro_batch.input_ids, [*images.values()], [1] * len(images), places)
    if model.config.model_type in BOTH_WAYS:
        more["both_ways"] = [
            (starts[segment] + first, starts[segment] + end)
            for segment, of in images.items()
            for first, end in _runs(of.places)
        ]
    output = model.get_decoder()(
        inputs_embeds=embeds,
        attention_mask=torch.ones(embeds.shape[:2], dtype=torch.bool, device=device),
        position_ids=positions,
        layout=layout,
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
    model: Any, micro_batch: MicroBatch, ids: torch.Tensor, mask: torch.Tensor, prompts: Sequence[int]
) -> torch.Tensor:
    """Those of padded rows, (B, L, hidden).

    Args:
        ids, mask: (B, L), the mask 1 where there is a token.
        prompts: [B] the segment of each row's prompt. A prompt's features are computed once, also if rows repeat it.
    """
    by_segment, width = micro_batch.images or {}, ids.shape[1]
    with_pictures = [(row, by_segment[segment]) for row, segment in enumerate(prompts) if segment in by_segment]
    images: dict[Images, list[int]] = {}
    for row, of in with_pictures:
        images.setdefault(of, []).append(row)
    places = torch.cat([torch.tensor(of.places) + row * width for of, rows in images.items() for row in rows])
    embeds, more = _with_pictures(model, ids, [*images], [len(rows) for rows in images.values()], places)
    positions = torch.arange(width, device=ids.device).expand_as(ids)
    if hasattr(_body(model), "get_rope_index"):
        positions = positions.expand(3, *ids.shape).clone()
        for row, of in with_pictures:
            length = micro_batch.layout.lengths[prompts[row]]
            found = _prompt_positions(model, ids[row, :length].cpu(), of)
            after = torch.arange(width - length) + int(found.max()) + 1
            positions[:, row] = sent(torch.cat([found, after.expand(3, -1)], 1), ids.device)
    masks: Any = mask.long()
    if model.config.model_type in BOTH_WAYS:
        masks = _masks_both_ways(model, embeds, masks, positions, with_pictures)
    output = model.get_decoder()(
        inputs_embeds=embeds, attention_mask=masks, position_ids=positions, use_cache=False, **more
    )
    return output.last_hidden_state


def _with_pictures(
    model: Any, ids: torch.Tensor, images: Sequence[Images], times: Sequence[int], places: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The embeddings of ``ids`` (B, L) with the pictures' features at ``places`` of the flattened ids, and what else
    the language model takes of them.

    Args:
        times: how often each prompt's features are put in, one time after the other.

    Raises:
        RuntimeError: there are more or fewer features than places.
    """
    features, deeper = _features(model, images)
    counts = [len(of.places) for of in images]
    if len(features) != sum(counts):
        raise RuntimeError(
            f"The vision tower gives {len(features)} features of pictures that have {sum(counts)} tokens in their "
            "prompts: the processor isn't the model's (give the processor that was saved with it)."
        )

    def repeated(values: torch.Tensor) -> torch.Tensor:
        if all(n == 1 for n in times):
            return values
        return torch.cat([part.repeat(n, 1) for part, n in zip(values.split(counts), times, strict=True)])

    embeds = model.get_input_embeddings()(ids)
    at = sent(places, ids.device)
    order = at.argsort()
    flat = embeds.flatten(0, 1).index_copy(0, at, repeated(features).to(embeds.dtype))
    more: dict[str, Any] = {}
    if deeper:
        seen = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, at, True)
        more["visual_pos_masks"] = seen.view_as(ids)
        more["deepstack_visual_embeds"] = [repeated(each).index_select(0, order) for each in deeper]
    return flat.view_as(embeds), more


def _features(model: Any, images: Sequence[Images]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Features of all pictures in their order (F, hidden), and those for the language model's first layers."""
    body = _body(model)
    taken = inspect.signature(body.get_image_features).parameters
    given = {name for of in images for name in of.inputs if name in taken}
    dtype, device = model.dtype, next(body.parameters()).device
    tiled = "pixel_attention_mask" in given
    inputs: dict[str, torch.Tensor] = {}
    for name in sorted(given):
        parts = [of.inputs[name] for of in images]
        value = _joined(parts) if tiled else torch.cat(parts)
        inputs[name] = sent(value.to(dtype) if value.is_floating_point() else value, device)
    output = body.get_image_features(**inputs, return_dict=True)
    pooled = output.pooler_output
    features = torch.cat([*pooled]) if isinstance(pooled, (list, tuple)) else pooled.flatten(0, -2)
    return features, [*(getattr(output, "deepstack_features", None) or ())]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Prompts' inputs one after the other. Those with a pixel mask are (1, tiles, ...), and of different sizes are
    filled up with what the mask hides."""
    height, width = (max(part.shape[axis] for part in parts) for axis in (-2, -1))
    pad = torch.nn.functional.pad
    return torch.cat([pad(p, (0, width - p.shape[-1], 0, height - p.shape[-2])) for p in parts], dim=1)


def _row_positions(model: Any, micro_batch: MicroBatch, images: Mapping[int, Images]) -> torch.Tensor:
    """Positions (3, 1, T) of a packed row: a prompt's by the model's own scheme, its completions' right behind them."""
    layout, starts = micro_batch.layout, micro_batch.layout.starts
    positions = micro_batch.position_ids.cpu().expand(3, 1, -1).clone()
    ids = micro_batch.input_ids[0].cpu()
    ends: dict[int, int] = {}
    for segment, of in images.items():
        here = slice(starts[segment], starts[segment] + layout.lengths[segment])
        positions[:, 0, here] = _prompt_positions(model, ids[here], of)
        ends[segment] = int(positions[:, 0, here].max()) + 1
    for segment, seen in enumerate(layout.sees):
        if seen and seen[0] in ends:
            length = layout.lengths[segment]
            positions[:, 0, starts[segment] : starts[segment] + length] = torch.arange(length) + ends[seen[0]]
    return sent(positions, micro_batch.input_ids.device)


def _prompt_positions(model: Any, ids: torch.Tensor, images: Images) -> torch.Tensor:
    """(3, P) positions of a prompt with pictures: of time, height and width."""
    kinds = torch.zeros(1, len(ids), dtype=torch.int)
    kinds[0, list(images.places)] = 1
    grid = images.inputs.get("image_grid_thw")
    found: torch.Tensor = _body(model).get_rope_index(ids[None], mm_token_type_ids=kinds, image_grid_thw=grid)[0]
    return found[:, 0]


def _masks_both_ways(
    model: Any,
    embeds: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    with_pictures: Sequence[tuple[int, Images]],
) -> Any:
    """Gemma 3's masks: causal, but within a picture."""
    kinds = torch.zeros(embeds.shape[:2], dtype=torch.long)
    for row, of in with_pictures:
        kinds[row, list(of.places)] = 1
    theirs = sys.modules[type(_body(model)).__module__]
    return theirs.create_masks_for_vision_model(
        block_sequence_ids=theirs.get_block_sequence_ids_for_mask(sent(kinds, embeds.device), device=embeds.device),
        config=model.config.get_text_config(),
        inputs_embeds=embeds,
        attention_mask=mask,
        past_key_values=None,
        position_ids=positions,
    )


def _body(model: Any) -> Any:
    """All of the model but its head."""
    return model.base_model if model.base_model is not model else model.model
