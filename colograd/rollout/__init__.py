"""From prompts to scored groups.

    prompts -> a source writes groups -> rewards judge them -> ScoredGroup

`stages` says what a source and a scoring are. The sources: the engine alone, `conversations` with tools (`toolbox`,
`tool_format`), a function of the user's (`custom`). `rounds` streams groups from the source into the rewards;
`statistics` counts what came out.
"""
