"""Speculative decoding that samples the same tokens as decoding without drafts."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "derived_metrics": "conflicts:acceptance",
    "engine_feature": "engine.speculation:drafts_of",
}
