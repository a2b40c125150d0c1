"""From prompts to scored groups.

    prompts -> a source writes groups -> rewards judge them -> ScoredGroup

`stages` says what a source and a scoring are, and what they must return. The sources: the engine alone,
`conversations` with tools, a function of the user's (`custom`). `rounds` streams groups from the source into the
rewards; `statistics` counts what came out. What was scored is in the `journal` before it is trained on, in a
`record_file` per rank and round, with the `pictures` that no dataset has; beside it are the `figures` of the steps that
it trained.

Of conversations, `toolbox` says what the model may call, `tool_calls` runs the calls, `environments` makes and lends
environments, and `tool_format` reads calls and writes answers as tokens.
"""
