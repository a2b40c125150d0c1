"""The judge as a reward, against a server of OpenAI's protocol on this machine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from colograd.extensions.graders.judge import Judge
from colograd.rewards.functions import is_async, resolve_rewards


class Server(ThreadingHTTPServer):
    """Replies with the number of letters in the answer; `failures` has statuses to send first."""

    failures: list[int]
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
        status = self.server.failures.pop(0) if self.server.failures else 200
        answer = body["messages"][0]["content"].partition("<answer>\n")[2].partition("\n</answer>")[0]
        reply = "no idea" if answer == "?" else f"It has {len(answer)}: {len(answer)}"
        content = {"choices": [{"message": {"content": reply}}], "usage": {"total_tokens": 100}}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.failures, found.requests = [], []
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def judge_of(server: Server, folder: Path, **changes: Any) -> Judge:
    address = f"http://127.0.0.1:{server.server_port}/v1"
    return Judge(**{"address": address, "model": "m", "cache": str(folder), "backoff": 0.01} | changes)


def ask(judge: Judge, completions: list[Any], metrics: dict[str, float] | None = None) -> list[float | None]:
    prompts = [[{"role": "user", "content": "Say something."}]] * len(completions)
    logged: dict[str, float] = {} if metrics is None else metrics
    return asyncio.run(judge(prompts, completions, log_metric=logged.__setitem__, answer=["x"] * len(completions)))


def test_scores_are_the_replies_last_numbers(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOGRAD_JUDGE_KEY", "secret")
    judge, metrics = judge_of(server, tmp_path), {}
    completions = ["abcde", [{"role": "assistant", "content": "ab"}], "?", "abcde", "longer than ten"]
    assert ask(judge, completions, metrics) == [0.5, 0.2, None, 0.5, None]
    assert len(server.requests) == 4 == metrics["judge/calls"], "an equal question is asked once"
    asked = server.requests[0]
    assert asked["path"] == "/v1/chat/completions" and asked["key"] == "Bearer secret" and asked["temperature"] == 0
    assert "user: Say something." in asked["messages"][0]["content"]


def test_replies_are_cached_by_model_and_question(server: Server, tmp_path: Path) -> None:
    metrics: dict[str, float] = {}
    assert ask(judge_of(server, tmp_path), ["abc"]) == ask(judge_of(server, tmp_path), ["abc"], metrics) == [0.3]
    assert len(server.requests) == 1 and metrics["judge/cached"] == 1
    for changes in ({"model": "n"}, {"settings": {"temperature": 0.5}}, {"cache": None}):
        assert ask(judge_of(server, tmp_path, **changes), ["abc"]) == [0.3]
    assert len(server.requests) == 4


def test_a_failure_is_tried_again_then_abstains(server: Server, tmp_path: Path) -> None:
    server.failures = [500, 429]
    assert ask(judge_of(server, tmp_path), ["abc"]) == [0.3] and len(server.requests) == 3
    server.failures = [503] * 4
    metrics: dict[str, float] = {}
    assert ask(judge_of(server, tmp_path), ["abcd"], metrics) == [None]
    assert len(server.requests) == 7 and metrics["judge/failed"] == 1
    gone = judge_of(server, tmp_path, address="http://127.0.0.1:9/v1", tries=2)
    assert ask(gone, ["abcd"]) == [None] and gone.calls == 2


def test_a_spent_budget_abstains(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judge_of(server, tmp_path, max_calls=2, parallel=1)
    assert ask(judge, ["a", "ab", "abc"]) == [0.1, 0.2, None]
    assert ask(judge, ["a", "abcd"]) == [0.1, None], "the cache costs nothing"
    assert ask(judge_of(server, tmp_path, max_tokens=150, parallel=1), ["b", "bb", "bbb"]) == [0.1, 0.2, None]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ask(judge_of(server, tmp_path, max_calls=2, parallel=1), ["c", "cc"]) == [0.1, None], "ranks share it"


def test_the_judge_is_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the reward `judge` needs an address and a model: set the environment"):
        resolve_rewards(["judge"], None)
    monkeypatch.setenv("COLOGRAD_JUDGE_ADDRESS", "http://localhost:8000/v1")
    monkeypatch.setenv("COLOGRAD_JUDGE_MODEL", "m")
    (found,) = resolve_rewards(["judge"], None)
    assert found.name == "judge" and is_async(found.function)
    with pytest.raises(ValueError, match=r"scale is \(1, 1\), but the first number must be below"):
        resolve_rewards([Judge(scale=(1, 1))], None)
