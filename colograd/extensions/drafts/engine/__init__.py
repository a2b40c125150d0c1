"""The part of `drafts` inside the engine."""
