"""Sharding strategies on 1, 2 and 4 ranks: the same weights bit for bit, in the memory that the arithmetic promises."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import launcher
import pytest
import torch
from needs import has
from paths import SCRIPTS

from colograd.batch import LossOutput
from colograd.sharding import optimizer_state
from colograd.sharding.strategy import Owned
from colograd.sharding.zero import Bucket, SharedGradients, buckets_of
from colograd.training import learner
from colograd.training.adamw_split import AdamWSplit

SCRIPT = SCRIPTS / "sharded_ranks.py"
WAYS = ("none", "optimizer", "gradients", *(("fsdp",) if has("fsdp") else ()))
ON_HOST = ("none on the host", "optimizer on the host", "gradients on the host") if has("offload") else ()
EACH = (*WAYS, *ON_HOST)
DTYPES = ("bfloat16", "float32")
MOMENTS = {"bfloat16": 10, "float32": 8}  # bytes of optimizer state per parameter
BUCKET = 4160 * 4  # bytes of float32 gradients in the largest bucket, which is the embedding


def run(ranks: int, *arguments: Path) -> list[dict[str, Any]]:
    done = launcher.run(SCRIPT, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((arguments[0] / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


SEVERAL = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2, 4)}


@pytest.fixture(scope="module")
def ranks(folders: dict[int, Path]) -> Callable[[int], list[dict[str, Any]]]:
    """Start ``count`` ranks once, and return each rank's results."""
    return functools.cache(lambda count: run(count, folders[count]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", EACH)
@pytest.mark.parametrize("count", [1, *SEVERAL])
def test_every_strategy_leaves_the_same_bits_in_place(ranks, count, way, dtype) -> None:
    expected = ranks(1)[0][f"none-{dtype}"]["steps"]
    for found in ranks(count):
        steps = found[f"{way}-{dtype}"]["steps"]
        assert [(step["weights"], step["norm"]) for step in steps] == [
            (step["weights"], step["norm"]) for step in expected
        ]
        assert found[f"{way}-{dtype}"]["stayed"] or way == "fsdp", "its weights come together anew in each pass"
    assert len({step["weights"] for step in expected}) == 6 and expected[0]["norm"] > 0.5, "each moves, and is clipped"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SEVERAL)
def test_each_rank_holds_its_share(ranks, count, dtype) -> None:
    for rank in ranks(count):
        parameters = rank[f"none-{dtype}"]["parameters"]
        padding = 3 * count * MOMENTS[dtype]  # at most, of a bucket each
        assert rank[f"none-{dtype}"]["state"] == MOMENTS[dtype] * parameters
        for way in WAYS[1:]:
            share = rank[f"{way}-{dtype}"]["state"]
            rows = 0.1 * share if way == "fsdp" else 0  # which aren't cut
            assert abs(share - MOMENTS[dtype] * parameters / count) <= padding * 8 + rows, way
    held = [rank[f"{way}-{dtype}"]["gradients"] for rank in ranks(count) for way in WAYS[2:]]
    whole = [rank[f"none-{dtype}"]["gradients"] for rank in ranks(count)]
    assert whole == [4 * parameters] * count
    # Expected gradients (4 / N), two buckets in flight with this rank's part of each, and a bucket that fills up.
    assert max(held) <= 4 * parameters / count + 2 * BUCKET * (1 + 1 / count) + BUCKET


@pytest.mark.parametrize("count", SEVERAL)
def test_bytes_through_collectives(ranks, count) -> None:
    for rank, dtype in itertools.product(ranks(count), DTYPES):
        size = {"bfloat16": 2, "float32": 4}[dtype]
        moved = {way: rank[f"{way}-{dtype}"]["steps"][1] for way in WAYS}
        parameters = rank[f"none-{dtype}"]["parameters"]
        padded = pytest.approx(4 * parameters, rel=0.01)
        assert moved["none"] == moved["none"] | {"sync/reduced_bytes": 4 * parameters, "sync/gathered_bytes": 0}
        assert moved["optimizer"]["sync/reduced_bytes"] == padded
        assert moved["gradients"]["sync/reduced_bytes"] == pytest.approx(4 * parameters * 4 / count, rel=0.01)
        for way in ("optimizer", "gradients"):  # weights once, in the policy's dtype: nothing else is published
            assert moved[way]["sync/gathered_bytes"] == pytest.approx(size * parameters, rel=0.01)
        if not has("fsdp"):
            continue
        assert moved["fsdp"]["sync/reduced_bytes"] == pytest.approx(moved["gradients"]["sync/reduced_bytes"], rel=0.05)
        # All weights are gathered in each row's forward, and the layers' weights again in the backward.
        layers = parameters - 130 * 32 - 32
        found = moved["fsdp"]["sync/gathered_bytes"] * count / 4
        assert found == pytest.approx(size * (parameters + layers), rel=0.05)


@pytest.mark.parametrize(
    ("wrote", "reads"), [(2, 1), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((1, 2), (2, 4), (4, 1)))]
)
def test_checkpoint_resumes_with_other_ranks_and_strategy(ranks, folders, tmp_path, wrote, reads) -> None:
    """Three more steps leave the same bits for any writer, and each strategy reads every other strategy's files."""
    ranks(wrote)
    (expected,) = ranks(1)
    found = run(reads, tmp_path, folders[wrote])
    crossed = tmp_path / "crossed"
    for way, dtype in itertools.product(EACH, DTYPES):
        for rank in found:
            steps = rank[f"{way}-{dtype}"]["steps"]
            assert [s["weights"] for s in steps] == [s["weights"] for s in expected[f"none-{dtype}"]["steps"][3:]]
        written = EACH[(EACH.index(way) + 1) % len(EACH)]
        shutil.copytree(folders[wrote] / f"{written}-{dtype}", crossed / f"{way}-{dtype}")
    (tmp_path / "again").mkdir()
    for rank in run(reads, tmp_path / "again", crossed):
        for way, dtype in itertools.product(EACH, DTYPES):
            steps = rank[f"{way}-{dtype}"]["steps"]
            assert steps[-1]["weights"] == expected[f"none-{dtype}"]["steps"][-1]["weights"], (way, dtype)


