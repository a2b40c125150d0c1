"""The files around the package: one version, a citation, issue forms."""

from __future__ import annotations

import configparser
import re

import yaml
from paths import ROOT

from colograd import __version__


def test_version_stands_in_one_place() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: colograd.__version__"
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert __version__ not in (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "pyproject.toml").read_text()


def test_citation_has_the_fields_that_its_format_requires() -> None:
    """https://github.com/citation-file-format/citation-file-format/blob/main/schema-guide.md"""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert all(set(author) == {"name"} for author in citation["authors"])


def test_issue_forms_have_their_required_keys() -> None:
    """https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests/syntax-for-issue-forms"""
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= set(form)
        assert all(
            {"type", "id", "attributes"} <= set(field) and field["attributes"]["label"] for field in form["body"]
        )


def test_contributing_names_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"(?:^|`)make ([a-z0-9 -]+?)(?:`|\s{2,}#)", text, re.MULTILINE)
    assert len(commands) > 5 and {word for command in commands for word in command.split()} <= targets
