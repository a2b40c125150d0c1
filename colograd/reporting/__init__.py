"""Tells what a run does: `metrics` as numbers, `console` as lines and bars, `completion_log` as files of completions
(whose columns `log_columns` names), `completion_table` as tables of them, `model_card` as the README of the trained
model.
"""
