"""Streamed datasets: their order, resuming, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from accelerate import skip_first_batches
from datasets import IterableDataset
from paths import MODEL

from colograd.config import GRPOConfig
from colograd.data import PromptRules, tokenize_prompts
from colograd.extensions.streams.stream import PromptStream

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if not (MODEL / "config.json").exists():
        pytest.skip("made by `make model`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def streamed(
    tokenizer: Any, size: int = 11, limit: int = 100, rows: Any = None, rank: int = 0, ranks: int = 1,
    rules: PromptRules | None = None, tell: Any = print, **changes: Any,
) -> PromptStream:  # fmt: skip
    given = {"prompts_per_step": 2, "max_steps": 50, "shuffle_dataset": False, "report_to": "none"} | changes
    config = GRPOConfig("unused", **given)
    config.__class__ = type("Ranked", (GRPOConfig,), {"world_size": ranks, "process_index": rank})
    made = rows or IterableDataset.from_generator(lambda: ({"prompt": f"row {i}", "n": i} for i in range(size)))
    return PromptStream(made, rules or PromptRules(tokenizer, limit, "drop", {}, "train_dataset", tell=tell), config)


def take(prompts: Any, count: int) -> list[list[tuple[int, int]]]:
    """(row, position) of the prompts of each step."""
    return [[(p.example["n"], p.position) for p in step] for _, step in zip(range(count), prompts)]  # noqa: B905


def test_a_stream_gives_whole_rounds_and_begins_anew(tokenizer: Any) -> None:
    """11 rows, rounds of two steps of two prompts, trained twice. Rows that don't fill a round are left out."""
    items = take(streamed(tokenizer, steps_per_generation=2, num_iterations=2), 10)
    first, second = [[(0, 0), (1, 1)], [(2, 2), (3, 3)]], [[(4, 4), (5, 5)], [(6, 6), (7, 7)]]
    assert items == [*first, *first, *second, *second, [(0, 8), (1, 9)], [(2, 10), (3, 11)]]
    prompts = streamed(tokenizer, rows=None, size=3)
    assert [p.example["n"] for p in prompts.first(5)] == [0, 1, 2], "looking takes nothing"
    assert take(prompts, 2) == [[(0, 0), (1, 1)], [(0, 2), (1, 3)]]


def test_stream_shuffle_depends_on_seed_and_pass(tokenizer: Any) -> None:
    passes = [take(streamed(tokenizer, shuffle_dataset=True, seed=seed), 10) for seed in (1, 1, 2)]
    rows = [[row for step in items for row, _ in step] for items in passes]
    assert rows[0] == rows[1] != rows[2] and rows[0][:10] != rows[0][10:]
    assert len(set(rows[0][:10])) == 10


def test_ranks_share_a_stream(tokenizer: Any) -> None:
    ranks = {"ranks": 2, "num_generations": 2}
    halves = zip(*(take(streamed(tokenizer, rank=rank, **ranks), 6) for rank in (0, 1)), strict=True)
    assert [first + second for first, second in halves] == take(streamed(tokenizer), 6)


def test_a_resumed_stream_goes_on_exactly_where_it_stopped(tokenizer: Any) -> None:
    whole = take(streamed(tokenizer, shuffle_dataset=True), 9)
    before = streamed(tokenizer, shuffle_dataset=True)
    take(before, 6)
    after = streamed(tokenizer, shuffle_dataset=True)
    after.load(before.saved)
    assert before.saved["items"] == 6
    assert take(skip_first_batches(after.loader(), 6), 3) == whole[6:]


def test_a_stream_that_is_another_one_is_noticed_when_resuming(tokenizer: Any) -> None:
    before, after = streamed(tokenizer), streamed(tokenizer, size=3)
    take(before, 4)
    after.load(before.saved)
    with pytest.raises(ValueError, match="train_dataset isn't the stream that the checkpoint was trained on"):
        take(skip_first_batches(after.loader(), 4), 1)


def test_long_prompts_of_a_stream_are_dropped_and_counted(tokenizer: Any) -> None:
    rows = IterableDataset.from_generator(
        lambda: ({"prompt": "long " * 20 if i % 2 else f"row {i}", "n": i} for i in range(8))
    )
    lines: list[str] = []
    prompts = streamed(tokenizer, limit=10, rows=rows, tell=lines.append)
    assert not lines, "looking counts nothing"
    assert take(prompts, 2) == [[(0, 0), (2, 1)], [(4, 2), (6, 3)]]
    assert (prompts.num_dropped, prompts.longest) == (3, 10)  # the last one is yet to be read
    (line,) = lines
    assert "1 prompt(s) of train_dataset were too long" in line and "limit of 10" in line and "row 1 of pass 1" in line
    take(prompts, 6)
    assert prompts.num_dropped == 11 and "10 prompt(s)" in lines[-1] and "row 3 of pass 3 (21 tokens)" in lines[-1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_stream_s_rows_have_their_own_keys(tokenizer: Any, first: int) -> None:
    made = [{"prompt": [USER], "n": i} | ({"chat_template_kwargs": {"tone": "dry"}} if i % 2 else {}) for i in range(5)]
    stream = IterableDataset.from_generator(lambda: iter(made[first:]))
    rules = PromptRules(tokenizer, 100, "drop", {"chat_template": "{{ tone or 'no' }}"}, "train_dataset")
    wanted = ["no", "dry", "no", "dry"] if first == 0 else ["dry", "no", "dry", "no"]
    read = [prompt for step in itertools.islice(streamed(tokenizer, rows=stream, rules=rules), 2) for prompt in step]
    assert [tokenizer.decode(prompt.prompt_ids) for prompt in read] == wanted
    evaluated = tokenize_prompts(stream, rules).prompts()
    assert [tokenizer.decode(prompt.prompt_ids) for prompt in evaluated[:4]] == wanted
    pictured = IterableDataset.from_generator(lambda: iter([{"prompt": "a"}, {"prompt": "b", "image": "b.png"}]))
    with pytest.raises(ValueError, match="has the column 'image', but the model reads text alone"):
        streamed(tokenizer, rows=pictured)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": -1}, "max_steps is -1, but a streamed dataset has no length"),
        ({"dynamic_sampling": True}, "dynamic_sampling is true and the dataset is a stream"),
        ({"size": 0}, "train_dataset has no rows"),
        ({"limit": 1}, "all prompts exceed the limit of 1 tokens"),
        ({"size": 1}, "ended after 1 prompts, but one generation takes 2"),
        (
            {"rows": IterableDataset.from_generator(lambda: iter([{"question": "a"}]))},
            "no column 'prompt'; it has 'question'",
        ),
    ],
)
def test_a_stream_that_cannot_be_trained_on_is_refused(tokenizer: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(streamed(tokenizer, **changes), 1)
