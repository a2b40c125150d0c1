"""Losses and advantages. `token_losses` has a class per `loss_type`. `objective` combines the loss with terms that any
loss can have (entropy bonus, KL). `entropy` computes entropy values of the whole step. `correction` corrects and
measures the difference between sampler and trainer. `advantages` converts a group's rewards to advantages.

A user's own loss derives from `TokenLoss` (docs/losses.md).
"""

from .objective import Objective
from .token_losses import LOSSES
from .tokens import ClippedLoss, OverCompletions, TokenLoss, Tokens, per_sequence_sum, sequence_mean_weights
