"""Training with truncated sampling: the policy's softmax is over the tokens that top_k, top_p and min_p kept."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "engine_feature": "engine.kept_tokens:kept_tokens_record",
    "policy": "rider:set_up",
    "riders": "rider:KeptTokens",
}
