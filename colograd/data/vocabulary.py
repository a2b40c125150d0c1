"""Compare the tokenizer's tokens with the rows of the model's embedding. The tokenizer or the model may have more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

NAMED = 5  # Maximum number of tokens that a message lists.


def size_of(tokenizer: Any) -> int:
    """Return the number of embedding rows that the tokenizer needs: its highest token id plus 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_rows(ids: Iterable[int], rows: int, tokenizer: Any, where: str) -> None:
    if (highest := max(ids, default=0)) >= rows:
        raise ValueError(
            f"{where} has the token {tokenizer.convert_ids_to_tokens(highest)!r} ({highest}), but the model's "
            f"embedding has {rows:,} rows, numbered from 0. {remedy(tokenizer)}"
        )


def remedy(tokenizer: Any) -> str:
    return (
        "Use the tokenizer of the model, or a model with more rows: call "
        f"model.resize_token_embeddings({size_of(tokenizer)}) and save_pretrained, and train from that folder."
    )


def surplus_tokens(tokenizer: Any, rows: int) -> Iterator[str]:
    """Yield a warning if the tokenizer has tokens without a row in the model's embedding."""
    surplus = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if surplus:
        which = ", ".join(f"{token!r} ({index})" for index, token in surplus[:NAMED])
        yield (
            f"tokenizer: the model's embedding has {rows:,} rows, so that {len(surplus):,} token(s) have none, and a "
            f"text with one is an error: {which}{', ...' * (len(surplus) > NAMED)}. {remedy(tokenizer)}"
        )


def surplus_rows(tokenizer: Any, rows: int) -> Iterator[str]:
    """Yield a log line if the embedding has rows without a token. The engine may sample such ids."""
    if (tokens := size_of(tokenizer)) < rows:
        yield (
            f"tokenizer: {rows - tokens:,} of the model's {rows:,} rows have no token; sampled ones "
            f"({tokens} and above) have no text, and `sampling/unknown_tokens` counts them"
        )
