"""Sequence parallelism (`sequence_parallel_size`): several ranks divide the tokens of each packed row."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "check_settings": "conflicts:check_sequences",
    "conflicts": "conflicts:CONFLICTS",
    "loaded_policy": "forward:check_policy",
    "model_feature": "forward:WholeRows",
    "notes": "forward:warn_of_own_loss",
    "sharding_variant": "forward:over_rows",
    "shares_out_mixer": "recurrent_heads:way_of",
}
