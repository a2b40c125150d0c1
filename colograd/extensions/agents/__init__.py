"""Agents: users' programs that call the model over HTTP. Each completion is one run of the program (a session).

`AgentSessions` starts the programs. An HTTP server on loopback (`endpoint`) answers their requests with the engine of
the same process, through `WorkQueue`. `context` converts messages to token ids, and keeps the ids of earlier answers.
"""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "add_advantages": "turn_rewards:with_turn_rewards",
    "riders": "branches:Branches",
    "source": "feature:AgentFeature",
    "stages": "turn_rewards:agent_stages",
}
