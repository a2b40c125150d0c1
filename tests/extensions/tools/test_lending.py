"""At most as many environments as in TRL are lent to conversations. They come back after scoring."""

from __future__ import annotations

import asyncio
import itertools
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from tool_cases import Counter

from colograd.batch import FinishReason, Group, ModelInput, Prompt
from colograd.engine.protocol import Sampled
from colograd.engine.sampling import Sampling
from colograd.extensions.tools.conversations import Conversations
from colograd.extensions.tools.environments import begin_lent
from colograd.extensions.tools.toolbox import Toolbox, environment_reward
from colograd.rewards import Scorer, resolve_rewards

SERVERS = ("localhost:1", "localhost:2")


class OneTurn:
    """An engine that ends each request with one token, in its turn."""

    context = 100

    def __init__(self) -> None:
        self.requests: list[str] = []

    def require(self, version: int) -> None: ...

    def submit(self, *args: Any, **kwargs: Any) -> str:
        self.requests.append(str(len(self.requests)) if not self.requests else str(int(self.requests[-1]) + 1))
        return self.requests[-1]

    def advance(self) -> Iterator[tuple[str, tuple[Sampled]]]:
        yield self.requests.pop(0), (Sampled(array("i", [5]), array("f", [-1.0]), FinishReason.STOP),)

    def abort(self, requests: Any) -> None: ...


class Server(Counter):
    """An environment on one of two servers. It counts the episodes that run at once."""

    playing: set[str] = set()
    most = 0

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def reset(self, **row: Any) -> None:
        self.value = row["start"]
        assert self.address not in Server.playing, "two conversations have one server"
        Server.playing.add(self.address)
        Server.most = max(Server.most, len(Server.playing))

    def get_reward(self) -> float:
        Server.playing.remove(self.address)
        return float(self.value)


class SlowServer(Server):
    async def get_reward(self) -> float:  # type: ignore[override]
        await asyncio.sleep(0.05)
        return Server.get_reward(self)


def play(kind: Any, limit: int | None, collects: bool = False) -> list[list[float]]:
    Server.playing, Server.most = set(), 0
    addresses = iter(SERVERS if not collects else [str(n) for n in range(20)])
    box = Toolbox(None, lambda: kind(next(addresses)), most_environments=limit)
    scorer = Scorer(resolve_rewards([environment_reward(kind, box)], None))
    begin = lambda groups: scorer.submit(groups, [["x", "x"]])  # noqa: E731
    form: Any = SimpleNamespace(read=lambda *args: ({"role": "assistant", "content": "x"}, []), reader=None)
    talks = Conversations(OneTurn(), box, form, None, None)  # type: ignore[arg-type]
    prompts = [Prompt({"prompt": [], "start": n}, ModelInput((1, 2)), n) for n in range(5)]
    pending: dict[int, Any] = {}
    try:
        groups: Any = talks.generate(prompts, Sampling(2, 10, 1.0, {}), version=1, seed=0)
        for group in list(groups) if collects else groups:
            assert isinstance(group, Group)
            pending[group.position] = begin_lent(box.environments, begin, [group])
        return [pending[n].result()[:, 0].tolist() for n in sorted(pending)]
    finally:
        box.close()


@pytest.mark.parametrize("kind", [Server, SlowServer])
def test_two_servers_serve_a_whole_round(kind: Any) -> None:
    assert play(kind, limit=2) == [[float(n)] * 2 for n in range(5)]
    assert Server.most == 2


def test_groups_that_nobody_scores_hang_nowhere() -> None:
    """Environments of unscored groups block nothing, e.g. if a subclass collects the groups of `generate`."""
    assert play(Server, limit=2, collects=True) == [[float(n)] * 2 for n in range(5)]
    assert Server.most == 10


def test_a_factory_that_fails_is_named() -> None:
    servers = itertools.cycle(SERVERS)
    addresses = iter([next(servers), next(servers)])

    def make_server() -> Server:
        return Server(next(addresses))

    box = Toolbox(None, make_server, most_environments=4)
    for _ in range(2):
        box.open({"start": 1})
    said = r"environment_factory 'make_server' couldn't make environment 3 .*: StopIteration\. Up to 4 environments"
    with pytest.raises(ValueError, match=said):
        box.open({"start": 1})
    box.close()


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 1}, 2),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 8),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "generation_batch_size": 4}, 4),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 1}, 2),
        ({"prompts_per_step": 3, "steps_per_generation": 2}, 12),
    ],
)
def test_as_many_are_lent_as_trl_makes(changes: dict[str, Any], most: int) -> None:
    settings: dict[str, Any] = {"num_generations": 2, "prompts_per_step": None, **changes}
    assert tiny.config(Path("unused"), **settings).environments_at_once == most


def test_environments_come_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are returned once, even if an async reward function ends while the next round starts."""
    box = Toolbox(None, Counter)
    environments, taking, goes_on = box.environments, threading.Event(), threading.Event()
    lent = environments.lend(None)
    group: Any = SimpleNamespace(position=0, rollouts=[SimpleNamespace(columns={"environments": lent.instance})])
    take_back = environments._take_back

    def slowly(environment: Any) -> None:
        taking.set()
        goes_on.wait(0.2)
        take_back(environment)

    monkeypatch.setattr(environments, "_take_back", slowly)
    scored = threading.Thread(target=environments.take_back)
    scored.start()
    assert taking.wait(tiny.PATIENCE)
    environments.end_scoring([group])
    goes_on.set()
    scored.join()
    assert environments.lend(None) is lent
    assert environments.lend(None) is not lent
    box.close()
