"""Truncated vocabularies: the policy's distribution over the tokens that top_k and top_p kept."""

HOOKS: dict[str, str | tuple[str, ...]] = {"policy": "head:set_up"}
