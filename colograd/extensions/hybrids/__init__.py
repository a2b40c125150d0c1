"""Models with recurrent layers in addition to attention (hybrids), such as Qwen3.5 and Granite 4."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "model_feature": "recurrent:Hybrids",
    "rows": "recurrent:ROWS",
    "uncompiled": "recurrent:keep_uncompiled",
}
