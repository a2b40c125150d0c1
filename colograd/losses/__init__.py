"""Losses and advantages. A user's own loss derives from `TokenLoss` (docs/losses.md)."""

from .objective import Objective
from .token_losses import LOSSES
from .tokens import ClippedLoss, OverCompletions, TokenLoss, Tokens, per_sequence_sum, sequence_mean_weights
