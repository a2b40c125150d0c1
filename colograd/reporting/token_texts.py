"""The text of each token on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode


class TokenTexts:
    """Token ids -> texts that join to the completion's text; lone bytes of a character become escapes (``\\xe2``)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        # Byte-level vocabularies write each byte as one character.
        self._bytes = {char: byte for byte, char in bytes_to_unicode().items()} if b'"ByteLevel"' in decoder else None
        self._marks_spaces = b"\xe2\x96\x81" in decoder
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        return [self._known[i] if i in self._known else self._known.setdefault(i, self._text(i)) for i in ids]

    def _text(self, token: int) -> str:
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
