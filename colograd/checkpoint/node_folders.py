"""Whether nodes share a file system: whether what one writes into the run's folder is there on the others."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from ..parallel.layout import RankLayout
from ..parallel.ranks import gather, on_all_ranks


def nodes_are_apart(run_dir: str | Path, layout: RankLayout) -> bool:
    """Whether each node has a folder of its own under this name. A collective; of one node never.

    Raises:
        ValueError: some nodes share one and others don't.
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
        # By name: a listing may be older than the file, in a network's file system.
        seen = gather([node for node, mark in enumerate(marks) if mark.exists()])
    finally:
        if layout.leads_node:
            with contextlib.suppress(OSError):
                marks[layout.node].unlink()
    everything = list(range(layout.nodes))
    if all(nodes == everything for nodes in seen):
        return False
    if all(nodes == [rank // layout.ranks_per_node] for rank, nodes in enumerate(seen)):
        return True
    found = "; ".join(f"node {n} sees what {seen[n * layout.ranks_per_node]} write" for n in everything)
    raise ValueError(
        f"output_dir is {str(run_dir)!r}, which some nodes share and others don't ({found}): give a folder that all of "
        "them share, or one that is local on each."
    )
