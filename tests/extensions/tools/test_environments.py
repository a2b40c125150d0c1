"""Tools and environments: which process runs them, and the cost of slow, failing and hanging tools."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sqlite3
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

import launcher
import pytest
import tiny
import tool_cases
import torch
from paths import SCRIPTS
from tool_cases import Counter, Silent

from colograd.batch import FinishReason, Group, ModelInput, Rollout
from colograd.data.columns import EMPTY
from colograd.extensions.tools.feature import ToolFeature
from colograd.extensions.tools.tool_format import ToolCall
from colograd.extensions.tools.toolbox import Toolbox, environment_reward, shown_content
from colograd.rewards import Scorer, resolve_rewards
from colograd.training.preparation import train_prompts_of


def answers(box: Toolbox, *calls: ToolCall, row: dict[str, Any] | None = None) -> list[str]:
    """Run calls in a fresh conversation and return the answers that the model reads."""
    session, beginning = box.open(row or {})
    settle(beginning)
    for each in beginning:
        box.outcome(each)
    begun = box.call(session, calls)
    settle(begun)
    return [message["content"] for message in box.told(begun)]


def settle(pending: Any) -> None:
    started = time.monotonic()
    while not all(call.done() for call in pending):
        assert time.monotonic() - started < tiny.PATIENCE
        time.sleep(0.01)


def call(name: str, a: int = 1, b: int = 2) -> ToolCall:
    return ToolCall(name, {"a": a, "b": b})


@pytest.fixture(params=[0, 1], ids=["threads", "worker"])
def workers(request: pytest.FixtureRequest) -> int:
    return request.param


def test_calls_are_answered_in_their_order(workers: int) -> None:
    box = Toolbox([tool_cases.slow_add, tool_cases.add, tool_cases.waits], None, workers)
    told = answers(box, call("slow_add", 1, 1), call("add", 2, 2), call("waits", 3, 3), call("add", 4, 4))
    box.close()
    assert told == ["2", "4", "6", "8"]
    assert box.take_counts()["tools/calls"] == 4


def test_a_tool_gets_what_the_model_wrote_whatever_its_name(workers: int) -> None:
    box = Toolbox([tool_cases.scan], None, workers)
    assert answers(box, ToolCall("scan", {"trainer_state": "a", "log_metric": "b"})) == ["a b"]
    box.close()


def test_what_goes_wrong_is_told_to_the_model(workers: int) -> None:
    box = Toolbox([tool_cases.fails, tool_cases.add, tool_cases.waits], None, workers)
    wrong = [ToolCall(name, {"a": 1}) for name in ("add", "waits")]
    told = answers(box, call("fails"), call("subtract"), call("add"), *wrong)
    box.close()
    assert told[0] == "{'error': 'division by zero'}" and told[1] == "{'error': 'Tool subtract not found.'}"
    assert told[2] == "3" and all("missing 1 required positional argument: 'b'" in told[i] for i in (3, 4))
    counts = box.take_counts()
    assert (counts["tools/failures"], counts["tools/timeouts"]) == (4, 0)


def test_a_tool_that_hangs_costs_its_deadline(workers: int) -> None:
    box = Toolbox([tool_cases.hangs, tool_cases.add], None, workers, timeout=2)
    assert answers(box, call("hangs")) == ["{'error': 'timed out after 2 s'}"]
    assert answers(box, call("add")) == ["3"], "others still run"
    box.close()
    assert box.take_counts()["tools/timeouts"] == 1


def test_an_async_tool_that_is_late_is_cancelled() -> None:
    box = Toolbox([tool_cases.waits], None, timeout=0.2)
    assert answers(box, call("waits")) == ["{'error': 'timed out after 0.2 s'}"]


def test_a_tool_may_end_its_worker() -> None:
    box = Toolbox([tool_cases.ends, tool_cases.add], None, workers=1)
    assert answers(box, call("ends"), call("add")) == ["{'error': \"the tool's process ended with status 3\"}", "3"]
    box.close()


def test_a_tool_that_can_not_travel_stays() -> None:
    lock = __import__("threading").Lock()

    def held(a: int, b: int) -> int:
        """Adds.

        Args:
            a: one number
            b: another
        """
        with lock:
            return a + b

    box = Toolbox([held], None, workers=1)
    assert answers(box, call("held")) == ["3"] and "held runs in the trainer's process" in box.notes[0]
    box.close()


def here(a: int, b: int) -> str:
    """Says where it runs.

    Args:
        a: one number
        b: another
    """
    return threading.current_thread().name


def test_main_thread_tool_runs_there_from_first_call(workers: int) -> None:
    """A tool with `signal.alarm` needs the main thread and runs there from its first call on."""
    box = Toolbox([tool_cases.alarmed, here, tool_cases.add], None, workers, main_thread=["alarmed", "here"])
    main = threading.current_thread().name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = answers(box, call("alarmed"), call("here"), call("add", 2, 2), call("alarmed", 5, 5))
    box.close()
    assert told == ["3", main, "4", "10"] and not [note for note in box.notes if "here" in note]
    counts = box.take_counts()
    assert (counts["tools/calls"], counts["tools/failures"]) == (4, 0)


def test_main_thread_tool_may_use_main_thread_connection() -> None:
    database = sqlite3.connect(":memory:")

    def query(sql: str) -> str:
        """Asks.

        Args:
            sql: a query
        """
        return str(database.execute(sql).fetchone()[0])

    asked = ToolCall("query", {"sql": "select 5"})
    assert answers(Toolbox([query], main_thread=["query"]), asked) == ["5"]
    with pytest.warns(UserWarning, match=r"query failed .* main_thread_tools: \[query\]"):
        (told,) = answers(Toolbox([query]), asked)
    assert "SQLite objects created in a thread" in told


def test_tool_needing_main_thread_moves_there_after_failure() -> None:
    calls = []

    def counted(a: int, b: int) -> int:
        """Wants the main thread.

        Args:
            a: one number
            b: another
        """
        calls.append(threading.current_thread().name)
        return tool_cases.alarmed(a, b)

    box = Toolbox([counted, tool_cases.add])
    with pytest.warns(
        UserWarning, match=r"from now on it runs there .*main_thread_tools: \[counted\].* With tool_workers a tool"
    ):
        told = answers(box, call("counted"), call("add", 2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers(box, call("counted")) == ["3"]
    assert told == ["{'error': 'signal only works in main thread of the main interpreter'}", "4"], "it isn't repeated"
    assert calls == ["colograd-tool", "MainThread"] and box.take_counts()["tools/failures"] == 1


def test_where_a_tool_of_the_user_raised_is_said_once() -> None:
    def stock(item: str) -> str:
        """Looks up.

        Args:
            item: such as red lamp
        """
        return {"red lamp": "1"}[item]

    box, asked = Toolbox([stock]), ToolCall("stock", {"item": "sofa"})
    place = rf"tests/extensions/tools/test_environments\.py:{stock.__code__.co_firstlineno + 6}"
    with pytest.warns(
        UserWarning, match=rf"tool 'stock' raised KeyError: 'sofa' \({place}\)\. The model reads the error"
    ):
        told = answers(box, asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers(box, asked) == told, "said once"
        answers(Toolbox([tool_cases.add]), ToolCall("add", {"c": 1}))  # the model's mistake, not the tool's


def test_a_call_in_the_main_thread_that_nobody_asks_for_never_runs() -> None:
    box = Toolbox([tool_cases.fails, here], main_thread=["here"])
    begun = box.call(box.open({})[0], [call("here")])
    assert begun[0].done()
    begun[0].abandon()
    assert begun[0].future.cancelled() and box.outcome(begun[0]).kind == "raised"


def test_returned_list_is_text_only_to_the_model() -> None:
    """Reward functions get the list itself."""
    box = Toolbox([tool_cases.rows])
    session, _ = box.open({})
    begun = box.call(session, [call("rows", 1, 2)])
    settle(begun)
    (message,) = box.told(begun)
    assert (
        message["content"] == [(1, 2), {"type": "row"}]
        and shown_content(message["content"]) == "[(1, 2), {'type': 'row'}]"
    )


def test_a_list_that_can_not_be_copied_is_text() -> None:
    def held(a: int) -> list:
        """Gives a lock.

        Args:
            a: a number
        """
        return [threading.Lock()]

    (told,) = answers(Toolbox([held]), ToolCall("held", {"a": 1}))
    assert isinstance(told, str) and told.startswith("[<unlocked")


# -- environments


def test_an_environment_lives_as_long_as_its_conversation_and_is_used_again() -> None:
    Counter.made = 0
    box = Toolbox(None, Counter)
    (first, beginning), (second, other) = box.open({"start": 5}), box.open({"start": 7})
    for pending, said in ((beginning, " from 5"), (other, " from 7")):
        settle(pending)
        assert box.outcome(pending[0]).value == said
    begun = box.call(first, [ToolCall("count", {"by": 2}), ToolCall("count", {"by": 3})])
    settle(begun)
    assert [message["content"] for message in box.told(begun)] == ["7", "10"]
    reward = environment_reward(Counter, box)
    assert reward.__name__ == "Counter" and reward([first.instance, None, second.instance]) == [
        10.0,
        None,
        7.0,
    ]
    box.environments.take_back()
    session, _ = box.open({"start": 0})
    assert Counter.made == 2 and session in (first, second)


def test_a_late_tool_leaves_the_environment_sound() -> None:
    box = Toolbox([tool_cases.hangs], Counter, timeout=2)
    session, beginning = box.open({"start": 1})
    settle(beginning)
    begun = box.call(session, [call("hangs"), ToolCall("count", {"by": 2})])
    settle(begun)
    assert [m["content"] for m in box.told(begun)] == [
        "{'error': 'timed out after 2 s'}",
        "3",
    ] and not session.stuck


def test_an_environment_whose_call_nobody_waits_for_is_not_used_again() -> None:
    box = Toolbox(None, Counter, timeout=30)
    session, beginning = box.open({})
    settle(beginning)
    box.call(session, [ToolCall("stall", {})])[0].abandon()
    box.environments.take_back()
    assert session.stuck and box.open({})[0] is not session


def test_declared_environment_keeps_call_order_in_main_thread() -> None:
    box = Toolbox(None, tool_cases.Alarmed, main_thread=["Alarmed"], timeout=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # a new one, and the same again
            session, beginning = box.open({})
            assert beginning[0].done() and box.outcome(beginning[0]).value == "so"
            begun = box.call(session, [ToolCall("step", {"by": 2}), ToolCall("look", {}), ToolCall("step", {"by": 3})])
            assert all(each.done() for each in begun) and [m["content"] for m in box.told(begun)] == [
                "[0, 2]",
                "[0, 2]",
                "[0, 2, 3]",
            ]
            assert environment_reward(tool_cases.Alarmed, box)([session.instance]) == [3.0]
            box.environments.take_back()


class Mixed:
    """An environment with a connection and a method that secretly needs the main thread, as in math-verify."""

    made: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.made.append(threading.current_thread().name)
        self.database = sqlite3.connect(":memory:")

    def reset(self, **row: Any) -> None:
        return None

    def verify(self) -> str:
        """Verifies."""
        try:
            return str(tool_cases.alarmed(1, 1))
        except ValueError as error:
            raise ValueError("threads aren't supported") from error

    def query(self) -> str:
        """Asks."""
        return str(self.database.execute("select 5").fetchone()[0])

    def get_reward(self) -> float:
        return float(self.verify())


@pytest.mark.parametrize("declared", [False, True])
def test_environment_keeps_its_thread_and_warning_names_setting(declared: bool) -> None:
    Mixed.made.clear()
    box = Toolbox(None, {"mixed": Mixed, "counter": Counter}, main_thread=["mixed"] if declared else [])
    session, beginning = box.open({"environment": "mixed"})
    settle(beginning)
    box.outcome(beginning[0])
    begun = box.call(session, [ToolCall("query", {}), ToolCall("verify", {}), ToolCall("query", {})])
    settle(begun)
    expected = pytest.warns(UserWarning, match=r"mixed failed .* main_thread_tools: \[mixed\]")
    with contextlib.nullcontext() if declared else expected:
        told = [message["content"] for message in box.told(begun)]
    assert told == ["5", "2" if declared else "{'error': \"threads aren't supported\"}", "5"]
    assert Mixed.made == ["MainThread" if declared else "colograd-environment"]


@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_hidden_method_needing_main_thread_raises_and_warns(method: str) -> None:
    """Methods `reset` and `get_reward` are no tools of the model."""

    class Bound(Counter):
        pass

    def bound(self: Any, **row: Any) -> Any:
        return tool_cases.alarmed(1, 1)

    setattr(Bound, method, bound)
    box = Toolbox(None, Bound)
    session, beginning = box.open({})
    settle(beginning)
    with pytest.warns(UserWarning, match=r"set main_thread_tools: \[Bound\]"):
        if method == "reset":
            assert box.outcome(beginning[0]).kind == "raised"
        else:
            with pytest.raises(ValueError, match="signal only works in main thread"):
                environment_reward(Bound, box)([session.instance])
    assert not session.stuck


class Stalling(Counter):
    """An environment whose `get_reward` never returns."""

    def get_reward(self) -> float:
        while True:
            time.sleep(0.1)


def test_an_environment_that_never_rewards_itself_is_late_and_not_used_again() -> None:
    box = Toolbox(None, Stalling)
    session, beginning = box.open({})
    settle(beginning)
    rewards = resolve_rewards([environment_reward(Stalling, box)], None)
    own = {"environments": session.instance}
    rollout = Rollout(ModelInput((1,)), (2,), torch.zeros(1), torch.ones(1).bool(), FinishReason.STOP, 0, (), own)
    group = Group({"prompt": "a"}, (rollout,), 0)
    scored = Scorer(rewards, timeout=0.3, on_error="abstain").submit([group], [["b"]]).result()
    assert scored.isnan().all() and session.stuck
    box.environments.take_back()
    again, beginning = box.open({})
    settle(beginning)
    assert again is not session


def test_a_factory_that_is_declared_has_the_main_thread_and_another_raises() -> None:
    class Bound(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.value = tool_cases.alarmed(2, 2)

    def bound() -> Bound:
        return Bound()

    counted = ToolCall("count", {"by": 2})
    assert answers(Toolbox(None, bound, main_thread=["bound"]), counted, row={"start": 1}) == ["3"]
    half = functools.partial(bound)
    assert answers(Toolbox(None, {"a": half, "b": Counter}, main_thread=["bound"]), counted, row={"environment": "a"})
    with (
        pytest.warns(UserWarning, match=r"set main_thread_tools: \[Bound\]"),
        pytest.raises(ValueError, match="signal"),
    ):
        Toolbox(None, Bound)


@pytest.mark.parametrize("named", ["ad", "waits", "count"])
def test_a_name_that_can_not_have_the_main_thread_is_refused(named: str) -> None:
    """The name is unknown, the tool is async, or the tool is a method of an environment."""
    tools = [tool_cases.add, tool_cases.waits]
    said = f"`main_thread_tools` has '{named}', but .* .add, game, Counter.: correct .* or leave main_thread_tools out"
    with pytest.raises(ValueError, match=said):
        Toolbox(tools, {"game": Counter}, main_thread=["add", named])


def test_a_factory_may_give_the_same_environment_again() -> None:
    same = Counter()
    box = Toolbox(None, lambda: same)
    environments = [box.open({})[0] for _ in range(2)]
    assert environments[0] is environments[1] and environments[0].instance is same
    environments[0].stuck = True
    box.environments.take_back()


class Table:
    """An environment whose database connection, like a browser, works only in the thread that opened it."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")

    def reset(self, **row: Any) -> None:
        self.second = sqlite3.connect(":memory:")

    def query(self, sql: str) -> list:
        """Asks both connections.

        Args:
            sql: a query
        """
        return [connection.execute(sql).fetchone()[0] for connection in (self.database, self.second)]

    def get_reward(self) -> float:
        return float(self.query("select 7")[0])


