"""Ranks find out whether nodes share the run's folder: each looks for the other nodes' marker files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from colograd.checkpoint import folders as node_folders
from colograd.checkpoint.folders import nodes_are_apart
from colograd.parallel.layout import RankLayout


class Ranks:
    """Simulates all ranks one after the other. The result of `gather` is computed when a rank calls it."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders  # of the nodes
        self.layouts = [RankLayout(rank, 2 * len(folders), ranks_per_node=2) for rank in range(2 * len(folders))]

    def ask(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> bool:
        layout, asked = self.layouts[rank], []

        def gather(value: Any) -> list[Any]:
            asked.append(value)
            if len(asked) == 1:
                return [value] * layout.world_size
            marks = [f".node-{node}-{asked[0]}" for node in range(layout.nodes)]
            for node, mark in enumerate(marks):
                (self.folders[node] / mark).touch()
            here = [[node for node, mark in enumerate(marks) if (folder / mark).exists()] for folder in self.folders]
            seen = [here[other.node] for other in self.layouts]
            for node, mark in enumerate(marks):
                if node != layout.node or not layout.leads_node:
                    (self.folders[node] / mark).unlink(missing_ok=True)
            return seen

        monkeypatch.setattr(node_folders, "gather", gather)
        monkeypatch.setattr(node_folders, "on_all_ranks", lambda what: contextlib.nullcontext())
        return nodes_are_apart(self.folders[layout.node], layout)


def test_of_one_node_nothing_is_written(tmp_path: Path) -> None:
    assert nodes_are_apart(tmp_path / "absent", RankLayout(0, 2, ranks_per_node=2)) is False
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("apart", [True, False])
def test_all_ranks_agree_and_remove_their_marks(tmp_path: Path, monkeypatch, rank: int, apart: bool) -> None:
    folders = [tmp_path / ("a" if node and apart else "b") for node in range(2)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    assert Ranks(folders).ask(rank, monkeypatch) is apart
    assert not any(list(folder.iterdir()) for folder in folders)


def test_a_folder_that_some_share_is_an_error(tmp_path: Path, monkeypatch) -> None:
    folders = [tmp_path / name for name in "aab"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    said = r"node 0 sees files of nodes \[0, 1\]; node 1 sees files of nodes \[0, 1\]; node 2 sees files of nodes \[2\]"
    with pytest.raises(ValueError, match=said):
        Ranks(folders).ask(0, monkeypatch)
