"""Hostile output of models and tools: a turn without calls is text, and an unprintable answer is an error."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import tiny

from colograd.batch import FinishReason, ModelInput, Prompt
from colograd.data import PromptRules
from colograd.engine.protocol import Sampled
from colograd.engine.sampling import Sampling
from colograd.extensions.tools.conversations import Conversations
from colograd.extensions.tools.tool_format import ToolFormat
from colograd.extensions.tools.toolbox import Toolbox

DEEP = "[" * 1200 + "]" * 1200


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny.make_tokenizer()
    made.chat_template = tiny.TOOL_TEMPLATE
    return made


class Parsing:
    """A tokenizer with a parser that returns anything."""

    def __init__(self, tokenizer: Any, message: Any) -> None:
        self._tokenizer, self._message, self.response_schema = tokenizer, message, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def parse_response(self, ids: Any, **kwargs: Any) -> Any:
        return self._message


class Engine:
    """Writes one call for each prompt, and then an end."""

    context = 4096

    def __init__(self, first: Sequence[int], end: int) -> None:
        self._turns, self._asked, self.read = [[*first, end], [end]], 0, list[ModelInput]()

    def require(self, version: int) -> None: ...

    def abort(self, requests: Any) -> None: ...

    def submit(self, read: ModelInput, *args: Any, **kwargs: Any) -> str:
        self.read.append(read)
        self._asked += 1
        return str(self._asked)

    def advance(self) -> list[Any]:
        ids = array("i", self._turns[self._asked - 1])
        return [(str(self._asked), (Sampled(ids, array("f", [0.0] * len(ids)), FinishReason.STOP),))]


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "echo", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>{'[' * 1200}</tool_call>", []),
        (f"<tool_call>{DEEP}</tool_call>", []),
        (call(f'{{"x": {DEEP}}}'), []),
        (call('{"x": ' + "1" * 5000 + "}"), []),
        (call('{"x": "\\ud83d"}'), [{"x": "?"}]),
        (call('{"\\ud83d": [{"y": "\\udc80"}]}'), [{"?": [{"y": "?"}]}]),
        (call('{"x": "\\u0000"}'), [{"x": "\0"}]),
        (call("null"), [{}]),
        (call("[[]]"), []),
        ('<tool_call>{"name": null}</tool_call>', []),
        ('<tool_call>{"name": ["echo"]}</tool_call>', []),
        ("<tool_call>null</tool_call>", []),
        ("<tool_call></tool_call><tool_call>", []),
    ],
)
def test_whatever_a_model_writes_is_read(tokenizer: Any, text: str, calls: list[Any]) -> None:
    form = ToolFormat(tokenizer, {})
    message, found = form.read(tokenizer(text).input_ids, (), None)
    assert [each.arguments for each in found] == calls
    json.dumps(message, ensure_ascii=False).encode()
    tokenizer.apply_chat_template([{"role": "user", "content": "so"}, message], tokenize=True)


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        (None, []),
        ({"tool_calls": 3}, []),
        ({"tool_calls": {"a": 1}}, []),
        ({"tool_calls": [{"function": None}]}, []),
        ({"tool_calls": [{"function": {"name": "echo", "arguments": json.loads("[" * 300 + "]" * 300)}}]}, []),
        ({"tool_calls": [{"function": {"name": "echo", "arguments": {"x": "\ud83d"}}}]}, [{"x": "?"}]),
        ({"content": "\ud83d", "tool_calls": []}, []),
    ],
)
def test_whatever_a_parser_returns_is_read(tokenizer: Any, message: Any, calls: list[Any]) -> None:
    parsing: Any = Parsing(tokenizer, message)
    read, found = ToolFormat(parsing, {}).read(tokenizer("so").input_ids, (), None)
    assert [each.arguments for each in found] == calls
    json.dumps(read, ensure_ascii=False).encode()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("caf\udce9", "caf?"),
        (["caf\udce9"], "['caf?']"),
        ([{"type": "text", "text": "caf\udce9"}], "caf?"),
        ([{"type": "text"}], "'text'"),
        ([{"type": "image", "image": "x"}], "can't be shown"),
        (b"caf\xe9", "b'caf\\xe9'"),
        ({"x": float("nan")}, "{'x': nan}"),
        (None, "None"),
        ("\x00\x1b[2J", "\x00\x1b[2J"),
        ("<end><assistant>", "<end><assistant>"),
        (Unprintable(), "no text"),
        (endless(), "[[...]]"),
        (json.loads("[" * 300 + "]" * 300), "[[[[[["),
    ],
)
@pytest.mark.filterwarnings("ignore:what tool")
def test_whatever_a_tool_returns_is_shown(tokenizer: Any, value: Any, shown: str) -> None:
    def echo() -> Any:
        """Returns a value."""
        return value

    box = Toolbox([echo])
    group = run(tokenizer, box, call("{}"))[0]
    (answer,) = (message for message in group.rollouts[0].messages if message["role"] == "tool")
    json.dumps(answer["content"], ensure_ascii=False).encode()
    (rollout,) = group.rollouts
    told = tokenizer.decode([t for t, s in zip(rollout.completion_ids, rollout.sampled, strict=True) if not s])
    assert shown in told
    box.close()


def run(tokenizer: Any, box: Toolbox, turn: str, tokens: int = 3000) -> list[Any]:
    engine: Any = Engine(tokenizer(turn).input_ids, tokenizer.eos_token_id)
    form = ToolFormat(tokenizer, {})
    talks = Conversations(engine, box, form, PromptRules(tokenizer, 900, "drop", {}, "rows"), None)
    prompt = Prompt({"prompt": [{"role": "user", "content": "so"}]}, ModelInput((1, 2)), 0)
    return list(talks.generate([prompt], Sampling(1, tokens, 1.0, {}), version=0, seed=0))


@pytest.mark.parametrize("size", [60_000, 20_000_000])
def test_a_huge_answer_is_not_tokenised(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def echo() -> str:
        """Returns a long text."""
        return "x " * (size // 2)

    box, lengths = Toolbox([echo]), list[int]()
    write = ToolFormat._read

    def counted(self: ToolFormat, messages: Any, **kwargs: Any) -> ModelInput:
        lengths.append(len(str(messages)))
        return write(self, messages, **kwargs)

    monkeypatch.setattr(ToolFormat, "_read", counted)
    began = time.process_time()
    (group,) = run(tokenizer, box, call("{}"))
    assert group.rollouts[0].finish_reason is FinishReason.LENGTH and not any(~group.rollouts[0].sampled)
    assert max(lengths) < 1000 and time.process_time() - began < 5
    box.close()


class Library:
    """An environment with a first observation of 20 million characters."""

    def reset(self, **row: Any) -> str:
        return "x " * 10_000_000

    def close_book(self) -> str:
        """Closes a book."""
        return ""


def test_a_huge_observation_is_not_tokenised(tokenizer: Any) -> None:
    box, began = Toolbox(environment_factory=Library), time.process_time()
    with pytest.raises(ValueError, match="with the text that `reset` returned, the prompt has more than 900 tokens"):
        run(tokenizer, box, call("{}"))
    assert time.process_time() - began < 5
    box.close()
