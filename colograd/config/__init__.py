"""Every knob of a run. Names and meanings are TRL's wherever the thing is the same.

`grpo` is the run (`GRPOConfig`), `model` the model (`ModelConfig`), `script` the dataset and the rewards
(`ScriptArguments`). Each validates and normalises itself once, when it is made; nothing writes to it afterwards.

`GRPOConfig` is one flat dataclass, put together from groups of knobs, each with its rules: `policy`, `sharding`,
`steps`, `sampling`, `evaluation`, `engine`, `rewards`, `advantages`, `objective`, `reference`, `saving`, `journal` and
`logs`. A group derives from what its rules read: another group, or transformers' arguments. Every group is written with
the helpers of `knob`. `launched` says what accelerate's and DeepSpeed's configurations ask for.

`names` answers unknown names and TRL's, `parse` reads a recipe and the command line.
"""

from .grpo import GRPOConfig
from .model import ModelConfig
from .parse import given_settings, parse_arguments
from .script import ScriptArguments
