"""Who has how much of the device's memory: `plan` says it before the start (and with it the KV cache's size),
`token_budget` for each micro-batch, `device_turns` while sampling and training take turns.
"""
