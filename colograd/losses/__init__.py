"""Objectives: `token_losses` has one small class per loss, and `objective` combines it with the terms that any loss can
have. `entropy` computes the entropy values of the whole step, and `mismatch` measures the difference between sampler
and trainer. `advantages` turns a group's rewards into the numbers that weigh its tokens.

A loss of your own derives from `TokenLoss` (docs/losses.md).
"""

from .objective import Objective
from .token_losses import LOSSES
from .tokens import ClippedLoss, OverCompletions, TokenLoss, Tokens, per_sequence_sum, sequence_mean_weights
