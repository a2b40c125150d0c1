"""What the docs site needs beside the pages of this folder: README and changelog as pages, recipes as files.

Loaded by mkdocs (`hooks` in mkdocs.yml). Links that lead out of docs/ in the repository lead to these in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
OTHERS = ("recipes/**/*.yaml", "recipes/**/*.slurm", "LICENSE")
LINK = re.compile(r"(\]\()(?![a-z]+://|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add what isn't in docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    for pattern in OTHERS:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page in docs/ to what is beside docs/."""
    depth = page.file.src_uri.count("/")
    if page.file.src_uri in PAGES.values():
        return markdown
    out = re.compile(rf"(\]\(){re.escape('../' * (depth + 1))}([\w./-]+)")
    return out.sub(lambda match: match[1] + "../" * depth + PAGES.get(match[2], match[2]), markdown)


def _from_root(match: re.Match[str]) -> str:
    """A link of the README's, which stands above docs/, as one of a page in it."""
    return match[1] + PAGES.get(match[2], match[2].removeprefix("docs/"))
