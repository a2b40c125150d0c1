"""A curriculum: chooses prompts by pass rate, dataset column or difficulty (setting `curriculum`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "check_settings": "settings:read_curriculum",
    "conflicts": "settings:CONFLICTS",
    "tally": "curriculum:pass_rates",
    "train_prompts": "curriculum:add_curriculum",
}
