"""Images in a forward: rows with pictures, and text rows of a model that could read more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...policy import attention
from ...policy import towers as core_towers
from ...policy.logprobs import ForwardStep, Pass, run_body
from ...policy.packing import PackedSequence
from ...policy.padded import PaddedInputs
from . import towers


class ImageStep(ForwardStep):
    """Rows with pictures, and models that could read more than text."""

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        model, batch = row.model, row.batch
        text_alone = core_towers.reads_text_alone(model)
        hides = towers.hidden_tokens(model.config) and not text_alone
        if batch.media is None and not towers.in_each_forward(model) and not hides:
            return run_body(row, model.get_decoder()) if text_alone else inner(row)
        if model.config._attn_implementation == attention.NAME:
            with attention.packed_rows():
                return towers.packed_hidden_states(model, batch)
        rows = PaddedInputs.of(batch)
        return rows.packed(towers.padded_hidden_states(model, batch, rows.ids, rows.mask, rows.rows.chains))

    def attention(self, model: Any, name: str) -> str | dict[str, str]:
        """Set the attention of the language model and of a vision tower. The tower's rows are images."""
        if not core_towers.takes_images(model.config):
            return name
        tower = name
        if name not in ("eager", "sdpa"):
            # For layers that take windows (`cu_seqlens`) transformers would wait in each layer for the GPU to return
            # the windows' lengths. The present device doesn't matter: a reference in host memory moves to the GPU.
            layers = core_towers.tower_layers(model)
            windows = bool(layers) and "cu_seqlens" in inspect.signature(type(layers[0]).forward).parameters
            tower = attention.TOWER_NAME if windows and torch.cuda.is_available() else "sdpa"
        return {"": name, "text_config": name, "vision_config": tower}

    def own_inputs(self, part: PackedSequence) -> dict[str, Any]:
        return towers.of_sequence(part.images, part.answers, (len(part.prompt_ids), len(part.completion_ids)))

    def misreads(self, model: Any, part: PackedSequence) -> bool:
        """Return whether the model would put a picture's features in place of a sampled image token, or hide a
        sampled placeholder."""
        if hidden := towers.hidden_tokens(model.config):
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
    """Return the forward's step of a model that could read more than text."""
    return ImageStep() if core_towers.has_tower(model.config) else None
