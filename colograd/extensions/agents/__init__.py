"""Agents: users' programs that call the model over HTTP. Each completion is one run of the program (a session)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "add_advantages": "turn_rewards:with_turn_rewards",
    "riders": "branches:Branches",
    "source": "feature:AgentFeature",
    "stages": "turn_rewards:agent_stages",
}
