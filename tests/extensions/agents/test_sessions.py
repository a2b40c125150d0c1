"""Sessions of agents against the real engine: the requests, the trained tokens, and the effects of faults."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_cases
import httpx
import pytest
import tiny
import torch
from agent_cases import run

from colograd.batch import Group, Rollout, ScoredGroup
from colograd.extensions.agents import endpoint, session
from colograd.extensions.agents.branches import branches_of
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A trainer after two steps with an agent. The model is forced to call its tool in every turn."""
    trainer = agent_cases.trainer(tmp_path_factory.mktemp("run"))
    seen = tiny.remembered_groups(trainer)
    trainer.train()
    yield trainer, seen
    trainer.close()


def sessions_of(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def test_a_run_trains_what_the_agents_model_wrote(trained: Any) -> None:
    trainer, groups = trained
    tokenizer, calls = trainer.processing_class, 0
    for rollout in sessions_of(groups):
        assert tokenizer.decode(rollout.prompt_ids).endswith("<end><assistant>")
        turns = rollout.columns["session"]
        assert int(rollout.sampled.sum()) == sum(turn["tokens"] for turn in turns)
        calls += sum(len(turn["reply"].get("tool_calls", ())) for turn in turns)
        assert rollout.columns["agent_reward"] == sum(len(t["reply"].get("tool_calls", ())) for t in turns)
        assert branches_of(rollout) == (), "each request went on from the last one's tokens"
        assert rollout.messages[0]["role"] == "assistant"
    entry = next(entry for entry in trainer.state.log_history if entry["step"] == 1)
    assert calls > 8 and entry["reward"] == entry["rewards/agent_reward/mean"] > 0
    assert entry["agent/sessions"] == 8 and entry["agent/requests"] >= 8 and "agent/failures" not in entry


def test_the_trainer_gives_a_sessions_tree_the_samplers_log_probabilities(trained: Any) -> None:
    trainer, _ = trained
    groups = run(trainer, agent_cases.compacting, prompts=2)
    scored = [ScoredGroup(g, torch.zeros(len(g.rollouts), 1), torch.ones(len(g.rollouts))) for g in groups]
    (row,) = pack(scored, 10_000, False, torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = policy_logprobs(trainer.model, row, 1.0)
    assert ((logprobs - row.sampler_logprobs) * row.loss_mask).abs().max() < 1e-3
    assert any(branches_of(rollout) for rollout in sessions_of(groups)), "the short context is a branch"
    assert {r.columns["agent_reward"] for r in sessions_of(groups)} == {None}


def test_each_answer_may_have_a_reward_of_its_own(trained: Any) -> None:
    trainer, _ = trained

    def rewarded(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, Any]:
        agent_cases.compacting(base_url, api_key, model, row)
        return {"reward": 1.0, "turn_rewards": [1.0, 0.0, 0.5]}

    (group,) = run(trainer, rewarded)
    advantages = trainer.compute_advantages(group, torch.ones(2, 1))
    for rollout, of_tokens in zip(
        group.rollouts, advantages.split([len(r.completion_ids) for r in group.rollouts]), strict=True
    ):
        turns, sampled = rollout.columns["session"], rollout.sampled.tolist()
        for turn, sign in zip(turns, (1, -1, 0), strict=True):
            of_turn = slice(turn["at"], turn["at"] + turn["tokens"])
            assert of_tokens[of_turn].sign().unique().tolist() == [sign] and all(sampled[of_turn])
    (group,) = run(trainer, lambda row: {"reward": 1.0, "turn_rewards": [1.0]}, agent_on_error="abstain")
    assert all("one for each of the 0 answers" in rollout.columns["agent_failure"] for rollout in group.rollouts)


def test_what_is_sampled_depends_on_the_session_and_not_on_time(trained: Any) -> None:
    trainer, _ = trained

    def slow(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
        time.sleep(hash(api_key) % 7 / 20)
        agent_cases.compacting(base_url, api_key, model, row)

    first, second = (run(trainer, agent, prompts=2) for agent in (agent_cases.compacting, slow))
    assert [list(r.completion_ids) for r in sessions_of(first)] == [list(r.completion_ids) for r in sessions_of(second)]
    assert len({tuple(r.completion_ids) for r in sessions_of(first)}) == 4


def test_the_clients_of_openai_and_anthropic_are_answered(trained: Any) -> None:
    trainer, _ = trained
    told: dict[str, Any] = {}

    async def asks(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
        from anthropic import AsyncAnthropic
        from openai import AsyncOpenAI

        asked: list[Any] = [{"role": "user", "content": "so"}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as openai:
            told["models"] = [each.id for each in (await openai.models.list()).data]
            chat = openai.chat.completions
            told["two"] = await chat.create(model=model, messages=asked, n=2, logprobs=True, max_tokens=4, stop=["q"])
            stream = await chat.create(
                model=model, messages=asked, stream=True, max_tokens=12, stream_options={"include_usage": True}
            )
            told["stream"] = [chunk async for chunk in stream]
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            told["json"] = await chat.create(
                model=model,
                messages=asked,
                response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
            )
            told["text"] = await openai.completions.create(model=model, prompt=["a", "b"], max_tokens=3, logprobs=1)
            told["many"] = await asyncio.gather(
                *(chat.create(model=model, messages=asked, max_tokens=3) for _ in range(8))
            )
        async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0) as anthropic:
            told["message"] = await anthropic.messages.create(model=model, messages=asked, max_tokens=4)
            async with anthropic.messages.stream(model=model, messages=asked, max_tokens=4) as events:
                told["events"] = await events.get_final_message()
            told["tool"] = await anthropic.messages.create(
                model=model,
                messages=asked,
                max_tokens=60,
                tools=[{"name": "add", "input_schema": agent_cases.TOOLS[0]["function"]["parameters"]}],
                tool_choice={"type": "any"},
            )
        return 1.0

    (group,) = run(trainer, asks, size=1)
    (rollout,) = group.rollouts
    assert told["models"] == ["model"]
    assert [choice.index for choice in told["two"].choices] == [0, 1]
    assert told["two"].usage.completion_tokens == sum(len(c.logprobs.content) for c in told["two"].choices)
    chunks = told["stream"]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens <= 12
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    if told["json"].choices[0].finish_reason == "stop":
        assert isinstance(json.loads(told["json"].choices[0].message.content)["a"], int)
    assert len(told["text"].choices) == 2 and len(told["text"].choices[0].logprobs.tokens) <= 3
    assert told["message"].content[0].type == "text" and told["message"].usage.output_tokens <= 4
    assert told["events"].stop_reason in ("max_tokens", "end_turn")
    if told["tool"].stop_reason == "tool_use":
        assert {*told["tool"].content[-1].input} == {"a", "b"}
    turns = rollout.columns["session"]
    assert len(turns) == 2 + 1 + 1 + 2 + 8 + 3
    assert int(rollout.sampled.sum()) == sum(turn["tokens"] for turn in turns)


def test_a_command_in_any_language_is_an_agent(trained: Any, tmp_path: Path) -> None:
    trainer, _ = trained
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "row = json.load(sys.stdin)\n"
        "body = {'model': os.environ['COLOGRAD_MODEL'], 'max_tokens': 4,"
        " 'messages': [{'role': 'user', 'content': row['question']}]}\n"
        "asked = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode(),"
        " {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'})\n"
        "told = json.load(urllib.request.urlopen(asked))\n"
        "print('working')\n"
        "print(json.dumps({'reward': 0.5, 'tokens': told['usage']['completion_tokens']}))\n"
    )
    (group,) = run(trainer, f"{sys.executable} {script}")
    for rollout in group.rollouts:
        assert rollout.columns["agent_reward"] == 0.5
        assert rollout.columns["tokens"] == int(rollout.sampled.sum())


def test_a_command_that_sigterm_ended_runs_again(trained: Any, tmp_path: Path) -> None:
    """A scheduler sends SIGTERM to all processes of a job, and the trainer finishes the generation first."""
    trainer, _ = trained
    again = tmp_path / "again"
    once = tmp_path / "once.sh"
    once.write_text(f"test -e {again} && echo 0.25 && exit\ntouch {again}\nkill -TERM $$\n")
    (group,) = run(trainer, f"sh {once}", size=1)
    assert group.rollouts[0].columns["agent_reward"] == 0.25
    with pytest.raises(RuntimeError, match="ended with status -15"):
        run(trainer, "sh -c 'kill -TERM $$'", size=1)


# -- faults


def ask(base_url: str, key: str, body: Any, path: str = "/chat/completions", **further: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(base_url + path, content=content, headers={"Authorization": f"Bearer {key}"}, **further)


def test_what_is_wrong_is_a_clear_http_error_and_no_sessions_end(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained
    monkeypatch.setattr(endpoint, "LARGEST", 4000)
    fine = {"model": "model", "messages": [{"role": "user", "content": "so"}], "max_tokens": 2}
    cases: list[tuple[Any, int, str]] = [
        ({**fine, "temperature": 0.3}, 400, "temperature is 0.3 in the request, but 1.0 in this run"),
        ({**fine, "top_p": 0.9}, 400, "top_p is 0.9"),
        ({**fine, "logit_bias": {"3": 4.0}}, 400, "logit_bias"),
        ({**fine, "messages": []}, 400, "`messages` is empty"),
        ({**fine, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         400, "only text is supported"),
        ({**fine, "messages": 3}, 400, "messages"),
        ({**fine, "n": 100}, 429, "agent_parallel"),
        ({**fine, "echo": True}, 400, "echo"),
        ({**fine, "chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs has chat_template"),
        ({**fine, "messages": [{"role": "user", "content": "x" * 3000}]}, 400, "the context of 1024 tokens"),
        ({**fine, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
         400, "refuses"),
        (b"\x00{rubbish", 400, "isn't JSON"),
        ([], 400, "isn't a JSON object"),
    ]  # fmt: skip
    told: list[httpx.Response] = []

    def wrong(base_url: str, api_key: str) -> float:
        told[:] = [ask(base_url, api_key, body) for body, _, _ in cases]
        told.append(ask(base_url, "sk-another", fine))
        told.append(ask(base_url, api_key, fine, "/embeddings"))
        told.append(ask(base_url, api_key, b"{" + b" " * 2000 + b"}"))
        told.append(ask(base_url, api_key, {"model": "model", "prompt": [2**31]}, "/completions"))
        plain = ask(
            base_url, api_key, {"model": "model", "prompt": [5, 6], "logprobs": 0, "max_tokens": 2}, "/completions"
        )
        assert plain.status_code == 200, plain.text
        assert len(plain.json()["choices"][0]["logprobs"]["token_logprobs"]) == 2, plain.text
        assert ask(base_url, api_key, fine).status_code == 200
        return 1.0

    run(trainer, wrong, size=1, agent_requests=100, agent_parallel=8)
    for (_, status, text), response in zip(cases, told, strict=False):
        assert response.status_code == status and text in response.json()["error"]["message"], response.text
    assert [response.status_code for response in told[len(cases) :]] == [401, 404, 400, 400]


def test_other_sampling_settings_may_be_answered_and_are_not_trained(trained: Any) -> None:
    trainer, _ = trained

    def greedy(base_url: str, api_key: str) -> float:
        asked = {"model": "model", "messages": [{"role": "user", "content": "so"}], "max_tokens": 4}
        first, second = (ask(base_url, api_key, {**asked, "temperature": 0.0}).json() for _ in range(2))
        assert first["choices"][0]["message"] == second["choices"][0]["message"]
        return float(ask(base_url, api_key, asked).json()["usage"]["completion_tokens"])

    (group,) = run(trainer, greedy, size=1, agent_sampling="untrained")
    (rollout,) = group.rollouts
    assert int(rollout.sampled.sum()) == rollout.columns["agent_reward"]
    assert [turn["trained"] for turn in rollout.columns["session"]] == [False, False, True]


def test_a_session_that_hangs_dies_floods_or_calls_late_disturbs_no_other(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained
    gate, late, statuses, whole = threading.Event(), [], set[int](), []
    # Its time is over when all others have ended, however slow this machine is.
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + (1e6 if len(whole) == 3 else 0.0))
    monkeypatch.setattr(session, "time", clock)

    def fine(base_url: str, api_key: str, **row: Any) -> float:
        answer = ask(
            base_url, api_key, {"model": "m", "messages": [{"role": "user", "content": "so"}], "max_tokens": 3}
        )
        return float(answer.json()["usage"]["completion_tokens"])

    def faulty(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        kind = int(row["question"][8])
        if kind == 1:  # hangs, and calls after its end
            gate.wait(tiny.PATIENCE)
            return 1.0
        if kind == 2:
            raise SystemExit(3)
        if kind == 3:  # floods: more than it may, and hangs up on some

            async def flood() -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": "so"}], "max_tokens": 30}
                async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
                    patience = [0.5 if number % 10 else tiny.PATIENCE for number in range(100)]
                    address = base_url + "/chat/completions"
                    asked = [client.post(address, json=body, timeout=seconds) for seconds in patience]
                    for answer in await asyncio.gather(*asked, return_exceptions=True):
                        statuses.add(getattr(answer, "status_code", 0))

            asyncio.run(flood())
            late.append((base_url, api_key))
            return 1.0
        return fine(base_url, api_key)

    alone = run(trainer, fine, prompts=1)
    groups = run(trainer, faulty, prompts=4, each=whole.append, agent_timeout=1e5, agent_on_error="abstain")
    gate.set()
    assert [list(r.completion_ids) for r in groups[0].rollouts] == [list(r.completion_ids) for r in alone[0].rollouts]
    failures = [[r.columns["agent_failure"] for r in group.rollouts] for group in groups]
    assert failures[0] == ["", ""] and failures[3] == ["", ""]
    assert all("agent_timeout" in each for each in failures[1])
    assert all("SystemExit" in each for each in failures[2])
    assert 429 in statuses or 403 in statuses
    with pytest.raises(httpx.HTTPError):
        ask(*late[0], {"model": "m"})  # the endpoint is there for a generation only
    with pytest.raises(RuntimeError, match=r"agent 'faulty', prompt 2, session \d: it raised SystemExit"):
        run(trainer, faulty, prompts=3)  # a hanging agent blocks nobody


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_a_request_frees_its_place(trained: Any, stream: bool) -> None:
    trainer, _ = trained
    body = {"model": "m", "messages": [{"role": "user", "content": "so"}], "max_tokens": 40}

    def leaves(base_url: str, api_key: str) -> float:
        with suppress(httpx.TimeoutException):
            ask(base_url, api_key, {**body, "stream": stream}, timeout=httpx.Timeout(tiny.PATIENCE, read=0.01))
        while (status := ask(base_url, api_key, body).status_code) == 429:
            time.sleep(0.01)  # the endpoint doesn't know yet
        return float(status)

    (group,) = run(trainer, leaves, size=1, agent_requests=1000, agent_parallel=1)
    (rollout,) = group.rollouts
    assert rollout.columns["agent_reward"] == 200
    assert len(rollout.columns["session"]) in (1, 2), "2: the answer was there before it was left"


def test_a_failed_sessions_group_is_scored_by_nobody(trained: Any) -> None:
    trainer, _ = trained

    def falls(row: dict[str, Any]) -> float:
        if row["question"] == "what is 0?":
            raise KeyError("fell")
        return 1.0

    groups = run(trainer, falls, prompts=2, agent_on_error="abstain")
    rewards = trainer.sampler.stages().begin_score(groups).result()
    assert rewards.isnan().tolist() == [[True], [True], [False], [False]]
    assert all(not rollout.sampled.any() for rollout in sessions_of(groups)), "nobody asked the model"
