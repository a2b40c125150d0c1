"""Tools and environments with pictures: in training rows, in the engine and in the journal."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import image_cases
import launcher
import picture_tools
import pyarrow as pa
import pytest
import tiny
import tiny_images
import tool_cases
import torch
from picture_tools import Room, look, make_model, processor_of, rows
from shown_rows import sample_entries

from colograd import GRPOTrainer
from colograd.batch import (
    FinishReason,
    Group,
    Logged,
    ModelInput,
    Prompt,
    Rollout,
    ScoredGroup,
)
from colograd.data import PromptRules
from colograd.engine.sampling import Sampling
from colograd.extensions.images.data import ImageReader
from colograd.extensions.images.rider import PER_TOKEN, STAND_IN, Images
from colograd.extensions.recording.event_log import json_line
from colograd.extensions.recording.group_views import TokenTexts
from colograd.extensions.tools.conversations import Conversations
from colograd.extensions.tools.tool_format import ToolCall, ToolFormat
from colograd.extensions.tools.toolbox import RunningCall, Toolbox, answer_content, shown_content
from colograd.policy import row_proof
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.rollout import group_records, store
from colograd.rollout.store import RewardedGroup
from colograd.usercode.calls import Outcome

# -- answers as tokens


@pytest.fixture(scope="module")
def form() -> ToolFormat:
    model, processor = processor_of("idefics3")
    return ToolFormat(processor.tokenizer, {}, ImageReader(processor, model.config.image_token_id))


def test_an_answer_has_the_tokens_that_trl_gives_it(form: ToolFormat) -> None:
    import trl_oracle

    trainer = trl_oracle.bare_trainer()
    trainer.processing_class = form.reader.processor
    trainer._tokenizer, trainer._is_vlm = trainer.processing_class.tokenizer, True
    trainer.chat_template, trainer.chat_template_kwargs = None, {}
    for content in (look(1, 2), look(2, 1), "text"):
        message = {"role": "tool", "name": "look", "content": content}
        theirs = trainer._get_tool_suffix_ids([message])
        shown = {**message, "content": shown_content(content, images=True)}
        answer = form.answer([shown])
        assert list(answer.ids) == list(theirs)
        if answer.images is not None:
            token = form.reader.image_token
            assert answer.images.places == tuple(at for at, id in enumerate(answer.ids) if id == token)
            assert answer.images.engine_ids.count(token) == len(answer.images.pictures)


def test_tool_written_image_token_is_refused_beside_picture(form: ToolFormat) -> None:
    """Text without a picture keeps the image token as an ordinary token."""
    message = {"role": "tool", "name": "look", "content": "an <image> token"}
    answer = form.answer([message])
    assert answer.images is None and answer.ids.count(form.reader.image_token) == 1
    beside = [{"type": "image", "image": tiny_images.picture(1)}, {"type": "text", "text": "an <image> token"}]
    with pytest.raises(ValueError, match=r"2 image token\(s\) in the text and 1 image"):
        form.answer([{**message, "content": beside}])


@image_cases.needs("torchvision")
def test_qwen3_vl_template_writes_pictures_of_tool_answers() -> None:
    """Chat templates as shipped with TRL. Qwen2.5-VL's doesn't write tools' calls and is refused."""
    import trl

    model, processor = processor_of("qwen3_vl")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    processor.tokenizer.eos_token = "<|im_end|>"
    reader, folder = ImageReader(processor, model.config.image_token_id), Path(trl.__file__).parent / "chat_templates"
    processor.chat_template = (folder / "qwen3_vl.jinja").read_text()
    shown = shown_content(look(1, 2), images=True)
    answer = ToolFormat(processor.tokenizer, {}, reader).answer([{"role": "tool", "name": "look", "content": shown}])
    assert answer.images is not None
    assert processor.tokenizer.decode(answer.images.engine_ids) == (
        f"\n<|im_start|>user\n<tool_response>\n{2 * picture_tools.PLACEHOLDERS['qwen3_vl']}12\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    processor.chat_template = (folder / "qwen2_5_vl.jinja").read_text()
    with pytest.raises(ValueError, match="doesn't write tools' calls and answers"):
        ToolFormat(processor.tokenizer, {}, reader)


def test_a_template_must_write_the_parts_of_tools_answers(form: ToolFormat) -> None:
    processor = copy.deepcopy(form.reader.processor)
    message = "{% if m['role'] == 'tool' %}{{ m['content'] }}{% else %}"
    processor.chat_template = processor.chat_template.replace("{% for part", message + "{% for part", 1).replace(
        "{% endfor %}{% for c", "{% endfor %}{% endif %}{% for c"
    )
    with pytest.raises(ValueError, match="writes a message's list of content parts as Python code, but must write"):
        ToolFormat(processor.tokenizer, {}, ImageReader(processor, form.reader.image_token))


def test_rejected_picture_becomes_an_error_and_a_warning() -> None:
    """Tells the error to the model and warns the user once."""
    box = Toolbox([look])
    messages = [{"role": "tool", "name": "look", "content": of} for of in (look(1, 2), "text")]
    with pytest.warns(UserWarning, match=r"what tool 'look' returned can't be shown \(too small\)"):
        told = box.refused(messages, ValueError("too small"))
    assert [m["content"] for m in told] == ["{'error': 'too small'}", "text"]
    assert box.counts["tools/failures"] == 1
    box.close()


def test_unreadable_picture_warns_once_per_tool() -> None:
    box = Toolbox([look])
    call = RunningCall("look", Future())
    call.future.set_result(Outcome("value", [{"type": "image", "image": "/nowhere.png"}], 0.0))
    with pytest.warns(UserWarning, match="what tool 'look' returned can't be shown .*/nowhere.png") as said:
        told = box.told([call, call], images=True)
    assert len(said) == 1 and box.counts["tools/failures"] == 2
    assert all("an image can't be read" in message["content"] for message in told)
    box.close()


def test_the_journal_reads_a_picture_with_a_large_colour_profile(form: ToolFormat) -> None:
    """PIL writes profiles of any size, and refuses to open a PNG with one of more than a mebibyte."""
    assert form.reader is not None
    picture = tiny_images.picture(1)
    picture.info["icc_profile"] = random.Random(0).randbytes(2**21)
    answer = form.answer([{"role": "tool", "name": "look", "content": [{"type": "image", "image": picture}]}])
    assert answer.images is not None
    ids, everything = answer.ids, torch.ones(len(answer), dtype=torch.bool)
    rollout = Rollout((1,), ids, torch.zeros(len(ids)), everything, FinishReason.STOP, 0, riders=(answer.images,))
    content = Images.table([rollout])
    assert len(content) < 2**16
    bare = dataclasses.replace(rollout, riders=())
    assert Images.with_table(pa.BufferReader(content), [bare], form.reader)[0].riders == rollout.riders


def test_what_cannot_be_shown_is_told_to_the_model() -> None:
    for content, said in (
        ([{"type": "image", "image": "/nowhere.png"}], "the tool's answer: an image can't be read"),
        ([{"type": "image"}], "an image can't be read"),
        ([{"type": "image", "image": tiny_images.picture(1)}, {"type": "audio"}], "'audio' can't be shown"),
    ):
        with pytest.raises(ValueError, match=said):
            answer_content(Outcome("value", content, 0.0), images=True)
    with pytest.raises(ValueError, match="'image' can't be shown to this model"):
        answer_content(Outcome("value", look(1, 1), 0.0))
    assert answer_content(Outcome("value", [1, {"type": "image"}], 0.0), images=True) == [1, {"type": "image"}]


def test_written_placeholders_are_replaced_for_the_engine() -> None:
    """Stand-ins keep the engine from seeing a picture in each of them."""
    told = Images("d", (8, 90, 9), ("picture",), {}, (1, 2), placeholder=90)
    first = ModelInput((90, 5))
    read = first.followed_by([90, 6]).followed_by((8, 90, 90, 9), told).followed_by([90])
    assert read.ids == (90, 5, 90, 6, 8, 90, 90, 9, 90) and read.images is not None
    assert read.images.places == (5, 6) and read.images.pictures == ("picture",)
    assert read.images.engine_ids == (STAND_IN, 5, STAND_IN, 6, 8, 90, 9, STAND_IN)


# -- rows


def answered(model: Any, family: str) -> list[ScoredGroup]:
    """Groups with pictures in their completions, for a prompt with a picture and a prompt without. The first completion
    has two answers with pictures. The second and third have one of them, the second after an image token that the model
    wrote. The last has none."""
    draw, found = torch.Generator().manual_seed(1), []
    for position, prompt in enumerate((tiny_images.made_up(model, family, 1, 1), ModelInput((3, 4, 5, 6)))):
        rollouts = []
        for index in range(4):
            written = torch.randint(5, 250, (3 + index,), generator=draw).tolist()
            if index == 1:
                written[1] = model.config.image_token_id
            ids, seen, sampled = written, [], [True] * len(written)
            for answer in range((2, 1, 1, 0)[index]):
                told = tiny_images.made_up(model, family, 1 + answer, 20 + 2 * position + answer)
                assert told.images is not None
                places = tuple(len(ids) + place for place in told.images.places)
                seen.append(dataclasses.replace(told.images, places=places))
                ids, sampled = ids + [*told.ids, 7, 8], sampled + [False] * len(told) + [True] * 2
            nothing = torch.zeros(len(ids))
            mask = torch.tensor(sampled)
            rollouts.append(Rollout(prompt, ids, nothing, mask, FinishReason.STOP, 0, riders=tuple(seen)))
        advantages = torch.tensor([1.0, -0.5, 0.25, 0.75])
        found.append(ScoredGroup(Group({}, tuple(rollouts), position), torch.zeros(4, 1), advantages))
    return found


@pytest.mark.parametrize("family", image_cases.but_slowly(image_cases.PACKED))
def test_packed_and_padded_rows_give_one_loss_and_one_gradient(family: str) -> None:
    model = image_cases.exact_model(family)
    assert row_proof.choose_rows(model, asked=[tiny_images.made_up(model, family, 2)]) == ""
    groups = answered(model, family)
    packed = image_cases.loss_and_gradients(model, groups, share=True)
    row_proof.set_attention(model, "sdpa")
    padded = image_cases.loss_and_gradients(model, groups, share=False)
    image_cases.check_alike(packed, padded, by_size=3e-5 if family == "gemma4_experts" else 0.0)


@pytest.mark.parametrize("family", image_cases.but_slowly(tiny_images.FAMILIES))
def test_rows_with_pictures_in_answers_give_the_models_own_probabilities(family: str) -> None:
    model, _ = tiny_images.random_model(family)
    assert row_proof.choose_rows(model, asked=[tiny_images.made_up(model, family, 2)]) == ""
    groups = []
    for group in answered(model, family):  # the model's own takes each image token for a picture's
        rollouts = tuple(group.group.rollouts[index] for index in (0, 2, 3))
        kept = dataclasses.replace(group.group, rollouts=rollouts)
        groups.append(ScoredGroup(kept, torch.zeros(3, 1), torch.ones(3)))
    rows = pack(groups, 400, False, torch.device("cpu"), share_prompts=True)
    assert float(row_proof.differences(model, rows, 1.0)[1].max()) < 1e-5


def test_what_a_picture_shows_reaches_what_is_written_behind_it() -> None:
    """A picture changes the tokens sampled after it. Otherwise the tests above would prove nothing."""
    model, _ = tiny_images.random_model("idefics3")
    groups = answered(model, "idefics3")[1:]
    before = image_cases.loss_and_gradients(model, groups, share=True)[0]
    for of in groups[0].group.rollouts[0].riders:
        of.inputs["pixel_values"].neg_()
    assert abs(image_cases.loss_and_gradients(model, groups, share=True)[0] - before) > 1e-3


# -- runs


class EachTurnCalls(ToolFormat):
    """A tool format that reads any output of a random model as a call."""

    name = "look"

    def read(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Any) -> tuple[dict, list[ToolCall]]:
        return {"role": "assistant", "content": ""}, [ToolCall(self.name, {"a": ids[0] % 10, "b": len(ids) % 10})]


def seeing_trainer(folder: Path, family: str, reward: Any, **changes: Any) -> GRPOTrainer:
    """A trainer with a model that is forced to call a tool in every turn."""
    config = tiny.config(
        folder / "run",
        **picture_tools.SETTINGS,
        max_steps=2,
        prompts_per_step=2,
        log_completions=True,
        journal="keep",
        **changes,
    )
    model = folder / "model"
    if not model.exists():
        make_model(model, family)
    return GRPOTrainer(str(model), reward, config, rows(), tools=[look, tool_cases.add])


@pytest.fixture(
    scope="module",
    params=["idefics3", image_cases.GEMMA3, *image_cases.OTHERS],
)
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Iterator[Any]:
    told: list[Any] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        told.extend(completions)
        return [float(sum(map(ord, str(messages[0].get("tool_calls")))) % 7) for messages in completions]

    trainer = seeing_trainer(tmp_path_factory.mktemp("run"), request.param, reward)
    seen = tiny.remembered_groups(trainer)
    trainer.train()
    yield trainer, seen, told
    trainer.close()


@pytest.mark.engine
def test_a_pictures_tokens_are_in_the_completion_and_not_in_the_loss(trained: Any) -> None:
    trainer, groups, _ = trained
    token, shown = trainer.policy.image_token, 0
    assert trainer.policy.why_padded == ""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        ids = torch.tensor(rollout.completion_ids)
        places = [place for of in rollout.riders for place in of.places]
        assert sorted(places) == (ids == token).nonzero().flatten().tolist()
        assert not rollout.sampled[places].any() and (rollout.sampler_logprobs[~rollout.sampled] == 0).all()
        answers = [m["content"] for m in rollout.messages if m["role"] == "tool" and isinstance(m["content"], list)]
        assert [len(of.pictures) for of in rollout.riders] == [len(content) - 1 for content in answers]
        shown += len(answers)
    assert shown > 4, "the model called"
    (row,) = pack([scored(group) for group in groups], 10_000, False, torch.device("cpu"))
    assert row.loss_mask.sum() == sum(int(r.sampled.sum()) for g in groups for r in g.rollouts)


@pytest.mark.engine
def test_reward_functions_get_the_pictures(trained: Any) -> None:
    _, _, told = trained
    contents = [m["content"] for messages in told for m in messages if m["role"] == "tool"]
    pictures = [part["image"] for c in contents if isinstance(c, list) for part in c if part["type"] == "image"]
    assert pictures and all(picture.mode == "RGB" for picture in pictures)
    assert any(isinstance(content, str) for content in contents), "the tool of texts was called, too"


@pytest.mark.engine
def test_samples_show_small_pictures_and_no_large_ones(trained: Any) -> None:
    trainer, groups, _ = trained
    pieces = TokenTexts(trainer.policy.tokenizer)
    told = [(scored(group), [0.0] * len(group.rollouts)) for group in groups[:2]]
    for entry in sample_entries(told, "train", ["r"], {}, pieces, False):
        rollout = groups[[g.position for g in groups].index(entry["position"])].rollouts[entry["index"]]
        prompt = rollout.input.images
        shown = sum(len(of.pictures) for of in rollout.riders)
        assert len(entry.get("images", ())) == min(4, shown) + (0 if prompt is None else len(prompt.pictures))
        assert b"PIL" not in json_line(entry)


@pytest.mark.engine
def test_the_journal_has_the_pictures(trained: Any) -> None:
    trainer, groups, _ = trained
    prompts = [Prompt(group.example, group.rollouts[0].input, group.position) for group in groups[:2]]
    trainer.journal.begin(0, "")
    found = trainer.journal.recall(prompts)
    for group in groups[:2]:
        again = found[group.position].group.rollouts
        for before, after in zip(group.rollouts, again, strict=True):
            assert after.input == before.input and after.riders == before.riders
            for one, other in zip(before.riders, after.riders, strict=True):
                assert one.places == other.places and all(
                    torch.equal(value, other.inputs[name])
                    for name, value in one.inputs.items()
                    if name not in PER_TOKEN
                )


def written(trained: Any, box: Toolbox, name: str, tokens: int = 120, **options: Any) -> list[Group]:
    """Sample three conversations for each of three prompts, with a few tokens in each turn."""
    trainer = trained[0]
    reader = ImageReader(trainer.policy.processor, trainer.policy.image_token)
    form = EachTurnCalls(trainer.policy.tokenizer, {}, reader)
    form.name = name
    rules = PromptRules(trainer.policy.tokenizer, 900, "drop", {}, "rows", reader=reader)
    prompts = [Prompt(row, reader.prompt(row, index, rules), index) for index, row in enumerate(rows(3))]
    sampling = Sampling(3, tokens, 1.0, {"stop_token_ids": list(range(40))} | options)
    talks = Conversations(trainer.engine, box, form, rules, 2)
    trainer.publish()
    groups = list(talks.generate(prompts, sampling, version=trainer.engine.version, seed=1))
    return sorted(groups, key=lambda group: group.position)


def scored(group: Group) -> ScoredGroup:
    return ScoredGroup(group, torch.zeros(len(group.rollouts), 1), torch.ones(len(group.rollouts)))


def difference(trainer: Any, groups: list[Group]) -> torch.Tensor:
    """Differences between the sampler's and the trainer's log-probabilities of the sampled tokens."""
    (row,) = pack([scored(group) for group in groups], 10_000, False, torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = policy_logprobs(trainer.model, row, 1.0)
    return ((logprobs - row.sampler_logprobs) * row.loss_mask).abs()


@pytest.mark.engine
def test_the_trainer_gives_a_conversation_with_pictures_the_samplers_log_probabilities(
    trained: Any, tried: Callable[..., None]
) -> None:
    trainer = trained[0]
    groups = written(trained, Toolbox([look]), "look")
    assert sum(len(rollout.riders) for group in groups for rollout in group.rollouts) > 6
    assert float(difference(trainer, groups).max()) < 1e-5
    kind = trainer.model.config.model_type
    tried("gemma3_vl" if kind == "gemma3" else kind, "tool_images")


@pytest.mark.engine
def test_an_environment_shows_pictures_in_the_prompt_and_in_answers(trained: Any) -> None:
    trainer = trained[0]
    groups = written(trained, Toolbox(None, Room), "go")
    assert float(difference(trainer, groups).max()) < 1e-5
    for group in groups:
        own = bool(group.example["images"])
        for rollout in group.rollouts:
            assert rollout.input.images is not None and len(rollout.input.images.pictures) == 1 + own
            assert rollout.columns["prompts"][-1]["content"][-1]["image"].size == (32, 32)
    recorded = RewardedGroup(groups[1], torch.zeros(3, 1), Logged({}, {}))
    prompt = Prompt(groups[1].example, ModelInput((1, 2)), 1)
    again = group_records.group_of(group_records.group_bytes(recorded), prompt, trainer.journal.reader).group
    assert [r.input for r in again.rollouts] == [r.input for r in groups[1].rollouts]
    assert float((difference(trainer, [again]) - difference(trainer, groups[1:2])).abs().max()) < 1e-6


@pytest.mark.engine
def test_picture_after_written_image_token_keeps_its_place(trained: Any) -> None:
    """The engine's prompt log-probabilities equal the trainer's, although vLLM sees a picture in any placeholder."""
    trainer = trained[0]
    (group,) = written(trained, Toolbox([look]), "look")[1:2]
    rollout, token = next(r for r in group.rollouts if r.riders), trainer.policy.image_token
    form = EachTurnCalls(trainer.policy.tokenizer, {}, trainer.journal.reader)
    answer = form.answer([{"role": "tool", "name": "look", "content": shown_content(look(1, 2), True)}])
    turn = [token, 50, token]
    read = rollout.input.followed_by(turn).followed_by(answer.ids, answer.images).followed_by([60, token, 70])
    theirs = trainer.engine.prompt_logprobs(read)[len(rollout.input) - 1 :]
    assert answer.images is not None
    placed = dataclasses.replace(answer.images, places=tuple(len(turn) + at for at in answer.images.places))
    ids, nothing = [*turn, *answer.ids, 60, token, 70], torch.zeros(len(turn) + len(answer) + 3)
    made = Rollout(rollout.input, ids, nothing, nothing == 0, FinishReason.STOP, 0, riders=(placed,))
    (row,) = pack([scored(Group({}, (made,), 0))], 10_000, False, torch.device("cpu"))
    with torch.no_grad():
        ours, _ = policy_logprobs(trainer.model, row, 1.0)
    assert float((ours - theirs).abs().max()) < 1e-4
    moved = pickle.loads(pickle.dumps(scored(Group({}, (made,), 0)).for_training())).group.rollouts[0]
    assert moved.riders[0].pictures == () and moved.riders[0].places == placed.places
    assert torch.equal(moved.riders[0].inputs["pixel_values"], placed.inputs["pixel_values"])


@pytest.mark.engine
def test_an_answer_without_room_is_left_out_whole(trained: Any) -> None:
    groups = written(trained, Toolbox([look]), "look", tokens=16)
    ends = [rollout for group in groups for rollout in group.rollouts]
    assert all(len(r.completion_ids) <= 16 and r.finish_reason is FinishReason.LENGTH for r in ends)
    assert all(r.messages[-1]["role"] == "assistant" and r.riders == () for r in ends)


@pytest.mark.slow
@pytest.mark.engine
def test_a_resumed_run_takes_pictures_from_the_journal(trained: Any, tmp_path: Path) -> None:
    """The resumed run samples, calls and scores nothing, and ends with the same weights."""
    first = trained[0]
    shutil.copytree(Path(first.args.output_dir) / store.FOLDER, tmp_path / "run" / store.FOLDER)
    shutil.copytree(Path(first.args.output_dir).parent / "model", tmp_path / "model")

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        raise AssertionError("it was scored")

    trainer = seeing_trainer(tmp_path, "", reward)
    trainer.train(resume_from_checkpoint="auto")
    for (name, before), after in zip(first.model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(before, after), name
    trainer.close()


@pytest.mark.slow
@pytest.mark.engine
def test_two_ranks_move_groups_with_pictures_and_train_to_the_same_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "idefics3")
    done = launcher.run(
        image_cases.RANKS, str(model), str(tmp_path / "run"), str(tmp_path), "float32", "look", "none", ranks=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}-of-2.json").read_text()) for rank in range(2)]
    assert all(step["differing"] == [] for rank in ranks for step in rank["seen"])
    assert ranks[0]["seen"][-1]["weights"] == ranks[1]["seen"][-1]["weights"]
    assert ranks[0]["moved"] > 0
