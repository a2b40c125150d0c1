"""Datasets, tokens and the order of prompts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from datasets import Dataset, DatasetDict, IterableDataset
from paths import MODEL

from colograd.config import ScriptArguments
from colograd.data import (
    PromptDataset,
    PromptLoader,
    PromptRules,
    StepOrder,
    load_datasets,
    tokenize_prompts,
)
from colograd.training.preparation import without_template

USER = {"role": "user", "content": "Hi"}


def load(**kwargs: Any) -> tuple[Dataset, Dataset | None]:
    return load_datasets(ScriptArguments(**kwargs))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if not (MODEL / "config.json").exists():
        pytest.skip("made by `make model`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def tokenize(rows: Any, tokenizer: Any, limit: int = 100, overlong: str = "drop", **template: Any) -> PromptDataset:
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return tokenize_prompts(dataset, PromptRules(tokenizer, limit, overlong, template, "train_dataset"))


# -- Loading


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"tasks_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(
        "from datasets import Dataset, DatasetDict\n"
        "rows = lambda word, n: Dataset.from_dict({'prompt': [f'{word} {i}' for i in range(n)]})\n"
        "def plain(n=3): return rows('plain', n)\n"
        "def several(): return DatasetDict(train=rows('train', 3), test=rows('test', 2))\n"
        "def by_split(split, n=3): return None if split == 'nothing' else rows(split, n)\n"
        "def wrong(): return [1]\n"
        "def strange(): return DatasetDict(dev=rows('dev', 1))\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("separator", [":", "."])
def test_an_import_path_names_a_function(module: str, separator: str) -> None:
    train, test = load(dataset_name=f"{module}{separator}plain", dataset_kwargs='{"n": 2}')
    assert train["prompt"][:] == ["plain 0", "plain 1"] and test is None
    train, test = load(dataset_name=f"{module}{separator}several")
    assert test is not None and (len(train), test["prompt"][0]) == (3, "test 0")


def test_a_function_with_a_split_is_asked_for_both(module: str) -> None:
    train, test = load(dataset_name=f"{module}:by_split", dataset_train_split="a", dataset_test_split="b")
    assert test is not None and (train["prompt"][0], test["prompt"][0]) == ("a 0", "b 0")
    assert load(dataset_name=f"{module}:by_split", dataset_test_split="nothing")[1] is None
    assert load(dataset_name=f"{module}:by_split", dataset_kwargs={"split": "c"})[0]["prompt"][0] == "c 0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither was given"),
        ({"dataset_name": "a", "datasets": [{"path": "b"}]}, "both were given"),
        ({"dataset_name": "MODULE:plain", "dataset_kwargs": {"m": 1}}, "unexpected keyword argument 'm'"),
        ({"dataset_name": "MODULE:plain", "dataset_kwargs": "{n: 1}"}, "isn't JSON"),
        ({"dataset_name": "MODULE:plain", "dataset_kwargs": "[1]"}, "must be a dict"),
        ({"dataset_name": "MODULE:plain", "test_split_size": 0.1}, "works only with `datasets`"),
        ({"dataset_name": "MODULE:wrong"}, "MODULE:wrong is of type list, but must be a datasets.Dataset"),
        ({"dataset_name": "MODULE:number"}, "is of type int, but must be a function"),
        ({"dataset_name": "MODULE:absent"}, "has no attribute 'absent'"),
        ({"dataset_name": "no_module_here:f"}, "module 'no_module_here' can't be imported"),
        ({"dataset_name": "MODULE:strange"}, "no split 'train'; it has 'dev'"),
        (
            {"dataset_name": "MODULE:plain", "dataset_prompt_column": "question"},
            "no column 'question'; it has 'prompt'",
        ),
        ({"dataset_name": "absent.jsonl"}, "no such file"),
        ({"datasets": [{"path": "MODULE:plain", "weight": 1}]}, "a mapping with `path`, and optionally name"),
        ({"datasets": [{"path": "MODULE:plain", "columns": ["x"]}]}, "no column 'x'"),
        ({"datasets": [{"path": "MODULE:strange"}]}, "no split 'train'; it has 'dev'"),
        ({"datasets": [{"path": "MODULE:plain"}], "test_split_size": 7}, "doesn't fit 3 rows"),
    ],
)
def test_a_wrong_dataset_is_explained(module: str, given: dict[str, Any], message: str) -> None:
    given = json.loads(json.dumps(given).replace("MODULE", module))
    with pytest.raises(ValueError, match=message.replace("MODULE", module)):
        load(**given)


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.from_dict({"prompt": ["a", "b"], "answer": [1, 2]})
    rows.to_json(tmp_path / "rows.jsonl")
    rows.to_csv(tmp_path / "rows.csv")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    rows.to_json(tmp_path / "three" / "train.jsonl")
    for name in ("rows.jsonl", "rows.csv", "rows.parquet", "one", "three"):
        train, test = load(dataset_name=str(tmp_path / name))
        assert train.to_list() == rows.to_list() and test is None, name
    train, test = load(dataset_name=str(tmp_path / "two"))
    assert test is not None and test["answer"][:] == [2]
    (tmp_path / "rows.txt").touch()
    with pytest.raises(ValueError, match=r"ends in '\.txt': convert the file to \.json"):
        load(dataset_name=str(tmp_path / "rows.txt"))


def test_a_mixture_is_joined_and_held_out_from(module: str) -> None:
    parts = [{"path": f"{module}:plain"}, {"path": f"{module}:several", "split": "test", "columns": ["prompt"]}]
    whole, test = load(datasets=json.dumps(parts))
    assert whole["prompt"][:] == ["plain 0", "plain 1", "plain 2", "test 0", "test 1"] and test is None
    train, test = load(datasets=parts, test_split_size=2)
    assert test is not None and sorted([*train["prompt"], *test["prompt"]]) == sorted(whole["prompt"])
    assert (len(train), len(test)) == (3, 2)
    again = load(datasets=parts, test_split_size=2)[1]
    assert again is not None and again["prompt"][:] == test["prompt"][:]


def test_parts_of_a_mixture_can_have_shares(tmp_path: Path) -> None:
    """The mixture is as large as possible without repeated rows: it has all rows of the smaller part."""
    for name, size in (("a", 30), ("b", 10)):
        Dataset.from_dict({"prompt": [f"{name}{i}" for i in range(size)]}).to_json(tmp_path / f"{name}.jsonl")
    parts = [{"path": str(tmp_path / "a.jsonl"), "fraction": 3}, {"path": str(tmp_path / "b.jsonl"), "fraction": 2}]
    whole, _ = load(datasets=parts)
    assert whole["prompt"][:] == [f"a{i}" for i in range(15)] + [f"b{i}" for i in range(10)]
    with pytest.raises(ValueError, match="set a positive number in every entry"):
        load(datasets=[parts[0], {"path": str(tmp_path / "b.jsonl")}])
    with pytest.raises(ValueError, match="set a positive number in every entry"):
        load(datasets=[parts[0], parts[1] | {"fraction": "2"}])
    with pytest.raises(ValueError, match="a stream has no length"):
        load(datasets=parts, streaming=True)
    with pytest.raises(ValueError, match="test_split_size is 2, but a streamed mixture"):
        load(datasets=parts, streaming=True, test_split_size=2)


def test_streamed_datasets_keep_their_prompts(tmp_path: Path, module: str) -> None:
    rows = Dataset.from_dict({"question": ["a", "b"], "answer": [1, 2]})
    rows.to_json(tmp_path / "rows.jsonl")
    rows.save_to_disk(tmp_path / "saved")
    for name in (str(tmp_path / "rows.jsonl"), str(tmp_path / "saved")):
        train, _ = load(
            dataset_name=name, dataset_streaming=True, dataset_prompt_column="question", system_prompt="Be brief."
        )
        assert isinstance(train, IterableDataset)
        assert [row["prompt"][1]["content"] for row in train] == ["a", "b"] and next(iter(train))["answer"] == 1
    assert isinstance(load(dataset_name=f"{module}:several", dataset_streaming=True)[0], IterableDataset)
    parts = [{"path": f"{module}:plain"}, {"path": f"{module}:several", "split": "test", "columns": ["prompt"]}]
    train, _ = load(datasets=parts, streaming=True)
    assert [row["prompt"] for row in train] == ["plain 0", "plain 1", "plain 2", "test 0", "test 1"]


def test_the_prompt_column_and_the_system_prompt(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Mine."}, USER]
    Dataset.from_dict({"question": ["a"]}).to_json(tmp_path / "plain.jsonl")
    Dataset.from_list([{"prompt": [USER]}, {"prompt": own}]).to_json(tmp_path / "chat.jsonl")
    Dataset.from_list([{"prompt": "a", "question": "b"}]).to_json(tmp_path / "both.jsonl")
    plain, _ = load(dataset_name=str(tmp_path / "plain.jsonl"), dataset_prompt_column="question")
    assert plain.to_list() == [{"prompt": "a"}]
    plain, _ = load(
        dataset_name=str(tmp_path / "plain.jsonl"), dataset_prompt_column="question", system_prompt="Be brief."
    )
    assert plain["prompt"][:] == [[system, {"role": "user", "content": "a"}]]
    chat, _ = load(dataset_name=str(tmp_path / "chat.jsonl"), system_prompt="Be brief.")
    assert chat["prompt"][:] == [[system, USER], own]
    with pytest.raises(ValueError, match="is 'question', but the train split also has a column 'prompt'"):
        load(dataset_name=str(tmp_path / "both.jsonl"), dataset_prompt_column="question")


# -- Tokens


def test_plain_prompts_are_tokenised_as_they_are(tokenizer: Any) -> None:
    prompts = tokenize([{"prompt": "What is 3 + 4?", "answer": "7"}], tokenizer)
    prompt = prompts[0, 9]
    assert prompt.example == {"prompt": "What is 3 + 4?", "answer": "7"} and prompt.position == 9
    assert list(prompt.prompt_ids) == tokenizer("What is 3 + 4?").input_ids
    assert all(type(token) is int for token in prompt.prompt_ids)


def test_conversations_go_through_the_template(tokenizer: Any) -> None:
    started = [USER, {"role": "assistant", "content": "Sure, I"}]
    rows = [{"prompt": [USER]}, {"prompt": started}, {"prompt": [{"role": "user", "content": "Bye"}]}]
    texts = [tokenizer.decode(p.prompt_ids) for p in tokenize(rows, tokenizer).prompts()]
    assert texts[0].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].endswith("<|im_start|>assistant\nSure, I")
    assert texts[2].endswith("<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")


def test_plain_text_without_a_chat_model_s_template_is_told(tokenizer: Any) -> None:
    def told(prompt: Any) -> bool:
        return any(without_template(tokenize([{"prompt": prompt}], tokenizer), policy))

    policy: Any = SimpleNamespace(tokenizer=tokenizer, path="models/tiny")
    own = tokenizer.apply_chat_template([USER], tokenize=False)
    assert [told(prompt) for prompt in ("Hi", [USER], own)] == [True, False, False]
    policy.tokenizer = SimpleNamespace(chat_template=None)
    assert not told("Hi")


def test_template_arguments_of_the_row_come_first(tokenizer: Any) -> None:
    template = "{{ tone }} {{ size }}"
    rows = [
        {"prompt": [USER], "chat_template_kwargs": {"tone": "dry"}},
        {"prompt": [USER], "chat_template_kwargs": None},
    ]
    prompts = tokenize(rows, tokenizer, chat_template=template, tone="warm", size="big").prompts()
    assert [tokenizer.decode(p.prompt_ids) for p in prompts] == ["dry big", "warm big"]
    assert set(prompts[0].example) == {"prompt", "chat_template_kwargs"}


def test_keys_that_arrow_fills_in_are_left_out(tokenizer: Any) -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        called = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [called]}

    asked = [USER, call("add", a=1, b=2), call("find", item="x", where={"city": "y"}), call("find", where={"zip": 3})]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }};{% endfor %}"
        "{% endfor %}{{ documents | tojson }}"
    )
    rows = [
        {"prompt": [*asked, USER], "chat_template_kwargs": {"documents": [{"title": "t"}, {"text": "u"}]}},
        {"prompt": [*asked, USER], "chat_template_kwargs": {"documents": [{"text": "v"}]}},
    ]
    calls = '{"a": 1, "b": 2};{"item": "x", "where": {"city": "y"}};{"where": {"zip": 3}};'
    for mixed in (None, "use_json"):
        dataset = Dataset.from_list(rows, on_mixed_types=mixed)
        first, second = tokenize(dataset, tokenizer, limit=500, chat_template=template).prompts()
        assert tokenizer.decode(first.prompt_ids) == calls + '[{"title": "t"}, {"text": "u"}]'
        assert tokenizer.decode(second.prompt_ids) == calls + '[{"text": "v"}]'


PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
KNOWS_PARTS = (
    "{% for m in messages %}[{% if m.content is none %}called{% elif m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}]{% endfor %}"
)
TEXTS_ALONE = "{% for m in messages %}[{{ m.content if m.content is string else '' }}]{% endfor %}"  # Qwen3
AS_JSON = "{% for m in messages %}[{{ m.content if m.content is string else m.content | tojson }}]{% endfor %}"  # LFM2


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (PLAIN, "[None ab][][]"),
        (TEXTS_ALONE, "[None ab][][]"),
        (AS_JSON, "[None ab][][]"),
        (KNOWS_PARTS, "[<None a><b>][called][]"),
    ],
)
def test_contents_are_written_as_texts(tokenizer: Any, template: str, wanted: str) -> None:
    parts = [{"type": "text", "text": "None a"}, {"type": "text", "text": "b"}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [{"prompt": [{"role": "user", "content": parts}, called, {"role": "user", "content": ""}]}]
    stream = IterableDataset.from_generator(lambda: iter(rows))  # Arrow takes no mixed contents
    (prompt,) = tokenize(stream, tokenizer, chat_template=template).prompts()
    assert tokenizer.decode(prompt.prompt_ids) == wanted


def test_a_text_has_one_beginning_token(tokenizer: Any) -> None:
    from tokenizers import processors

    beginning = copy.deepcopy(tokenizer)
    beginning.bos_token = start = tokenizer.eos_token
    token = beginning.bos_token_id
    beginning.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, token)]
    )
    texts = [f"{start}Hi", "Hi", f"{start}{start}Hi"]
    found = [list(p.prompt_ids) for p in tokenize([{"prompt": text} for text in texts], beginning).prompts()]
    hi = tokenizer("Hi").input_ids
    assert found == [[token, *hi], [token, *hi], [token, token, *hi]]


def test_long_prompts_are_dropped_and_counted_or_named(tokenizer: Any) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a " * 20}, {"prompt": "b"}]
    prompts = tokenize(rows, tokenizer, limit=5)
    assert [(p.example["prompt"], p.position) for p in prompts.prompts()] == [("a", 0), ("b", 1)]
    assert [(p.example["prompt"], p.position) for p in prompts.prompts(1, 2)] == [("b", 1)], "the second of two ranks"
    assert (len(prompts), prompts.dropped) == (2, {1: 21})
    said = tokenize([*rows, *[rows[1]] * 8], tokenizer, limit=5).dropped_line()
    assert "9 of 11" in said and "train_dataset" in said and "row 1 (21 tokens), row 3 (21 tokens)" in said
    assert "row 6" in said and "row 7" not in said, "the first five"
    with pytest.raises(ValueError, match=r"train_dataset, row 1: the prompt has 21 tokens, over the limit of 5\."):
        tokenize(rows, tokenizer, limit=5, overlong="error")
    with pytest.raises(ValueError, match="all 1 prompts are over the limit of 5 tokens"):
        tokenize([rows[1]], tokenizer, limit=5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a"}], "no column 'prompt'; it has 'question'"),
        (Dataset.from_dict({"prompt": []}), "has no rows"),
        (Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset().filter(lambda row: False), "has no rows"),
        ([{"prompt": "a"}, {"prompt": ""}], "row 1: the prompt '' has no tokens"),
        ([{"prompt": 3}], "row 0: the prompt is 3; it must be a text"),
        ([{"prompt": []}], r"row 0: the prompt is \[\]; it must be a text"),
        ([{"prompt": [{"role": "user"}]}], "row 0: the prompt is .* it must be a text"),
        ([IterableDataset.from_generator(lambda: iter([{"question": "a"}]))], "no column 'prompt'; it has 'question'"),
        ([3], "must be a datasets.Dataset"),
        (
            [Dataset.from_dict({"prompt": ["a"]}).with_transform(lambda rows: rows)],
            "transform .* with `dataset.map`",
        ),
        ([{"prompt": "a", "image": "a.png"}], "has the column 'image', but the model reads text alone"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            r"row 0: message 0 of the prompt \(role user\) has a part of type 'image'",
        ),
        ([{"prompt": [{"role": "user", "content": None}]}], r"row 0: message 0 .* has no content: write a text"),
        ([{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}], "row 0: message 0 .* must have a text"),
        ([{"prompt": [{"role": "user", "content": 3}]}], "row 0: message 0 .* has the content 3, but must have a text"),
    ],
)
def test_what_is_no_prompt_is_named(tokenizer: Any, rows: Any, message: str) -> None:
    rows = rows[0] if isinstance(rows, list) and not isinstance(rows[0], dict) else rows
    with pytest.raises(ValueError, match=message):
        tokenize(rows, tokenizer)


def test_a_template_is_needed_for_conversations_and_may_refuse(tokenizer: Any) -> None:
    refuses = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}fine"
    with pytest.raises(ValueError, match=r"row 1: the chat template refuses the prompt .* not this"):
        tokenize([{"prompt": [USER]}, {"prompt": [{**USER, "content": "no"}]}], tokenizer, chat_template=refuses)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(ValueError, match=r"has no chat template\. Use an instruction-tuned model"):
            tokenize([{"prompt": [USER]}], tokenizer)
    finally:
        tokenizer.chat_template = template


# -- Order


def steps(epoch: int = 0, data_rank: int = 0, data_size: int = 1, **kwargs: Any) -> list[list[tuple[int, int]]]:
    given = {"num_rows": 23, "prompts_per_step": 4, "steps_per_generation": 2, "num_iterations": 1, "seed": 1, **kwargs}
    order = StepOrder(data_rank=data_rank, data_size=data_size, **given)
    order.set_epoch(epoch)
    items = list(order)
    assert len(items) == len(order)
    return items


def test_an_epoch_is_whole_rounds_and_takes_no_row_twice() -> None:
    items = [prompt for step in steps() for prompt in step]
    assert len(steps()) == 4 and len({row for row, _ in items}) == len(items) == 16
    assert [position for _, position in items] == list(range(16))


def test_two_ranks_take_together_what_one_takes() -> None:
    halves = zip(steps(data_rank=0, data_size=2), steps(data_rank=1, data_size=2), strict=True)
    assert [first + second for first, second in halves] == steps()


def test_epochs_and_seeds_differ_and_repeat() -> None:
    assert steps(epoch=1) == steps(epoch=1)
    rows = [[row for step in items for row, _ in step] for items in (steps(), steps(epoch=1), steps(seed=2))]
    assert rows[0] != rows[1] != rows[2] != rows[0]
    positions = [position for epoch in range(3) for step in steps(epoch=epoch) for _, position in step]
    assert positions == list(range(48))


@pytest.mark.parametrize("shape", [(23, 4, 2, 1), (23, 4, 2, 3), (8, 2, 1, 2), (100, 6, 3, 1)])
def test_the_same_seed_gives_the_prompts_of_trl(shape: tuple[int, int, int, int]) -> None:
    """Three epochs have TRL's prompts. TRL's sampler repeats a generation's prompts for each of its batches."""
    from trl.trainer.utils import RepeatSampler

    rows, per_step, steps_per_generation, iterations = shape
    size, repeats = per_step * steps_per_generation, iterations * steps_per_generation
    sampler = RepeatSampler(range(rows), 1, batch_size=size, repeat_count=repeats, seed=1)
    for epoch in range(3):
        theirs = list(sampler)
        rounds = [theirs[first : first + size] for first in range(0, len(theirs), size * repeats)]
        named = {"steps_per_generation": steps_per_generation, "num_iterations": iterations}
        ours = steps(epoch=epoch, num_rows=rows, prompts_per_step=per_step, **named)
        found = [
            [row for step in ours[first : first + repeats] for row, _ in step] for first in range(0, len(ours), repeats)
        ]
        assert found == [one * iterations for one in rounds]


