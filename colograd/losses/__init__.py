"""Objectives: `token_losses` has one small class each, `objective` what goes with any of them, `entropy` what its terms
must know of the whole step, `mismatch` how far sampler and trainer are apart. `advantages` turns a group's rewards into
the numbers that weigh its tokens.

A loss of your own derives from `TokenLoss` (docs/losses.md).
"""

from .objective import Objective
from .token_losses import (
    LOSSES,
    ClippedLoss,
    OverCompletions,
    TokenLoss,
    Tokens,
    per_sequence_sum,
    sequence_mean_weights,
)
