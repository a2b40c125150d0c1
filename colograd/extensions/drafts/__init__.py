"""Speculative decoding that changes no token."""

HOOKS: dict[str, str | tuple[str, ...]] = {"engine_feature": "engine.speculation:drafts_of"}
