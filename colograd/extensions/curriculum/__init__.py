"""A curriculum: prompts are chosen by their pass rates (setting `curriculum`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "check_settings": "settings:read_curriculum",
    "conflicts": "settings:CONFLICTS",
    "tally": "curriculum:pass_rates",
    "train_prompts": "curriculum:add_curriculum",
}