# -- buckets


def parameters(*shapes: tuple[int, ...]) -> torch.nn.ParameterDict:
    return torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.randn(s)) for i, s in enumerate(shapes)})


@pytest.mark.parametrize("ranks", (1, 2, 3, 7))
def test_ranks_own_every_element_once(ranks) -> None:
    model = parameters((3, 5), (7,), (), (4, 4), (1,))
    owned: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters()}
    for rank in range(ranks):
        for bucket in buckets_of(model, rank, ranks, elements=17):
            for piece in bucket.places:
                owned[piece.name] += range(piece.start, piece.stop)
                assert torch.equal(piece.part, piece.of(model.get_parameter(piece.name).data))
    assert owned == {name: list(range(p.numel())) for name, p in model.named_parameters()}


def test_divisible_parameter_is_exchanged_in_place() -> None:
    (parameter,) = model = list(parameters((6, 4)).values())
    bucket = Bucket(["p"], model, 1, 2)
    assert bucket.in_place and bucket.flat([parameter.data], torch.float32).data_ptr() == parameter.data_ptr()
    assert next(iter(bucket.places)).part.data_ptr() == parameter.view(-1)[12:].data_ptr()
    assert not Bucket(["p"], model, 1, 5).in_place


def test_buckets_have_one_dtype_and_no_frozen_parameters() -> None:
    model = parameters((4,), (4,), (4,), (4,))
    model["p1"].data = model["p1"].data.bfloat16()
    model["p3"].requires_grad_(False)
    assert [tuple(piece.name for piece in bucket.places) for bucket in buckets_of(model, 0, 2)] == [
        ("p2",),
        ("p1",),
        ("p0",),
    ]


# -- a backward that fails


class Failing(torch.autograd.Function):
    """A function that runs out of memory in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no room")


class Keeping(torch.autograd.Function):
    """A function that keeps an activation for its backward."""

    kept: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.activation = torch.ones(1000)
        Keeping.kept.append(weakref.ref(ctx.activation))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def test_failed_backward_frees_its_graph_before_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the graph stayed, a rank would run out of memory again in a collective and the others would wait for ever."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    sharding, alive = SharedGradients(model), []

    def answer(sharding: SharedGradients, bucket: Bucket) -> None:
        alive.append(any(kept() is not None for kept in Keeping.kept))

    def compute_loss(row: Any) -> LossOutput:
        hidden = Keeping.apply(model[0](torch.ones(4)))
        return LossOutput(model[1](Failing.apply(hidden)).sum(), {}, {}, {})

    monkeypatch.setattr(SharedGradients, "_reduce", answer)
    monkeypatch.setattr(learner, "collate", lambda row: row)
    step: Any = SimpleNamespace(rows=[SimpleNamespace(num_tokens=1)], version=0, trained=0)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        learner.loss_pass(step, compute_loss, contextlib.nullcontext, sharding)
    assert len(alive) == len(sharding.buckets) >= 1 and not any(alive) and len(Keeping.kept) == 1


# -- files


def saved(folder: Path) -> tuple[AdamWSplit, list[Owned]]:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = AdamWSplit([weight], lr=0.5)
    weight.grad = torch.ones(4)
    optimizer.step()
    owned = [Owned("weight", weight, 0, 4)]
    optimizer_state.save(optimizer, owned, folder, 0, 1)
    return optimizer, owned


def test_missing_file_is_named_unless_own_file_suffices(tmp_path) -> None:
    optimizer, owned = saved(tmp_path)
    (tmp_path / "optimizer-00000-of-00001.safetensors").rename(tmp_path / "optimizer-00000-of-00002.safetensors")
    optimizer_state.load(optimizer, owned, tmp_path, rank=0, ranks=2)
    assert optimizer.state[owned[0].part]["step"] == 1
    for rank, pieces in ((1, owned), (0, [Owned("weight", owned[0].part, 2, 6)])):
        with pytest.raises(ValueError, match=r"written by 2 ranks, but optimizer-00001-of-00002\S+ is missing there"):
            optimizer_state.load(optimizer, pieces, tmp_path, rank=rank, ranks=2)


def test_state_of_another_model_is_refused(tmp_path) -> None:
    optimizer, owned = saved(tmp_path)
    with pytest.raises(ValueError, match="lacks elements of 1 trained parameters \\(other\\)"):
        optimizer_state.load(optimizer, [Owned("other", owned[0].part, 0, 4)], tmp_path)
    longer = torch.nn.Parameter(torch.zeros(6))
    with pytest.raises(ValueError, match=r"lacks elements of 1 trained parameters \(weight\)"):
        optimizer_state.load(AdamWSplit([longer]), [Owned("weight", longer, 0, 6)], tmp_path)
    with pytest.raises(ValueError, match=r"has neither optimizer\.pt nor"):
        optimizer_state.load(optimizer, owned, tmp_path / "nowhere")


def test_settings_of_groups_come_back(tmp_path) -> None:
    saved(tmp_path)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = AdamWSplit([weight], lr=0.1)
    optimizer_state.load(optimizer, [Owned("weight", weight, 0, 4)], tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.state[weight]["step"] == 1
