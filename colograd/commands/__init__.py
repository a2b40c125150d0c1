"""The console script ``colograd``: `cli` picks a command, `doctor` checks a recipe, `show` prints completions."""
