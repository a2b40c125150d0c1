"""The settings of a run. A setting that TRL has too keeps TRL's name; its help text names any difference.

`GRPOConfig` checks the rules of each setting at construction, then pairs of settings that exclude each other.
`GRPOTrainer` resolves the settings that depend on policy, device and nodes, and freezes the configuration.
"""

from .grpo import GRPOConfig
from .parse import given_settings, parse_arguments
from .script import ModelConfig, ScriptArguments
