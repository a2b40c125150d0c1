"""Colograd: GRPO with the policy, its optimizer and a vLLM engine in one process per GPU.

    from colograd import GRPOConfig, GRPOTrainer

The names are imported on first use, so that ``import colograd`` itself is light, and the process's environment can
still be prepared (threads, rank variables) before torch and vLLM read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import process

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]

process.prepare_threads()

if TYPE_CHECKING:
    from .config import GRPOConfig
    from .trainer import GRPOTrainer


def __getattr__(name: str) -> Any:
    if name == "GRPOConfig":
        from .config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        from .trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
