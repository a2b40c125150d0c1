"""Truncated vocabularies: the policy's distribution over the tokens that top_k and top_p kept."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "engine_feature": "engine.kept_tokens:kept_tokens_record",
    "policy": "rider:set_up",
    "riders": "rider:KeptTokens",
}
