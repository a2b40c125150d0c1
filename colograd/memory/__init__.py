"""Who has how much of the device's memory: `plan` says it before the start (and with it the KV cache's size),
`token_budget` for each micro-batch, `device_turns` while sampling and training take turns. `segments` keeps torch's
allocator from leaving holes.

A plan's arithmetic is in pure functions of numbers: `shape` has what follows from a decoder's shape, `tower` from that
of what sees pictures, `ways` what a policy takes in each way of sharding, `table` puts them together (`MemoryPlan`),
`choice` picks a way (`auto`) and says what would fit.
"""
