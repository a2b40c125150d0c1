"""Images of prompts in the completions log, its table, the tables of trackers and the report."""

from __future__ import annotations

import dataclasses
import io
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
import tiny_images
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from shown_rows import write_samples

from colograd.apps.cli import main
from colograd.apps.report.samples import Samples
from colograd.batch import FinishReason, Group, ModelInput, Rollout, ScoredGroup
from colograd.extensions.images.rider import Images
from colograd.extensions.recording.completion_log import CompletionLog
from colograd.extensions.recording.completions import CompletionRow, data_url, read_log, write_log
from colograd.extensions.recording.event_log import prompt_text
from colograd.extensions.recording.group_views import completion_rows
from colograd.runtime.sizes import THUMBNAIL_BYTES

PAIR = [tiny_images.picture(n, 40, 40) for n in (2, 3)]
PLACED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]}]


def group(position: int, pictures: list[Any], prompt: Any = PLACED, completions: int = 2) -> ScoredGroup:
    images = Images(str(len(pictures)), (1,), tuple(pictures), {}, ()) if pictures else None
    asked = ModelInput((1,), images)
    rollouts = tuple(
        Rollout(asked, (2,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0)
        for _ in range(completions)
    )
    return ScoredGroup(
        Group({"prompt": prompt}, rollouts, position), torch.zeros(completions, 1), torch.ones(completions)
    )


def rows_of(*groups: ScoredGroup, images: bool = True) -> list[CompletionRow]:
    return completion_rows(groups, [[b"red"] * len(each.group.rollouts) for each in groups], 1, images)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """Two prompts with one image, one with two and one without; a reward function is called as a column is."""
    one, two = [tiny_images.picture(1, 100, 50)], PAIR
    plain = [{"role": "user", "content": "none"}]
    return write_log(
        tmp_path, rows_of(group(0, one), group(1, two), group(2, one), group(3, [], plain)), ["image"], 1, images=True
    )


def test_datasets_reads_images_without_being_told(logged: Path, tmp_path: Path) -> None:
    found = Dataset.from_parquet(str(logged), cache_dir=str(tmp_path / "cache"))
    wanted = Features({"image": List(Image()), "image_size": List(Value("string"))})
    assert {name: found.features[name] for name in wanted} == wanted and "rewards/image" in found.features
    assert [[each.size for each in row] for row in found["image"]][::2] == [[(64, 32)], [(40, 40)] * 2, [(64, 32)], []]
    assert found["image_size"][::2] == [["100x50"], ["40x40"] * 2, ["100x50"], []]


def test_a_file_of_a_run_without_images_has_nothing_more(tmp_path: Path) -> None:
    path = write_log(tmp_path, rows_of(group(0, [], "text")), ["image"], 1)
    schema = pq.read_schema(path)
    assert not {"image_size", "rewards/image"} & {*schema.names} and len(schema.metadata) == 2
    assert read_log(path)[0][0].rewards == (0.0,), "a function named like the column keeps its name"


def test_a_picture_is_made_once_and_stored_once_for_all_its_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    small = Images.thumbnails
    monkeypatch.setattr(Images, "thumbnails", lambda images: made.append(1) or small(images))
    noise = Pictures.frombytes("RGB", (64, 64), torch.randint(256, (64 * 64 * 3,)).to(torch.uint8).numpy().tobytes())
    rows = rows_of(group(0, [noise], completions=100), group(1, [noise], completions=100))
    assert made == [1] and all(row.thumbnails is rows[0].thumbnails for row in rows)
    size = len(rows[0].thumbnails[0])
    assert size > 1000
    alone = write_log(tmp_path, rows_of(group(0, [noise], completions=1)), ["r"], 1, images=True).stat().st_size
    assert write_log(tmp_path, rows, ["r"], 2, images=True).stat().st_size < alone + size


def test_each_completion_has_the_pictures_that_its_environment_began_with() -> None:
    began = [group(0, pictures).group.rollouts[0] for pictures in ([], [tiny_images.picture(1)], [PAIR[0]] * 2)]
    whole = dataclasses.replace(group(0, [], PLACED, completions=3), rewards=torch.zeros(3, 1))
    rows = rows_of(dataclasses.replace(whole, group=dataclasses.replace(whole.group, rollouts=tuple(began))))
    assert [row.sizes for row in rows] == [(), ("32x32",), ("40x40",) * 2]
    assert [len(row.thumbnails) for row in rows] == [0, 1, 2]


def test_what_else_a_picture_holds_makes_no_thumbnail_too_large() -> None:
    picture = tiny_images.picture(1)
    picture.info["comment"] = bytes(THUMBNAIL_BYTES)
    assert len(Images("", (), (picture,), {}, ()).thumbnails()) == 1


def test_the_report_shows_as_many_of_tools_answers_as_of_the_prompt(tmp_path: Path) -> None:
    pictures = tuple(tiny_images.picture(n) for n in range(4))
    small = [*map(data_url, Images("", (), pictures, {}, ()).thumbnails())]
    entry = {"step": 1, "purpose": "train", "position": 0, "index": 0, "tokens": ["a"], "images": small * 3}
    write_samples(tmp_path, entry)
    samples = Samples(tmp_path)
    samples.refresh()
    assert samples.of_step(1, 2**20)[0][0]["images"] == small * 2


def test_a_mark_stands_in_the_place_of_each_picture(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prompt_text(PLACED, ["3x4"]) == "[image 3x4]which?"
    assert prompt_text(PLACED) == "[image]which?", "where no sizes were logged"
    assert prompt_text([{"role": "user", "content": "u"}], ["1x1", "2x2"]) == "[image 1x1][image 2x2]u"
    later = [*PLACED, {"role": "assistant", "content": "a"}, *PLACED]
    assert prompt_text(later, ["1x1", "2x2"]) == "[image 2x2]which?", "as the texts: those of the last message"
    assert prompt_text([*PLACED, {"role": "user", "content": "and now?"}], ["1x1"]) == "and now?"
    assert main(["show", str(logged.parents[1]), "--width", "150"]) == 0
    shown = capsys.readouterr().out
    assert "[image 100x50]which?" in shown and "none" in shown and "content" not in shown


def test_trackers_get_them_as_their_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the column `image` has a list of the tracker's images, as in TRL."""
    sent: list[Any] = []
    tracker = types.SimpleNamespace(
        run=object(),
        log=lambda values, commit: sent.append(values["completions"]),
        Table=lambda dataframe: dataframe,
        Image=lambda picture: picture,
    )
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    state = types.SimpleNamespace(global_step=0, logging_steps=1)
    for multimodal in (True, False):
        changes = {"log_completions": True, "report_to": "wandb", "log_multimodal": multimodal}
        log = CompletionLog(tiny.config(tmp_path, **changes), ["r"], images=multimodal)
        steps = [[group(0, [tiny_images.picture(1)]), group(1, [], "text")]]
        log.add(steps, lambda group: ["a", "b"], state)  # type: ignore[arg-type]
    assert [[each.size for each in row] for row in sent[0]["image"]] == [[(32, 32)], [(32, 32)], [], []]
    assert "image" not in sent[1].columns


def test_the_report_shows_those_of_completions_that_are_only_logged(logged: Path) -> None:
    samples = Samples(logged.parents[1])
    samples.refresh()
    found, _ = samples.of_step(1, 2**20)
    assert [len(each.get("images", ())) for each in found] == [1, 1, 2, 2, 1, 1, 0, 0]
    assert all(url.startswith("data:image/jpeg;base64,/9j/") for each in found for url in each.get("images", ()))


def test_what_isn_t_small_is_left_out(tmp_path: Path) -> None:
    """A file with large images in the place of small ones, as somebody else may have written it."""
    buffer = io.BytesIO()
    tiny_images.picture(1, 2000, 2000).save(buffer, "BMP")
    row = rows_of(group(0, [tiny_images.picture(1)]))[0]
    hostile = CompletionRow(
        **{name: getattr(row, name) for name in row.__slots__} | {"thumbnails": (buffer.getvalue(),)}
    )
    write_log(tmp_path, [hostile], ["r"], 1, images=True)
    samples = Samples(tmp_path)
    samples.refresh()
    assert "images" not in samples.of_step(1, 2**20)[0][0]
    assert main(["show", str(tmp_path)]) == 0
