"""Datasets and prompts, one file per job: load them, tokenise them, order them.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Prompts are tokenised once, before training. Their order is a pure function of (seed, epoch), without a global
generator: a resumed run takes the same prompts, and any number of ranks takes the same prompts in the same step. A
dataset that is streamed is tokenised while it is read, by a `PromptStream` and its `StreamLoader`.
"""

from .loading import load_datasets
from .order import PromptLoader, StepOrder, extra_prompts
from .prompts import PromptDataset, PromptRules, tokenize_prompts
from .stream import PromptStream, StreamLoader

__all__ = [
    "PromptDataset",
    "PromptLoader",
    "PromptRules",
    "PromptStream",
    "StepOrder",
    "StreamLoader",
    "extra_prompts",
    "load_datasets",
    "tokenize_prompts",
]
