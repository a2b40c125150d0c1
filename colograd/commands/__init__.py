"""The console script ``colograd``: `cli` picks a command, `doctor` checks a recipe, `plan` says what fits a GPU,
`export` makes a model folder of a checkpoint, `show` prints completions, `replay` trains recorded steps again.
"""
