"""Reward models: sequence classifiers with one output, in the trainer's process.

Scoring while the engine generates would save no time, because both use the same device. Large batches save time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ...config import GRPOConfig
from ...data.messages import template_messages
from ...rewards.answers import builtin_rewards
from ...rewards.functions import ModelReward, as_list
from ...runtime.hub import check_model_name

BATCH_TOKENS = {"cpu": 512, "cuda": 16384}
# Keys of `model_init_kwargs` that don't apply to reward models. All others do.
POLICY_KWARGS = ("revision", "device_map")


def with_models(reward_funcs: Any, processing_classes: Any, config: GRPOConfig) -> list[Any]:
    """Return the reward functions as a list, with a `RewardModel` in the place of each model.

    Args:
        reward_funcs: items for `resolve_rewards`, or modules, folders and Hub ids of models.
        processing_classes: TRL's ``reward_processing_classes``: a tokenizer, or one per function (None: the
            model's)."""
    given = as_list(reward_funcs)
    classes = [None] * len(given) if processing_classes is None else processing_classes
    classes = classes if isinstance(classes, (list, tuple)) else [classes]
    if len(classes) != len(given):
        rule = "give one each, None for a function or for a model with its own tokenizer"
        numbers = f"{len(classes)} entries for {len(given)} reward functions"
        raise ValueError(f"reward_processing_classes has {numbers}: {rule}.")
    items: list[Any] = []
    for item, tokenizer in zip(given, classes, strict=True):
        is_model = isinstance(item, torch.nn.Module)
        if isinstance(item, str) and item not in builtin_rewards() and ":" not in item:
            is_model = "/" in item or os.path.isdir(item)
        items.append(RewardModel(item, tokenizer, config) if is_model else item)
    return items


class RewardModel(ModelReward):
    """A reward function that runs a model. The reward is the model's logit for prompt and completion.

    Models of transformers return the logit at the last token that isn't padding. The chat template formats
    conversations. Plain prompts and completions are concatenated. As in TRL 1.16, no special tokens are added.

    Args:
        model: a module with an output ``logits`` [rows, 1], a folder, or a Hub id.
        tokenizer: the tokenizer. None means the model's tokenizer.
        config: the run's configuration. Its ``model_init_kwargs`` apply, except `POLICY_KWARGS`."""

    def __init__(self, model: str | torch.nn.Module, tokenizer: Any, config: GRPOConfig) -> None:
        shown = model if isinstance(model, str) else type(model).__name__
        loaded = _load_classifier(model, config) if isinstance(model, str) else model
        settings: Any = getattr(loaded, "config", None)
        path = model if isinstance(model, str) else getattr(settings, "_name_or_path", "")
        self.__name__ = path.rstrip("/").split("/")[-1] or shown
        if (labels := getattr(settings, "num_labels", 1)) != 1:
            remedy = "give a model for sequence classification with num_labels 1, or a function that returns one number"
            raise ValueError(f"reward model {shown!r} has num_labels {labels}, but a reward is one number: {remedy}.")
        self.tokenizer = tokenizer if tokenizer is not None else _load_tokenizer(shown, path, config)
        self._settings: Any = None if settings is None else settings.get_text_config()
        named = self.tokenizer.pad_token_id if settings is None else getattr(self._settings, "pad_token_id", None)
        self._padding: int | None = None if named is None or named < 0 else named
        self.model, self.device = loaded.to(config.device).eval(), config.device
        self.batch_tokens = BATCH_TOKENS.get(config.device.type, BATCH_TOKENS["cuda"])
        self._template: dict[str, Any] = dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        def write(messages: list[dict[str, Any]]) -> str:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self._template))

        texts = [
            write(template_messages([*prompt, *own], write)) if isinstance(prompt, list) else str(prompt + own)
            for prompt, own in zip(prompts, completions, strict=True)
        ]
        rows = self.tokenizer(text=texts, add_special_tokens=False)
        rewards = torch.zeros(len(texts))
        for batch in batches([*map(len, rows["input_ids"])], self.batch_tokens):
            padded = self._padded({name: [values[row] for row in batch] for name, values in rows.items()})
            with torch.inference_mode():
                logits = self.model(**padded).logits
            if logits.shape != (len(batch), 1):
                remedy = "use a sequence classifier with num_labels 1"
                shapes = f"logits of shape {tuple(logits.shape)}, not {(len(batch), 1)}"
                raise ValueError(f"reward model {self.__name__!r} returned {shapes}: {remedy}.")
            rewards[batch] = logits[:, 0].float().cpu()
        return rewards.tolist()

    def _padded(self, rows: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        """Return tensors [rows, longest row], padded on the right."""
        padding = self._padding
        if padding is None:  # Choose a token that no row has: classifiers read the last token that isn't padding.
            used = {token for ids in rows["input_ids"] for token in ids}
            padding = next(token for token in itertools.count() if token not in used)
        if self._settings is not None:
            self._settings.pad_token_id = padding
        padded = {}
        for name, values in rows.items():
            tensors = [torch.tensor(row, dtype=torch.long) for row in values]
            fill = padding if name == "input_ids" else 0
            padded[name] = pad_sequence(tensors, batch_first=True, padding_value=fill).to(self.device)
        return padded


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield lists of row indices, longest rows first. A list has at most ``tokens`` padded tokens, or a single row."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _load_classifier(path: str, config: GRPOConfig) -> torch.nn.Module:
    kwargs: dict[str, Any] = {"dtype": "auto", "trust_remote_code": config.trust_remote_code}
    own: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    kwargs |= {name: value for name, value in own.items() if name not in POLICY_KWARGS}
    try:
        check_model_name(path)
        model, found = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **kwargs)
    except (OSError, ValueError) as error:
        remedy = "give a folder, a Hub id, or the import path of a function (package.module:function)"
        raise ValueError(f"reward model {path!r} can't be loaded ({str(error).splitlines()[0]}): {remedy}.") from error
    if missing := sorted(found["missing_keys"]):
        remedy = "so it wasn't trained to give rewards: give a checkpoint of a model for sequence classification"
        raise ValueError(f"reward model {path!r} has no weights for {', '.join(missing[:3])}, {remedy}.")
    return model


def _load_tokenizer(shown: str, path: str, config: GRPOConfig) -> Any:
    problem = "its configuration doesn't say where it comes from"
    if path:
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0]
    raise ValueError(f"reward model {shown!r} has no tokenizer ({problem}): give one in reward_processing_classes.")
