"""Datasets and prompts.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

The order of prompts doesn't depend on the number of ranks."""

from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts, prompt_at
from .prompts import PromptDataset, PromptRules, tokenize_prompts
