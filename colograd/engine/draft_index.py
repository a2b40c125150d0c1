"""Drafts that cost no model: what followed in other completions of the same prompt.

A completion often goes on as its siblings did, or as the same prompt's completions of earlier epochs, where these have
the same words before. So the longest end of its text that occurs in them is looked up, and what most of them have
behind it is the draft (suffix decoding, arXiv 2411.04975).

The look-up scans all their tokens. A suffix automaton would find the same matches, but Python needs microseconds for
each of its tokens, and the sequences of a tail wait meanwhile; numpy scans all of them in one call.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import numpy as np

START, END = -2, -1  # around each completion; no tokens
REACH = 32  # tokens of a text's end that are compared at most
# Of n completions with the same words v have the same token next: the share of texts that go on with it is about
# v / (n + PRIOR), fitted by hand to completions of the quickstart's model at temperature 1 (at 0.6 it is more).
PRIOR = 1.5
TOKENS_OF_PROMPT = 2**17  # the latest completions of one prompt
BYTES = 2**26  # of all prompts
BYTES_OF_COMPLETION, BYTES_OF_PROMPT = 100, 900  # besides the tokens: Python's objects


def propose(completions: np.ndarray, text: Sequence[int], most: int, least: float) -> list[tuple[int, float]]:
    """What probably follows ``text``, at most ``most`` tokens, each with the probability that all up to it are right.

    Args:
        completions: int32 (M,), the tokens of all of them, each between `START` and `END`.
        text: a completion so far, behind `START`, or its end.
        least: probability below which a draft ends.
    """
    at = np.flatnonzero(completions == text[-1])
    for back in range(1, min(REACH, len(text))):
        longer = at[completions[at - back] == text[-1 - back]]
        if not len(longer):
            break
        at = longer
    draft: list[tuple[int, float]] = []
    likely = 1.0
    while len(at) and len(draft) < most:
        at = at + 1
        following = completions[at]
        tokens, votes = np.unique(following, return_counts=True)
        best = int(votes.argmax())
        likely *= int(votes[best]) / (len(at) + PRIOR)
        if tokens[best] < 0 or likely < least:
            break
        draft.append((int(tokens[best]), likely))
        at = at[following == tokens[best]]
    return draft


def likeliest(drafts: Sequence[Sequence[tuple[int, float]]], room: int) -> list[list[int]]:
    """The drafts' tokens, of all of them the ``room`` that are most probably right."""
    if sum(map(len, drafts)) > room:
        order = sorted(((-likely, row) for row, draft in enumerate(drafts) for _, likely in draft))
        taken = Counter(row for _, row in order[:room])
        drafts = [draft[: taken[row]] for row, draft in enumerate(drafts)]
    return [[token for token, _ in draft] for draft in drafts]


class CompletionMemory:
    """Completions by prompt: the latest ones of each, and of the prompts those that were met last."""

    def __init__(self, most_bytes: int = BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._kept: OrderedDict[bytes, deque[array[int]]] = OrderedDict()
        self._joined: dict[bytes, np.ndarray] = {}  # as `propose` takes them, of prompts that were asked for

    def add(self, key: bytes, completion: Sequence[int], before: int = 0) -> None:
        """Remember a completion; forget the oldest of its prompt, and the prompts not met for the longest time.

        Args:
            key: of its prompt, from `key_of`.
            before: its first tokens that were another request's: what is remembered of that is a part of this one.
        """
        if key not in self._kept:
            self._kept[key], self._bytes = deque(), self._bytes + BYTES_OF_PROMPT
        ours, new = self._kept[key], array("i", completion)
        self._kept.move_to_end(key)
        self._joined.pop(key, None)
        for part in [each for each in ours if before and len(each) <= before and new[: len(each)] == each]:
            ours.remove(part)
            self._bytes -= _bytes_of(part)
        ours.append(new)
        self._bytes += _bytes_of(new)
        while len(ours) > 1 and sum(map(len, ours)) > TOKENS_OF_PROMPT:
            self._bytes -= _bytes_of(ours.popleft())
        while self._bytes > self._most_bytes and len(self._kept) > 1:
            prompt, oldest = self._kept.popitem(last=False)
            self._joined.pop(prompt, None)
            self._bytes -= BYTES_OF_PROMPT + sum(map(_bytes_of, oldest))

    def of(self, key: bytes) -> np.ndarray:
        """The completions of a prompt, as `propose` takes them."""
        if key not in self._joined:
            tokens = array("i")
            for completion in self._kept.get(key, ()):
                tokens.append(START)
                tokens.extend(completion)
                tokens.append(END)
            self._joined[key] = np.array(tokens, dtype=np.int32)
        return self._joined[key]

    def end_tail(self) -> None:
        """Drop what `of` has made."""
        self._joined.clear()


def key_of(prompt: Sequence[int], pictures: Sequence[str] = ()) -> bytes:
    """A prompt's key, by its token ids and the names of its pictures, whose tokens are the same for all of a size."""
    digest = hashlib.blake2b(array("i", prompt).tobytes(), digest_size=16)
    for name in pictures:
        digest.update(name.encode())
    return digest.digest()


def _bytes_of(completion: array[int]) -> int:
    return BYTES_OF_COMPLETION + completion.itemsize * len(completion)
