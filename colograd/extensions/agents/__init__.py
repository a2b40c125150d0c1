"""Agents: programs of the user's that call the model over HTTP while it is trained.

`AgentSessions` (`sessions`) is the rollout source. It starts a program per completion (`programs`). During a
generation it serves the engine to the programs on loopback (`server`, `endpoint`). Their requests go into the engine's
one queue (`decoding`). Each session becomes a `Rollout` that is a tree (`tree`). `context` gives a request the exact
token ids of its session's earlier turns. `session` holds a session's limits and its turns.
"""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "add_advantages": "turn_rewards:with_turn_rewards",
    "part_rewards": "turns:split",
    "source": "feature:AgentFeature",
    "stages": "failures:agent_stages",
}
