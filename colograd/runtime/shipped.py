"""Files that come with the package: recipes, chat templates, accelerate configurations, jobs for schedulers."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER, SUFFIX = "recipes", ".yaml"
INSTALLED = Path(__file__).resolve().parents[1] / FOLDER  # Doesn't exist in a git clone.


def shipped_folder() -> Path:
    return INSTALLED if INSTALLED.is_dir() else INSTALLED.parents[1] / FOLDER


def file_or_shipped(path: Path) -> Path:
    """Return the user's file ``path`` if it exists, else a shipped file of that name, else ``path`` unchanged.
    ``grpo_qwen``, ``grpo_qwen.yaml`` and ``recipes/grpo_qwen.yaml`` name the same shipped file."""
    words = path.parts[1:] if path.parts[:1] == (FOLDER,) else path.parts
    inside = bool(words) and not path.is_absolute() and ".." not in words
    bases = [path, shipped_folder().joinpath(*words)] if inside else [path]
    candidates = [Path(f"{base}{suffix}") for base in bases for suffix in ("", SUFFIX)]
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def is_shipped(path: Path) -> bool:
    return path.resolve().is_relative_to(INSTALLED)


def near_names(path: Path) -> str:
    names = sorted(path.stem for path in shipped_folder().glob(f"*{SUFFIX}"))
    return ", ".join(difflib.get_close_matches(path.stem, names) or names)
