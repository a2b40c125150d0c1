"""A run's report without a browser: which files of the run are read, which damage is survived, and the page's size."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from made_up_run import HOSTILE, WRONG, WRONG_SAMPLES, MadeUp
from paths import ROOT
from shown_rows import sample_entries, write_samples

from colograd.apps.cli import main
from colograd.apps.report import page, samples, write_report
from colograd.apps.report.page import _half, of_step, overview, spread_out
from colograd.apps.report.recorded_run import RecordedRun
from colograd.apps.report.untrusted import Tail, open_inside, parse
from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.extensions.recording.completions import FIXED, CompletionRow, write_log


def read(folder: Path) -> RecordedRun:
    run = RecordedRun(folder)
    run.refresh()
    return run


def append(folder: Path, name: str, *entries: Any) -> None:
    """Add lines to a file of a run's record: objects as JSON, bytes as they are."""
    path = folder / "_report" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for entry in entries:
            file.write(entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n")


def log(step: int, **metrics: Any) -> dict[str, Any]:
    return {"kind": "log", "time": 1.0, "step": step, "metrics": metrics}


def unpacked(html: str, run: int, step: int) -> dict[str, Any]:
    found = re.search(rf'id="step-{run}-{step}">([^<]*)<', html)
    assert found is not None, (run, step)
    return json.loads(zlib.decompress(base64.b64decode(found.group(1))))


def embedded(html: str) -> dict[str, Any]:
    found = re.search(r'id="data">([^<]*)</script>', html)
    assert found is not None
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeUp(steps=12, ranks=2, tools=True, alarms=True).write(tmp_path_factory.mktemp("runs") / "made_up")


def test_what_a_run_recorded_is_read(made_up: Path) -> None:
    run = read(made_up)
    found = overview(run)
    assert found["steps"] == list(range(1, 13)) and len(found["columns"]["reward"]) == 12
    assert found["evaluations"]["steps"] == [2, 4, 6, 8, 10, 12] and "eval_pass@8" in found["evaluations"]["columns"]
    assert found["run"]["settings"]["num_generations"] == 8 and found["memory"][1]["part"] == "optimizer state"
    assert found["status"] | {"begun": 0, "seen": 0} == {
        "state": "finished",
        "error": "",
        "step": 12,
        "max_steps": 12,
        "begun": 0,
        "seen": 0,
        "recorded": True,
    }
    rules = ["entropy-collapse", "all-truncated", "gradient-spike", "solved"]
    assert [alarm["rule"] for alarm in found["alarms"]] == rules
    assert ["until" in alarm for alarm in found["alarms"]] == [False, True, False, False]
    assert [alarm["severity"] for alarm in found["alarms"]] == ["severe", "warning", "warning", "note"]
    step = of_step(run, 5, 10**9)
    assert [rollout["rank"] for rollout in step["rollouts"]] == [0, 1] and step["rollouts"][0]["tools"]
    assert len(step["completions"]) == 16 and len(step["prompts"]) == 2 and len(step["groups"]) == 4
    first = step["completions"][0]
    assert len(first["tokens"]) == len(first["sampler"]) == len(first["trainer"]) == len(first["mask"])
    assert first["messages"][1]["role"] == "tool" and "advantages" not in first


def test_groups_are_solved_unsolved_or_mixed(tmp_path: Path) -> None:
    rows = [["a", 0, 4, 1.0, 0.0, 0.0, 0], ["b", 1, 4, 0.5, 0.5, 0.0, 1, "x" * 200], ["c", 2, 4, 0.0, 0.0, 1.0, 0]]
    append(tmp_path, "events.jsonl", {"kind": "groups", "time": 1.0, "step": 3, "groups": rows})
    append(
        tmp_path, "events.jsonl", {"kind": "groups", "time": 1.0, "step": 9, "groups": [["b", 7, 4, 1.0, 0.0, 0.0, 0]]}
    )
    found = overview(read(tmp_path))
    assert found["groups"] == {
        "mark": 1,
        "steps": [3, 9],
        "solved": [1, 1],
        "unsolved": [1, 0],
        "mixed": [1, 0],
        "signal": [1, 0],
    }
    assert found["prompts"]["shown"][0] == ["b", 0.5, [[3, 0.5, 0.5, 0], [9, 1, 0, 0]]]
    assert found["texts"] == of_step(read(tmp_path), 9, 0)["texts"] == {"b": "x" * 160 + " …"}, "as once recorded"
    assert found["prompts"] | {"shown": 0} == {"total": 3, "visits": 4, "half": 1, "shown": 0}


def test_solved_mark_lies_between_means_without_passes(tmp_path: Path) -> None:
    rows = [["a", 0, 4, -3.0, 0.0, 0.0, 0], ["b", 1, 4, -1.0, 0.0, 0.0, 0]]
    append(tmp_path, "events.jsonl", {"kind": "groups", "time": 1.0, "step": 1, "groups": rows})
    groups = overview(read(tmp_path))["groups"]
    assert groups["mark"] == -2 and groups["solved"] == [1] and groups["unsolved"] == [1]


def test_the_least_and_the_greatest_reward_of_each_function_are_read(tmp_path: Path) -> None:
    spread = {"kind": "spread", "step": 1, "functions": {"right": [0, 1], "short": [-0.5, 2]}}
    append(tmp_path, "events.jsonl", spread, spread | {"step": 2, "functions": {"short": [1]}})
    assert read(tmp_path).spreads == {1: {"functions": {"right": [0, 1], "short": [-0.5, 2]}}}


def test_half_of_an_amount() -> None:
    assert [_half(x) for x in ([], [0.0], [1.0], [5, 1, 1], [1, 1, 1, 1])] == [0, 0, 1, 1, 2]


def test_a_resumed_runs_later_entries_count(made_up: Path, tmp_path: Path) -> None:
    append(tmp_path, "events.jsonl", MadeUp(steps=9).start(), *(log(step, reward=0.1) for step in range(1, 6)))
    append(tmp_path, "events.jsonl", b'{"kind": "log", "step": 6, "metri')  # where it was killed
    append(tmp_path, "events.jsonl", {**MadeUp(steps=9).start(), "step": 3, "resumed": True}, log(4, reward=0.7, kl=1))
    run = read(tmp_path)
    assert overview(run)["columns"] == {"reward": [0.1, 0.1, 0.1, 0.7, 0.1], "kl": [None, None, None, 1, None]}
    assert [start["resumed"] for start in run.starts] == [False, True]


def test_another_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    append(tmp_path, "events.jsonl", MadeUp().start(), *(log(step, reward=0.1) for step in range(1, 6)))
    run = read(tmp_path)
    append(tmp_path, "events.jsonl", MadeUp().start(), log(1, reward=0.9))
    assert run.refresh() and overview(run)["columns"] == {"reward": [0.9]}


def test_alarm_that_holds_on_resume_stays_open(tmp_path: Path) -> None:
    """A resumed run raises an alarm of the steps before its start no second time."""
    alarm = {"kind": "alarm", "time": 1.0, "step": 2, "rule": "x", "severity": "severe", "seen": "s"}
    calm = {"kind": "calm", "time": 1.0, "step": 9, "rule": "x"}
    append(tmp_path, "events.jsonl", MadeUp().start(), log(2, reward=1), alarm, alarm | {"step": 5, "rule": "y"}, calm)
    append(tmp_path, "events.jsonl", {**MadeUp().start(), "step": 2, "resumed": True})
    (found,) = read(tmp_path).alarms
    assert found["rule"] == "x" and "until" not in found


def test_wrong_types_torn_lines_and_endless_numbers_are_survived(tmp_path: Path) -> None:
    append(tmp_path, "events.jsonl", *WRONG, log(3, reward=0.5))
    write_samples(tmp_path, *WRONG_SAMPLES, {"step": 2, "tokens": ["a"]})
    run = read(tmp_path)
    assert overview(run)["columns"] == {"reward": [0.5]} and run.samples.steps == [1, 2]
    assert len(of_step(run, 2, 10**6)["completions"]) == 1
    embedded(write_report(tmp_path).read_text())  # strict JSON


@pytest.mark.parametrize("line", WRONG + WRONG_SAMPLES)
def test_each_wrong_line_alone_is_survived(line: bytes, tmp_path: Path) -> None:
    append(tmp_path, "events.jsonl", log(1, reward=1), line)
    write_samples(tmp_path, line)
    write_report(tmp_path)


class Elements(HTMLParser):
    """Parser that collects a page's elements, as a browser would."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_hostile_text_stays_data(tmp_path: Path) -> None:
    """No text of a run becomes markup: the page has the same elements as the page of a harmless run."""

    def elements(name: str, hostile: bool) -> list[tuple[str, dict[str, str | None]]]:
        folder = MadeUp(steps=3, hostile=hostile, alarms=True).write(tmp_path / name)
        found = Elements()
        found.feed(write_report(folder).read_text())
        return found.tags

    assert elements(HOSTILE[1].replace("/", ""), hostile=True) == elements("harmless", hostile=False)
    html = (tmp_path / HOSTILE[1].replace("/", "") / "report.html").read_text()
    assert not any(text in html for text in (HOSTILE[0], HOSTILE[1], "\u2028", "\u202e"))
    data = embedded(html)
    assert data["runs"][0]["run"]["model"].endswith(HOSTILE[0]), "it is there, as text"
    assert any(HOSTILE[0] in "".join(found["tokens"]) for found in unpacked(html, 0, 1)["completions"])


def test_a_page_asks_nobody_for_anything(made_up: Path) -> None:
    html = write_report(made_up).read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy.group(1).startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy.group(1) and "unsafe" not in policy.group(1)
    found = Elements()
    found.feed(html)
    for tag, attributes in found.tags:
        asked = [attributes[name] or "" for name in ("src", "href", "action", "srcset", "style") if name in attributes]
        assert all(address.startswith("data:") for address in asked), (tag, attributes)
    assert "@import" not in html and not re.search(r"url\((?!['\"]?data:)", html)


def test_no_script_of_ours_takes_text_for_markup() -> None:
    for name in page.SCRIPTS:
        source = (page.ASSETS / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source), (
            name
        )
        assert "</script" not in source and "<!--" not in source, name
    assert all("</style" not in (page.ASSETS / name).read_text() for name in page.STYLES)


def test_the_vendored_library_is_the_packages_own() -> None:
    folder = page.ASSETS / "uplot"
    assert "(v1.6.32)" in (folder / "uPlot.iife.min.js").read_text()[:200]
    assert "MIT License" in (folder / "LICENSE").read_text() and "1.6.32" in (folder / "README.md").read_text()


def test_an_old_run_has_its_curves(tmp_path: Path) -> None:
    """Curves come from trainer_state.json, or from the newest checkpoint's while the run goes on."""
    history = [{"step": s, "reward": s / 9, "loss": math.nan, "epoch": 0.1} for s in range(1, 7)]
    history += [{"step": 6, "eval_reward": 0.5, "eval_runtime": 2.0}]
    for number in (4, 10, 9):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history[: number - 4], "max_steps": 9}))
    found = overview(read(tmp_path))
    assert found["status"]["state"] == "running" and found["status"]["max_steps"] == 9
    assert found["columns"]["reward"][-1] == 0.66667 and found["evaluations"]["steps"] == []
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"log_history": [*history, {"step": 6, "train_runtime": 1.0}]})
    )
    found = overview(read(tmp_path))
    assert found["status"]["state"] == "finished" and found["totals"] == {"train_runtime": 1}
    assert found["evaluations"]["columns"]["eval_reward"] == [0.5] and not found["status"]["recorded"]
    (tmp_path / "trainer_state.json").write_text("{not json")
    write_report(tmp_path, Path(tmp_path))


