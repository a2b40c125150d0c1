"""`colograd watch`: new entries of a run reach the page, and no other file can be requested."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from made_up_run import HOSTILE, MadeUp
from paths import ROOT
from shown_rows import write_samples

from colograd.apps.cli import main
from colograd.apps.report import serving
from colograd.apps.report.serving import Server, host_is_ours


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(serving, "LOOK_SECONDS", 0.0)
    with Server(folder) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=tiny.PATIENCE)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def data(server: Server, after: int = 0) -> dict[str, Any]:
    status, text, _ = ask(server, f"/data?after={after}")
    assert status == 200, text
    return json.loads(text)


def append(folder: Path, *events: dict[str, Any]) -> None:
    (folder / "_report").mkdir(parents=True, exist_ok=True)
    with (folder / "_report" / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_a_page_waits_for_the_run_and_gets_what_is_new(server: Server, folder: Path) -> None:
    assert ask(server, "/")[0] == 200
    first = data(server)
    assert first["status"]["state"] == "waiting" and first["steps"] == []
    run = MadeUp(steps=40, alarms=True)
    append(folder, run.start())
    assert data(server, first["change"])["status"]["max_steps"] == 40
    append(folder, *run.step_events(1), *run.step_events(2))
    second = data(server, first["change"])
    assert second["steps"] == [1, 2] and second["status"]["state"] == "running"
    assert data(server, second["change"]) == {"change": second["change"]}, "nothing is new"
    append(folder, *run.step_events(20))
    write_samples(folder, *({"step": 20, "position": 1, "index": i, **run.completion(20, 1, i)} for i in range(3)))
    third = data(server, second["change"])
    assert third["steps"] == [1, 2, 20] and [20, 1] in third["held"] and "20" in third["spreads"]
    assert third["changed"]["20"] == third["change"] > third["changed"]["2"], "a page fetches only changed steps again"
    assert third["columns"]["reward"][-1] == pytest.approx(run.metrics(20)["reward"], rel=1e-4)
    assert [alarm["rule"] for alarm in third["alarms"]] == ["entropy-collapse"]
    content = json.loads(ask(server, "/step?step=20")[1])
    assert len(content["completions"]) == 3 and content["rollouts"] and content["groups"]


def test_only_new_bytes_are_read(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUp(steps=30)
    append(folder, run.start(), *(event for step in range(1, 30) for event in run.step_events(step)))
    change = data(server)["change"]
    taken: list[bytes] = []
    read = serving.RecordedRun._take
    monkeypatch.setattr(
        serving.RecordedRun, "_take", lambda self, step, event: (taken.append(event["kind"]), read(self, step, event))
    )
    append(folder, {"kind": "log", "time": 1.0, "step": 30, "metrics": {"reward": 1.0}})
    assert data(server, change)["steps"] == [*range(1, 31)] and taken == ["log"]


def test_a_run_that_began_anew_is_sent_whole(server: Server, folder: Path) -> None:
    append(folder, MadeUp().start(), *MadeUp().step_events(1), *MadeUp().step_events(2))
    before = data(server)
    (folder / "_report" / "events.jsonl").unlink()
    append(folder, MadeUp().start(), *MadeUp().step_events(1))
    after = data(server, before["change"])
    assert after["steps"] == [1] and after["changed"]["1"] > before["changed"]["1"]


REFUSED = [
    "/../../etc/passwd",
    "/..%2f..%2fetc%2fpasswd",
    "//etc/passwd",
    "/etc/passwd",
    "/_report/events.jsonl",
    "/report.html",
    "/step?step=../../x",
    "/step?step=-1",
    "/step?step=1&step=2",
    "/step?step=1&file=x",
    "/step?step=",
    "/step",
    "/data",
    "/data?after=1e3",
    "/data?after=%F0%9D%9F%8F",
    "/data?after=" + "9" * 16,
    "/step/../data?after=0",
    "/index.html",
    "/?a=1",
    "http://example.org/",
    "/data/?after=0",
    "/%00",
    "/favicon.ico",
    "//x/data?after=0",
    "/data?after=0&a=1&b=1&c=1&d=1&e=1",
]


@pytest.mark.parametrize("path", REFUSED)
def test_nothing_but_the_fixed_addresses_is_there(server: Server, folder: Path, path: str) -> None:
    MadeUp(steps=1).write(folder)
    (folder / "report.html").write_text("secret")
    status, text, _ = ask(server, path)
    assert status in (400, 403, 404) and "secret" not in text and "root:" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW"])
def test_only_get_is_answered(server: Server, method: str) -> None:
    assert ask(server, "/data?after=0", method)[0] in (405, 501)


def test_requests_that_name_another_host_are_refused(server: Server, folder: Path) -> None:
    """DNS rebinding: a foreign page whose host name resolves to this machine sends its host name in the Host header."""
    MadeUp(steps=1).write(folder)
    for host in (
        "example.org",
        "example.org:80",
        "127.0.0.1.example.org",
        "localhost.example.org",
        "",
        "10.0.0.1",
        "[::2]:80",
    ):
        assert ask(server, "/data?after=0", Host=host)[0] == 403, host
    for host in ("localhost:1", "127.0.0.1", "[::1]:5", f"127.0.0.1:{server.server_port}"):
        assert ask(server, "/data?after=0", Host=host)[0] == 200, host
    assert ask(server, "/data?after=0", Sec_Fetch_Site="cross-site")[0] == 403


def test_a_host_given_by_name_is_taken() -> None:
    assert host_is_ours("node7:8765", "node7") and not host_is_ours("node8", "node7")
    assert host_is_ours("10.1.2.3:8765", "0.0.0.0") and not host_is_ours("example.org", "0.0.0.0")
    assert not host_is_ours(None, "127.0.0.1")


def test_links_that_lead_out_of_the_run_are_not_followed(server: Server, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "other"
    MadeUp(steps=2).write(secret)
    folder.mkdir()
    (folder / "_report").symlink_to(secret / "_report")
    (folder / "completions").symlink_to(secret)
    (folder / "trainer_state.json").symlink_to(secret / "trainer_state.json")
    found = data(server)
    assert found["status"]["state"] == "waiting" and found["steps"] == [] and found["held"] == []
    assert json.loads(ask(server, "/step?step=1")[1])["completions"] == []


def test_answers_tell_browsers_to_keep_them_to_themselves(server: Server, folder: Path) -> None:
    MadeUp(steps=3, hostile=True).write(folder)
    status, html, headers = ask(server, "/")
    assert status == 200 and HOSTILE[0] not in html and "Access-Control-Allow-Origin" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and "connect-src 'self'" in policy.group(1) and "unsafe" not in policy.group(1)


def test_nothing_is_written(server: Server, folder: Path) -> None:
    MadeUp(steps=2).write(folder)
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    for path in ("/", "/data?after=0", "/step?step=1"):
        assert ask(server, path)[0] == 200
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before


def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colograd.apps.cli", "watch", str(tmp_path / "later"), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/", told).group(1))  # type: ignore[union-attr]
        append(tmp_path / "later", MadeUp().start(), *MadeUp().step_events(1))
        deadline, steps = time.monotonic() + tiny.PATIENCE, []
        while not steps and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=tiny.PATIENCE)
            connection.request("GET", "/data?after=0")
            steps = json.loads(connection.getresponse().read())["steps"]
            time.sleep(0.1)
        assert steps == [1]
        process.send_signal(signal.SIGINT)
        assert process.wait(tiny.PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_and_a_file_are_one_clear_error(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), "--port", str(server.server_port)]) == 2
    assert "choose another --port (0: a free one)" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["watch", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
