"""Where every weight lies, in the policy and in the engine; and whether any has moved."""

from __future__ import annotations

import torch

from ..engine.vllm_engine import Engine


class Addresses:
    """Remembers the data pointers of all parameters on both sides.

    Both models are walked anew at each check: a weight that was replaced by another tensor (a reload, `.to()`,
    `.data =`) would otherwise be published into memory that nobody reads.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine) -> None:
        self._policy, self._engine = policy, engine
        self._planned = self._look()

    def check(self) -> None:
        """Raise unless everything lies where it lay.

        Raises:
            RuntimeError: naming what moved.
        """
        found = self._look()
        if found != self._planned:
            moved = [name for name in self._planned | found if self._planned.get(name) != found.get(name)]
            raise RuntimeError(
                f"{len(moved)} weights lie elsewhere than when publishing was planned ({', '.join(moved[:3])}): "
                "a reload, `.to()` or `.data =` has replaced their tensors, and the engine would sample from others "
                "than are trained. Change weights in place (`copy_`), or build a new trainer."
            )

    def _look(self) -> dict[str, int]:
        sides = (("policy", self._policy), ("engine", self._engine.model))
        return {f"{side} {name}": p.data_ptr() for side, model in sides for name, p in model.named_parameters()}
