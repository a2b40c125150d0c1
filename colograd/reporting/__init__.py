"""A run's output for people: metrics on the console, completions as files and tables, the `_report/` record with its
alarms, charts in trackers, the model card, a profile.
"""
