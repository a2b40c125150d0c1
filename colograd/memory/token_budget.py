"""The token budget of a micro-batch: measured once on a GPU, halved when memory runs out. The update stays the same.

`max_tokens_per_microbatch: auto` measures the peak memory of dummy rows of growing length, fits a line, and takes what
fills `SHARE` of what is free beside the policy, the engine and the optimizer's state to come.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence

import torch

from ..batch import MicroBatch, RolloutId, StepBatch
from ..parallel.ranks import gather
from ..policy.packing import PackingRules, dummy, pack_step, sequences
from . import plan

SHARE = 0.8  # of the free memory: fragmentation and lengths that the dummy rows don't have need the rest
SMALLEST, LARGEST = 1024, 65536  # measured sizes, in tokens; a row of LARGEST keeps any GPU busy
STEP = 256  # budgets are multiples of it


def fill(peak: Callable[[int], int | None], limit: int) -> int:
    """The most tokens whose peak memory stays under ``limit`` bytes, by a line through the last two sizes measured.

    Args:
        peak: tokens -> bytes that a forward and backward needs at most; None: it ran out of memory.

    Returns:
        A multiple of `STEP`, at least `STEP`.
    """
    # Starting at the origin makes a single size an upper estimate of the slope.
    x, y, slope, most = 0, 0, 0.0, LARGEST
    tokens = SMALLEST
    while tokens <= LARGEST:
        used = peak(tokens)
        if used is None:
            most = tokens - STEP
            break
        x, y, slope = tokens, used, (used - y) / (tokens - x)
        if y + slope * x > limit:  # twice as many tokens wouldn't fit
            break
        tokens *= 2
    if not x:
        return SMALLEST // 2
    best = x + (limit - y) / slope if slope > 0 else most
    return max(STEP, int(min(best, most)) // STEP * STEP)


def measure(
    model: torch.nn.Module,
    loss: Callable[[MicroBatch], torch.Tensor],
    shape: tuple[int, int, int],
    rules: PackingRules,
    pending_bytes: int,
) -> tuple[int, int]:
    """A safe budget on this GPU, and the bytes that it takes. A collective: every rank gets the least of all.

    Args:
        loss: forward of one micro-batch.
        shape: tokens of the longest prompt and of the longest completion, and completions per group.
        pending_bytes: what will be allocated later, by the optimizer at its first step.
    """
    device, peaks = rules.device, {0: 0}
    if not rules.share_prompts:
        shape = (*shape[:2], 1)  # rows that are padded have a prompt for each completion

    def peak(tokens: int) -> int | None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        used: int | None = None
        try:
            loss(dummy_row(tokens, shape, device)).backward()
            used = torch.cuda.max_memory_allocated(device) - before
        except torch.OutOfMemoryError:
            pass
        free_memory(model)
        reports = gather(used)
        found = [report for report in reports if report is not None]
        if len(found) < len(reports):
            return None
        peaks[tokens] = max(found)
        return peaks[tokens]

    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - pending_bytes
    tokens = fill(peak, int(SHARE * min(gather(free))))
    return tokens, bytes_at(tokens, peaks)


def bytes_at(tokens: int, peaks: dict[int, int]) -> int:
    """The peak memory at ``tokens``, on the line through the last two of ``peaks`` (tokens -> bytes)."""
    if len(peaks) < 2:
        return 0
    (x0, y0), (x1, y1) = sorted(peaks.items())[-2:]
    return int(y1 + (tokens - x1) * (y1 - y0) / (x1 - x0))


def dummy_row(tokens: int, shape: tuple[int, int, int], device: torch.device) -> MicroBatch:
    """A row of ``tokens`` tokens without a signal, of groups as long as they can be; the last one is cut short."""
    groups: list[tuple[int, list[int]]] = []
    left = tokens
    while left > 1:
        prompt = min(shape[0], left - 1)
        left -= prompt
        completions: list[int] = []
        while left and len(completions) < shape[2]:
            completions.append(min(shape[1], left))
            left -= completions[-1]
        groups.append((prompt, completions))
    if left:  # a single token is no group
        groups[-1][1][-1] += left
    return dummy(device, groups)


def optimizer_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, name: str) -> int:
    """What the optimizer is still to allocate. (None: it isn't made yet.)"""
    return 0 if optimizer is not None and optimizer.state else plan.optimizer_bytes(model, name)


def back_off(
    rules: PackingRules, batches: Sequence[StepBatch], reason: BaseException | str, among: int = 1
) -> tuple[PackingRules, list[StepBatch]]:
    """Halve the budget and pack the steps again. A collective: all ranks call it after any ran out of memory.

    Args:
        batches: the step that failed, and the rest of its round.
        among: that many of them, from the first, were under way.

    Raises:
        torch.OutOfMemoryError: each micro-batch of the step is a single completion already.
    """
    failed = [row for batch in batches[:among] for row in batch.micro_batches]
    largest = max(gather(max((row.input_ids.numel() for row in failed), default=0)))
    if not any(gather(any(row.num_sequences > 1 for row in failed))):
        raise torch.OutOfMemoryError(
            f"A single completion with its prompt doesn't fit ({largest:,} tokens; {reason}): keep "
            "gradient_checkpointing: true, set vllm_enable_sleep_mode: true, or lower max_completion_length, "
            "max_prompt_tokens or vllm_gpu_memory_utilization."
        )
    rules = dataclasses.replace(rules, max_tokens=max(1, min(rules.max_tokens, largest) // 2))
    return rules, [repack(batch, rules) for batch in batches]


def repack(batch: StepBatch, rules: PackingRules) -> StepBatch:
    """The same step in micro-batches of another budget, with what was known of each completion."""
    rows = pack_step(batch.groups, rules)
    for name in ("old_logprobs", "ref_logprobs"):
        rows = _carry_over(name, batch.micro_batches, rows)
    return dataclasses.replace(batch, micro_batches=rows)


def _carry_over(name: str, old: Sequence[MicroBatch], new: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    """Give ``new`` the [N] tensor ``name`` of ``old``, completion by completion."""
    known: dict[RolloutId, torch.Tensor] = {}
    for row in old:
        values = getattr(row, name)
        if values is None:
            return tuple(new)
        known |= {part.rollout: values[part.place] for part in sequences(row)}
    filled = []
    for row in new:
        parts = [  # a dummy may be new: zeros, as its tokens aren't in the loss
            known.get(part.rollout, row.advantages.new_zeros(len(part.completion_ids))) for part in sequences(row)
        ]
        filled.append(dataclasses.replace(row, **{name: torch.cat(parts)}))
    return tuple(filled)


def free_memory(model: torch.nn.Module) -> None:
    """Drop gradients and give back what the failed forward left. Call it after the exception is gone, whose traceback
    holds the activations."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
