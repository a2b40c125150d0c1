"""The device's memory: a plan of all parts before anything is built, a token budget for micro-batches, and turns between
sampling and training.

A plan follows from numbers alone. `description` has a run's numbers, of `shape`, `tower` and `policy_sizes`; `estimate`
adds them up for a strategy of sharding as a `table`; `choice` picks the strategy. `token_budget` is of micro-batches,
`device_turns` of the turns; `segments` keeps torch's allocator from leaving holes.
"""
