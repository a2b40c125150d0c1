"""Background saving: a checkpoint is complete or doesn't appear. A failing save doesn't end the run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launcher
import pytest
import tiny
import torch
from paths import SCRIPTS
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_utils import SchedulerType

from colograd.checkpoint import folders, manifest, writing
from colograd.checkpoint.writing import HostFiles, Save, Writer, why_in_foreground, write_bytes
from colograd.training import checkpointer

# -- images of files


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every width, odd sizes, empty tensors and scalars. Two tensors share a storage."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(6, 5, generator=generator)
    return {
        "b.bf16": torch.randn(7, 3, generator=generator).bfloat16(),
        "a.upper": both[:3],
        "a.lower": both[3:].T,
        "step": torch.tensor(float(seed)),
        "empty": torch.empty(0, 4),
        "remainder": torch.randint(-99, 99, (2051,), generator=generator).short(),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor([seed + 5]),
    }


def test_an_image_is_the_file_that_safetensors_reads(tmp_path: Path) -> None:
    images, path = HostFiles(), tmp_path / "model.safetensors"
    for seed in (1, 2):
        images.put(tensors(seed), path, {"format": "pt"})
        ((found, image),) = images.take().items()
        entry = write_bytes(image.bytes, path)
        assert found == path and entry == manifest.entry_of(path) and entry.size == image.size
        read = load_file(path)
        assert read.keys() == tensors().keys()
        assert all(torch.equal(read[name], value) for name, value in tensors(seed).items())
    assert images.take() == {}


def test_buffers_are_reused_for_the_same_shapes(tmp_path: Path) -> None:
    images, path = HostFiles(), tmp_path / "f.safetensors"
    images.put(tensors(1), path)
    first = images.kept["f.safetensors"]
    images.put(tensors(2), path)
    assert images.kept["f.safetensors"] is first and images.nbytes == first.size
    place = images.places("f.safetensors")["b.bf16"]
    place.fill_(3.0)  # as `state_dict_on_host` does: the copy is spared
    images.put(tensors(2) | {"b.bf16": place}, path)
    assert bool((images.places("f.safetensors")["b.bf16"] == 3).all())
    images.put(tensors(3) | {"new": torch.ones(1)}, path)
    assert images.kept["f.safetensors"] is not first and images.places("other") == {}


@pytest.mark.parametrize("size", [0, 1, 4096, 2**24 + 1])
def test_bytes_are_written_as_they_are(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    entry = write_bytes(content, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content and entry == manifest.entry_of(tmp_path / "file")


# -- one save


def save_of(run_dir: Path, step: int, **changes: Any) -> Save:
    """One rank's save: an image of the weights in host memory, and a file that already exists."""
    images, name = HostFiles(), f"checkpoint-{step}"
    images.put({"w": torch.full((300_000,), float(step))}, "model.safetensors")
    ready = run_dir / "ready" / "trainer_state.json"
    with contextlib.suppress(OSError):  # on a full disk
        ready.parent.mkdir(parents=True, exist_ok=True)
        ready.write_text("{}")
    sources = {"model.safetensors": images.take()[Path("model.safetensors")], "trainer_state.json": b"{}"}
    settings: dict[str, Any] = {
        "step": step,
        "final": run_dir / name,
        "aside": run_dir / folders.ASIDE / f"{name}.1",
        "sources": sources | ({"ready.json": ready} if ready.exists() else {}),
        "leads": True,
        "leaders": (0,),
        "members": (0,),
        "afterwards": lambda: None,
    }
    return Save(**(settings | changes))


def finished(writer: Writer) -> str | None:
    assert writer.present is not None and writer.present.done.wait(tiny.PATIENCE)
    state, writer.present = writer.state(), None
    return state


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_ends_as_a_whole_checkpoint(tmp_path: Path, in_background: bool) -> None:
    writer, rotated = Writer(), []
    writer.begin(
        save_of(tmp_path, 3, afterwards=lambda: rotated.append((tmp_path / "checkpoint-3").is_dir())), in_background
    )
    assert finished(writer) == "" and rotated == [True]
    assert folders.check(tmp_path / "checkpoint-3")
    files = manifest.read(tmp_path / "checkpoint-3")
    assert files is not None and files.keys() == {"model.safetensors", "trainer_state.json", "ready.json"}
    assert not list((tmp_path / folders.ASIDE).iterdir())


