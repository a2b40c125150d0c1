"""Every knob of a run, in three groups: the run (`GRPOConfig`), the model (`ModelConfig`), the script
(`ScriptArguments`).

Names and meanings are TRL's wherever the thing is the same. Each group validates and normalises itself once, when it is
made; nothing writes to it afterwards.
"""

from .grpo import GRPOConfig
from .model import ModelConfig
from .parse import parse_arguments
from .script import ScriptArguments

__all__ = ["GRPOConfig", "ModelConfig", "ScriptArguments", "parse_arguments"]
