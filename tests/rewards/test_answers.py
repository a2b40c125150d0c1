"""Answers as the built-in rewards read them: hostile, badly written, in parts, from threads, as special tokens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from reward_cases import own_ids

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, ModelInput, Rollout
from colograd.rewards import (
    Scorer,
    get_soft_overlong_punishment,
    gsm8k_reward,
    last_number,
    resolve_rewards,
    think_format_reward,
)
from colograd.rewards.gsm8k import rows
from colograd.rollout.sampler import Sampler
from colograd.rollout.texts import with_prompt_text


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("5", 1e-5, 0.0),
        ("16", 1e16, 0.0),
        ("1e-5", 1e-5, 1.0),
        ("10,000,000,000,000,000", 1e16, 1.0),
        ("0.3", 0.1 + 0.2, 1.0),
        ("1000000000", 1000000001.0, 0.0),
        ("0", 1e-5, 0.0),
        ("5", None, None),
        ("5", float("nan"), None),
        (None, 5, 0.0),
    ],
)
def test_last_number_reads_numbers_as_numbers(completion: Any, answer: Any, expected: float | None) -> None:
    assert last_number([[{"role": "assistant", "content": completion}]], [answer]) == [expected]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("#### 72", 72.0, 1.0),
        ("#### 72.00", 72, 1.0),
        ("#### 1000", "1,000", 1.0),
        ("#### 1,000", 1000, 1.0),
        ("#### 72", "48 + 24 = <<48+24=72>>72\n#### 72", 1.0),
        ("#### 7", "#### 72", 0.0),
        ("72", "72", 0.0),
        ("#### 72.", "72", 0.0),  # as in verl
        ("#### $72", "72", 0.0),
        ("#### 72" + " " * 300, "72", 0.0),
        ("#### 72", None, None),
        ("#### None", "None", None),
    ],
)
def test_gsm8k_answers_are_read_as_numbers(completion: str, answer: Any, expected: float | None) -> None:
    assert gsm8k_reward([completion], [answer]) == [expected]


def test_parts_of_a_content_are_one_text() -> None:
    parts = [{"type": "text", "text": "<think>a</think>#### 4"}, {"type": "image"}, {"type": "text", "text": "2"}]
    talk = [{"role": "assistant", "content": parts}]
    assert last_number([talk], [42]) == gsm8k_reward([talk], [42]) == [1.0]
    assert think_format_reward([talk]) == [1.0]


@pytest.mark.parametrize("content", [None, [], ""])
def test_an_empty_content_is_no_answer(content: Any) -> None:
    talk = [{"role": "assistant", "content": content}]
    for function in (last_number, gsm8k_reward):
        assert function([talk], ["42"]) == [0.0]
    assert think_format_reward([talk]) == [0.0]


def test_a_tool_s_last_word_is_no_answer() -> None:
    talk = [{"role": "assistant", "content": "wait"}, {"role": "tool", "content": "#### 42"}]
    assert last_number([talk], [42]) == gsm8k_reward([talk], [42]) == [0.0]


BEGUN = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("a</think>b", BEGUN, 1.0),
        ("a</think>b", "<|im_start|>assistant\n", 0.0),
        ("<think>a</think>b", BEGUN, 0.0),
        ("a, cut off", BEGUN, 0.0),
        ("<think>a</think>b", BEGUN + "\n</think>\n\n", 1.0),
    ],
)
def test_a_thought_may_begin_in_the_prompt(text: str, prompt: str, expected: float) -> None:
    assert think_format_reward([text], prompt_texts=[prompt]) == [expected]


def group_of(ids: list[int], mask: list[int], prompt: list[int] | None = None) -> Group:
    rollout = Rollout(
        ModelInput(tuple(prompt or (1,))), ids, torch.zeros(len(ids)), torch.tensor(mask).bool(), FinishReason.STOP, 0
    )
    return Group({"prompt": [{"role": "user", "content": "so?"}]}, (rollout,), 0)


def test_prompt_texts_are_what_the_model_read(monkeypatch) -> None:
    tokenizer = tiny.make_tokenizer()
    scorer = Scorer(resolve_rewards([think_format_reward], None))
    hooks = SimpleNamespace(
        decode=lambda group: tokenizer.batch_decode([list(each.completion_ids) for each in group.rollouts]),
        state=None,
        policy=SimpleNamespace(tokenizer=tokenizer),
    )
    events = SimpleNamespace(decoded=lambda groups, texts: None)
    sampler = SimpleNamespace(hooks=hooks, events=events, scorer=scorer)
    for prompt, expected in ((BEGUN, 1.0), ("so?", 0.0)):
        group = group_of(tokenizer.encode("a</think>b"), [1] * 10, tokenizer.encode(prompt))
        assert Sampler.begin_scoring(sampler, [group]).result().tolist() == [[expected]]  # type: ignore[arg-type]
    assert with_prompt_text(group, tokenizer).rollouts[0].columns == {"prompt_texts": "so?"}


def test_each_environment_s_prompt_has_its_text() -> None:
    tokenizer = tiny.make_tokenizer()
    rooms = [group_of([1], [1], tokenizer.encode(room)).rollouts[0] for room in ("room a", "room b", "room a")]
    group = dataclasses.replace(group_of([1], [1]), rollouts=tuple(rooms))
    texts = [rollout.columns["prompt_texts"] for rollout in with_prompt_text(group, tokenizer).rollouts]
    assert texts == ["room a", "room b", "room a"]


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_see_which_ids_are_the_model_s(workers: int) -> None:
    scorer = Scorer(resolve_rewards([own_ids], None), workers)
    try:
        assert scorer.submit([group_of([5, 100, 7], [1, 0, 1])], [["text"]]).result().tolist() == [[12.0]]
    finally:
        scorer.close()


def test_soft_overlong_punishment_counts_own_tokens() -> None:
    function = get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)
    mask = [1] * 100 + [0] * 380
    assert function(completion_ids=[[0] * 480]) == [-0.75]
    assert function(completion_ids=[[0] * 480], completion_mask=[mask]) == [0.0]


def test_special_tokens_reach_rewards_where_asked_for() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = [*tokenizer.encode("<answer>4</answer>"), tokenizer.eos_token_id]
    group = group_of(ids, [1] * len(ids))
    for options, text in ((None, "4"), ({"skip_special_tokens": False}, "<answer>4</answer>")):
        trainer = SimpleNamespace(
            args=SimpleNamespace(generation_kwargs=options), policy=SimpleNamespace(tokenizer=tokenizer)
        )
        assert GRPOTrainer.decode(trainer, group) == [text]  # type: ignore[arg-type]


def test_built_in_rewards_need_no_torch() -> None:
    script = "import sys, colograd.rewards as r; r.last_number(['1'], [1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_gsm8k_rows_have_verls_question(tmp_path: Path) -> None:
    """The recipes reproduce a published number with these rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "What is 20 times 60?", "answer": "20 * 60 = 1200\\n#### 1,200"}\n')
    (row,) = rows(path=str(file))
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert row == {"prompt": [{"role": "user", "content": f"What is 20 times 60? {instruction}"}], "answer": "1200"}
    assert rows("test", str(file)) is None, "a file has one split"
    file.write_text('{"question": "?", "answer": "12"}\n')
    with pytest.raises(ValueError, match="gsm8k, row 0: the answer '12' has no"):
        rows(path=str(file))
