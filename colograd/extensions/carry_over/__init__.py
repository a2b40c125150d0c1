"""Rounds that end with their first groups; the others go on in the next round (`carry_over`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "in_flight": "in_flight:InFlight",
    "riders": "rider:Versions",
    "source": "source:CarryOverFeature",
}
