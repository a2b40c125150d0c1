"""Settings that can't be combined with drafts (`speculative_config`), and the metric `drafts/acceptance`."""

from __future__ import annotations

from typing import Any

from ...config.conflicts import ANY, DRAFTS, SET, Conflict, above

CONFLICTS = (
    Conflict(DRAFTS, ANY, "vllm_tensor_parallel_size", above(1),
             "drafts aren't available in an engine over several ranks in this version", "remove one of them"),
    Conflict(DRAFTS, ANY, "min_p", SET, "vLLM ignores min_p in a request with drafts", "remove one of them"),
    Conflict(DRAFTS, ANY, "generation_kwargs.min_tokens", SET,
             "vLLM doesn't count drafted tokens towards min_tokens", "remove one of them"),
)  # fmt: skip


def acceptance(statistics: Any, metrics: dict[str, float]) -> None:
    if drafted := statistics.counts["drafts/tokens"]:
        metrics["drafts/acceptance"] = statistics.counts["drafts/accepted"] / drafted
