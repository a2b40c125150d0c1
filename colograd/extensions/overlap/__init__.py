"""Setting `overlap`: a rank that has sampled its groups trains finished groups while other ranks still sample."""

HOOKS: dict[str, str | tuple[str, ...]] = {"notes": "rounds:note", "round": "rounds:overlapped_round"}
