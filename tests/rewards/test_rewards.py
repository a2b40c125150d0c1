"""Reward functions: how they are found, called and checked."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import importlib
import math
import pickle
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from needs import case
from scoring_cases import score_group

from colograd.batch import FinishReason, Group, ModelInput, Rollout, ScoredGroup
from colograd.rewards import (
    RewardError,
    RewardFunction,
    Scorer,
    get_soft_overlong_punishment,
    last_number,
    resolve_rewards,
    think_format_reward,
    weighted_sum,
)
from colograd.rewards.answers import builtin_rewards
from colograd.rewards.calling import check_columns_for
from colograd.rewards.functions import code_digest, is_async
from colograd.rollout.rounds import SampledStep, unscored
from colograd.rollout.texts import with_messages


def make_group(size: int = 3, position: int = 17, **example: Any) -> Group:
    def rollout(length: int) -> Rollout:
        return Rollout(
            input=ModelInput((1, 2)),
            completion_ids=tuple(range(length)),
            sampler_logprobs=torch.zeros(length),
            sampled=torch.ones(length, dtype=torch.bool),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )

    return Group({"prompt": "2 + 2 =", **example}, tuple(rollout(i + 1) for i in range(size)), position)


def texts(size: int = 3) -> list[str]:
    return [f"text {i}" for i in range(size)]


def wrap(*functions: Any) -> list[RewardFunction]:
    return resolve_rewards(list(functions), None)


def score(function: Any, **example: Any) -> list[float]:
    return score_group(wrap(function), make_group(**example), texts())[0][:, 0].tolist()


def zeros(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


class Judge:
    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


# -- resolve


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards_module.py").write_text(
        "def mine(completions, **kw):\n    return [2.0] * len(completions)\nx = 3\n"
    )
    (tmp_path / "my_broken_module.py").write_text("raise OSError('no licence file')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "my_rewards_module", raising=False)
    return "my_rewards_module"


def test_names_paths_and_callables_resolve(user_module: str) -> None:
    given = [
        "last_number",
        f"{user_module}:mine",
        f"{user_module}.mine",
        zeros,
        Judge(),
        functools.partial(zeros, extra=1),
    ]
    resolved = resolve_rewards(given, None)
    assert [r.name for r in resolved] == ["last_number", "mine", "mine_2", "zeros", "Judge", "zeros_2"]
    assert [r.weight for r in resolved] == [1.0] * 6
    assert score_group(resolved[1:2], make_group(), texts())[0].tolist() == [[2.0]] * 3


def test_one_function_needs_no_list() -> None:
    assert [r.name for r in resolve_rewards("last_number", [0.5])] == ["last_number"]
    assert resolve_rewards(zeros, [0.5])[0].weight == 0.5


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [
        ([], None, "no reward function"),
        (None, None, "no reward function"),
        (["last_nmber"], None, r"nearest is 'last_number'.*package.module:function"),
        (["completely_else"], None, "package.module:function"),
        (["no_such_module:fn"], None, r"ModuleNotFoundError: No module named 'no_such_module'"),
        (["my_broken_module.fn"], None, r"OSError: no licence file"),
        (["my_rewards_module:min"], None, r"no attribute 'min'.*'mine'"),
        (["my_rewards_module.x"], None, "type int, but must be callable"),
        ([Judge], None, "is a class"),
        ([3.5], None, "type float, but must be callable"),
        ([zeros, Judge()], [1.0], r"1 weights \[1.0\] for 2 reward functions"),
        ([zeros], [], r"0 weights \[\] for 1 reward functions"),
        (["torch.nn:Linear"], None, "is a model, but an import path must lead to a function"),
    ],
)
def test_what_cannot_be_a_reward_function_is_refused(
    user_module: str, given: Any, weights: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_rewards(given, weights)


# -- call


def test_a_function_gets_trl_s_keywords() -> None:
    seen: dict[str, Any] = {}

    def look(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 0.0, 0.0]

    state = SimpleNamespace(global_step=1)
    score_group(wrap(look), make_group(answer="4", tags=["a"]), texts(), trainer_state=state)
    assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
    assert seen == {
        "prompts": ["2 + 2 ="] * 3,
        "completions": ["text 0", "text 1", "text 2"],
        "completion_ids": [[0], [0, 1], [0, 1, 2]],
        "completion_mask": [[1], [1, 1], [1, 1, 1]],
        "trainer_state": state,
        "answer": ["4"] * 3,
        "tags": [["a"]] * 3,
    }


def test_a_conversational_prompt_makes_conversational_completions() -> None:
    messages = [{"role": "user", "content": "hi"}]

    def look(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert prompts == [messages] * 2
        assert completions == [[{"role": "assistant", "content": f"text {i}"}] for i in range(2)]
        return [1.0, 0.0]

    group = make_group(size=2, prompt=messages)
    assert score_group(wrap(look), group, texts(2))[0].tolist() == [[1.0], [0.0]]


def test_a_completion_is_the_message_that_the_tokenizer_s_own_parser_reads() -> None:
    """The tokenizer's own parser reads chats, as in TRL. Unreadable completions and plain ones stay text."""

    class Tokenizer:
        response_schema, eos_token = {"thoughts": "apart"}, "<end>"

        def parse_response(self, ids: list[int]) -> dict[str, Any] | None:
            return None if len(ids) == 2 else {"thinking": str(ids), "content": "so<end>" if len(ids) == 1 else None}

    seen: list[Any] = []

    def look(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    talk, plain = make_group(prompt=[{"role": "user", "content": "so?"}]), make_group()
    for group in (talk, plain):
        score_group(wrap(look), with_messages(group, Tokenizer()), texts())
    assert seen == [
        [{"role": "assistant", "thinking": "[0]", "content": "so"}],
        [{"role": "assistant", "content": "text 1"}],
        [{"role": "assistant", "thinking": "[0, 1, 2]", "content": ""}],
        *texts(),
    ]
    assert with_messages(talk, object()) is talk


def test_a_completion_that_nobody_judged_is_told_with_its_row() -> None:
    group, nothing = make_group(size=2, task="poem"), float("nan")
    judged = ScoredGroup(group, torch.tensor([[1.0, nothing], [nothing, 2.0]]), torch.zeros(2))
    missed = ScoredGroup(group, torch.tensor([[1.0, nothing], [nothing, nothing]]), torch.zeros(2))
    first, second = (SampledStep(kept=(), sampled=(scored,)) for scored in (judged, missed))
    assert unscored([first, first]) == ""
    assert "abstained for completion 1 of the prompt '2 + 2 =' with {'task': 'poem'}" in unscored([first, second])


def test_a_function_without_kwargs_gets_only_what_it_names() -> None:
    def narrow(completions: list[str], answer: list[str], unknown: int = 5) -> list[float]:
        return [float(a) + unknown for a in answer]

    assert score(narrow, answer="4", other=1) == [9.0] * 3


def test_a_missing_column_is_named() -> None:
    def needy(completions: list[str], gold: list[str], **kwargs: Any) -> list[float]:
        return []

    with pytest.raises(RewardError, match=r"'needy', prompt 17: it needs 'gold' .*, but .* 'prompt', 'answer'"):
        score(needy, answer="4")


@pytest.mark.parametrize("workers", [0, 1])
def test_user_code_changes_no_other_arguments(workers: int) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": [call]}]
    example = {"prompt": prompt, "tests": [{"left": 3}], "spec": {"k": [1]}}

    def vandal(prompts: Any, completions: Any, tests: Any, spec: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        seen = []
        for i in range(3):
            fresh = prompts[i] == prompt and completions[i][0] == {"role": "assistant", "content": f"text {i}"}
            seen.append(float(fresh and tests[i] == [{"left": 3}] and spec[i] == {"k": [1]}))
            prompts[i][0]["tool_calls"][0]["function"]["arguments"]["a"] += 1
            prompts[i][0]["content"].clear()
            completions[i][0]["content"] = "gone"
            tests[i][0]["left"] -= 1
            spec[i]["k"].append(9)
        prompts.clear()
        kwargs["completion_ids"][0].clear()
        trainer_state.global_step = 99
        trainer_state.log_history.append({"loss": 0.0})
        return seen

    async def asynchronous(**kwargs: Any) -> list[float]:
        return vandal(**kwargs)

    group, state = make_group(**copy.deepcopy(example)), SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])
    scorer = Scorer(wrap(vandal, vandal, asynchronous), workers=workers)
    try:
        rewards = scorer.submit([group], [texts()], state).result()
    finally:
        scorer.close()
    assert rewards.tolist() == [[1.0, 1.0, 1.0]] * 3
    assert group.example == example and list(group.rollouts[0].completion_ids) == [0]
    assert state == SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])


