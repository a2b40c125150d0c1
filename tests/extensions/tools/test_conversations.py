"""Conversations with tools: who wrote each token, and that a tool's timing doesn't change the sampled tokens."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import tool_cases
import torch
from conversation_cases import EachTurnCalls, asked, rows, written
from datasets import Dataset
from tool_cases import Counter

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, ModelInput, Prompt, Rollout, ScoredGroup
from colograd.engine.sampling import Sampling
from colograd.extensions.recording.completions import logged_steps, read_log
from colograd.extensions.tools.conversations import Conversations
from colograd.extensions.tools.tool_format import ToolFormat
from colograd.extensions.tools.toolbox import Toolbox
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack

CALL = r'<tool_call>\{"name": "(add|subtract)", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny.make_tokenizer()
    made.chat_template = tiny.TOOL_TEMPLATE
    return made


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context that is long enough for calls spelled in bytes."""
    return tiny.make_model(tmp_path_factory.mktemp("models") / "talker", context=1024)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("template") / "tools.jinja"
    file.write_text(tiny.TOOL_TEMPLATE)
    return str(file)


def pieces(rollout: Rollout) -> list[tuple[bool, list[int]]]:
    """Split the completion into runs of tokens with the same author: (whether the model wrote them, the tokens)."""
    found: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(rollout.completion_ids, rollout.sampled.tolist(), strict=True):
        if not found or found[-1][0] != sampled:
            found.append((sampled, []))
        found[-1][1].append(token)
    return found


def scored(group: Group) -> ScoredGroup:
    return ScoredGroup(group, torch.zeros(len(group.rollouts), 1), torch.ones(len(group.rollouts)))


# -- a trainer with a tool that the model is forced to call


