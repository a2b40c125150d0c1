"""A prompt with images, to prove forwards on."""

from __future__ import annotations

from collections.abc import Sequence

from ...batch import ModelInput
from ...data import PromptDataset
from ...policy.loading import Policy
from ...rollout.features import SourceFeature
from ...training.prompts import Prompts
from .data import reader_of

ROWS_LOOKED_AT = 64  # rows to search for an image


def proof_prompts(prompts: Sequence[Prompts], policy: Policy, feature: SourceFeature) -> list[ModelInput]:
    """Return one prompt with images, to prove forwards on; empty if the run has no images.

    The prompt is made up if only tools, or rows behind the first ROWS_LOOKED_AT, have images.
    """
    if (reader := reader_of(policy)) is None:
        return []
    if isinstance(prompts[0], PromptDataset) and prompts[0].most_images:
        inputs = (prompts[0][row, row].input for row in range(min(ROWS_LOOKED_AT, len(prompts[0]))))
        if (first := next((each for each in inputs if each.media is not None), None)) is not None:
            return [first]
    has_some = feature.may_add_images or any(getattr(part, "most_images", 0) for part in prompts)
    return [reader.made_up()] if has_some else []