def test_environments_reach_functions_themselves() -> None:
    game, group = Judge(), make_group()
    rollouts = tuple(dataclasses.replace(r, columns={"environments": game}) for r in group.rollouts)

    def same(environments: list[Any], **kwargs: Any) -> list[float]:
        return [float(each is game) for each in environments]

    group = dataclasses.replace(group, rollouts=rollouts)
    assert score_group(wrap(same), group, texts())[0].tolist() == [[1.0]] * 3


def test_each_group_has_its_own_columns() -> None:
    groups = [make_group(1, 0, note="n"), make_group(1, 1, answer="4")]
    seen: list[Any] = []

    def look(completions: list[Any], answer: list[Any], note: list[Any]) -> list[float]:
        seen.extend(zip(answer, note, strict=True))
        return [0.0] * len(completions)

    Scorer(wrap(look)).submit(groups, [["a"], ["b"]]).result()
    assert seen == [(None, "n"), ("4", None)]


def test_rewards_have_a_column_per_function_and_nan_for_none() -> None:
    rewards, seconds = score_group(wrap(lambda **_: [1, None, 0.5], zeros), make_group(), texts())
    assert rewards.dtype == torch.float32 and rewards.shape == (3, 2)
    assert rewards[:, 1].tolist() == [0.0] * 3
    assert rewards[0, 0] == 1 and rewards[1, 0].isnan() and rewards[2, 0] == 0.5
    assert list(seconds) == ["<lambda>", "zeros"] and all(s >= 0 for s in seconds.values())


