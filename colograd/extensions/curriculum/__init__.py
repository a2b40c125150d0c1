"""Prompts in an order that depends on their pass rates (`curriculum`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "check_settings": "settings:read_curriculum",
}
