"""Converts scored groups (prompts' completions with rewards) into data of the completions log and of the report."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...batch import Group, Media, RolloutId, ScoredGroup
from ...data.messages import text_of
from ...policy.packing import loss_tokens
from .completions import CompletionRow, data_url

MOST_TOKENS, LEAST_TOKENS = 4096, 256  # Tokens that the report shows of a long completion: at most, at least.
STEP_TOKENS = 32_768  # Roughly the maximum of tokens that the report shows of a step's completions.
LEFT_OUT_IF_EMPTY = ("images", "messages", "session", "cut")


def _prompt(group: Group) -> Any:
    prompt = group.example.get("prompt", "")
    return text_of(prompt) if any(rollout.input.media is not None for rollout in group.rollouts) else prompt


def _advantages(scored: ScoredGroup) -> list[torch.Tensor]:
    """Return each completion's advantage: a scalar, or [C] with one value per token."""
    lengths = [len(rollout.completion_ids) for rollout in scored.group.rollouts]
    per_token = len(scored.advantages) != len(lengths)
    return list(scored.advantages.split(lengths) if per_token else scored.advantages)


def as_utf8(texts: Sequence[str]) -> list[bytes]:
    return [text.encode(errors="replace") for text in texts]


def completion_rows(
    groups: Sequence[ScoredGroup], texts: Sequence[Sequence[bytes]], step: int, images: bool = True
) -> list[CompletionRow]:
    rows, small = [], dict[str, tuple[bytes, ...]]()  # digest of a prompt's images -> thumbnails
    for scored, of_group in zip(groups, texts, strict=True):
        prompt, advantages = _prompt(scored.group), _advantages(scored)
        for i, (rollout, text) in enumerate(zip(scored.group.rollouts, of_group, strict=True)):
            media = rollout.input.media if images else None
            if media is not None and media.digest not in small:
                small[media.digest] = tuple(media.thumbnails())
            pictures = ((), ()) if media is None else (small[media.digest], media.sizes)
            lengths = len(rollout.prompt_ids), len(rollout.completion_ids), rollout.finish_reason.value
            judged = tuple(scored.rewards[i].tolist()), float(advantages[i].mean())
            extra = {name: values[i] for name, values in scored.logged.columns.items()}
            rows.append(CompletionRow(step, scored.group.position, prompt, text, *lengths, *judged, extra, *pictures))
    return rows


class TokenTexts:
    """Map from token ids to texts. The bytes of an incomplete character become "\ufffd"."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        for token in {*ids} - self._known.keys():
            # Some tokenizers drop a space at a text's start. So the text of the second of two equal tokens is taken.
            self._known[token] = self._decode([token, token])[len(self._decode([token])) :] or f"<{token}>"
        return [self._known[token] for token in ids]


def shown_completions(
    groups: Sequence[tuple[ScoredGroup, Sequence[float]]],
    purpose: str,
    reward_names: Sequence[str],
    trainer: Mapping[RolloutId, torch.Tensor],
    token_texts: TokenTexts,
    mask_truncated: bool,
) -> list[dict[str, Any]]:
    """Return completions as dicts for the report. ``trainer``: the trainer's log-probabilities per completion, [C]."""
    completions = sum(len(scored.group.rollouts) for scored, _ in groups)
    most = min(MOST_TOKENS, max(LEAST_TOKENS, STEP_TOKENS // max(completions, 1)))
    shown = []
    for scored, totals in groups:
        group, prompt, advantages = scored.group, _prompt(scored.group), _advantages(scored)
        for identity, rollout, total in zip(group.rollout_ids, group.rollouts, totals, strict=True):
            index, known, answers = identity.index, trainer.get(identity), rollout.all(Media)
            advantage = advantages[index]
            found = {
                "purpose": purpose,
                "position": group.position,
                "index": index,
                "prompt": prompt,
                "key": rollout.input.key,
                "tokens": token_texts(rollout.completion_ids[:most]),
                "sampler": _rounded(rollout.sampler_logprobs[:most]),
                "trainer": None if known is None else _rounded(known[:most]),
                "advantage": _rounded(advantage[:most]) if advantage.dim() else round(float(advantage), 4),
                "mask": loss_tokens(rollout, mask_truncated)[:most].int().tolist(),
                "sampled": rollout.sampled[:most].int().tolist(),
                "rewards": dict(zip(reward_names, scored.rewards[index].tolist(), strict=True)),
                "reward": total,
                "finish": rollout.finish_reason.value,
                "extra": {name: values[index] for name, values in scored.logged.columns.items()},
                "images": [*_picture_urls(rollout.input.media), *_picture_urls(*answers)],
                "messages": text_of(list(rollout.messages)),
                "session": rollout.columns.get("session"),
                "cut": len(rollout.completion_ids) > most,
            }
            shown.append({name: value for name, value in found.items() if value or name not in LEFT_OUT_IF_EMPTY})
    return shown


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _picture_urls(*media: Media | None) -> list[str]:
    parts = [part for part in media if part is not None]
    return [*map(data_url, parts[0].thumbnails(*parts[1:]))] if parts else []


def chosen_groups(
    groups: Sequence[tuple[ScoredGroup, Sequence[float]]], trainer: Mapping[RolloutId, torch.Tensor], number: int
) -> list[tuple[ScoredGroup, Sequence[float]]]:
    """Choose ``number`` groups: alternately the one with the largest spread of rewards, and the one with the largest
    mean difference of sampler's and trainer's log-probabilities."""
    known = [[total for total in totals if total == total] for _, totals in groups]
    spreads = [max(totals, default=0.0) - min(totals, default=0.0) for totals in known]
    differences = []  # per group: mean of |trainer's - sampler's log-probability| over sampled tokens
    for scored, _ in groups:
        pairs = zip(scored.group.rollout_ids, scored.group.rollouts, strict=True)
        apart = [(trainer[i] - r.sampler_logprobs)[r.sampled].abs() for i, r in pairs if i in trainer]
        count = sum(map(len, apart))
        differences.append(sum(float(each.nansum()) for each in apart) / count if count else 0.0)
    left, chosen = [*range(len(groups))], list[int]()
    for turn in range(min(number, len(groups))):
        by = differences if turn % 2 else spreads
        chosen.append(max(left, key=by.__getitem__))
        left.remove(chosen[-1])
    return [groups[index] for index in sorted(chosen)]
