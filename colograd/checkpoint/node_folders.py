"""The test whether nodes share a file system: whether a file of one node in the run's folder exists on the others."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from ..parallel.layout import RankLayout
from ..parallel.ranks import gather, on_all_ranks


def nodes_are_apart(run_dir: str | Path, layout: RankLayout) -> bool:
    """Return whether each node has a separate folder of this name. A collective. False with one node.

    Raises:
        ValueError: some nodes share a folder and others don't.
    """
    if layout.nodes == 1:
        return False
    trial = gather(uuid.uuid4().hex)[0]
    marks = [Path(run_dir) / f".node-{node}-{trial}" for node in range(layout.nodes)]
    try:
        with on_all_ranks("writing into output_dir"):
            if layout.leads_node:
                marks[layout.node].parent.mkdir(parents=True, exist_ok=True)
                marks[layout.node].touch()
        # Test each name, because a folder's listing may be outdated in a network file system.
        visible = gather([node for node, mark in enumerate(marks) if mark.exists()])
    finally:
        if layout.leads_node:
            with contextlib.suppress(OSError):
                marks[layout.node].unlink()
    all_nodes = list(range(layout.nodes))
    if all(nodes == all_nodes for nodes in visible):
        return False
    if all(nodes == [rank // layout.ranks_per_node] for rank, nodes in enumerate(visible)):
        return True
    sharing = "; ".join(f"node {n} sees files of nodes {visible[n * layout.ranks_per_node]}" for n in all_nodes)
    raise ValueError(
        f"output_dir is {str(run_dir)!r}, which some nodes share and others don't ({sharing}). Set it to a folder that "
        "all nodes share, or to one that is local on each node."
    )