@pytest.fixture(scope="module")
def trained(talker: Path, template: str, tmp_path_factory: pytest.TempPathFactory):
    """A trainer after two steps with real calls: every turn of the model is a call."""
    folder, told = tmp_path_factory.mktemp("run"), []

    def reward(completions: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
        told.append((prompts, completions))
        return [float(len(str(messages)) % 7) for messages in completions]

    config = tiny.config(
        folder,
        max_completion_length=340,
        max_steps=2,
        prompts_per_step=2,
        chat_template_path=template,
        vllm_structured_outputs_regex=CALL,
        vllm_importance_sampling_correction=False,
        max_tool_calling_iterations=2,
        log_completions=True,
    )
    trainer = GRPOTrainer(str(talker), reward, config, rows(), tools=[tool_cases.add])
    seen = tiny.remembered_groups(trainer)
    trainer.train()
    yield trainer, seen, told
    trainer.close()


def test_masks_and_tokens_are_the_turns_and_the_answers_token_by_token(trained: Any) -> None:
    trainer, groups, _ = trained
    tokenizer, form = trainer.processing_class, trainer.sampler.source.form
    end, answered = tokenizer.eos_token_id, 0
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        cut = pieces(rollout)
        assert [sampled for sampled, _ in cut] == [index % 2 == 0 for index in range(len(cut))] and len(cut) <= 5
        for (_, turn), (_, answer) in zip(cut[::2], cut[1::2], strict=False):
            assert turn[-1] == end, "a turn is whole, with its end"
            text = tokenizer.decode(turn[:-1])
            match = re.fullmatch(CALL, text)
            assert match, text
            arguments = json.loads(text[len("<tool_call>") : -len("</tool_call>")])["arguments"]
            right = str(tool_cases.add(**arguments)) if match[1] == "add" else "{'error': 'Tool subtract not found.'}"
            assert tokenizer.decode(answer) == f"<tool>{right}<end><assistant>"
            message = {"role": "tool", "name": match[1], "content": right}
            assert tuple(answer) == form.answer([message]).ids
            answered += 1
        assert (rollout.sampler_logprobs[~rollout.sampled] == 0).all()
        assert (rollout.sampler_logprobs[rollout.sampled] <= 0).all()
    assert answered > 3, "the model called"


def test_reward_functions_get_all_messages(trained: Any) -> None:
    _, _, told = trained
    messages = [messages for _, completions in told for messages in completions]
    assert {m["role"] for of_one in messages for m in of_one} == {"assistant", "tool"}
    called = [of_one for of_one in messages if len(of_one) > 1]
    assert called and all(of_one[0]["tool_calls"][0]["function"]["name"] in ("add", "subtract") for of_one in called)
    assert all(of_one[-1]["role"] == "assistant" for of_one in messages)


def test_lengths_count_what_the_model_wrote_and_calls_are_counted(trained: Any) -> None:
    trainer, groups, _ = trained
    entry = next(entry for entry in trainer.state.log_history if entry["step"] == 1)
    of_step = groups[:2]
    written = [int(r.sampled.sum()) for g in of_step for r in g.rollouts]
    assert entry["completions/mean_length"] == pytest.approx(sum(written) / len(written))
    calls = sum(m["role"] == "tool" for g in of_step for r in g.rollouts for m in r.messages)
    assert entry["tools/calls"] >= calls and entry["tools/call_frequency"] == entry["tools/calls"] / len(written)
    assert 0 <= entry["tools/failure_frequency"] <= 1
    log, _ = read_log(logged_steps(Path(trainer.args.output_dir))[1])
    assert len(log) == 8 and all("<tool>" in row.completion for row in log)


def test_answers_are_no_part_of_the_loss(trained: Any) -> None:
    _, groups, _ = trained
    (row,) = pack([scored(group) for group in groups], 10_000, False, torch.device("cpu"))
    told = torch.cat([~rollout.sampled for group in groups for rollout in group.rollouts])
    assert row.loss_mask.sum() == (~told).sum() and told.any()


# -- the same engine, with calls read from anything


def ids_of(groups: list[Group]) -> list[Any]:
    return [(list(r.completion_ids), r.sampled.tolist()) for group in groups for r in group.rollouts]


def test_what_is_sampled_does_not_depend_on_the_tools_timing(trained: Any) -> None:
    trainer, _, _ = trained
    quick, slow = Toolbox([tool_cases.add]), Toolbox([tool_cases.slow_add])
    waited_for = Toolbox([tool_cases.add], main_thread=["add"])
    first, second = written(trainer, quick), written(trainer, slow, "slow_add")
    # The name is in neither template nor answer, so that the tokens are comparable.
    assert ids_of(first) == ids_of(second) == ids_of(written(trainer, waited_for))
    assert any(not sampled for _, mask in ids_of(first) for sampled in mask)


def test_the_trainer_gives_a_conversations_tokens_the_samplers_log_probabilities(trained: Any) -> None:
    trainer, _, _ = trained
    groups = written(trainer, Toolbox([tool_cases.add]))
    (row,) = pack([scored(group) for group in groups], 10_000, False, torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = policy_logprobs(trainer.model, row, 1.0)
    difference = (logprobs - row.sampler_logprobs) * row.loss_mask
    assert difference.abs().max() < 1e-3 and (row.loss_mask == 0).any()


def test_a_slow_tool_stalls_its_own_conversation_only(trained: Any) -> None:
    trainer, _, _ = trained
    gate, order = threading.Event(), []

    def held(a: int, b: int) -> int:
        """Waits for the others where it is called first.

        Args:
            a: one number
            b: another
        """
        mine = len(order)
        order.append(mine)
        if mine == 0:
            assert gate.wait(tiny.PATIENCE)
        elif mine >= 8:
            gate.set()
        return a + b

    written(trainer, Toolbox([held]), "held", iterations=3)
    assert gate.is_set() and len(order) > 9, "all others went on for a turn while the first waited"


def test_a_conversation_without_room_for_an_answer_is_truncated(trained: Any) -> None:
    trainer, _, _ = trained
    groups = written(trainer, Toolbox([tool_cases.add]), tokens=16)
    ends = [rollout for group in groups for rollout in group.rollouts]
    assert all(len(r.completion_ids) <= 16 and r.finish_reason is FinishReason.LENGTH for r in ends)
    assert all(r.messages[-1]["role"] == "assistant" for r in ends)


def test_an_environment_begins_the_prompt_and_its_rollouts_have_their_own(trained: Any) -> None:
    trainer, _, _ = trained
    in_thread, in_main = (Toolbox([tool_cases.add], Counter, main_thread=names) for names in ([], ["Counter"]))
    groups = written(trainer, in_thread)
    assert ids_of(groups) == ids_of(written(trainer, in_main))
    for group in groups:
        texts = [trainer.processing_class.decode(rollout.prompt_ids) for rollout in group.rollouts]
        assert all(text.endswith(f" from {group.example['start']}<end><assistant>") for text in texts)
        environments = [rollout.columns["environments"] for rollout in group.rollouts]
        assert len({id(e) for e in environments}) == 3 and {e.value for e in environments} == {group.example["start"]}
        assert group.rollouts[0].columns["prompts"][-1]["content"].endswith(f" from {group.example['start']}")


def test_what_is_in_flight_is_aborted_when_nobody_wants_it(trained: Any) -> None:
    trainer, _, _ = trained
    form = EachTurnCalls(trainer.processing_class)
    rules, prompts = asked(trainer, 4)
    trainer.engine.stamp(78)
    talks = Conversations(trainer.engine, Toolbox([tool_cases.slow_add]), form, rules, 4)
    groups = talks.generate(prompts, Sampling(2, 200, 1.0, {}), version=78, seed=1)
    next(groups)
    groups.close()
    trainer.engine.version = None
    assert not trainer.engine.core.has_unfinished_requests()


def test_a_function_may_write_the_rollouts(trained: Any) -> None:
    from colograd.extensions.custom_rollouts.source import CustomRollouts

    trainer, _, _ = trained
    asked: list[Any] = []

    end = trainer.processing_class.eos_token_id

    def rollout(prompts: list[Any]) -> dict[str, Any]:
        asked.append(prompts)
        size = len(prompts)
        return {
            "prompt_ids": [[1, 2]] * size,
            "completion_ids": [[5, 6, end if index % 2 else 7] for index in range(size)],
            "logprobs": [[-1.0, -2.0, [-3.0]]] * size,
            "env_mask": [[1, 0, 1]] * size,
            "luck": list(range(size)),
            "place": "here",
        }

    prompts = [Prompt(rows()[i], ModelInput((1, 2)), i) for i in range(2)]
    trainer.engine.stamp(79)
    writer = CustomRollouts(trainer.engine, rollout, {end})
    groups = list(writer.generate(prompts, Sampling(2, 10, 1.0, {}), version=79, seed=0))
    assert [p[0]["content"] for p in asked[0]] == ["0", "0", "so 1", "so 1"]
    assert [r.columns["luck"] for g in groups for r in g.rollouts] == [0, 1, 2, 3]
    assert {r.columns["place"] for g in groups for r in g.rollouts} == {"here"}, "no sequence: the same for all"
    first, second = groups[0].rollouts
    assert (first.finish_reason, second.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert first.sampled.tolist() == [True, False, True] and first.sampler_logprobs.tolist() == [-1, -2, -3]
    for broken, said in (
        ({"prompt_ids": [[1]]}, "must return a dict with prompt_ids, completion_ids, logprobs"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]]}, "1 `prompt_ids` for 4 completions"),
        ({"prompt_ids": [[1]] * 4, "completion_ids": [[1]] * 4, "logprobs": [[]] * 4}, "three numbers must be equal"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]], "completions": ["a"]}, "rename these"),
        ({"prompt_ids": 3, "completion_ids": [[1]], "logprobs": [[0.0]]}, "a single `prompt_ids` for 4"),
        ({"prompt_ids": [[1]] * 4, "completion_ids": [[999]] * 4, "logprobs": [[0.0]] * 4}, "the token id 999, but"),
    ):
        writer = CustomRollouts(trainer.engine, lambda prompts, broken=broken: broken, {end})
        with pytest.raises(ValueError, match=said):
            list(writer.generate(prompts, Sampling(2, 10, 1.0, {}), version=79, seed=0))
    trainer.engine.version = None


