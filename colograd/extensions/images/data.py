"""Converts dataset rows with images, in TRL's format, into inputs of the model and of the engine."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import jinja2
from datasets import Dataset

from ...batch import ModelInput
from ...data import PromptDataset
from ...data.columns import IMAGES as COLUMNS
from ...data.columns import check_rows
from ...data.messages import check_prompt, content_parts, text_of, without_nones
from ...data.prompts import PromptRules, text_ids
from ...parallel import watchdog
from ...policy.loading import Policy
from ...rollout.features import SourceFeature
from ...runtime.process import cpu_threads
from ...training.preparation import Prompts
from .rider import PER_TOKEN, Images, digest_of

TEXT_INPUTS = ("input_ids", "attention_mask")
PROMPTS_IN_MEMORY = 64
BYTES_IN_MEMORY = 2**29
SEARCHED_ROWS = 64
Row = dict[str, Any]
PROBES = 4
ROWS_PER_THREAD = 4
SECONDS_BETWEEN_LINES = 10.0
REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError)


class ImageReader:
    """Converts rows with images into prompts. ``image_token``: id of the tokens that stand for image features."""

    def __init__(self, processor: Any, image_token: int, rows: int = 0) -> None:
        self.processor, self.image_token, self.rows = processor, image_token, rows
        self.most_images = 0
        self._latest: dict[int, ModelInput] = {}

    def prompt(self, example: dict[str, Any], row: int, rules: PromptRules) -> ModelInput:
        if (arguments := _arguments(example, row, rules)) is None:
            return ModelInput(tuple(text_ids(rules.tokenizer, [example["prompt"]])[0]))
        return self.read(example, arguments, rules.where(row))

    def of_row(self, example: dict[str, Any], row: int, rules: PromptRules) -> ModelInput:
        """Convert a row into its prompt, or take the prompt from a cache of the latest rows."""
        made = self._latest.pop(row, None) or self.prompt(example, row, rules)
        if len(made.ids) > rules.max_prompt_tokens:
            raise ValueError(
                f"{rules.where(row)}: with its images the prompt has {len(made.ids)} tokens, over the "
                f"limit of {rules.max_prompt_tokens}. The check at start counted fewer tokens. Remove this row."
            )
        self._latest[row] = made
        size = 1 if made.media is None else max(1, made.media.nbytes)
        while len(self._latest) > min(PROMPTS_IN_MEMORY, max(1, BYTES_IN_MEMORY // size)):
            del self._latest[next(iter(self._latest))]
        return made

    def read(self, row: Mapping[str, Any], arguments: Mapping[str, Any], where: str) -> ModelInput:
        with _refusals(row, where):
            return self.made(*self._messages(row, where), arguments)

    def made(
        self, messages: Sequence[dict[str, Any]], pictures: Sequence[Any], arguments: Mapping[str, Any]
    ) -> ModelInput:
        """Convert messages and RGB images into a prompt. Each message's content is a list of parts."""
        text, special = self._text(messages, arguments)
        engine_ids = self._placeholders(text, special, len(pictures))
        if not pictures:
            return ModelInput(engine_ids)
        made = self.processor(text=[text], images=[[*pictures]], return_tensors="pt", add_special_tokens=special)
        ids = tuple(made["input_ids"][0].tolist())
        places = tuple(place for place, token in enumerate(ids) if token == self.image_token)
        inputs = {name: value for name, value in made.items() if name not in TEXT_INPUTS}
        return ModelInput(
            ids, Images(digest_of(pictures), engine_ids, tuple(pictures), inputs, places, self.placeholder)
        )

    def tokens(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        text, special = self._text(messages, arguments)
        return text, tuple(self.processor.tokenizer(text, add_special_tokens=special).input_ids)

    def again(self, pictures: Sequence[Any], engine_ids: Sequence[int], places: Sequence[int]) -> Images:
        """Return a rollout record's images, processed again for the model. A record has no pixel tensors."""
        text = self.processor.image_token * len(pictures)
        made = self.processor(text=[text], images=[[*pictures]], return_tensors="pt")
        inputs = {name: value for name, value in made.items() if name not in TEXT_INPUTS}
        for name in inputs.keys() & PER_TOKEN:
            inputs[name] = inputs[name].new_zeros(1, places[-1] + 1)
            inputs[name][0, [*places]] = 1
        return Images(digest_of(pictures), tuple(engine_ids), tuple(pictures), inputs, tuple(places), self.placeholder)

    def split(self, messages: Sequence[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], list[Any]]:
        return with_images([*messages], (), where)

    def own_messages(self, row: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], bool]:
        """Return a row's messages with the images inside, and whether column `images` or `image` has an image."""
        of_columns = images_of(row, where)
        messages, images = with_images(row["prompt"], of_columns, where)
        waiting = iter(images)
        for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
            part["image"] = next(waiting)
        return messages, bool(of_columns)

    @property
    def placeholder(self) -> int:
        """Id of the token that the chat template writes for an image. It may differ from `image_token` (Gemma 3)."""
        return int(self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token))

    def count(self, row: Mapping[str, Any], arguments: Mapping[str, Any], where: str) -> int | None:
        """Count a prompt's tokens without processing its images. Return None if the processor can't do this."""
        with _refusals(row, where):
            messages, pictures = self._messages(row, where)
            text, special = self._text(messages, arguments)
            placeholders = len(self._placeholders(text, special, len(pictures)))
            if not pictures:
                return placeholders
            if whole := getattr(self.processor, "full_image_sequence", ""):  # Gemma 3: a fixed number of image tokens
                text = text.replace(self.processor.boi_token, whole)
                return len(self.processor.tokenizer(text, add_special_tokens=special).input_ids)
            # vLLM, too, calls this private method: processors have no public one that counts tokens.
            if not hasattr(self.processor, "_get_num_multimodal_tokens"):
                return None
            sizes = [(picture.height, picture.width) for picture in pictures]
            each = self.processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
            around = 2 if hasattr(self.processor, "eoi_token") else 0  # Gemma 4's count omits tokens around images.
            return placeholders + sum(tokens - 1 + around for tokens in each)

    def lengths(self, rows: Dataset, rules: PromptRules) -> list[int]:
        """Return each row's number of prompt tokens.

        Most processors can compute this number from the images' sizes. A few rows are processed as a check. If the
        processor can't, or the check fails, all rows are processed, which may take half a second per row.
        """

        def processed(row: int) -> int:
            return len(self.prompt(rows[row], row, rules).ids)

        names = rows.column_names
        rows = rows.select_columns([*rules.read_columns(names), *(name for name in COLUMNS if name in names)])
        found = self._counted(rows, rules)
        if found is not None:
            first_rows = {found[row]: row for row in reversed(range(len(found)))}
            probes = sorted({0, first_rows[min(found)], first_rows[max(found)], *[*first_rows.values()][:PROBES]})
            if all(processed(row) == found[row] for row in probes):
                return found
        rules.tell(
            f"{rules.name}: images: the processor can't compute correct numbers of tokens from images' sizes, so "
            "each row is processed"
        )
        return [processed(row) for row in _marked(range(len(rows)), len(rows), rules)]

    def _counted(self, rows: Dataset, rules: PromptRules) -> list[int] | None:
        lengths, size = [], ROWS_PER_THREAD * cpu_threads()
        raw = rows.with_format(None)
        raw.info.features = _undecoded(raw.features)  # so images stay bytes or paths until `in_rgb` decodes them

        def load(row: int) -> Row:
            example = raw[row]
            return example | {"images": images_of(example, rules.where(row)) or None, "image": None}

        with ThreadPoolExecutor(cpu_threads()) as threads:
            for first in _marked(range(0, len(raw), size), len(raw), rules):
                numbers = range(first, min(first + size, len(raw)))
                for row, example in zip(numbers, threads.map(load, numbers), strict=True):
                    if (arguments := _arguments(example, row, rules)) is None:
                        length: int | None = len(text_ids(rules.tokenizer, [example["prompt"]])[0])
                    else:
                        length = self.count(example, arguments, rules.where(row))
                    if length is None:
                        return None
                    lengths.append(length)
        return lengths

    def _messages(self, row: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[Any]]:
        messages, pictures = with_images(row["prompt"], images_of(row, where), where)
        self.most_images = max(self.most_images, len(pictures))
        return messages, pictures

    def _placeholders(self, text: str, special: bool, pictures: int) -> tuple[int, ...]:
        """Return the text's token ids. Raise a ValueError unless the text has ``pictures`` image tokens."""
        ids = tuple(self.processor.tokenizer(text, add_special_tokens=special).input_ids)
        own = self.placeholder, self.image_token
        if self.rows:
            check_rows((token for token in ids if token not in own), self.rows, self.processor.tokenizer, "the text")
        written = sum(token in own for token in ids)
        if written != pictures:
            raise ValueError(
                f"there are {written} image token(s) in the text and {pictures} image(s): remove image tokens from the "
                'text, and mark the place of each image with a {"type": "image"} part.'
            )
        return ids

    def _text(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Return a conversation's text, and whether the tokenizer must add special tokens."""
        text = self.processor.apply_chat_template([*messages], tokenize=False, **arguments)
        start = self.processor.tokenizer.bos_token
        return text, not (start and text.startswith(start))


def _arguments(example: dict[str, Any], row: int, rules: PromptRules) -> dict[str, Any] | None:
    """Return the arguments of a row's chat template, or None if its prompt is plain text without images."""
    check_prompt(example["prompt"], rules.where(row), images=True)
    arguments = rules.template_arguments(example, rules.where(row))
    return {} if arguments is None and any(example.get(name) for name in COLUMNS) else arguments


class Unreadable(ValueError):
    """Error about a row's images. Its message already names the row."""


@contextlib.contextmanager
def _refusals(row: Mapping[str, Any], where: str) -> Iterator[None]:
    try:
        yield
    except Unreadable:
        raise
    except REFUSALS as error:
        raise ValueError(f"{where}: the processor refuses the prompt {text_of(row['prompt'])!r}: {error}") from error


def images_of(row: Mapping[str, Any], where: str) -> list[Any]:
    several, one = row.get("images"), row.get("image")
    if several and one is not None:
        raise Unreadable(f"{where}: the row has both `images` and `image`: leave one of the columns out.")
    if several is not None and not isinstance(several, (list, tuple)):
        raise Unreadable(
            f"{where}: `images` has the type {type(several).__name__}, but must be a list: give a "
            "list of images, or put a single image into the column `image`."
        )
    return [in_rgb(image, where) for image in several or ([] if one is None else [one])]


def in_rgb(image: Any, where: str) -> Any:
    """Convert a PIL image, a path, or a dict with bytes or path into an upright PIL image in RGB."""
    from PIL import ExifTags, Image, ImageOps

    if isinstance(image, Mapping):
        image = io.BytesIO(image["bytes"]) if image.get("bytes") else image.get("path")
    try:
        if not isinstance(image, Image.Image):
            image = Image.open(image)
        image.load()  # raises if the file is incomplete
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # broken files raise many kinds of errors
        raise Unreadable(
            f"{where}: an image can't be read ({type(error).__name__}: {error}): give a PIL image, a file's path "
            f"(relative to {os.getcwd()}), or a column of `datasets.Image`."
        ) from None


def with_images(prompt: Any, images: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return a conversation's messages and its images. A part ``{"type": "image"}`` marks the place of an image."""
    if not isinstance(prompt, list):
        raise Unreadable(
            f"{where}: the prompt is plain text, but images need a conversation: give a list of messages, such as "
            '[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}].'
        )
    contents = [[*content_parts(message["content"])] for message in prompt]
    places = [part for content in contents for part in content if part["type"] == "image" and not part.get("image")]
    texts = [i for i, m in enumerate(prompt) if m["role"] == "user" and isinstance(m["content"], str)]
    if images and not places and texts:
        contents[texts[0]] = [*({"type": "image"} for _ in images), *contents[texts[0]]]
        places = [*images]
    if len(places) != len(images):
        raise Unreadable(
            f'{where}: the prompt has {len(places)} {{"type": "image"}} part(s) without an image, but the '
            f"columns `images` and `image` have {len(images)} image(s): give as many images as such parts."
        )
    waiting, messages, pictures = iter(images), [], []
    for message, content in zip(prompt, contents, strict=True):
        for index, part in enumerate(content):
            if part["type"] == "image":
                own = part.get("image")
                pictures.append(in_rgb(own, where) if own else next(waiting))
                content[index] = {"type": "image"}
        messages.append({**without_nones({**message, "content": None}), "content": content})
    return messages, pictures


def reader_of(policy: Any) -> ImageReader | None:
    return None if policy.processor is None else ImageReader(policy.processor, policy.image_token, policy.rows)


def most_images(prompts: Prompts) -> int:
    return getattr(prompts.rules.reader, "most_images", 0) if isinstance(prompts, PromptDataset) else 0


def proof_prompts(prompts: Sequence[Prompts], policy: Policy, feature: SourceFeature) -> list[ModelInput]:
    """Return a list with one image prompt for the check of packed rows at start, or [] if the run has no images."""
    if (reader := reader_of(policy)) is None:
        return []
    if most_images(prompts[0]):
        inputs = (prompts[0][row, row].input for row in range(min(SEARCHED_ROWS, len(prompts[0]))))
        if (first := next((each for each in inputs if each.media is not None), None)) is not None:
            return [first]
    if not (feature.may_add_images or any(map(most_images, prompts))):
        return []
    from PIL import Image

    picture = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    row = {"prompt": [{"role": "user", "content": "What is it?"}], "image": picture}
    return [reader.read(row, {"add_generation_prompt": True}, "a made-up prompt")]


def _marked(rows: range, total: int, rules: PromptRules) -> Iterator[int]:
    last = time.monotonic()
    for row in rows:
        watchdog.progress("the prompts' images")
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            rules.tell(f"{rules.name}: reading images: {row:,} of {total:,} rows")
        yield row


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return type(feature)({name: _undecoded(part) for name, part in feature.items()})
    return datasets.Image(mode=feature.mode, decode=False) if isinstance(feature, datasets.Image) else feature
