"""The token budget: the maximum tokens of a micro-batch (`max_tokens_per_microbatch`), halved if memory runs out."""

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
from .shape import SHORT

SHARE = 0.8  # Fraction of free memory to fill. Fragmentation and unmeasured row lengths may need the rest.

# A row of SMALLEST tokens is measured first, then rows of twice as many. LARGEST tokens keep any GPU busy.
SMALLEST, LARGEST = 1024, 65536

STEP = 256  # A measured token budget is a multiple of STEP.


def fill(peak: Callable[[int], float], limit: int, largest: int = LARGEST) -> tuple[int, int]:
    """Return (tokens, estimated peak bytes) of the largest micro-batch within ``largest`` tokens and ``limit`` bytes.

    ``peak(tokens)`` trains on a row of ``tokens`` tokens and returns the peak bytes, or inf if memory ran out. Bytes of
    other row lengths are estimated by a line through the last two measurements.
    """
    # The first line goes through the origin, so that it rather overestimates than underestimates bytes per token.
    x, y, slope, most = 0, 0.0, 0.0, largest
    tokens = SMALLEST
    while tokens <= largest:
        used = peak(tokens)
        if used == math.inf:
            most = tokens - STEP
            break
        x, y, slope = tokens, used, (used - y) / (tokens - x)
        if y + slope * x > limit:
            break
        tokens *= 2
    if not x:
        return SMALLEST // 2, 0
    best = x + (limit - y) / slope if slope > 0 else most
    tokens = max(STEP, int(min(best, most)) // STEP * STEP)
    return tokens, int(y + (tokens - x) * slope)


def measure(
    train: Callable[[PackedRow], None], clean: Callable[[], None], shape: tuple[int, int, int], rules: PackingRules,
    pending_bytes: int, ranks_per_sequence: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Return (tokens, estimated peak bytes) of the largest micro-batch that fits in the fraction `SHARE` of free memory
    on every rank's GPU. All ranks must call this.

    Args:
        train: runs forward and backward of one micro-batch.
        clean: frees activations and gradients.
        shape: tokens of the longest prompt, tokens of the longest completion, and completions per group.
        pending_bytes: bytes to leave free for the optimizer's state. 0 if the state is allocated already.
    """
    device = rules.device
    prompt, completion, count = shape
    if rules.share_prompts:  # Rows of long completions have most logits. Rows of short completions copy most keys.
        shapes = {shape, (prompt, max(1, completion // SHORT), count)}
    else:
        shapes = {(prompt, completion, 1)}

    def peak(tokens: int) -> float:
        peaks = []
        for of in shapes:
            row = dummy_row(tokens, of, device)
            before = torch.cuda.memory_allocated(device)
            peaks.append(math.inf)
            with contextlib.suppress(torch.OutOfMemoryError):
                # This first row allocates gradients, which exist in all micro-batches of a step but the first.
                train(dummy_row(STEP, of, device))
                torch.cuda.reset_peak_memory_stats(device)
                train(row)
                peaks[-1] = torch.cuda.max_memory_allocated(device) - before
            clean()
        return max(gather(max(peaks)))

    # The policy's CUDA stream can't use memory that torch caches for the engine's stream.
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - pending_bytes
    return fill(peak, int(SHARE * min(gather(free))), max(LARGEST * ranks_per_sequence, prompt + completion))


def dummy_row(tokens: int, shape: tuple[int, int, int], device: torch.device) -> PackedRow:
    longest_prompt, longest, count = shape
    groups: list[tuple[int, list[int]]] = []
    left = tokens
    while left > 1:
        prompt = min(longest_prompt, left - 1)
        room = min(left - prompt, longest * count)
        groups.append((prompt, [min(longest, room - start) for start in range(0, room, longest)]))
        left -= prompt + room
    if left:  # A single token is left, but a group needs two.
        groups[-1][1][-1] += left
    return dummy(device, groups)


def back_off(
    rules: PackingRules, batches: Sequence[StepBatch], reason: BaseException | str, among: int = 1
) -> tuple[PackingRules, list[StepBatch]]:
    """Halve the token budget after any rank ran out of memory. All ranks must call this.

    Return the new rules, and ``batches`` packed by these rules. Memory ran out in one of the first ``among`` batches.
    The new budget is at most half these batches' longest row. If every row of these batches has a single
    completion, raise an error that quotes ``reason``.
    """
    failed = [row for batch in batches[:among] for row in batch.rows]
    largest = max(gather(max((row.num_tokens for row in failed), default=0)))
    if not any(gather(any(len(row.rollouts) > 1 for row in failed))):
        raise torch.OutOfMemoryError(
            f"A single completion with its prompt doesn't fit in memory ({largest:,} tokens; {reason}): set "
            "gradient_checkpointing: true or vllm_enable_sleep_mode: true, choose a `sharding` that divides more "
            "over ranks, or lower max_completion_length, max_prompt_tokens or vllm_gpu_memory_utilization."
        )
    rules = dataclasses.replace(rules, max_tokens=max(1, min(rules.max_tokens, largest) // 2))
    return rules, [repack(batch, rules) for batch in batches]


def repack(batch: StepBatch, rules: PackingRules) -> StepBatch:
    """Return ``batch`` with its groups packed into new rows, which all count as untrained. Per-token values, e.g.
    `old_logprobs`, are copied to the new rows if every old row has them."""
    rows = pack_step(batch.groups, rules)
    for name in ("old_logprobs", *kinds()):
        recorded = [tensor for row in batch.rows if (tensor := row.scores.get(name)) is not None]
        if not recorded or len(recorded) < len(batch.rows):
            continue
        known = {
            rollout: tensor[place]
            for row, tensor in zip(batch.rows, recorded, strict=True)
            for rollout, place in places(row)
        }
        packed = []
        for row in rows:
            values = []
            for rollout, at in places(row):  # A dummy row gets zeros, because the loss ignores its tokens.
                blank = recorded[0].new_zeros(at.stop - at.start, *recorded[0].shape[1:])
                values.append(known.get(rollout, blank))
            packed.append(row.with_scores(name, torch.cat(values)))
        rows = tuple(packed)
    return dataclasses.replace(batch, rows=rows, trained=0)


def free_memory(model: torch.nn.Module) -> None:
    """Free gradients and a failed forward's activations.

    The caller must have dropped the forward's exception, because its traceback holds the activations.
    """
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
