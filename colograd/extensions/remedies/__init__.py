"""Changes of settings that an error proposes when a run doesn't fit the memory of its device."""

HOOKS: dict[str, str | tuple[str, ...]] = {"remedies": "changes:remedies"}
