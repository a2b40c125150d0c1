"""Complete the docs site: README, changelog and notebooks as pages, other files that pages link, formulas as MathML.
Browsers show MathML without a script.

Loaded by mkdocs (`hooks` in mkdocs.yml). A link that leads out of docs/ in the repository leads to the same file's copy
in the site.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()(?![a-z]+://|#)([^)#\s]+)")
TABLE = re.compile(r"<table[^>]*(>.*?</table>)", re.DOTALL)
FORMULA = re.compile(r"<(span|div) class=\"arithmatex\">\\[(\[](.*?)\\[)\]]</\1>", re.DOTALL)


class Notebook(File):
    """A notebook of docs/ that is a page of the site, so that links to the notebook lead to its page.

    mkdocs-jupyter would need 49 more packages, and its pages are twelve times as large.
    """

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: Any) -> Files:
    """Add README, changelog, linked files, and the notebooks both as pages and as files to download."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, use_directory_urls=False))
        files.append(File.generated(config, f"downloads/{file.name}.ipynb", abs_src_path=file.abs_src_path))
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    for name in sorted({*_linked_files()}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_read_source(page: Any, **_: Any) -> str | None:
    """Return a notebook's cells and stored outputs as Markdown. None lets mkdocs read the other pages."""
    if not isinstance(page.file, Notebook):
        return None
    cells = json.loads(Path(page.file.abs_src_path).read_text(encoding="utf-8"))["cells"]
    title, *parts = (part for cell in cells for part in _parts(cell))
    return "\n\n".join([title, f"[Download this notebook](../downloads/{page.file.name}.ipynb)", *parts])


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


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell's source and its outputs as Markdown. An output in HTML is reduced to its table."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if table := TABLE.search("".join(data.get("text/html", ()))):
            yield "<table" + "".join(line.strip() for line in table[1].splitlines())
        elif text := "".join(output.get("text") or data.get("text/plain", ())).strip("\n"):
            yield f"```text\n{text}\n```"


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
