"""A hostile or broken checkpoint ends in one clear error: seeded mutations of each kind of file, through its loader."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerState

from colograd.checkpoint import folders, manifest
from colograd.checkpoint.reading import look, reading, trainer_state
from colograd.engine.sampling import LengthHistory
from colograd.sharding import optimizer_state
from colograd.sharding.strategy import Owned
from colograd.sharding.weight_files import WeightFiles, float32_weights
from colograd.training.adamw_split import AdamWSplit

MUTATIONS = 60  # of each kind of file
BOUND = 2**28  # bytes of memory that reading small files may take


def make_optimizer() -> tuple[AdamWSplit, list[Owned]]:
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(4, 3).bfloat16()) for name in ("a.weight", "b.weight")}
    optimizer = AdamWSplit(parameters.values(), lr=1e-3)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, [Owned(name, p, 0, p.numel()) for name, p in parameters.items()]


class Rng:
    """The parts of a trainer that have a random state."""

    args: Any = SimpleNamespace(world_size=1, process_index=0, parallel_mode=None, output_dir="")

    def write(self, folder: Path) -> None:
        Trainer._save_rng_state(self, str(folder))

    def read(self, folder: Path) -> None:
        with reading(folder, "the random state"):
            Trainer._load_rng_state(self, str(folder))


def write_all(folder: Path) -> None:
    optimizer, owned = make_optimizer()
    optimizer_state.save(optimizer, owned, folder, 0, 1)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    save_file({"a.weight": torch.randn(4, 3), "b.weight": torch.randn(4, 3)}, folder / "model.safetensors")
    Rng().write(folder)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    state = TrainerState(global_step=3, max_steps=9, log_history=[{"loss": 0.5, "step": 1}])
    state.save_to_json(str(folder / "trainer_state.json"))
    (folder / "prompts.json").write_text(json.dumps({"items": 3, "digest": "ab" * 16}))
    LengthHistory().save(folder, 0)
    (folder / "lengths_0.json").write_text(json.dumps({"a": 3.5, "b": 7.0}))
    index = {"metadata": {}, "weight_map": {"a.weight": "model.safetensors", "b.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    entries = {name: manifest.entry_of(folder / name) for name in manifest.files_of(folder)}
    (folder / manifest.MANIFEST).write_text(manifest.as_text(entries))


def load_optimizer(folder: Path) -> None:
    optimizer, owned = make_optimizer()
    with reading(folder, "the optimizer's state"):
        optimizer_state.load(optimizer, owned, folder, ["a.weight", "b.weight"])
        optimizer.step()


def load_old_optimizer(folder: Path) -> None:
    (folder / "optimizer-00000-of-00001.safetensors").unlink(missing_ok=True)
    load_optimizer(folder)


def load_weights(folder: Path) -> None:
    model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(4, 3))})

    with reading(folder, "the model"):
        WeightFiles(folder).copy(["a.weight"], model["a"], model["a"].shape, range(4))
        for _ in float32_weights(folder):
            pass


def load_scheduler(folder: Path) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(make_optimizer()[0], lambda step: 1.0)
    with reading(folder, "the scheduler"):
        scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))


def check_manifest(folder: Path) -> None:
    files = manifest.read(folder)
    if files is not None:
        manifest.check(folder, files)


READERS: dict[str, Callable[[Path], Any]] = {
    "optimizer-00000-of-00001.safetensors": load_optimizer,
    "optimizer.pt": load_old_optimizer,
    "model.safetensors": load_weights,
    "model.safetensors.index.json": load_weights,
    "rng_state.pth": Rng().read,
    "scheduler.pt": load_scheduler,
    "trainer_state.json": trainer_state,
    "prompts.json": lambda folder: folders.read_prompts(str(folder), "wasn't streamed"),
    "lengths_0.json": lambda folder: LengthHistory().load(folder, 0),
    manifest.MANIFEST: check_manifest,
}
VALUES = (None, True, -1, 2**70, 1e400, "x", "../../etc/passwd", [], {}, [[]], {"a": None}, "\0", "é" * 50)


def mutated_json(random_: random.Random, content: bytes) -> bytes:
    """Change one random value or key of a JSON document."""
    tree = json.loads(content)
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = random_.choice(list(keys))
        if isinstance(node[key], dict | list) and node[key] and random_.random() < 0.7:
            node = node[key]
            continue
        if isinstance(node, dict) and random_.random() < 0.2:
            node[str(random_.choice(VALUES))] = node.pop(key)
        else:
            node[key] = random_.choice(VALUES)
        return json.dumps(tree).encode()


def mutated_header(random_: random.Random, content: bytes) -> bytes:
    """Corrupt a safetensors header: a wrong length, changed JSON, or changed data offsets."""
    length = int.from_bytes(content[:8], "little")
    if random_.random() < 0.3:
        return struct.pack("<Q", random_.choice((0, 1, 2**31, 2**62, 2**64 - 1, length - 1))) + content[8:]
    header = mutated_json(random_, content[8 : 8 + length])
    if random_.random() < 0.3:
        header = header.replace(b"[0,", b"[" + str(random_.choice((2**40, -1, 7))).encode() + b",", 1)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def mutated_bytes(random_: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    kind = random_.randrange(5)
    if kind == 0:
        return bytes(data[: random_.randrange(len(data))])
    if kind == 1:
        start = random_.randrange(len(data))
        del data[start : start + random_.randrange(1, 40)]
    elif kind == 2:
        start = random_.randrange(len(data))
        data[start:start] = random_.randbytes(random_.randrange(1, 40))
    else:
        for _ in range(random_.choice((1, 1, 3, 20))):
            data[random_.randrange(len(data))] = random_.choice((0, 255, random_.randrange(256)))
    return bytes(data)


def mutated(random_: random.Random, name: str, content: bytes) -> bytes:
    if name.endswith(".json") and random_.random() < 0.7:
        return mutated_json(random_, content)
    if name.endswith(".safetensors") and random_.random() < 0.6:
        return mutated_header(random_, content)
    return mutated_bytes(random_, content)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_all(folder)
    for name, read in READERS.items():
        if read is not load_old_optimizer:  # removes the other one
            read(folder)
        assert (folder / name).is_file()
    look(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def attempt(read: Callable[[Path], Any], folder: Path) -> str:
    """Check the folder and load the file, as a run does. Returns the error's text, or "" if there was no error."""
    before = torch.get_rng_state()
    try:
        look(folder)
        read(folder)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and str(error)
        return str(error)
    finally:
        torch.set_rng_state(before)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_mutations_end_in_one_error_or_in_nothing(tmp_path: Path, contents: dict[str, bytes], name: str) -> None:
    random_ = random.Random(name)
    peak, errors, state = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0, random.getstate()
    for number in range(MUTATIONS):
        for other, content in contents.items():
            (tmp_path / other).write_bytes(content)
        (tmp_path / name).write_bytes(mutated(random_, name, contents[name]))
        if name != "model.safetensors.index.json":
            (tmp_path / "model.safetensors.index.json").unlink()
        try:
            errors += bool(attempt(READERS[name], tmp_path))
        except Exception as error:
            raise AssertionError(f"mutation {number} of {name} got through: {error!r}") from error
    random.setstate(state)
    assert errors > MUTATIONS / 5, "most mutations are noticed even without the manifest"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak < BOUND


