"""Checks of the setting `metric_for_best_model`, at start and after each evaluation."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "evaluation_check": "metric:check_best_metric",
    "lacks_best": "metric:lacks_best",
}
