"""A tokenizer with more tokens than its model has rows, and a model with more rows than its tokenizer has tokens."""

from __future__ import annotations

import pytest
import tiny
from datasets import Dataset

from colograd.data.columns import check_rows, size_of, surplus_rows
from colograd.policy.loading import load_policy
from colograd.training.preparation import train_prompts_of


@pytest.fixture
def larger():
    """The tiny model's tokenizer with two additional tokens, 258 and 259."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def test_a_token_without_a_row_is_an_error(larger) -> None:
    check_rows([0, 257], 258, larger, "the text")
    check_rows([], 258, larger, "the text")
    said = r"the text has the token '<think>' \(258\), but the model's embedding has 258 rows.*resize_token_embeddings"
    with pytest.raises(ValueError, match=said + r"\(260\)"):
        check_rows([1, 258], 258, larger, "the text")


def test_surplus_rows_have_a_line(larger) -> None:
    assert size_of(larger) == 260
    assert not [*surplus_rows(larger, 260)]
    (line,) = surplus_rows(larger, 320)
    assert line.startswith("tokenizer: 60 of the model's 320 rows have no token; sampled ones (260 and above)")


def test_a_prompt_with_a_rowless_token_is_refused(tiny_model, tmp_path, larger) -> None:
    """vLLM would read zeros for a token without an embedding row, and the loss would end in an IndexError."""
    config = tiny.config(tmp_path)
    policy = load_policy(str(tiny_model), larger, config)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ["a", "<think> 2", "b", "c"]]
    with pytest.raises(ValueError, match=r"train, row 1: the prompt has the token '<think>' \(258\), but the model"):
        train_prompts_of(Dataset.from_list(rows), policy, config)
    without = [row for row in rows if "<think>" not in row["prompt"][0]["content"]]
    assert len(train_prompts_of(Dataset.from_list([*without, *without]), policy, config)) == 6


def test_an_end_token_without_a_row_is_refused(tiny_model, tmp_path, larger) -> None:
    larger.eos_token = "</think>"
    with pytest.raises(ValueError, match=r"as its end of a text, has the token '</think>' \(259\)"):
        load_policy(str(tiny_model), larger, tiny.config(tmp_path))