def test_unshuffled_rows_come_in_order() -> None:
    assert steps(shuffle=False)[1] == [(4, 4), (5, 5), (6, 6), (7, 7)]
    assert steps(shuffle=False, epoch=1)[0][0] == (0, 16)


def test_iterations_repeat_a_round_with_its_positions() -> None:
    once, twice = steps(), steps(num_iterations=2)
    assert twice == once[0:2] * 2 + once[2:4] * 2


def test_the_order_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    steps()
    assert torch.equal(torch.get_rng_state(), before)


def test_fewer_prompts_than_a_round_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"has 7 prompts, but one generation takes 8 \(prompts_per_step=4 times"):
        steps(num_rows=7)


# -- The loader


def loader(tokenizer: Any) -> PromptLoader:
    prompts = tokenize([{"prompt": f"row {i}"} for i in range(23)], tokenizer)
    return PromptLoader(prompts, StepOrder(len(prompts), 4, 0, 1, 2, 1, True, 1))


def test_the_loader_gives_the_prompts_of_each_step(tokenizer: Any) -> None:
    prompts = loader(tokenizer)
    before = torch.get_rng_state()
    items = [[(int(p.example["prompt"].split()[1]), p.position) for p in step] for step in prompts]
    assert items == steps() and len(prompts) == 4
    assert torch.equal(torch.get_rng_state(), before)
    prompts.set_epoch(1)
    assert [p.position for p in next(iter(prompts))] == [16, 17, 18, 19]


def test_a_resumed_loader_goes_on_exactly_where_it_stopped(tokenizer: Any) -> None:
    whole = loader(tokenizer)
    whole.set_epoch(1)
    skipped = skip_first_batches(loader(tokenizer), 3)
    skipped.batch_sampler.batch_sampler.set_epoch(1)  # as transformers.Trainer reaches it
    assert list(skipped) == list(whole)[3:]
    assert len(skipped) == 1
