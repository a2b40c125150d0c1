"""What would fit: the changes that an error names when a run doesn't fit its device."""

HOOKS: dict[str, str | tuple[str, ...]] = {"remedies": "changes:remedies"}
