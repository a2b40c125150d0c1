"""The console script's own errors."""

from __future__ import annotations

import pytest

from colograd.apps import cli
from colograd.runtime import registry


@pytest.mark.parametrize("command", cli.READERS)
def test_a_reader_without_its_extension_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "installed", lambda: ())
    assert cli.main([command, "runs/mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"colograd {command}: error: colograd {command} needs the extension `recording`")
    assert "restore that folder" in line