def make_rows(step: int, groups: int = 3, size: int = 4, text: str = "A text.") -> list[CompletionRow]:
    return [
        CompletionRow(
            step=step,
            position=g,
            prompt=[{"role": "user", "content": f"Question {g}"}],
            text=f"{text} {g} {i}".encode(),
            prompt_tokens=3,
            completion_tokens=5,
            finish_reason="stop",
            rewards=(0.5, math.nan),
            advantage=0.1,
            extra={"parsed": i},
        )
        for g in range(groups)
        for i in range(size)
    ]


def test_report_joins_logged_texts_and_recorded_tokens(tmp_path: Path) -> None:
    write_log(tmp_path, make_rows(2), ["right", "short"], 2)
    write_log(tmp_path, make_rows(2, groups=1), ["right", "short"], 2, "eval")
    entry = MadeUp(groups=3).completion(2, 1, 3)
    write_samples(tmp_path, {"step": 2, "position": 1, "index": 3, **entry})
    (tmp_path / "completions" / "completions_00007.parquet").write_bytes(b"no parquet")
    content = of_step(read(tmp_path), 2, 10**9)
    assert len(content["completions"]) == 16 and content["left_out"] == 0
    by_place = {(c["purpose"], c["position"], c["index"]): c for c in content["completions"]}
    assert by_place["train", 1, 3]["tokens"] and "tokens" not in by_place["train", 1, 2]
    assert by_place["train", 2, 0] | {"prompt": 0} == {
        "position": 2,
        "index": 0,
        "purpose": "train",
        "prompt": 0,
        "text": "A text. 2 0",
        "length": 5,
        "finish": "stop",
        "reward": 0.5,
        "rewards": {"right": 0.5, "short": None},
        "advantage": 0.1,
        "extra": {"parsed": 0},
    }
    assert by_place["eval", 0, 1]["text"] == "A text. 0 1"
    assert of_step(read(tmp_path), 7, 10**9)["completions"] == []


