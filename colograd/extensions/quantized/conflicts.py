"""Conflict of the settings `load_in_8bit` and `load_in_4bit`."""

from __future__ import annotations

from ...config.conflicts import SET, Conflict

CONFLICTS = (Conflict("load_in_8bit", SET, "load_in_4bit", SET, "a base has one precision", "remove one"),)
