"""The best model by `metric_for_best_model`: checks at start, and what follows from each evaluation's metric."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "evaluation_check": "metric:check_best_metric",
    "evaluated": "metric:after_evaluation",
}
