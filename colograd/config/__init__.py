"""The settings of a run. A setting that TRL has too keeps TRL's name and meaning.

`GRPOConfig` (grpo.py) is one flat dataclass. Its base classes are groups of knobs (settings with a help text and
rules), and each group checks the rules of its knobs. If a rule reads settings of a second group or of transformers'
`TrainingArguments`, the group derives from that class. `ModelConfig` has the settings of the model; `ScriptArguments`
has the settings of dataset and rewards. A configuration checks its values at construction. `GRPOTrainer` then resolves
the settings that depend on policy and device, and freezes the configuration.
"""

from .grpo import GRPOConfig
from .parse import given_settings, parse_arguments
from .script import ModelConfig, ScriptArguments
