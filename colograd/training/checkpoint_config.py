"""The policy's configuration as its checkpoint has it. `transformers.Trainer` changes it, so it is restored."""

from __future__ import annotations

from typing import Any

NAMES = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
MISSING = object()


class CheckpointConfig:
    """Values of a model's configuration and generation configuration before a trainer is made.

    `transformers.Trainer` sets ``use_cache`` when it is made, and the special tokens to the tokenizer's when it trains.
    The checkpoint's token is kept in three cases: the tokenizer has none, the checkpoint's list contains the
    tokenizer's, or the tokenizer's padding token is its end token. Other tokens of the tokenizer are new, and the saved
    model needs them.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        configs = [model.config, getattr(model, "generation_config", None)]
        self._values = [
            (config, {name: vars(config).get(name, MISSING) for name in NAMES})
            for config in configs
            if config is not None
        ]

    def restore(self) -> None:
        """Restore the values that a saved model keeps."""
        for config, values in self._values:
            for name, value in values.items():
                token, end = getattr(self._tokenizer, name, None), self._tokenizer.eos_token_id
                stands_in = token is None or (name == "pad_token_id" and token == end)
                if not stands_in and token not in (value if isinstance(value, list) else [value]):
                    continue  # the tokenizer's token is new, and the saved model needs it
                if value is MISSING:
                    vars(config).pop(name, None)
                else:
                    setattr(config, name, value)
