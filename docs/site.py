"""Complete the docs site: README and changelog as pages, other files that pages link, formulas as MathML. Browsers show
MathML without a script.

Loaded by mkdocs (`hooks` in mkdocs.yml). A link that leads out of docs/ in the repository leads to the same file's copy
in the site.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()(?![a-z]+://|#)([^)#\s]+)")
FORMULA = re.compile(r"<(span|div) class=\"arithmatex\">\\[(\[](.*?)\\[)\]]</\1>", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add README, changelog and linked files."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    for name in sorted({*_linked_files()}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's links to files outside docs/."""
    depth = page.file.src_uri.count("/")
    if page.file.src_uri in PAGES.values():
        return markdown
    out = re.compile(rf"(\]\(){re.escape('../' * (depth + 1))}([\w./-]+)")
    return out.sub(lambda match: match[1] + "../" * depth + PAGES.get(match[2], match[2]), markdown)


def on_page_content(text: str, **_: Any) -> str:
    """Convert the formulas that pymdownx.arithmatex marks."""
    return FORMULA.sub(_formula, text)


def _formula(match: re.Match[str]) -> str:
    way = "block" if match[1] == "div" else "inline"
    return convert(html.unescape(match[2]), display=way)


def _linked_files() -> Iterator[str]:
    """Yield the files outside docs/ that pages link, as paths in the repository."""
    for page in [ROOT / name for name in PAGES] + sorted((ROOT / "docs").rglob("*.md")):
        for _, target in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and name not in PAGES and not name.startswith("docs/"):
                yield name


def _from_root(match: re.Match[str]) -> str:
    """A link of the README's, which stands above docs/, as one of a page in it."""
    return match[1] + PAGES.get(match[2], match[2].removeprefix("docs/"))