# -- how calls are read


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("no call", [], "no call"),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><end>', [("f", {"x": 1})], ""),
        ('so <tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', [("f", {}), ("g", {})], "so"),
        ('<tool_call>{"name": "f", </tool_call>', [], '<tool_call>{"name": "f", </tool_call>'),
        ('<tool_call>{"arguments": {}}</tool_call>', [], '<tool_call>{"arguments": {}}</tool_call>'),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', [], None),
        ("<tool_call>[1]</tool_call>", [], None),
    ],
)
def test_calls_are_read_and_malformed_ones_are_text(tokenizer: Any, text: str, calls: Any, content: str | None) -> None:
    message, found = ToolFormat(tokenizer, {}).read(tokenizer(text).input_ids, (), None)
    assert [(call.name, call.arguments) for call in found] == calls
    assert message["content"] == (text if content is None else content) and ("tool_calls" in message) == bool(calls)


def test_calls_are_read_as_trl_reads_them() -> None:
    templates = pytest.importorskip("trl.chat_template_utils")
    ours, theirs = tiny.make_tokenizer(), tiny.make_tokenizer()
    for made in (ours, theirs):
        made.add_special_tokens({"eos_token": "<|im_end|>"})
        made.chat_template = templates.qwen3_chat_template
    templates.add_response_schema(theirs)
    for text in (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        "plain<|im_end|>",
        '<tool_call>\n{"name": "f"</tool_call>',
    ):
        ids = theirs(text).input_ids
        prompt = theirs.apply_chat_template(
            [{"role": "user", "content": "so"}], add_generation_prompt=True, return_dict=False
        )
        expected = templates.parse_response(theirs, ids, prefix=prompt)
        for tokenizer in (ours, theirs):
            message, _ = ToolFormat(tokenizer, {}).read(ids, prompt, None)
            assert message.get("tool_calls") == expected.get("tool_calls")


