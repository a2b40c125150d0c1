"""The settings of a run. A setting that TRL has too keeps TRL's name. Its help text names any difference.

`GRPOConfig` (grpo.py) is one flat dataclass. Its base classes are groups of knobs (settings with a help text, and rules
for the value). At construction it checks the rules, then the pairs of settings that exclude each other (conflicts.py).
`ModelConfig` has the settings of the model; `ScriptArguments` has the dataset, the rewards, the tools and the agent.
`GRPOTrainer` resolves the settings that depend on policy, device and nodes, and freezes the configuration.
"""

from .grpo import GRPOConfig
from .parse import given_settings, parse_arguments
from .script import ModelConfig, ScriptArguments