async def slow_one(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.2)
    return [1.0] * len(completions)


def test_async_functions_run_concurrently_and_are_timed() -> None:
    """Each of two calls waits until both have begun."""
    begun: list[int] = []

    async def meeting(completions: list[Any], **kwargs: Any) -> list[float]:
        begun.append(1)
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    rewards, seconds = score_group(wrap(meeting, zeros, meeting), make_group(), texts())
    assert rewards.tolist() == [[1.0, 0.0, 1.0]] * 3
    assert seconds["meeting"] >= 0.19 and seconds["meeting_2"] >= 0.19


def test_async_functions_run_inside_a_running_loop() -> None:
    async def notebook_cell() -> list[list[float]]:
        return score_group(wrap(slow_one), make_group(), texts())[0].tolist()

    assert asyncio.run(notebook_cell()) == [[1.0]] * 3


def test_async_functions_keep_their_loop_between_groups() -> None:
    loops = []

    async def look(**kwargs: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * 3

    score(look)
    score(look)
    assert loops[0] is loops[1]


def test_an_async_callable_object_counts_as_async() -> None:
    class AsyncJudge:
        async def __call__(self, **kwargs: Any) -> list[float]:
            return [3.0] * 3

    assert score(AsyncJudge()) == [3.0] * 3
    assert is_async(AsyncJudge()) and is_async(functools.partial(async_raising)) and not is_async(raising)


def test_columns_that_a_function_needs_are_looked_for_before_it_is_called() -> None:
    def needy(completions: list[str], answr: list[str], log_extra: Any, given: int = 1, **kwargs: Any) -> list[float]:
        return []

    place = rf"tests/rewards/test_rewards\.py:{needy.__code__.co_firstlineno}"
    said = (
        rf"'needy': it needs 'answr' \({place}\), but the dataset has .* 'prompt', 'answer': .* Did you mean 'answer'\?"
    )
    with pytest.raises(ValueError, match=said):
        check_columns_for(wrap(slow_one, needy), ["prompt", "answer"])
    check_columns_for(wrap(slow_one, needy), ["prompt", "answr"])


# -- check


def raising(completions: list[Any], **kwargs: Any) -> list[float]:
    raise KeyError("no such test case")


async def async_raising(completions: list[Any], **kwargs: Any) -> list[float]:
    raise KeyError("no such test case")


@pytest.mark.parametrize("function", [raising, async_raising])
def test_a_function_that_raises_is_named_with_its_traceback(function: Any) -> None:
    with pytest.raises(RewardError) as caught:
        score_group(wrap(slow_one, function), make_group(position=4), texts())
    message = str(caught.value)
    assert f"reward function {function.__name__!r}, prompt 4: it raised KeyError: 'no such test case'" in message
    assert (
        "Traceback" in message and f"(tests/rewards/test_rewards.py:{function.__code__.co_firstlineno + 1})" in message
    )
    assert (
        "must return one number per completion" in message and "Mend it, or set `reward_on_error: abstain`" in message
    )
    assert "colograd/rewards/" not in message


@pytest.mark.parametrize("wrong", [lambda text: text.split("="), lambda text: float(text), lambda text: text + "."])
def test_one_that_takes_messages_for_text_is_told_so(wrong: Any) -> None:
    def taking_text(completions: list[Any]) -> list[float]:
        return [len(wrong(completion)) for completion in completions]

    with pytest.raises(RewardError, match=r"the text is `completion\[0\]\[\"content\"\]`"):
        score(taking_text, prompt=[{"role": "user", "content": "2 + 2 ="}])


@pytest.mark.parametrize(
    ("returned", "completion", "message"),
    [
        ([1.0], None, "1 rewards for 3 completions"),
        (torch.zeros(4), None, "4 rewards for 3 completions"),
        (None, None, "returned None .*list of 3 numbers"),
        (0.5, None, r"returned 0.5 \(float\)"),
        ("abc", None, r"returned 'abc' \(str\)"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, None, r"\(dict\), but a reward function must return a list of 3"),
        (torch.tensor(1.0), None, "must return a list of 3"),
        ([0.0, "1.0", 0.0], 1, r"reward is '1.0' \(str\)"),
        ([0.0, 0.0, math.inf], 2, r"reward is inf \(float\)"),
        ([-math.inf, 0.0, 0.0], 0, "reward is -inf"),
        ([0.0, math.nan, 0.0], 1, "reward is nan .* return None"),
        (np.array([0.0, 0.0, np.nan]), 2, "return None"),
        (torch.tensor([math.nan, 0.0, 0.0]), 0, "return None"),
        ([0.0, 1e39, 0.0], 1, "finite float32"),
        ([0.0, 10**400, 0.0], 1, "finite float32"),
        ([1j, 0.0, 0.0], 0, "complex"),
        (torch.zeros(3, 1), 0, "ndarray"),
        ([[1.0], 0.0, 0.0], 0, "list"),
    ],
)
def test_what_is_not_a_reward_is_named_with_its_row(returned: Any, completion: int | None, message: str) -> None:
    def wrong(**kwargs: Any) -> Any:
        return returned

    with pytest.raises(RewardError, match=message) as caught:
        score(wrong)
    assert (caught.value.function, caught.value.position, caught.value.completion) == ("wrong", 17, completion)


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, 0.0, 1.0],
        (1, 0, 1),
        [True, False, True],
        [np.float32(1), np.int64(0), np.bool_(True)],
        [torch.tensor(1.0), torch.tensor(0), torch.tensor(True)],
        [Fraction(1), 0, 1],
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([True, False, True]),
        np.array([1, 0, 1]),
    ],
)
def test_numbers_of_every_kind_are_rewards(returned: Any) -> None:
    assert score(lambda **_: returned) == [1.0, 0.0, 1.0]