def test_all_that_an_environment_does_happens_in_one_thread() -> None:
    box = Toolbox(None, Table)
    for _ in range(2):  # a new one, and the same again
        session, beginning = box.open({})
        settle(beginning)
        for expected in (3, 4):
            begun = box.call(session, [ToolCall("query", {"sql": f"select {expected}"})])
            settle(begun)
            assert box.told(begun)[0]["content"] == [expected, expected]
        assert environment_reward(Table, box)([session.instance, None]) == [7.0, None]
        box.environments.take_back()
    box.close()


class Turns:
    """An environment that records the order in which its methods ran."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def reset(self, **row: Any) -> None:
        self.order = []

    async def slow(self) -> str:
        """Takes a while."""
        await asyncio.sleep(0.2)
        self.order.append("slow")
        return " ".join(self.order)

    async def quick(self) -> str:
        """Takes none."""
        self.order.append("quick")
        return " ".join(self.order)


def test_async_methods_of_an_environment_have_their_turn() -> None:
    box = Toolbox(None, Turns)
    session, beginning = box.open({})
    settle(beginning)
    begun = box.call(session, [ToolCall("slow", {}), ToolCall("quick", {})])
    settle(begun)
    assert [m["content"] for m in box.told(begun)] == ["slow", "slow quick"]


def test_an_async_tool_can_neither_end_nor_hold_up_the_loop() -> None:
    box = Toolbox([tool_cases.exits, tool_cases.clings, tool_cases.waits], timeout=1.5)
    assert answers(box, call("exits"), call("clings"), call("waits")) == [
        "{'error': 'SystemExit: 0'}",
        "{'error': 'timed out after 1.5 s'}",
        "3",
    ]


class Named:
    """An environment that reports the columns it got."""

    def reset(self, **row: Any) -> str:
        return " ".join(sorted(row))


def test_an_environment_of_a_dataset_without_prompts_gets_none() -> None:
    box = Toolbox(None, Named)
    for row, names in (({"prompt": EMPTY, "x": 1}, "x"), ({"prompt": "so", "x": 1}, "prompt x")):
        _, beginning = box.open(row)
        settle(beginning)
        assert box.outcome(beginning[0]).value == names


def test_without_a_dataset_there_are_empty_prompts_for_one_generation(tmp_path: Path) -> None:
    policy: Any = types.SimpleNamespace(context=200, tokenizer=tiny.make_tokenizer(), processor=None, rows=0)
    args = tiny.config(tmp_path, prompts_per_step=3, steps_per_generation=2)
    prompts = train_prompts_of(None, policy, args, ToolFeature(Toolbox(None, Counter)))
    assert [prompts[row] for row in range(len(prompts))] == [{"prompt": EMPTY}] * 6


def test_an_environment_that_is_stuck_is_left_to_itself() -> None:
    box = Toolbox([tool_cases.add], Counter, timeout=2)
    session, beginning = box.open({})
    settle(beginning)
    begun = box.call(session, [ToolCall("stall", {})])
    settle(begun)
    assert box.told(begun)[0]["content"] == "{'error': 'timed out after 2 s'}" and session.stuck
    begun = box.call(session, [ToolCall("count", {"by": 1}), call("add")])
    settle(begun)
    assert [m["content"] for m in box.told(begun)] == ["{'error': 'The environment is stuck.'}", "3"]
    box.environments.take_back()
    assert box.open({})[0] is not session


def test_rows_choose_among_environments() -> None:
    box = Toolbox([tool_cases.add], {"counter": Counter, "silent": Silent})
    names = [[s["function"]["name"] for s in box.schemas({"environment": e})] for e in ("counter", "silent")]
    assert names == [["add", "count", "stall"], ["add", "ask"]]
    asked = ToolCall("ask", {"what": "so"})
    assert answers(box, asked, row={"environment": "silent"}) == ["so!"], "async methods too"
    assert answers(box, asked, row={"environment": "counter"}) == ["{'error': 'Tool ask not found.'}"]
    assert [c.__name__ for c in box.reward_classes] == ["Counter"]
    with pytest.raises(ValueError, match="`environment` is 'game', but `environment_factory` has counter, silent"):
        box.schemas({"environment": "game"})


def test_a_reward_that_takes_environments_stays_in_the_trainers_process() -> None:
    scorer = Scorer(resolve_rewards([environment_reward(Counter, Toolbox(None, Counter))], None), workers=1)
    assert not scorer.notes, "no worker has it"
    scorer.close()


# -- what is refused


class NoReset:
    """Isn't an environment."""


