"""Remove secrets and this machine's absolute paths from texts that may be published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ABSOLUTE = re.compile(r"(?<![\w.~/-])/(?!/)[^\s'\",;:]+")
# Names of access tokens and keys that a command line or a recipe may contain.
_KEYS = r"(?:hub_token|hf_token|access_token|auth_token|api_key|password|secret)"
_SECRET = re.compile(
    rf"(--[\w-]*{_KEYS}(?:=|[ \t]+)|\b\w*{_KEYS}[\"']?[ \t]*[:=][ \t]*)(?!null\b|None\b|--)[^\s,}}\]]+|\bhf_\w{{16,}}",
    re.IGNORECASE,
)


def is_secret(name: str, value: Any) -> bool:
    if isinstance(value, dict | list):
        return False  # A mapping or list isn't a secret itself. Its entries may be, and need a check of their own.
    return (name == "token" and value is not None) or _SECRET.search(f"{name}: {value}") is not None


def without_secrets(text: str) -> str:
    return _SECRET.sub(lambda match: f"{match.group(1) or ''}<removed>", text)


def without_absolute_paths(text: str) -> str:
    return _ABSOLUTE.sub(lambda match: shown_path(Path(match.group())), text)


def shown_path(path: Path) -> str:
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return path.name


def is_local(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith(("./", "../", "~")) or Path(name).exists()
