"""Datasets and prompts. `sources` loads one dataset by its name. `loading` combines datasets into a run's rows.
`prompts` tokenises the rows. `order` chooses the prompts of each optimizer step. `columns` and `vocabulary` check
datasets and token ids. `messages` converts conversations for a chat template. Extensions add images, streams and a
curriculum.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Prompts are tokenised once, before training. The order of prompts depends only on the seed and the epoch, not on a
global random generator. With a curriculum (prompts chosen by pass rate) it depends on the seed, the generation and the
recorded pass rates. So a resumed run takes the same prompts, and a step's prompts don't depend on the number of ranks.
"""

from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts, prompt_at
from .prompts import PromptDataset, PromptRules, tokenize_prompts