def undescribed(a, b):
    return a + b


@pytest.mark.parametrize(
    ("tools", "factory", "said"),
    [
        ([3], None, "must list functions"),
        ([tool_cases.add, tool_cases.add], None, "two tools are called 'add'"),
        ([undescribed], None, "tool 'undescribed' can't be described to the model"),
        (["tool_cases:ad"], None, "Did you mean 'add'"),
        (None, NoReset, "has no method `reset`"),
    ],
)
def test_what_is_no_tool_is_refused(tools: Any, factory: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Toolbox(tools, factory)


def test_only_text_is_shown() -> None:
    assert shown_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert shown_content([1, 2]) == "[1, 2]" and shown_content(None) == "None" and shown_content([]) == "[]"
    assert shown_content([{"type": "house", "price": 3}]) == "[{'type': 'house', 'price': 3}]"
    with pytest.raises(ValueError, match="'image' can't be shown"):
        shown_content([{"type": "image", "image": None}])


# -- two ranks


@pytest.mark.slow
def test_hanging_tool_on_one_rank_only_times_out(tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(tiny.TOOL_TEMPLATE)
    model = tiny.make_model(tmp_path / "talker", context=512)
    script = SCRIPTS / "tool_ranks.py"
    done = launcher.run(script, model, template, tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert [e["step"] for e in first] == [e["step"] for e in second] == [1, 2]
    for entry in first:
        assert (entry["tools/calls"], entry["tools/timeouts"], entry["tools/failure_frequency"]) == (4, 2, 0.5)
