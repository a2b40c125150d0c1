"""Check the setting `metric_for_best_model`, and choose the best model by that metric after an evaluation."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "evaluation_check": "metric:check_best_metric",
    "evaluated": "metric:after_evaluation",
}
