"""Tells what a run does: `metrics` as numbers, `console` as lines and bars, `completion_log` as files of completions
(whose columns `log_columns` names), `completion_table` as tables of them, `model_card` as the README of the trained
model, `tracing` as a profile of steps. `run_record` keeps what a run's report is made of: `timeline` of what happens
inside a rollout, `samples` token by token, `thumbnails` of a prompt's images; `advisor` says what goes wrong.
`trackers` send wandb, trackio and TensorBoard what isn't a number. `redaction` takes out what isn't to be shown.
"""
