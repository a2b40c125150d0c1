"""Each place of the package that checks the device runs with a GPU's answer, or docs/design.md has the reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import cuda_places
import pytest
from paths import TESTS


def test_every_place_has_its_way_in_the_table() -> None:
    """Run a new place by a case of `host_cuda_cases.py`, or in another way, and add it to the table."""
    assert set(cuda_places.table()) <= set(cuda_places.WAYS)
    listed = sum((cuda_places.listed(way) for way in cuda_places.WAYS), Counter[str]())
    places = cuda_places.of_package()
    assert not places - listed, "cuda_places.toml lacks them"
    assert not listed - places, "cuda_places.toml lists them, but the package doesn't have them"


def test_tests_of_the_table_exist() -> None:
    entries = [entry for way in ("v2", "arguments") for entry in cuda_places.table()[way].values()]
    for test in {entry["test"] for entry in entries}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), test


def test_places_are_found_in_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_places, "PACKAGE", tmp_path)
    (tmp_path / "part.py").write_text(
        "class A:\n"
        "    on_cpu: torch.cuda.Stream\n"
        "    def of(self, tensor, on_gpu: bool):\n"
        "        return tensor.is_cuda and on_gpu or self.config.device.type == 'cpu'\n"
        "def work(device, config):\n"
        "    if not config.on_cpu and device == 'cuda':\n"
        "        torch.cuda.synchronize()\n"
    )
    assert cuda_places.of_package() == {"part.py A.of": 3, "part.py work": 3}