def test_a_reward_error_can_be_sent_to_other_ranks() -> None:
    error = RewardError("f", 3, 1, "why")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "reward function 'f', prompt 3, completion 1: why"


def test_the_weighted_sum_skips_abstentions_and_is_nan_where_all_abstain() -> None:
    nan = math.nan
    total = weighted_sum(torch.tensor([[1.0, 2.0], [nan, 2.0], [nan, nan]]), [1.0, 0.5])
    assert total[:2].tolist() == [1.0 * 1 + 2 * 0.5, 2 * 0.5]
    assert total[2].isnan()


# -- built-in functions


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so 40 + 2 = 42", "6 * 7 = 42\n#### 42", 1.0),
        ("#### 42", 42, 1.0),
        ("the answer is 42.", "42", 1.0),
        ("**42**", "42.0", 1.0),
        ("$1,234.50", "1234.5", 1.0),
        ("1,000,000", "1000000", 1.0),
        ("-5", "-5", 1.0),
        ("\u22125", "-5", 1.0),
        ("-$5", "-5", 1.0),
        ("x=-5", "-5", 1.0),
        ("10-5", "5", 1.0),
        ("5", "-5", 0.0),
        (".5", "0.5", 1.0),
        ("1, 2, 3", "3", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("42 apples of 50", "42", 0.0),
        ("none", "42", 0.0),
        ("", "42", 0.0),
        ("42", "no number", None),
    ],
)
def test_last_number(completion: str, answer: Any, expected: float | None) -> None:
    assert last_number([completion], [answer]) == [expected]
    assert last_number([[{"role": "assistant", "content": completion}]], [answer]) == [expected]


