"""What a run tells: `metrics` as numbers, `console` as lines and bars, `completion_log` and `completion_table` the
completions themselves, `model_card` the README of the trained model.
"""