@pytest.mark.parametrize("name", ["rng_state.pth", "scheduler.pt", "optimizer.pt"])
def test_nothing_is_unpickled_that_runs_code(tmp_path: Path, contents: dict[str, bytes], name: str) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-here"),)

    for other, content in contents.items():
        (tmp_path / other).write_bytes(content)
    torch.save({"python": Evil(), "state": Evil(), "last_epoch": Evil()}, tmp_path / name)
    assert name in attempt(READERS[name], tmp_path) or "can't be read" in attempt(READERS[name], tmp_path)
    assert not (tmp_path / "was-here").exists()


def test_compressed_file_is_refused_before_it_is_read(tmp_path: Path, contents: dict[str, bytes]) -> None:
    for other, content in contents.items():
        (tmp_path / other).write_bytes(content)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\0" * 50_000_000)
    (tmp_path / "rng_state.pth").write_bytes(packed.getvalue())
    assert len(packed.getvalue()) < 100_000
    with pytest.raises(ValueError, match=r"rng_state\.pth of .* can't be read \(TypeError: the file is compressed"):
        look(tmp_path)


def test_tensor_larger_than_its_file_is_refused(tmp_path: Path, contents: dict[str, bytes]) -> None:
    (tmp_path / "trainer_state.json").write_bytes(contents["trainer_state.json"])
    huge = torch.zeros(1).expand(2**40)
    torch.save(
        {"state": {0: {"step": torch.tensor(1.0), "exp_avg": huge}}, "param_groups": [{}]}, tmp_path / "optimizer.pt"
    )
    assert "has a tensor of 4,398,046,511,104 bytes, but stores fewer bytes" in attempt(load_optimizer, tmp_path)


def test_optimizer_of_more_parameters_is_refused(tmp_path: Path, contents: dict[str, bytes]) -> None:
    (tmp_path / "trainer_state.json").write_bytes(contents["trainer_state.json"])
    torch.save({"state": {99: {"step": torch.tensor(1.0)}}, "param_groups": [{}]}, tmp_path / "optimizer.pt")
    assert "has the optimizer state of more than the" in attempt(load_optimizer, tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "a/b", "..", 7, None, "a\0b"])
def test_named_files_must_be_in_the_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ValueError, match="isn't a file in the index's folder"):
        look(tmp_path)
