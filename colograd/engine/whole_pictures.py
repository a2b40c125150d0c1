"""Pictures whose tokens see each other (Gemma 3's) are read in one step of the engine.

vLLM reads long prompts in parts, and tokens of a picture wouldn't see those in the next part. On GPUs it doesn't cut
pictures of such models, but for those whose features it has from another prompt; on a CPU it cuts all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def whole_on_cpu() -> Iterator[None]:
    """Let engines that are built while it lasts not cut such pictures, as on GPUs. (Of other models vLLM would refuse
    those whose largest picture has more tokens than a step.)"""
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
    """Let engines that don't cut pictures not cut those either whose features they have, for the whole process."""
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
    """How many tokens of a prompt to read after the ``computed`` ones: ``count``, or fewer so as to cut none of the
    ``pictures`` (first and last token + 1 of each)."""
    for first, end in pictures:
        if first < computed + count < end:
            return max(0, first - computed)
    return count