def test_a_log_of_trl_without_positions_is_read(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    columns = {
        "step": [1] * 4,
        "prompt": ["a", "a", "b", "b"],
        "completion": ["w", "x", "y", "z"],
        "advantage": [0.1] * 4,
    }
    pq.write_table(pa.table(columns), tmp_path / "completions" / "completions_00001.parquet")
    found = of_step(read(tmp_path), 1, 10**9)["completions"]
    assert [(c["position"], c["index"], c["text"]) for c in found] == [
        (0, 0, "w"),
        (0, 1, "x"),
        (2, 0, "y"),
        (2, 1, "z"),
    ]


def test_the_columns_are_those_of_the_rows() -> None:
    names = ["completion" if f.name == "text" else f.name for f in dataclasses.fields(CompletionRow)]
    assert [name for name in names if name not in ("rewards", "extra", "thumbnails", "sizes")] == list(FIXED)


def test_a_page_stays_small_and_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUp(steps=300, recorded=2, variants=16, tokens=80, alarms=True).write(tmp_path)
    monkeypatch.setattr(page, "COMPLETION_BYTES", 60_000)
    monkeypatch.setattr(page, "ROLLOUT_BYTES", 40_000)
    html = write_report(tmp_path).read_text()
    run = embedded(html)["runs"][0]
    blocks = sum(len(found) for found in re.findall(r'id="step-0-\d+">([^<]*)<', html))
    assert blocks < 4 / 3 * 120_000
    held = dict(run["held"])
    assert run["chosen"] == [sum(held.values()), 300] and 5 < sum(held.values()) < 100 < len(held) + 100
    assert held[1] and held[300] and held[150], "the first, the last, and an alarm's"
    assert len(run["steps"]) == 300


def test_long_runs_have_means_of_steps(tmp_path: Path) -> None:
    append(tmp_path, "events.jsonl", *(log(step, reward=step % 2) for step in range(1, 5001)))
    found = overview(read(tmp_path))
    assert found["every"] == 3 and len(found["steps"]) == len(found["columns"]["reward"]) == 1666
    assert found["steps"][:2] == [3, 6] and found["columns"]["reward"][:2] == [0.66667, 0.33333]


def test_steps_are_spread_out() -> None:
    order = list(spread_out(range(1, 101), first=[42, 7, 1000]))
    assert sorted(order) == list(range(1, 101)) and order[:4] == [100, 1, 42, 7]
    chosen = sorted(order[:20])
    assert max(b - a for a, b in itertools.pairwise(chosen)) <= 14
    assert list(spread_out([])) == [] and list(spread_out([5])) == [5]


def test_a_step_larger_than_its_room_keeps_whole_groups(tmp_path: Path) -> None:
    write_log(tmp_path, make_rows(1, groups=40, size=4, text="x" * 1000), ["right", "short"], 1)
    content = of_step(read(tmp_path), 1, 50_000)
    assert content["left_out"] + len(content["completions"]) == 160 and len(content["completions"]) % 4 == 0
    assert 20 <= len(content["completions"]) <= 40


def test_what_is_new_is_read_once(tmp_path: Path) -> None:
    append(tmp_path, "events.jsonl", log(1, reward=0.1), b'{"kind": "log", "step": 2, ')
    tail = Tail(tmp_path, "_report/events.jsonl")
    assert len(list(tail.read())) == 1 and list(tail.read()) == []
    append(tmp_path, "events.jsonl", b'"metrics": {"reward": 0.2}}\n')
    (line,) = tail.read()
    assert parse(line, b'{"kind"') == {"kind": "log", "step": 2, "metrics": {"reward": 0.2}}
    assert not tail.restarted()
    (tmp_path / "_report" / "events.jsonl").write_bytes(b"")
    assert tail.restarted() and tail.offset == 0


def test_nothing_outside_of_the_folder_is_opened(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "secret.jsonl"
    (run / "_report").mkdir(parents=True)
    outside.write_text(json.dumps(log(1, reward=1)) + "\n")
    (run / "_report" / "events.jsonl").symlink_to(outside)
    (run / "completions").symlink_to(tmp_path)
    (run / "inside").symlink_to("real")
    (run / "real").write_text("x")
    os.mkfifo(run / "pipe")
    (run / "circle").symlink_to("circle")
    assert open_inside(run, "_report/events.jsonl") is None and not read(run).steps.rows
    names = ("../secret.jsonl", str(outside), "completions/secret.jsonl", "pipe", "circle", "_report", "none", "a\0b")
    assert [open_inside(run, name) for name in names] == [None] * len(names)
    with open_inside(run, "inside") as file:  # type: ignore[union-attr]
        assert file.read() == b"x"


def test_the_command_writes_a_page_of_several_runs(
    made_up: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = MadeUp(steps=4, learning_rate=1e-6, ended=None).write(tmp_path / "other")
    assert main(["report", str(made_up), str(other), "--out", str(tmp_path / "deep" / "both.html")]) == 0
    assert "both.html" in capsys.readouterr().out
    runs = embedded((tmp_path / "deep" / "both.html").read_text())["runs"]
    assert [run["name"] for run in runs] == ["made_up", "other"]
    assert [run["status"]["state"] for run in runs] == ["finished", "running"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["both.html"], "nothing half written is left"


def test_a_folder_without_a_run_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["report", str(folder)]) == 2
        assert "holds nothing to report" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_report_imports_neither_torch_nor_vllm(made_up: Path) -> None:
    script = (
        "import sys; from colograd.apps.cli import main; import colograd.apps.report.serving\n"
        f"assert main(['report', {str(made_up)!r}]) == 0\n"
        "print([name for name in ('torch', 'vllm', 'transformers', 'pandas') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_a_built_package_has_what_the_page_needs() -> None:
    settings = (ROOT / "setup.cfg").read_text()
    assert "colograd.apps.report =\n    assets/*\n    assets/uplot/*\n" in settings
    depth = {len(path.relative_to(page.ASSETS).parts) for path in page.ASSETS.rglob("*") if path.is_file()}
    assert depth == {1, 2} and all((page.ASSETS / name).is_file() for name in (*page.SCRIPTS, *page.STYLES))


def test_an_agents_session_is_a_tree_of_its_answers() -> None:
    say = {"role": "user", "content": "so?"}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    turn = {"messages": [say], "reply": reply, "finish": "tool_calls", "prompt_tokens": 9, "tokens": 3, "seconds": 0.5}
    session = [{**turn, "after": after} for after in (None, 0, 1, 0, None)]
    sampled, columns = torch.zeros(1, dtype=torch.bool), {"session": session}
    rollout = Rollout((1,), (2,), torch.zeros(1), sampled, FinishReason.ABORT, 0, columns=columns)
    scored = ScoredGroup(Group({}, (rollout,), 4), torch.zeros(1, 1), torch.zeros(1))
    (entry,) = sample_entries([(scored, [0.0])], "train", ["one"], {}, lambda ids: ["a"], False)
    found = samples._recorded(entry)
    assert found is not None
    assert [each["after"] for each in found["session"]] == [None, 0, 1, 0, None]
    assert found["session"][0]["reply"][0]["tool_calls"][0]["function"]["name"] == "add"
    if (node := shutil.which("node")) is None:
        pytest.skip("the page's own code wants node")
    shim = """class Node {
      constructor(tag) { Object.assign(this, { tag, children: [] }); }
      append(child) { this.children.push(child); }
      addEventListener() {}
      setAttribute() {}
    }
    const document = { createElement: (tag) => new Node(tag) };
    const words = (node) => (node.tag ? node.children.map(words).join("") : node);
    const below = (list) => list.children.map((line) => outline(line.children[0]));
    const outline = (node) => (node.tag === "ol" ? below(node) : words(node.children[0]));
    """
    base, data, tokens = (
        (ROOT / "colograd/apps/report/assets" / f"{name}.js").read_text() for name in ("base", "data", "tokens")
    )
    (message_text,) = re.findall(r"^const messageText = .*$", data, re.MULTILINE)
    shown = f"console.log(JSON.stringify(outline(sessionTree({json.dumps(found['session'])}))));"
    parts = [shim, base.split("const css")[0], message_text, tokens, shown]
    done = subprocess.run([node, "-e", "\n".join(parts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    tree = json.loads(done.stdout)
    numbers = json.loads(re.sub(r'"answer (\d+) [^"]*"', r"\1", done.stdout))
    assert numbers == [[1, [2, 3], [4]], [5]]
    assert tree[1][0].startswith("answer 5 · 3 tokens · 9 read · 0.5 s · at – s · tool_calls · calls add")
