"""Completions token by token, as a report shows them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..batch import Images, ModelInput, RolloutId, ScoredGroup
from ..data.images import text_of
from ..policy.packing import loss_tokens
from .thumbnails import data_url, thumbnails

MOST_TOKENS = 4096  # of a completion
MOST_OF_A_STEP = 32_768  # of all of a step's; one takes some 30 bytes
LEAST_TOKENS = 256  # of a completion, however many there are


class Pieces:
    """The text of each token on its own, such that the pieces of a completion join to its text. Bytes that are no UTF-8
    alone are shown as their escape, as in ``\\xe2``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        self._bytes = _byte_alphabet() if b'"ByteLevel"' in decoder else None
        self._marks_spaces = b"\xe2\x96\x81" in decoder
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        return [self._known[i] if i in self._known else self._known.setdefault(i, self._piece(i)) for i in ids]

    def _piece(self, token: int) -> str:
        raw = self._tokenizer.convert_ids_to_tokens(token)
        if raw is None:
            return f"<{token}>"
        if token in self._special:
            return str(raw)
        if self._bytes is not None and all(char in self._bytes for char in raw):
            return bytes(self._bytes[char] for char in raw).decode("utf-8", "backslashreplace")
        if len(raw) == 6 and raw.startswith("<0x"):  # a byte of a vocabulary that falls back to them
            return bytes([int(raw[3:5], 16)]).decode("utf-8", "backslashreplace")
        if self._marks_spaces:
            return str(raw).replace("\u2581", " ")
        return str(self._tokenizer.decode([token]))


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: those that can be seen stand for themselves, the
    others for the code points from 256 on, in their order (GPT-2's `bytes_to_unicode`)."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return {chr(byte if byte in seen else next(others)): byte for byte in range(256)}


def sample_entries(
    groups: Sequence[tuple[ScoredGroup, Sequence[float]]],
    step: int,
    purpose: str,
    reward_names: Sequence[str],
    trainer: Mapping[RolloutId, torch.Tensor],
    pieces: Pieces,
    mask_truncated: bool,
) -> list[dict[str, Any]]:
    """The lines of some groups in `samples.jsonl`, one per completion.

    Args:
        groups: each with the weighted sums of its rewards [G].
        trainer: the trainer's log-probabilities of completions, as far as they are known.
    """
    completions = sum(len(scored.group.rollouts) for scored, _ in groups)
    most = min(MOST_TOKENS, max(LEAST_TOKENS, MOST_OF_A_STEP // max(completions, 1)))
    found = []
    for scored, totals in groups:
        group, advantages = scored.group, _advantages(scored)
        prompt, shown = group.example.get("prompt", ""), dict[ModelInput, list[str]]()
        if group.rollouts[0].input.images is not None:
            prompt = text_of(prompt)
        for identity, rollout, total in zip(group.rollout_ids, group.rollouts, totals, strict=True):
            index, advantage = identity.index, advantages[identity.index]
            known = trainer.get(identity)
            entry: dict[str, Any] = {
                "step": step,
                "purpose": purpose,
                "position": group.position,
                "key": rollout.input.key,
                "index": index,
                "prompt": prompt,
                "tokens": pieces(rollout.completion_ids[:most]),
                "sampler": _rounded(rollout.sampler_logprobs[:most].tolist()),
                "trainer": None if known is None else _rounded(known[:most].tolist()),
                "advantage": advantage if isinstance(advantage, float) else advantage[:most],
                "mask": loss_tokens(rollout, mask_truncated)[:most].int().tolist(),
                "sampled": rollout.sampled[:most].int().tolist(),
                "rewards": dict(zip(reward_names, scored.rewards[index].tolist(), strict=True)),
                "reward": total,
                "finish": rollout.finish_reason.value,
                "extra": {name: values[index] for name, values in scored.logged.columns.items()},
            }
            if rollout.input not in shown:
                shown[rollout.input] = _small(rollout.input.images)
            if pictures := [*shown[rollout.input], *_small(*rollout.images)]:
                entry["images"] = pictures
            if rollout.messages:
                entry["messages"] = text_of(list(rollout.messages)) if rollout.images else list(rollout.messages)
            if len(rollout.completion_ids) > most:
                entry["cut"] = True
            found.append(entry)
    return found


def _small(*images: Images | None) -> list[str]:
    """The first of the pictures, as a page takes them."""
    pictures = [picture for of in images if of is not None for picture in of.pictures]
    return [*map(data_url, thumbnails(pictures))]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _advantages(scored: ScoredGroup) -> list[Any]:
    """[G] of one number each, or of one per token."""
    rollouts, given = scored.group.rollouts, scored.advantages
    if given.shape == (len(rollouts),):
        return [round(value, 4) for value in given.tolist()]
    return [_rounded(part.tolist()) for part in given.split([len(r.completion_ids) for r in rollouts])]


def chosen_groups(
    groups: Sequence[tuple[ScoredGroup, Sequence[float]]], trainer: Mapping[RolloutId, torch.Tensor], number: int
) -> list[tuple[ScoredGroup, Sequence[float]]]:
    """Which groups to record: by turns the one whose rewards differ most and the one where sampler and trainer differ
    most, then the first."""
    spreads = [_spread(totals) for _, totals in groups]
    differences = [_difference(scored, trainer) for scored, _ in groups]
    chosen: list[int] = []
    for turn in range(min(number, len(groups))):
        left = [index for index in range(len(groups)) if index not in chosen]
        by = differences if turn % 2 else spreads
        chosen.append(max(left, key=lambda index: (by[index], -index)))
    return [groups[index] for index in sorted(chosen)]


def _spread(totals: Sequence[float]) -> float:
    judged = [total for total in totals if total == total]
    return max(judged) - min(judged) if judged else 0.0


def _difference(scored: ScoredGroup, trainer: Mapping[RolloutId, torch.Tensor]) -> float:
    """The mean over the group's tokens of |trainer - sampler|; 0 where it isn't known."""
    total, count = 0.0, 0
    for identity, rollout in zip(scored.group.rollout_ids, scored.group.rollouts, strict=True):
        if (known := trainer.get(identity)) is not None:
            apart = (known - rollout.sampler_logprobs)[rollout.sampled].abs()
            total, count = total + float(apart.nansum()), count + len(apart)
    return total / count if count else 0.0
