"""Third-party packages for agents and environments, each with the real engine.

They aren't part of the pinned environment: requirements/agents.txt has them, and each test is skipped without its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import agent_cases
import pytest

from colograd.batch import Rollout
from colograd.extensions.agents.branches import branches_of


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = agent_cases.trainer(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


def rollouts(trainer: Any, agent: Any, **settings: Any) -> list[Rollout]:
    """Run two sessions of an agent."""
    (group,) = agent_cases.run(trainer, agent, **settings)
    return list(group.rollouts)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application with web sockets on loopback; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def calls_of(rollout: Rollout) -> int:
    """Number of tool calls in the endpoint's replies to a session's program."""
    return sum(len(turn["reply"].get("tool_calls") or ()) for turn in rollout.columns["session"])


def test_the_openai_agents_package(trainer: Any) -> None:
    pytest.importorskip("agents.run")  # a folder of tests is called as the package is
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def solves(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
        added: list[int] = []

        @agents.function_tool(strict_mode=False)  # strict, its schema would take the place of the run's pattern
        def add(a: int, b: int) -> int:
            """Adds."""
            added.append(a + b)
            return a + b

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            own = agents.OpenAIChatCompletionsModel(model, client)
            agent = agents.Agent(name="adder", instructions="Add.", tools=[add], model=own)
            with suppress(agents.MaxTurnsExceeded):  # the model is made to call in every turn
                await agents.Runner.run(agent, row["question"], max_turns=3)
        return float(len(added))

    for rollout in rollouts(trainer, solves, calls=True):
        assert rollout.columns["agent_reward"] == calls_of(rollout) >= 2
        assert branches_of(rollout) == (), "each request went on from the last one's tokens"


def test_an_environment_of_openenv_on_a_server(trainer: Any) -> None:
    pytest.importorskip("openenv.core.env_server")
    from openenv.core import GenericEnvClient
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        text: str

    class Told(Observation):
        letters: int = 0

    class Letters(Environment[Guess, Told, State]):
        """A game with three guesses. A guess's reward is its share of the letters a to m."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Told:
            self._state = State(episode_id=episode_id, step_count=0)
            return Told(done=False, reward=0.0)

        def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Told:
            self._state.step_count += 1
            low = sum("a" <= letter <= "m" for letter in action.text)
            return Told(letters=low, reward=low / max(len(action.text), 1), done=self._state.step_count == 3)

        @property
        def state(self) -> State:
            return self._state

    def plays(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, Any]:
        asked: list[Any] = [{"role": "user", "content": row["question"]}]
        total = 0.0
        with agent_cases.client(base_url, api_key) as client, GenericEnvClient(base_url=row["server"]).sync() as env:
            result = env.reset()
            while not result.done:
                reply = client.chat.completions.create(model=model, messages=asked, max_tokens=6).choices[0].message
                result = env.step({"text": reply.content})
                total += result.reward
                asked += [reply, {"role": "user", "content": f"{result.observation['letters']} letters"}]
            return {"reward": total, "steps": env.state()["step_count"]}

    app = create_fastapi_app(Letters, Guess, Told, max_concurrent_envs=8)
    with serving(app) as server:
        for rollout in rollouts(trainer, plays, columns={"server": server}):
            assert rollout.columns["steps"] == len(rollout.columns["session"]) == 3
            assert 0.0 <= rollout.columns["agent_reward"] <= 3.0


def test_an_environment_of_verifiers_with_a_tool_server(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vf = pytest.importorskip("verifiers.v1")
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    helpers = Path(agent_cases.__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(helpers), *sys.path]))  # of the tool server and the program

    async def prepared(self: Any, source: str, *args: Any, **kwargs: Any) -> list[str]:
        await self.write("program.py", source.encode())
        return [sys.executable, "program.py"]

    # uv would install the chat program's packages anew: they are here.
    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepared)
    config = vf.SingleAgentEnvConfig.model_validate(
        {
            "taskset": {"id": "verifiers_sums"},
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3},
        }
    )

    def plays(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, Any]:
        variable = f"SESSION_{api_key[-8:]}"  # the package reads keys from the environment
        os.environ[variable] = api_key

        async def episode() -> Any:
            env = vf.SingleAgentEnv(config)
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            async with env.serving():
                (slot,) = env.slots(next(iter(env.taskset)))
                return await env.run_slot(slot, vf.ModelContext(model=model, client=client))

        (trace,) = asyncio.run(episode()).traces
        return {"reward": trace.reward, "turns": trace.num_turns, "errors": [str(error) for error in trace.errors]}

    for rollout in rollouts(trainer, plays, calls=True):
        assert rollout.columns["errors"] == []
        assert rollout.columns["turns"] == len(rollout.columns["session"]) == 3
        assert rollout.columns["agent_reward"] >= 2
        assert branches_of(rollout) == (), "each request went on from the last one's tokens"
