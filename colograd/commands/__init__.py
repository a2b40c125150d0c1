"""The console script ``colograd``: `cli` picks a command, `init` writes a first recipe, `doctor` checks a recipe,
`plan` says what fits a GPU (of a recipe by `recipe_options`), `export` makes a model folder of a checkpoint, `replay`
trains recorded steps again, `show` prints completions, `report` writes a run's page, `watch` shows it live.
"""
