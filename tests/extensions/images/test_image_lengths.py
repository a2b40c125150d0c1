"""How many tokens rows with images have: counted by sizes, proved on some rows, processed where that fails."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_images
from datasets import Dataset, Features, Image, List, Value

from colograd.data import tokenize_prompts
from colograd.data.prompts import PromptRules
from colograd.extensions.images import data as image_data
from colograd.extensions.images.data import ImageReader, most_images, proof_prompts
from colograd.rollout.features import SourceFeature

GEMMA = next(family for family in tiny_images.FAMILIES if family.startswith("gemma3"))
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]


def tiled(tokenizer: Any) -> Any:
    """Idefics3's processor as in SmolVLM: an image becomes tiles and a small copy of the whole image."""
    import transformers as hf
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer.add_special_tokens({"additional_special_tokens": [*tiny_images.IDEFICS3, *TILES]})
    images = Idefics3ImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    return hf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)


def rules_of(
    processor: Callable[[Any], Any], family: str = "idefics3", limit: int = 10_000, **changes: Any
) -> PromptRules:
    model, tokenizer = tiny_images.random_model(family)
    reader = ImageReader(processor(tokenizer), model.config.image_token_id)
    return PromptRules(tokenizer, limit, "drop", {}, "train", reader=reader, **changes)


def rows(count: int = 8) -> Dataset:
    """Rows with no, one or two images of different sizes."""
    found = [
        {
            "prompt": [{"role": "user", "content": "see " * (row % 3)}],
            "images": [tiny_images.picture(row, 20 + 30 * (row % 4), 20 + 15 * k) for k in range(row % 3)],
        }
        for row in range(count)
    ]
    part = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_list(found, features=Features({"prompt": List(part), "images": List(Image())}))


def counting(rules: PromptRules, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each row whose images are read."""
    seen: list[int] = []
    assert rules.reader is not None
    read = ImageReader.read
    monkeypatch.setattr(ImageReader, "read", lambda self, row, *rest: seen.append(1) or read(self, row, *rest))
    return seen


@pytest.mark.parametrize(
    ("processor", "family"),
    [
        (tiny_images.PROCESSORS["idefics3"], "idefics3"),
        (tiled, "idefics3"),
        (tiny_images.gemma3_processor, GEMMA),
    ],
)
def test_what_is_counted_is_what_will_be_read(processor: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, dataset = rules_of(processor, family), rows(40)
    expected = [len(rules.reader.prompt(dataset[row], row, rules).ids) for row in range(len(dataset))]
    seen = counting(rules, monkeypatch)
    assert rules.reader.lengths(dataset, rules) == expected
    assert len(seen) <= image_data.PROBES + 3, "no more rows are processed than prove it"
    assert rules.reader is not None and rules.reader.most_images == 2


@pytest.mark.parametrize("wrong", [lambda tokens: None, lambda tokens: tokens + (tokens > 20)])
def test_where_sizes_don_t_tell_each_row_is_processed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    rules, dataset = rules_of(tiled, tell=told.append), rows()
    expected = [len(rules.reader.prompt(dataset[row], row, rules).ids) for row in range(len(dataset))]
    count = ImageReader.count
    monkeypatch.setattr(ImageReader, "count", lambda *given: wrong(count(*given)))
    assert rules.reader.lengths(dataset, rules) == expected
    assert "train: images: the processor can't compute" in told[0]


def test_long_rows_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept rows are read when they are asked for."""
    rules = rules_of(tiled, limit=40)
    seen = counting(rules, monkeypatch)
    prompts = tokenize_prompts(rows(), rules)
    assert 0 < len(prompts.dropped) < 8 and prompts.longest <= 40
    proved = len(seen)
    assert len(prompts[0, 0].input.ids) <= 40 and len(seen) == proved + 1
    monkeypatch.setattr("colograd.extensions.images.data.BYTES_IN_MEMORY", 1)
    for row in range(len(prompts)):
        prompts[row, row]
    assert len(rules.reader._latest) == 1, "as few as fit"


def test_a_longer_row_than_was_counted_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tokenize_prompts(rows(), rules_of(tiled))
    assert prompts.rules is not None
    monkeypatch.setattr(PromptRules, "max_prompt_tokens", 3)
    with pytest.raises(
        ValueError, match=r"train, row 2: with its images the prompt has \d+ tokens, over the limit of 3"
    ):
        prompts[2, 2]


def test_a_broken_image_is_found_at_start_with_its_row(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    tiny_images.picture(1, 200, 200).save(buffer, "PNG")
    whole, cut = tmp_path / "whole.png", tmp_path / "cut.png"
    whole.write_bytes(buffer.getvalue())
    cut.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    prompt = [{"role": "user", "content": "u"}]
    for broken in (cut, tmp_path / "missing.png"):
        dataset = Dataset.from_list([{"prompt": prompt, "image": str(path)} for path in (whole, whole, broken)])
        for given in (dataset, dataset.cast_column("image", Image())):
            with pytest.raises(ValueError, match=r"^train, row 2: an image can't be read \("):
                tokenize_prompts(given, rules_of(tiled))


def test_it_is_told_how_far_a_long_dataset_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_data, "SECONDS_BETWEEN_LINES", -1.0)
    told: list[str] = []
    rules = rules_of(tiled, tell=told.append)
    rules.reader.lengths(rows(40), rules)
    assert told[-1].startswith("train: reading images: ") and told[-1].endswith(" of 40 rows")


@pytest.mark.parametrize(("family", "written"), [("idefics3", "<image>"), (GEMMA, "<start_of_image>")])
def test_a_surplus_image_token_is_found_at_start(family: str, written: str) -> None:
    """Images are processed when training starts. A surplus image token is an error at start, with the row's number."""
    rules = rules_of(tiny_images.PROCESSORS[family], family)
    assert rules.reader is not None
    row = {"prompt": [{"role": "user", "content": f"a {written} b"}], "images": [tiny_images.picture(1)]}
    with pytest.raises(ValueError, match=r"^train, row 7: .*there are 2 image token\(s\) in the text and 1 image"):
        rules.reader.count(row, {}, "train, row 7")


def test_a_rowless_token_beside_an_image_is_refused() -> None:
    rules = rules_of(tiny_images.gemma3_processor, GEMMA)
    assert rules.reader is not None
    rules.reader.rows = 40
    row = {"prompt": [{"role": "user", "content": "see"}], "images": [tiny_images.picture(1)]}
    with pytest.raises(
        ValueError, match=r"^train, row 7: .*the text has the token '.*but the model's embedding has 40 "
    ):
        rules.reader.count(row, {}, "train, row 7")


def test_proof_prompts_include_the_only_image() -> None:
    rules = rules_of(tiny_images.gemma3_processor, GEMMA)
    assert rules.reader is not None
    prompt = [{"role": "user", "content": "u"}]
    given = [{"prompt": prompt, "images": [tiny_images.picture(1)] if row == 70 else []} for row in range(71)]
    prompts = tokenize_prompts(Dataset.from_list(given, features=rows().features), rules)
    policy: Any = SimpleNamespace(processor=rules.reader.processor, image_token=rules.reader.image_token, rows=0)
    (found,) = proof_prompts([prompts], policy, SourceFeature())
    assert found.images is not None and most_images(prompts) == 1
