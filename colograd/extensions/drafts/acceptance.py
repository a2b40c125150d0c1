"""The share of drafted tokens that the model accepted."""

from __future__ import annotations

from ...rollout.statistics import RolloutStatistics


def acceptance(statistics: RolloutStatistics, metrics: dict[str, float]) -> None:
    if drafted := statistics.counts["drafts/tokens"]:
        metrics["drafts/acceptance"] = statistics.counts["drafts/accepted"] / drafted
