"""Agents: user programs that call the model over HTTP while the model is trained.

`AgentSessions` (`sessions`) is the rollout source. It starts one run of the program (a session) per completion
(`programs`). During a generation an HTTP server on loopback answers the programs' requests (`endpoint`). All requests
to a server go into the queue of one engine (`WorkQueue`). `context` converts chat messages to token ids, in which
earlier answers keep their sampled ids. Each session (`session`) becomes a `Rollout`, with branches if needed
(`branches`).
"""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "add_advantages": "turn_rewards:with_turn_rewards",
    "riders": "branches:Branches",
    "source": "feature:AgentFeature",
    "stages": "turn_rewards:agent_stages",
}
