"""Datasets and prompts. `loading` loads datasets by their names, and combines them into a run's rows.
`prompts` tokenises the rows. `order` chooses the prompts of each optimizer step. `columns` checks
datasets and token ids. `messages` converts conversations for a chat template. Extensions add images, streams and a
curriculum.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Text prompts of a dataset are tokenised once, before training. Their order depends only on the seed and the epoch; with
a curriculum (prompts chosen by pass rate) on the seed, the generation and the recorded pass rates. So a resumed run and
any number of ranks take the same prompts in a step."""

from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts, prompt_at
from .prompts import PromptDataset, PromptRules, tokenize_prompts
