"""Colograd: GRPO with the policy, its optimizer and a vLLM engine in one process per GPU.

    from colograd import GRPOConfig, GRPOTrainer

The import sets environment variables before torch and vLLM read them.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from .runtime import process
from .runtime.importing import MovedModules

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]

OWN = {"GRPOConfig": "config", "GRPOTrainer": "trainer"}  # Imported on first use, so `import colograd` is fast.
# Names that `colograd` takes from TRL, for scripts written for TRL.
OF_TRL = ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config")
# Former import path -> present one. Recipes, model cards and notebooks may name the former paths.
MOVED = {
    "colograd.agents": "colograd.extensions.agents",
    "colograd.calculator": "colograd.apps.quickstart.calculator",
    "colograd.commands": "colograd.apps",
    "colograd.apps.exams": "colograd.rewards",
    "colograd.exams": "colograd.rewards",
    "colograd.logprobs": "colograd.policy.logprobs",
    "colograd.quickstart": "colograd.apps.quickstart.quickstart",
    "colograd.replayer": "colograd.apps.replaying.replayer",
    "colograd.reporting.completions": "colograd.extensions.recording.completions",
    "colograd.rewards.judge": "colograd.extensions.graders.judge",
    "colograd.rewards.mathematics": "colograd.extensions.graders.mathematics",
    "colograd.rewards.models": "colograd.extensions.graders.models",
    "colograd.sampling": "colograd.engine.sampling",
    "colograd.tasks": "colograd.apps.quickstart",
}

process.prepare_threads()
logging.getLogger(__name__).addHandler(logging.NullHandler())  # Log nothing unless the user sets up logging.
sys.meta_path.insert(0, MovedModules(MOVED))  # First, or Python's own finders would load moved modules again.

if TYPE_CHECKING:
    from .config import GRPOConfig
    from .trainer import GRPOTrainer


def __getattr__(name: str) -> Any:
    if name in OWN:
        return getattr(importlib.import_module(f".{OWN[name]}", __name__), name)
    if name == "get_kbit_device_map":  # Some versions of TRL lack `get_kbit_device_map`.
        return lambda: {"": int(os.environ.get("LOCAL_RANK", "0"))}
    if name in OF_TRL:
        return getattr(importlib.import_module("trl"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
