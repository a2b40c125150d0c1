"""Chat templates of many families, a tokenizer for each, and random turns of their models."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
from paths import ROOT

SAID = "the sum of two and three is five so we add them again then look it up before we say more 12 7 nothing"
WORDS = SAID.split(" ")


@dataclasses.dataclass
class Family:
    """A chat template, and how its model writes a turn behind it."""

    template: str
    ends: tuple[str, ...]
    write: Callable[[random.Random, str, str, list[dict[str, Any]]], str]  # reasoning, content, calls
    reasons: bool = True
    specials: tuple[str, ...] = ()
    most_calls: int = 2
    content_with_calls: bool = True


def dumped(draw: random.Random, value: Any) -> str:
    """Write JSON as a model does, not always as a template would."""
    return json.dumps(value, separators=draw.choice([(",", ":"), (", ", ": "), (" , ", " : ")]))


def hermes(think: Callable[[str], str]) -> Callable[..., str]:
    def write(draw: random.Random, reasoning: str, content: str, calls: list[dict[str, Any]]) -> str:
        made = [f"<tool_call>\n{dumped(draw, call)}\n</tool_call>" for call in calls]
        return think(reasoning) + "\n".join([*([content] if content else []), *made])

    return write


def qwen3_5(draw: random.Random, reasoning: str, content: str, calls: list[dict[str, Any]]) -> str:
    made = []
    for call in calls:
        given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call["arguments"].items())
        made.append(f"<tool_call>\n<function={call['name']}>\n{given}</function>\n</tool_call>")
    return f"{reasoning}\n</think>\n\n" + "\n\n".join([*([content] if content else []), *made])


def glm(draw: random.Random, reasoning: str, content: str, calls: list[dict[str, Any]]) -> str:
    made = []
    for call in calls:
        given = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in call["arguments"].items())
        made.append(f"\n<tool_call>{call['name']}\n{given}</tool_call>")
    return f"\n<think>{reasoning}</think>" + (f"\n{content}" if content else "") + "".join(made)


def gpt_oss(draw: random.Random, reasoning: str, content: str, calls: list[dict[str, Any]]) -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    if calls:
        given = dumped(draw, calls[0]["arguments"])
        return f"{thought} to=functions.{calls[0]['name']}<|channel|>commentary json<|message|>{given}"
    return f"{thought}<|channel|>final<|message|>{content}"


def llama(draw: random.Random, reasoning: str, content: str, calls: list[dict[str, Any]]) -> str:
    return dumped(draw, {"name": calls[0]["name"], "parameters": calls[0]["arguments"]}) if calls else content


def families() -> Iterator[tuple[str, Family]]:
    templates = pytest.importorskip("trl.chat_template_utils")
    chatml = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    plain = hermes(lambda reasoning: "")
    yield (
        "smollm2",
        Family(
            (ROOT / "recipes/chat_templates/smollm2_tools.jinja").read_text(), ("<|im_end|>",), plain, False, chatml
        ),
    )
    yield "qwen2.5", Family(templates.qwen2_5_chat_template, ("<|im_end|>",), plain, False, chatml)
    thinks = hermes(lambda reasoning: f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "")
    yield "qwen3", Family(templates.qwen3_chat_template, ("<|im_end|>",), thinks, True, chatml)
    yield "qwen3.5", Family(templates.qwen3_5_think_chat_template, ("<|im_end|>",), qwen3_5, True, chatml)
    marks = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    yield "glm-4.5", Family(templates.glm4moe_chat_template, ("<|user|>", "<|observation|>"), glm, True, marks)
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
    yield (
        "gpt-oss",
        Family(
            templates.gptoss_chat_template,
            ("<|return|>", "<|call|>"),
            gpt_oss,
            True,
            marks,
            1,
            content_with_calls=False,
        ),
    )
    marks = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    yield (
        "llama-3.1",
        Family(
            templates.llama3_1_chat_template,
            ("<|eot_id|>", "<|eom_id|>"),
            llama,
            False,
            marks,
            1,
            content_with_calls=False,
        ),
    )
    yield "no end in the template", Family(tiny.CHAT_TEMPLATE, ("<end>",), plain, False, (), 0)


FAMILIES = ["smollm2", "qwen2.5", "qwen3", "qwen3.5", "glm-4.5", "gpt-oss", "llama-3.1", "no end in the template"]


def tokenizer_of(family: Family) -> Any:
    """Make a tokenizer of bytes and merges, so that texts have several tokenisations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" ".join(WORDS), '{"name": "add", "arguments": {"a": 1, "b": 2}}\n\n'], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=family.ends[0], bos_token=None)
    fast.add_special_tokens({"additional_special_tokens": [*family.specials, *family.ends[1:]]})
    fast.chat_template = family.template
    return fast


class Model:
    """Writes random turns in random tokens."""

    def __init__(self, family: Family, tokenizer: Any, draw: random.Random) -> None:
        self.family, self.tokenizer, self.draw = family, tokenizer, draw
        self.ends = [tokenizer.convert_tokens_to_ids(end) for end in family.ends]

    def words(self, most: int) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(1, most)))

    def tokens(self, text: str) -> list[int]:
        """Tokenise a text in one of its many ways. Only special tokens stay whole."""
        canonical = self.tokenizer(text, add_special_tokens=False).input_ids
        if self.draw.random() < 0.3:
            return canonical
        found = []
        for token in canonical:
            piece = self.tokenizer.decode([token])
            if token in self.tokenizer.all_special_ids or len(piece) < 2 or self.draw.random() < 0.5:
                found.append(token)
            else:
                at = self.draw.randint(1, len(piece) - 1)
                found += self.tokenizer(piece[:at], add_special_tokens=False).input_ids
                found += self.tokenizer(piece[at:], add_special_tokens=False).input_ids
        return found

    def turn(self) -> tuple[list[int], dict[str, Any]]:
        """Return token ids and the message that a parser returns for these ids."""
        family, draw = self.family, self.draw
        reasoning = self.words(6) if family.reasons and draw.random() < 0.7 else ""
        calls = []
        if family.most_calls and draw.random() < 0.5:
            calls = [
                {"name": "add", "arguments": {"a": draw.randrange(20), "b": draw.randrange(20)}}
                for _ in range(draw.randint(1, family.most_calls))
            ]
        content = self.words(8) if not calls or (family.content_with_calls and draw.random() < 0.4) else ""
        ids = self.tokens(family.write(draw, reasoning, content, calls))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": f"c{i}", "type": "function", "function": {**c, "arguments": json.dumps(c["arguments"])}}
                for i, c in enumerate(calls)
            ]
        if calls or draw.random() < 0.9:  # else a limit of tokens ended it
            ids.append(self.ends[-1 if calls else 0])
        return ids, message