def test_damaged_checkpoint_of_same_step_is_kept_renamed(tmp_path: Path) -> None:
    writer = Writer()
    for keeps in (False, True):
        writer.begin(save_of(tmp_path, 3, keeps_old=keeps), in_background=False)
        assert finished(writer) == ""
    assert folders.check(tmp_path / "checkpoint-3") and folders.check(tmp_path / "refused-checkpoint-3")
    assert folders.complete_steps(str(tmp_path)) == [3]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system. The test is skipped where mounting isn't allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs isn't allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_leaves_only_the_older_checkpoint(tmp_path: Path) -> None:
    writer = Writer()
    with small_disk(tmp_path / "disk", "2m") as disk:
        writer.begin(save_of(disk, 1), in_background=True)
        assert finished(writer) == ""
        writer.begin(save_of(disk, 2), in_background=True)
        assert "No space left on device" in str(finished(writer))
        assert folders.complete_steps(str(disk)) == [1] and folders.check(disk / "checkpoint-1")
        assert not list((disk / folders.ASIDE).iterdir())
        folders.discard(disk / "checkpoint-1")  # there is room again
        writer.begin(save_of(disk, 3), in_background=True)
        assert finished(writer) == "" and folders.check(disk / "checkpoint-3")


def test_read_only_folder_fails_the_save(tmp_path: Path) -> None:
    writer = Writer()
    with small_disk(tmp_path / "disk", "9m") as disk:
        writer.begin(save_of(disk, 1), in_background=True)
        assert finished(writer) == ""
        save = save_of(disk, 2)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        writer.begin(save, in_background=True)
        assert "Read-only file system" in str(finished(writer))
        assert folders.complete_steps(str(disk)) == [1] and folders.check(disk / "checkpoint-1")


# -- whether it may be beside


