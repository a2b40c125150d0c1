"""Datasets and prompts. The order of prompts doesn't depend on the number of ranks.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Extensions add images, streams and a curriculum."""

from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts, prompt_at
from .prompts import PromptDataset, PromptRules, tokenize_prompts