MATHS = [r"so $\boxed{\frac{1}{3}}$", r"so $\boxed{\frac{1}{2}}$", "nothing", r"\boxed{1}"]
SOLUTIONS = [r"$\frac{1}{3}$", r"$\frac{1}{3}$", r"$\frac{1}{3}$", ""]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>\na\n</think>\nanswer", 1.0),
        ("<think></think>", 1.0),
        ("<think>a", 0.0),
        ("a<think>b</think>", 0.0),
        ("<think>a<think>b</think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(completion: str, expected: float) -> None:
    assert think_format_reward([completion]) == [expected]


def test_soft_overlong_punishment_follows_dapo_s_formula() -> None:
    function = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [0, 80, 81, 90, 100, 101, 500]
    assert function(completion_ids=[[0] * n for n in lengths]) == [0, 0, -1 / 20, -10 / 20, -1, -1, -1]


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_soft_overlong_punishment_refuses_a_cache_out_of_range(cache: int) -> None:
    with pytest.raises(ValueError, match=f"soft_punish_cache is {cache}"):
        get_soft_overlong_punishment(100, cache)


@pytest.mark.parametrize(
    "name",
    [
        case("accuracy_reward", "graders"),
        case("reasoning_accuracy_reward", "graders"),
        "think_format_reward",
        "get_soft_overlong_punishment",
    ],
)
def test_built_ins_agree_with_trl(name: str) -> None:
    """TRL's own functions, called on the same conversation; for the factory, its registered values."""
    theirs = pytest.importorskip("trl.rewards")
    function = getattr(theirs, name)
    if name.startswith("get_"):
        function = function(max_completion_len=1280, soft_punish_cache=256)
    completions = [[{"role": "assistant", "content": text}] for text in [*MATHS, r"<think>a</think>$\boxed{1}$"]]
    keywords = {
        "completions": completions,
        "completion_ids": [[0] * n for n in (1, 1024, 1100, 1280, 1281)],
        "solution": [*SOLUTIONS, "$1$"],
    }
    assert builtin_rewards()[name](**keywords) == function(**keywords)


def test_a_digest_follows_the_code_that_a_function_uses(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "import os\nWORDS = ['a']\nRANK = os.getpid()\nOTHER = 1\n\n\ndef helper(text):\n    return text in WORDS\n\n\n"
    )
    source += "def reward(completions, **kwargs):\n    return [float(helper(c) + RANK * 0) for c in completions]\n"
    edits = {
        "WORDS = ['a']": "WORDS = ['b']",
        "text in": "text not in",
        "+ RANK * 0": "* 2",
        "OTHER = 1": "# a comment",
    }
    digests = []
    for number, edited in enumerate([source, *(source.replace(*edit) for edit in edits.items())]):
        (tmp_path / f"digest_{number}.py").write_text(edited)
        digests.append(code_digest(importlib.import_module(f"digest_{number}").reward))
    assert digests[0] == digests[4] and len(set(digests)) == 4