class Reader(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def named(name: str, **switches: Any) -> Any:
    return type(name, (Reader,), switches)()


@pytest.mark.parametrize(
    ("changes", "callbacks", "copies", "said"),
    [
        ({}, [TrainerCallback()], 100, ""),
        ({"save_in_background": False}, [], 100, "save_in_background is false"),
        ({"push_to_hub": True, "hub_strategy": "end"}, [], 100, ""),
        ({"push_to_hub": True, "hub_strategy": "every_save"}, [], 100, "pushed to the Hub (hub_strategy: every_save)"),
        ({}, [Reader()], 100, "Reader.on_save may read it"),
        ({}, [named("WandbCallback", _log_model="end"), named("TrackioCallback")], 100, ""),
        ({}, [named("WandbCallback", _log_model="checkpoint")], 100, "WandbCallback.on_save may read it"),
        ({}, [named("MLflowCallback", _log_artifacts=False)], 100, ""),
        ({}, [named("MLflowCallback", _log_artifacts=True)], 100, "MLflowCallback.on_save may read it"),
        ({}, [], 2**60, "of host memory, of which"),
    ],
)
def test_what_makes_training_wait(tmp_path: Path, changes: Any, callbacks: Any, copies: int, said: str) -> None:
    config = tiny.config(tmp_path, **changes)
    found = why_in_foreground(config, callbacks, optimizer_is_cut=True, copies=copies, held=0)
    assert said in found if said else not found
    assert not said or why_in_foreground(config, callbacks, True, copies, held=copies) == (
        found if copies < 2**60 else ""
    )


def test_an_optimizer_with_other_state_is_waited_for(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, optim="adafactor")
    assert "optim: adafactor isn't made of tensors" in why_in_foreground(config, [], False, 0, 0)
    assert why_in_foreground(tiny.config(tmp_path, save_only_model=True), [], False, 0, 0) == ""


# -- a run


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A trainer that saves after each of its four steps. Each test sets its own output_dir."""
    from colograd import GRPOTrainer

    config = tiny.config(tmp_path_factory.mktemp("run"), save_strategy="steps", save_steps=1)
    trainer = GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts())
    yield trainer
    trainer.close()


@pytest.fixture
def run(trainer: Any, tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    """Reset the trainer's weights and return it with an output folder of this test."""
    weights = load_file(tiny_model / "model.safetensors")
    trainer.model.load_state_dict(weights, strict=False)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.args.output_dir = str(tmp_path / "run")
    before = dict(vars(trainer.args)), list(trainer.callback_handler.callbacks)
    yield trainer
    vars(trainer.args).update(before[0])
    trainer.callback_handler.callbacks = before[1]


def steps_left(trainer: Any) -> list[int]:
    """Check that each checkpoint is complete, and return their steps."""
    found = sorted(Path(trainer.args.output_dir).glob("checkpoint-*"), key=folders.step_of)
    assert all(folders.check(folder) for folder in found)
    return [folders.step_of(folder) for folder in found]


engine = pytest.mark.engine


@engine
def test_background_save_writes_the_same_files(run: Any, tiny_model: Path, capfd) -> None:
    run.train()
    assert steps_left(run) == [1, 2, 3, 4] and not list(Path(run.args.output_dir).glob(".*"))
    beside = Path(run.args.output_dir)
    assert "training waits" not in capfd.readouterr().out
    run.model.load_state_dict(load_file(tiny_model / "model.safetensors"), strict=False)
    run.optimizer = run.lr_scheduler = None
    run.args.output_dir += "-at-once"
    vars(run.args)["save_in_background"] = False
    run.train()
    at_once = Path(run.args.output_dir)
    assert steps_left(run) == [1, 2, 3, 4] and not list(at_once.glob(".*"))
    for step in (1, 4):
        names = manifest.files_of(beside / f"checkpoint-{step}")
        assert names == manifest.files_of(at_once / f"checkpoint-{step}") and "rng_state.pth" in names
        for name in ("model.safetensors", "optimizer-00000-of-00001.safetensors"):
            mine, theirs = (load_file(folder / f"checkpoint-{step}" / name) for folder in (beside, at_once))
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    first, last = (load_file(beside / f"checkpoint-{step}" / "model.safetensors") for step in (1, 4))
    assert any(not torch.equal(first[key], last[key]) for key in first), "each is of its own step"
    run.save_model(str(at_once / "model"))
    usual = (at_once / "model" / "config.json").stat().st_mode
    written = [path for folder in (beside, at_once) for path in folder.rglob("*.safetensors")]
    assert len(written) == 17 and {path.stat().st_mode for path in written} == {usual}, "whom others read, read these"
    assert not list(at_once.rglob(".*"))


@engine
def test_training_survives_a_full_disk_until_save_failures(run: Any, tmp_path: Path, capfd) -> None:
    with small_disk(tmp_path / "disk", "2500k") as disk:
        run.args.output_dir = str(disk)
        vars(run.args)["save_failures"] = 9
        run.train()
        said = capfd.readouterr().out
        left = steps_left(run)
        assert run.state.global_step == 4 and 0 < len(left) < 4 and left == list(range(1, len(left) + 1))
        assert f"checkpoints: checkpoint-{len(left) + 1} couldn't be written (OSError: [Errno 28] No space" in said
        assert "1 in a row; 9 end the run, save_failures" in said
        assert not [path for path in disk.rglob("*") if ".incomplete" in path.name]
        vars(run.args)["save_failures"] = 2
        with pytest.raises(RuntimeError, match=r"2 checkpoints in a row couldn't be written .*No space left on device"):
            run.train(resume_from_checkpoint=str(disk / "checkpoint-1"))
        assert steps_left(run) == left, "what was there still is"


@engine
def test_a_write_that_hangs_is_not_waited_for(run: Any, monkeypatch, capfd) -> None:
    go_on, write = threading.Event(), writing.write_bytes

    def hang(image: Any, path: Path) -> Any:
        if "checkpoint-1." in str(path):
            assert go_on.wait(tiny.PATIENCE)
        return write(image, path)

    class Release(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                go_on.set()
                assert run.checkpointer.writer.present.done.wait(tiny.PATIENCE)

    monkeypatch.setattr(writing, "write_bytes", hang)
    monkeypatch.setattr(checkpointer, "PATIENCE", 0.1)
    run.add_callback(Release())
    run.train()
    said = capfd.readouterr().out
    assert "checkpoints: step 2 isn't saved, as checkpoint-1 is still being written" in said
    assert "step 3 isn't saved" in said and "step 4" not in said.replace("step 4/4", "")
    assert steps_left(run) == [1, 4]


@engine
def test_the_one_before_a_damaged_one_is_taken(run: Any, capfd) -> None:
    run.args.save_total_limit = 2
    run.train()
    folder = Path(run.args.output_dir)
    assert steps_left(run) == [3, 4]
    path = folder / "checkpoint-4" / "optimizer-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"-4', a damaged checkpoint \(optimizer-00000-of-00001.* was changed"):
        run.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    (folder / "checkpoint-3" / "manifest.json").unlink()
    capfd.readouterr()
    run.train(resume_from_checkpoint="auto")
    said = capfd.readouterr().out
    assert "checkpoint-4 is damaged and isn't taken: optimizer-00000-of-00001.safetensors was changed after" in said
    assert "checkpoint-3 has no manifest.json (an older version wrote it): it is taken unchecked" in said
    assert run.state.global_step == 4 and "step 4/4" in said and "step 3/4" not in said
    assert path.read_bytes() != data and (folder / "refused-checkpoint-4" / path.name).read_bytes() == data
    assert folders.complete_steps(str(folder)) == [3, 4]


@engine
def test_a_callback_that_reads_the_files_finds_them(run: Any, monkeypatch, capfd) -> None:
    found = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            found.append((state.global_step, folders.check(folder)))

    commit = folders.commit

    def fail_once(aside: Path, final: Path, *rest: Any) -> None:
        if final.name == "checkpoint-2":
            raise OSError(errno.EIO, "Input/output error")
        commit(aside, final, *rest)

    monkeypatch.setattr(folders, "commit", fail_once)
    run.add_callback(Look())
    run.train()
    assert found == [(1, True), (3, True), (4, True)], "and isn't asked of one that isn't there"
    said = capfd.readouterr().out
    assert said.count("checkpoints: training waits while one is written, as Look.on_save may read it") == 1
    assert "checkpoint-2 couldn't be written (OSError: [Errno 5] Input/output error)" in said


# -- several ranks


def test_ranks_save_together_or_not_at_all(tmp_path: Path) -> None:
    done = launcher.run(SCRIPTS / "saving_ranks.py", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    leader, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    run_dir = tmp_path / "run"
    assert leader["whole"] == other["whole"] == ["", ""]
    files = manifest.read(run_dir / "checkpoint-1")
    assert files is not None and files.keys() == {"trainer_state.json", "part-0.safetensors", "part-1.safetensors"}
    assert folders.check(run_dir / "checkpoint-1")
    full = "OSError: [Errno 28] No space left on device"
    assert leader["one disk is full"] == [f"rank 1: {full}", full] == other["one disk is full"]
    assert leader["again"] == ["", ""] and folders.complete_steps(str(run_dir)) == [1, 3, 5]
    assert [sorted(manifest.files_of(tmp_path / f"node{n}" / "checkpoint-5")) for n in range(2)] == [
        [f"part-{n}.safetensors", "trainer_state.json"] for n in range(2)
    ]
    assert leader["apart"] == ["", ""] and leader["seconds alone"] < writing.ALONE + 5
    assert "rank 1 hasn't reported the end of its part of the save: this rank ends by an error" in leader["alone"]


def test_library_file_has_the_same_tensors(tmp_path: Path) -> None:
    """Our writer's files equal safetensors' files for readers: names, shapes, dtypes, metadata."""
    from safetensors import safe_open

    values = {name: value.contiguous().clone() for name, value in tensors().items()}
    save_file(values, tmp_path / "theirs", {"format": "pt"})
    images = HostFiles()
    images.put(values, "ours", {"format": "pt"})
    write_bytes(images.take()[Path("ours")].bytes, tmp_path / "ours")
    with safe_open(tmp_path / "ours", "pt") as ours, safe_open(tmp_path / "theirs", "pt") as theirs:
        assert ours.metadata() == theirs.metadata() and sorted(ours.keys()) == sorted(theirs.keys())
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()


@engine
def test_rate_kept_in_the_schedule_refuses_another(run: Any) -> None:
    vars(run.args).update(max_steps=1, lr_scheduler_type=SchedulerType.REDUCE_ON_PLATEAU)
    run.train()
    was = run.args.learning_rate
    vars(run.args)["learning_rate"] = 2 * was
    with pytest.raises(ValueError, match=f"reduce_lr_on_plateau` continues .*: set `learning_rate: {was}`"):
        run.checkpointer.begin(f"{run.args.output_dir}/checkpoint-1")
