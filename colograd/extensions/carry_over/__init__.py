"""Rounds that end with their first groups; the others go on in the next round (`carry_over`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "advice": "conflicts:advice",
    "conflicts": "conflicts:CONFLICTS",
    "riders": "rider:Versions",
    "round": "rounds:carried_round",
    "source": "source:CarryOverFeature",
}
