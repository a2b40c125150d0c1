"""Setting `carry_over`: a round of sampling leaves some groups unfinished, and the next round continues them."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "advice": "conflicts:advice",
    "conflicts": "conflicts:CONFLICTS",
    "derived_metrics": "in_flight:age_metrics",
    "riders": "in_flight:Versions",
    "round": "rounds:carried_round",
    "source": "rounds:CarryOverFeature",
}