def test_a_template_without_tools_is_refused() -> None:
    with pytest.raises(ValueError, match="doesn't write tools' calls"):
        ToolFormat(tiny.make_tokenizer(), {})


def test_a_turn_that_did_not_end_is_ended_before_the_answer(tokenizer: Any) -> None:
    form, answer = ToolFormat(tokenizer, {}), [{"role": "tool", "name": "f", "content": "3"}]
    assert tokenizer.decode(form.answer(answer).ids) == "<tool>3<end><assistant>"
    assert tokenizer.decode(form.answer(answer, last=5).ids) == "<end><tool>3<end><assistant>"


@pytest.mark.parametrize(
    ("end", "between", "turn_end", "expected"),
    [
        ("<|im_end|>", "\n", "<|im_end|>", "\n<tool>3<|im_end|>\n<assistant>"),
        ("<|im_end|>", "\n", "<end>", "<|im_end|>\n<tool>3<|im_end|>\n<assistant>"),
        ("<end>", "\n", "<end>", "\n<tool>3<end>\n<assistant>"),
        ("", "", "<end>", "<tool>3<assistant>"),
        ("", "", "<tool>", "3<assistant>"),  # GLM's: a turn ends with the token that begins the next one
    ],
)
def test_what_follows_a_turn_is_the_templates(end: str, between: str, turn_end: str, expected: str) -> None:
    """In ChatML of base models the end token differs from the token that ends a turn. The model may write both."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<tool>", "<assistant>"]})
    tokenizer.chat_template = tiny.TOOL_TEMPLATE.replace("<end>", f"{end}{between}")
    form, last = ToolFormat(tokenizer, {}), tokenizer.convert_tokens_to_ids(turn_end)
    answer = [{"role": "tool", "name": "f", "content": "3"}]
    assert tokenizer.decode(form.answer(answer, last=last).ids) == expected


def test_a_template_may_write_the_type_of_a_call() -> None:
    """As Python writes it, where a template has no `tojson`; contents that aren't text would be written so, too."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = tiny.TOOL_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls or '' }}")
    assert ToolFormat(tokenizer, {}).answer([{"role": "tool", "name": "add", "content": "3"}]).ids


def test_plain_text_prompts_have_no_tools(talker: Path, template: str, tmp_path: Path) -> None:
    plain = Dataset.from_list([{"prompt": "1 + 1 ="}] * 8)
    with pytest.raises(ValueError, match="plain text, but tools need a conversation"):
        GRPOTrainer(
            str(talker), tiny.vowels, tiny.config(tmp_path, chat_template_path=template), plain, tools=[tool_cases.add]
        )
