"""Reading of whole images in one engine step, for models with bidirectional image tokens (Gemma 3).

vLLM reads long prompts in parts, and an image's tokens can't attend to tokens in the next part. On GPUs vLLM cuts an
image of such models only if it has the image's features from another prompt. On a CPU it cuts every image.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def whole_on_cpu() -> Iterator[None]:
    """Keep such images whole on a CPU, as on GPUs, in engines that are built while the context lasts.

    Other models stay unchanged, because vLLM would refuse a model if its largest image has more tokens than a step.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    theirs = platform.check_and_update_config

    def check(config: Any) -> None:
        theirs(config)
        if getattr(config.model_config, "is_mm_prefix_lm", False):
            config.scheduler_config.disable_chunked_mm_input = True

    platform.check_and_update_config = staticmethod(check)
    try:
        yield
    finally:
        platform.check_and_update_config = theirs


def whole_of_known_features() -> None:
    """Keep images with known features whole too, in all engines of the process that don't cut images."""
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs: Any = getattr(Scheduler, "_try_schedule_encoder_inputs", None)
    if theirs is None or hasattr(theirs, "cuts_none"):
        return

    @functools.wraps(theirs)
    def schedule(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, *others: Any, **named: Any
    ) -> Any:
        inputs, count, *rest = theirs(self, request, num_computed_tokens, num_new_tokens, *others, **named)
        if self.scheduler_config.disable_chunked_mm_input:
            places = [feature.mm_position for feature in request.mm_features]
            pictures = [(place.offset, place.offset + place.length) for place in places]
            count = up_to_a_picture(pictures, num_computed_tokens, count)
        return inputs, count, *rest

    schedule.cuts_none = True  # type: ignore[attr-defined]
    Scheduler._try_schedule_encoder_inputs = schedule


def up_to_a_picture(pictures: Iterable[tuple[int, int]], computed: int, count: int) -> int:
    """Return how many tokens to read next behind ``computed``: the scheduler's ``count``, or fewer to cut no image.

    ``pictures`` are first and last token + 1 of each image.
    """
    for first, end in pictures:
        if first < computed + count < end:
            return max(0, first - computed)
    return count
