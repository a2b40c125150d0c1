"""Records of a run: events and alarms for its report, log of completions, data for trackers, and model card."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "completion_log": "completion_log:log_of",
    "guard_callbacks": "trackers:spare_from_trackers",
    "model_card": "model_card:write_card_of",
    "recorder": "recorder:recorder_of",
}
