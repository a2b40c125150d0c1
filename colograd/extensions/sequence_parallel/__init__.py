"""Sequence parallelism (`sequence_parallel_size`): several ranks divide the tokens of each packed row."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "check_settings": "conflicts:check_sequences",
    "conflicts": "conflicts:CONFLICTS",
    "loaded_policy": "shared_rows:check_policy",
    "model_feature": "shared_rows:WholeRows",
    "notes": "shared_rows:warn_of_own_loss",
    "sharding_variant": "shared_rows:over_rows",
    "shares_out_mixer": "recurrent_heads:way_of",
}
