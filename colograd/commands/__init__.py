"""The console script ``colograd``: `cli` picks a command, `doctor` checks a recipe, `plan` says what fits a GPU,
`export` makes a model folder of a checkpoint, `show` prints completions, `report` writes a run's page, `watch` shows it
live.
"""
