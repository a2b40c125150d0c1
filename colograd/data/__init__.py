"""Datasets and prompts, one file per job: `sources` finds a dataset by its name, `loading` makes a run's rows of one or
several, `prompts` tokenises them, `order` says which of them each step takes, `curriculum` by what was learnt of them.
`stream` does tokens and order for rows that are read while training. `columns` has the checks that they share,
`messages` makes conversations what a chat template takes, `images` rows with pictures what a model reads, and
`image_lengths` counts their tokens before.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Prompts are tokenised once, before training. Their order is a pure function of (seed, epoch), with a curriculum of
(seed, round, record), without a global
generator: a resumed run takes the same prompts, and any number of ranks takes the same prompts in the same step. A
streamed dataset is tokenised while it is read, by a `PromptStream` and its `StreamLoader`.
"""

from .curriculum import CurriculumOrder, CurriculumState
from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts, prompt_at
from .prompts import PromptDataset, PromptRules, tokenize_prompts
from .stream import PromptStream, StreamLoader
