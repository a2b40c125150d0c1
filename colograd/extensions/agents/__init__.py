"""Agents: programs of the user's that call the model over HTTP while it is trained.

`AgentSessions` (`sessions`) is the rollout source. It starts a program per completion (`programs`). During a
generation it serves the engine to the programs on loopback (`endpoint`). Their requests go into the engine's one queue
(`decoding`). `context` gives a request the exact token ids of its session's earlier turns. Each session (`session`)
becomes a `Rollout` that is a tree (`tree`).
"""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "add_advantages": "turn_rewards:with_turn_rewards",
    "part_rewards": "turn_rewards:split",
    "source": "feature:AgentFeature",
    "stages": "turn_rewards:agent_stages",
}
