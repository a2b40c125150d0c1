"""A run's record for people: events and alarms of its report, the completions log, trackers' charts, the model card."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "completion_log": "completion_log:log_of",
    "model_card": "model_card:write_card_of",
    "recorder": "recorder:recorder_of",
}
