"""The token budget of a micro-batch: measured once on a GPU, halved when memory runs out. The update stays the same.

`max_tokens_per_microbatch: auto` measures the peak memory of dummy rows of growing length, fits a line, and fills
`SHARE` of the memory that policy, engine and the optimizer's state leave free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Sequence

import torch

from ..batch import PackedRow, StepBatch
from ..parallel.ranks import gather
from ..policy.packing import PackingRules, dummy, pack_step, places
from ..policy.second_models import kinds
from . import policy_sizes
from .shape import SHORT

SHARE = 0.8  # share of the free memory; fragmentation and row lengths that weren't measured need the rest
# Measured sizes, in tokens. A row of LARGEST keeps any GPU busy; only a longer sequence needs more.
SMALLEST, LARGEST = 1024, 65536
STEP = 256  # tokens; budgets are multiples of STEP


def fill(peak: Callable[[int], float], limit: int, largest: int = LARGEST) -> tuple[int, int]:
    """Find the most tokens that stay under ``limit`` bytes of peak memory, by a line through the last two sizes
    measured.

    Args:
        peak: tokens -> peak bytes of a forward and backward; infinite: it ran out of memory.
        largest: tokens that are enough.

    Returns:
        The tokens, a multiple of `STEP`, and their bytes on the line.
    """
    # Starting at the origin makes a single size an upper estimate of the slope.
    x, y, slope, most = 0, 0.0, 0.0, largest
    tokens = SMALLEST
    while tokens <= largest:
        used = peak(tokens)
        if used == math.inf:
            most = tokens - STEP
            break
        x, y, slope = tokens, used, (used - y) / (tokens - x)
        if y + slope * x > limit:  # twice as many tokens wouldn't fit
            break
        tokens *= 2
    if not x:
        return SMALLEST // 2, 0
    best = x + (limit - y) / slope if slope > 0 else most
    tokens = max(STEP, int(min(best, most)) // STEP * STEP)
    return tokens, int(y + (tokens - x) * slope)


def measure(
    train: Callable[[PackedRow], None],
    clean: Callable[[], None],
    shape: tuple[int, int, int],
    rules: PackingRules,
    pending_bytes: int,
    ranks_per_sequence: int = 1,
) -> tuple[int, int]:
    """Measure the safe budget of each rank's GPU, and return the smallest one and its bytes. A collective.

    Args:
        train: forward and backward of one micro-batch.
        clean: frees activations and gradients.
        shape: tokens of the longest prompt and of the longest completion, and completions per group.
        pending_bytes: of the optimizer's state, if it isn't allocated yet.
        ranks_per_sequence: ranks that share out a row's tokens; each must have enough of them to be busy.
    """
    device = rules.device
    prompt, completion, count = shape
    if rules.share_prompts:  # long completions have most logits, short ones join most keys with their prompt's
        shapes = [shape, (prompt, max(1, completion // SHORT), count)]
    else:
        shapes = [(prompt, completion, 1)]  # each padded row has its own prompt

    def used(row: PackedRow) -> float:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = math.inf
        with contextlib.suppress(torch.OutOfMemoryError):
            train(row)
            found = torch.cuda.max_memory_allocated(device) - before
        clean()
        return found

    def peak(tokens: int) -> float:
        return max(gather(max(used(dummy_row(tokens, of, device)) for of in dict.fromkeys(shapes))))

    torch.cuda.empty_cache()  # the policy's stream can't use memory cached for the engine's stream
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - pending_bytes
    return fill(peak, int(SHARE * min(gather(free))), max(LARGEST * ranks_per_sequence, prompt + completion))


def dummy_row(tokens: int, shape: tuple[int, int, int], device: torch.device) -> PackedRow:
    """Make a row of ``tokens`` tokens with zero advantages: the longest groups, the last one cut short."""
    longest_prompt, longest, count = shape
    groups: list[tuple[int, list[int]]] = []
    left = tokens
    while left > 1:
        prompt = min(longest_prompt, left - 1)
        room = min(left - prompt, longest * count)
        groups.append((prompt, [min(longest, room - start) for start in range(0, room, longest)]))
        left -= prompt + room
    if left:  # a single token is no group
        groups[-1][1][-1] += left
    return dummy(device, groups)


def optimizer_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, name: str, parts: int = 1) -> int:
    """Count the bytes that the optimizer will allocate at its first step, for a state cut into ``parts``."""
    return 0 if optimizer is not None and optimizer.state else policy_sizes.optimizer_bytes(model, name) // parts


def back_off(
    rules: PackingRules, batches: Sequence[StepBatch], reason: BaseException | str, among: int = 1
) -> tuple[PackingRules, list[StepBatch]]:
    """Halve the budget and pack the steps again. A collective: all ranks call it after any rank ran out of memory.

    Args:
        batches: the step that failed, and the rest of its round.
        among: number of batches at the start that were being trained.

    Raises:
        torch.OutOfMemoryError: each micro-batch is already a single completion.
    """
    failed = [row for batch in batches[:among] for row in batch.rows]
    largest = max(gather(max((row.num_tokens for row in failed), default=0)))
    if not any(gather(any(len(row.rollouts) > 1 for row in failed))):
        raise torch.OutOfMemoryError(
            f"A single completion with its prompt doesn't fit ({largest:,} tokens; {reason}): set "
            "gradient_checkpointing: true, set vllm_enable_sleep_mode: true, share more out among the ranks "
            "(sharding), or lower max_completion_length, max_prompt_tokens or vllm_gpu_memory_utilization."
        )
    rules = dataclasses.replace(rules, max_tokens=max(1, min(rules.max_tokens, largest) // 2))
    return rules, [repack(batch, rules) for batch in batches]


def repack(batch: StepBatch, rules: PackingRules) -> StepBatch:
    """Pack the same step with another budget, and keep each completion's log-probabilities. No row counts as
    trained."""
    rows = pack_step(batch.groups, rules)
    for name in ("old_logprobs", *kinds()):
        rows = _carry_over(name, batch.rows, rows)
    return dataclasses.replace(batch, rows=rows, trained=0)


def _carry_over(name: str, old: Sequence[PackedRow], new: Sequence[PackedRow]) -> tuple[PackedRow, ...]:
    """Give ``new`` the [N] tensor ``name`` of ``old``, completion by completion."""
    if any(row.values(name) is None for row in old):
        return tuple(new)
    recorded = [tensor for row in old if (tensor := row.values(name)) is not None]
    known = {each: tensor[place] for row, tensor in zip(old, recorded, strict=True) for each, place in places(row)}
    like = recorded[0] if recorded else torch.empty(0)

    def values(row: PackedRow) -> torch.Tensor:
        def missing(tokens: int) -> torch.Tensor:  # values for a new dummy row; its tokens aren't in the loss
            return like.new_zeros(tokens, *like.shape[1:])

        return torch.cat(
            [known[rollout] if rollout in known else missing(at.stop - at.start) for rollout, at in places(row)]
        )

    return tuple(row.with_values(name, values(row)) for row in new)


def free_memory(model: torch.nn.Module) -> None:
    """Free gradients and a failed forward's activations. The exception must be gone: its traceback holds them."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
