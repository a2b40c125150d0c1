"""Restore the values of the model's configuration that `transformers.Trainer` changes, before the model is saved."""

from __future__ import annotations

from typing import Any

NAMES = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
MISSING = object()


class CheckpointConfig:
    """The original values of a model's configuration and generation configuration, to restore later.

    `transformers.Trainer` changes ``use_cache``, and sets the special tokens to the tokenizer's. `restore` puts back a
    special token of the checkpoint in three cases: the tokenizer lacks the token, the checkpoint's list contains the
    tokenizer's token, or the tokenizer's padding token is its end token. In all other cases the tokenizer's token is
    new, and the saved model needs it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        configs = [model.config, getattr(model, "generation_config", None)]
        self._values = [
            (config, {name: vars(config).get(name, MISSING) for name in NAMES})
            for config in configs
            if config is not None
        ]

    def restore(self) -> None:
        """Restore the checkpoint's values of ``use_cache`` and of special tokens, except tokens that are new."""
        for config, values in self._values:
            for name, value in values.items():
                token, end = getattr(self._tokenizer, name, None), self._tokenizer.eos_token_id
                stands_in = token is None or (name == "pad_token_id" and token == end)
                if not stands_in and token not in (value if isinstance(value, list) else [value]):
                    continue  # the tokenizer has a new special token, which the saved model needs
                if value is MISSING:
                    vars(config).pop(name, None)
                else:
                    setattr(config, name, value)
