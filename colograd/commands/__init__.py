"""The console script ``colograd``: `cli` picks a command, `doctor` checks a recipe, `plan` says what fits a GPU, `show`
prints completions.
"""
