"""Datasets and prompts, one file per job: `sources` loads a dataset by its name, `loading` combines one or several into
a run's rows, and `prompts` tokenises them. `order` chooses the prompts of each step; `curriculum` chooses them by their
pass rates. `columns` has shared checks.
`messages` converts conversations for a chat template, and `images` converts rows with images into the model's inputs.
`image_lengths` counts those rows' tokens before training.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Prompts are tokenised once, before training. Their order is a pure function of (seed, epoch), with a curriculum of
(seed, round, record), without a global generator. A resumed run therefore takes the same prompts, and any number of
ranks takes the same prompts in the same step.
"""

from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts, prompt_at
from .prompts import PromptDataset, PromptRules, tokenize_prompts
