"""Every knob of a run. Names and meanings are TRL's wherever TRL has the same setting.

`GRPOConfig` (grpo.py) is one flat dataclass, put together from groups of knobs that each check their own rules. A
group derives from the groups, or from transformers' arguments, that its rules read. `ModelConfig` is the model,
`ScriptArguments` the dataset and the rewards. A configuration checks itself when it is made; `GRPOTrainer` resolves the
settings that depend on policy and device, and freezes it.
"""

from .grpo import GRPOConfig
from .parse import given_settings, parse_arguments
from .script import ModelConfig, ScriptArguments
