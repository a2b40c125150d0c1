"""Models whose layers have a recurrent state, such as Qwen3.5 and Granite 4."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "uncompiled": "recurrent:keep_uncompiled",
}
