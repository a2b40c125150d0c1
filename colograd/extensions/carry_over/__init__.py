"""Setting `carry_over`: a round of sampling ends with the groups that finish first. The next round continues all
others."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "advice": "conflicts:advice",
    "conflicts": "conflicts:CONFLICTS",
    "riders": "in_flight:Versions",
    "round": "rounds:carried_round",
    "source": "rounds:CarryOverFeature",
}
