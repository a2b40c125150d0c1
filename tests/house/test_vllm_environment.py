"""setup.cfg, the advice and the page name the versions of vLLM that were run, and no others."""

from __future__ import annotations

import configparser

from packaging.requirements import Requirement
from paths import ROOT

from colograd.engine.building import PIN, TESTED_VLLM


def test_the_extras_and_the_advice_ask_for_what_was_run() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    first, last = TESTED_VLLM
    for line in (extras["vllm"], extras["cpu"], PIN):
        (pin,) = (Requirement(part) for part in line.split("\n") if part.strip())
        assert f"{first}.0" in pin.specifier and f"{last}.9" in pin.specifier
        assert "0.24.9" not in pin.specifier and "0.33.0" not in pin.specifier
    table = (ROOT / "docs" / "models.md").read_text()
    assert all(f"| {version}." in table for version in TESTED_VLLM)
