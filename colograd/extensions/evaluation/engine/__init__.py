"""Computes log-probabilities of given continuations with the engine, with all requests in its queue at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....engine.sampling import Sampling
from ....parallel import watchdog

SCORED = Sampling(1, 1, 0.0, {"prompt_logprobs": 0})  # Settings of a request to score. vLLM must sample a token.


def score(engine: Any, parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """Score (context, continuation) pairs of token ids, on an engine's first rank. Return for each pair the sum of the
    continuation's log-probabilities, and whether greedy decoding would write the continuation."""
    scores: dict[int, tuple[float, bool]] = {}
    waiting = {engine.submit([*context, *target], SCORED, seed=0): i for i, (context, target) in enumerate(parts)}
    names = [*waiting]
    try:
        while waiting:
            watchdog.progress("a step of the engine")
            for output in engine.core.step():
                if output.finished:
                    index = waiting.pop(output.request_id)
                    start = len(parts[index][0])
                    pairs = zip(output.prompt_logprobs[start:], output.prompt_token_ids[start:], strict=True)
                    found = [entry[token] for entry, token in pairs]
                    scores[index] = float(sum(each.logprob for each in found)), all(each.rank == 1 for each in found)
            for listener in engine.after_step:
                listener()
    finally:
        engine.abort(names)
    return [scores[index] for index in range(len(parts))]
