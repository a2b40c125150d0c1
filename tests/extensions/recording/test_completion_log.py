"""The completions log: complete files with all columns, the trackers' tables, and the output of `colograd show`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import resource
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.apps.cli import main
from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.extensions.recording import completion_log
from colograd.extensions.recording.completions import (
    NAMES_KEY,
    CompletionRow,
    logged_steps,
    prompt_of,
    read_log,
    write_log,
)

MUTATIONS = 30
BOUND = 2**27  # bytes of memory that reading a small file may take


def row(position: int, **changes: Any) -> CompletionRow:
    settings: dict[str, Any] = {
        "step": 3,
        "position": position,
        "prompt": [{"role": "user", "content": f"question {position}"}],
        "text": f"answer {position}".encode(),
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "finish_reason": "stop",
        "rewards": (1.0, math.nan),
        "advantage": 0.5,
    }
    return CompletionRow(**(settings | changes))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    rows = [row(0), row(0, text="zwölf\n".encode(), advantage=-0.5, rewards=(0.0, 2.0)), row(1, finish_reason="length")]
    path = write_log(tmp_path, rows, ["right", "step"], 3)
    assert path == tmp_path / "completions" / "completions_00003.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing half-written is left"
    table = pq.read_table(path)
    assert {"step", "prompt", "completion", "right", "advantage"} <= set(table.column_names), "TRL's columns"
    assert table.column("rewards/step").to_pylist()[1] == 2.0, "a function named like a column keeps its values"
    found, names = read_log(path)
    assert names == ["right", "step"] and str(found) == str(rows)


def test_prompts_of_different_shapes_are_written_as_json(tmp_path: Path) -> None:
    rows = [row(0), row(1, prompt="plain text")]
    path = write_log(tmp_path, rows, ["right", "short"], 1)
    messages = [{"role": "user", "content": "question 0"}]
    assert pq.read_table(path).column("prompt").to_pylist() == [json.dumps(messages), '"plain text"']
    assert read_log(path)[0][0].prompt == messages, "whoever reads the log sees messages"
    for text in ("[1, 2]", "[]", "[" * 100_000):
        assert prompt_of(text) == text, "a prompt that looks like some"


def test_what_is_shown_has_each_prompt_once_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each evaluation has a table, and training has one as often as it prints."""
    sent: dict[str, list[int]] = {}

    def log(values: dict[str, Any], commit: bool) -> None:
        assert not commit
        for key, rows in values.items():
            sent.setdefault(key, []).append(rows)

    tracker = types.SimpleNamespace(run=object(), log=log, Table=lambda dataframe: len(dataframe))
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    changes = {"log_completions": True, "log_completions_steps": 2, "log_unique_prompts": True, "report_to": "wandb"}
    log_ = completion_log.CompletionLog(tiny.config(tmp_path, **changes), ["r"])
    rollouts = tuple(
        Rollout((1,), (2,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0) for _ in range(3)
    )
    step = [ScoredGroup(Group({"prompt": "p"}, rollouts, n), torch.zeros(3, 1), torch.ones(3)) for n in range(2)]
    state = types.SimpleNamespace(global_step=4, logging_steps=1)
    log_.add([step, step], lambda group: ["a", "b", "c"], state)  # type: ignore[arg-type]
    log_.add_evaluation(step, lambda group: ["a", "b", "c"], state, "eval_some/rows")  # type: ignore[arg-type]
    assert sent == {"completions": [2], "eval_some/rows_completions": [2]}
    assert capsys.readouterr().out.count("Step 4, eval_some/rows") == 1
    rows, _ = read_log(tmp_path / "completions" / "eval_some_rows_00004.parquet")
    assert [r.completion for r in rows] == ["a", "b", "c"] * 2 and all(math.isnan(r.advantage) for r in rows)
    assert list(logged_steps(tmp_path)) == [5, 6], "an evaluation is no step"
    assert len(read_log(logged_steps(tmp_path)[6])[0]) == 6

    quiet = completion_log.CompletionLog(tiny.config(tmp_path, **changes, num_completions_to_print=0), ["r"])
    quiet.add_evaluation(step, lambda group: ["a", "b", "c"], state, "eval_quiet")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "" and sent["eval_quiet_completions"] == [2]
    with pytest.raises(ValueError, match="`num_completions_to_print` is -1, but must be at least 0"):
        tiny.config(tmp_path, num_completions_to_print=-1)


def test_show_prints_a_step_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3, 7):
        rows = [row(p, step=step, text=f"said {step}.{p}".encode(), advantage=float(p)) for p in range(3)]
        write_log(tmp_path, rows, ["right", "short"], step)
    assert main(["show", str(tmp_path), "--step", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Step 2" in shown and all(f"said 2.{p}" in shown for p in range(3)) and "right" in shown
    assert main(["show", str(tmp_path), "--limit", "1", "--best"]) == 0
    shown = capsys.readouterr().out
    assert "said 7.2" in shown and "said 7.1" not in shown, "the last step, the best of it"
    assert main(["show", str(tmp_path), "--step", "7", "--worst", "--limit", "2", "--width", "200"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) == 200
    assert main(["show", str(tmp_path), "--step", "2", "--grep", r"said 2\.[12]$"]) == 0
    shown = capsys.readouterr().out
    assert "said 2.1" in shown and "said 2.2" in shown and "said 2.0" not in shown and "2 of 3 completions" in shown
    assert main(["show", str(tmp_path), "--grep", r"said [13]\.2$"]) == 0
    shown = capsys.readouterr().out
    assert "said 1.2" in shown and "said 3.2" in shown and "2 of 12 completions" in shown, "of all steps"
    assert main(["show", str(tmp_path), "--group", "99"]) == 2
    assert "none of the 12 completions" in capsys.readouterr().err
    assert main(["show", str(tmp_path), "--step", "5"]) == 2
    assert "step 5 isn't in the log" in (said := capsys.readouterr().err) and "1-3, 7" in said
    (tmp_path / "empty").mkdir()
    assert main(["show", str(tmp_path / "empty")]) == 2
    assert "log_completions: true" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "nosuch")]) == 2
    said = capsys.readouterr().err
    assert "output_dir" in said and "log_completions" not in said and said.count("\n") == 1, "the folder is the error"


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with some bytes changed, in all of it or in its footer, cut, or with a piece put in another's place."""
    found, kind = bytearray(data), draw.randrange(4)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if kind == 0:
        for _ in range(draw.randint(1, 4)):
            found[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == 1:
        for _ in range(draw.randint(1, 3)):
            found[draw.randrange(footer, len(data) - 8)] = draw.choice([0, 127, 128, 255, draw.randrange(256)])
    elif kind == 2:
        del found[draw.randrange(len(data)) :]
    else:
        start = draw.randrange(len(data))
        found[start : start + draw.randint(1, 30)] = draw.randbytes(draw.randint(0, 30))
    return bytes(found)


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    """Forked processes read the files, because a crash would end the test. Memory stays within the file's needs."""
    rows = [row(position, extra={"length": position}) for position in range(40)]
    path = write_log(tmp_path, rows, ["right", "short"], 1)
    good, told = path.read_bytes(), 0
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(good, random.Random(seed)))
        status, said, taken = shown_elsewhere(tmp_path)
        assert status in (0, 2), (seed, status, said)
        assert (status == 2) == said.startswith(f"colograd show: error: {path} can't be read (") and said.count(
            "\n"
        ) <= 1, seed
        assert taken < BOUND, seed
        told += status == 2
    assert told > MUTATIONS // 2, "most of them are seen, by the checksums of pages too"


def shown_elsewhere(run: Path) -> tuple[int, str, int]:
    """Run `colograd show` in a fork. Returns its exit status, its standard error, and the bytes that it used."""
    reader, writer = os.pipe()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if not (child := os.fork()):
        status, said = 70, io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            try:
                status = main(["show", str(run)])
            except BaseException as error:
                said.write(repr(error))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, json.dumps([said.getvalue()[:1000], grown]).encode())
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said, grown = json.loads(pipe.read() or b'["it died", 0]')
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said, 1024 * grown


@pytest.mark.parametrize(
    ("columns", "names", "said"),
    [
        ({"finish_reason": ["[/red]\x1b[2J"]}, "[]", ""),
        ({"prompt": [[1, 2]]}, "[]", ""),
        ({"completion": [7]}, "[]", "AttributeError"),
        ({"completion": [None]}, "[]", "AttributeError"),
        ({"advantage": ["much"]}, "[]", "could not convert"),
        ({}, '["there is none"]', "KeyError"),
        ({}, '{"a": 1}', "isn't a list of column names"),
        ({}, "[" * 10**5, "RecursionError"),
    ],
)
def test_a_hostile_file_is_shown_or_one_clear_error(tmp_path: Path, capsys, columns, names, said) -> None:
    path = write_log(tmp_path, [row(0)], ["right", "short"], 1)
    table = pa.table({**pq.read_table(path).to_pydict(), **columns})
    pq.write_table(table.replace_schema_metadata({NAMES_KEY: names}), path)
    assert main(["show", str(tmp_path)]) == (2 if said else 0)
    told = capsys.readouterr()
    assert said in told.err and "\x1b" not in told.out


def test_a_small_file_that_unpacks_to_much_is_an_error(tmp_path: Path) -> None:
    """A dictionary with one long text, used fifty thousand times."""
    path = write_log(tmp_path, [row(0)], ["right", "short"], 1)
    table = pq.read_table(path).take([0] * 50_000)
    bomb = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int32()), pa.array(["x" * 2**16]))
    table = table.set_column(table.column_names.index("completion"), "completion", bomb)
    for stored, why in ((False, "rows take more than"), (True, "a column has a dictionary type")):
        pq.write_table(table, path, store_schema=stored)
        assert path.stat().st_size < 2**16
        status, said, taken = shown_elsewhere(tmp_path)
        assert status == 2 and why in said and taken < 4 * BOUND, (said, taken)


@pytest.mark.engine
def test_a_run_logs_every_completion_of_every_step(tiny_model: Path, tmp_path: Path, capfd) -> None:
    """A generation has two steps. Each file holds the completions of its own step."""
    changes = {"log_completions": True, "steps_per_generation": 2, "log_completions_steps": 4}
    trainer = GRPOTrainer(str(tiny_model), tiny.vowels, tiny.config(tmp_path, **changes), tiny.prompts())
    try:
        trainer.train()
    finally:
        trainer.close()
    steps = logged_steps(tmp_path)
    assert list(steps) == [1, 2, 3, 4]
    assert capfd.readouterr().out.count("Completion") == 1, "printed at every fourth step"
    history = {entry["step"]: entry for entry in trainer.state.log_history if "reward" in entry}
    positions = []
    for step, path in steps.items():
        rows, names = read_log(path)
        assert names == ["vowels"] and len(rows) == 16 and {r.step for r in rows} == {step}
        assert sum(r.rewards[0] for r in rows) / 16 == pytest.approx(history[step]["reward"], rel=1e-5)
        lengths = sum(r.completion_tokens for r in rows) / 16
        assert lengths == pytest.approx(history[step]["completions/mean_length"])
        positions += [r.position for r in rows[::4]]
    assert len(set(positions)) == 16


def test_complete_files_go_to_the_hub_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is huggingface_hub's own. Calls that need a connection are faked."""
    from huggingface_hub import _commit_scheduler

    sent: list[str] = []

    class Api(_commit_scheduler.HfApi):
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            return types.SimpleNamespace(repo_id=repo_id)

        def create_commit(self, operations: list[Any], **kwargs: Any) -> Any:
            sent.extend(operation.path_in_repo for operation in operations)
            return types.SimpleNamespace(oid="1")

        def list_repo_files(self, **kwargs: Any) -> list[str]:
            return []

    monkeypatch.setattr(_commit_scheduler, "HfApi", Api)
    config = tiny.config(tmp_path, log_completions=True, log_completions_hub_repo="me/log")
    log = completion_log.CompletionLog(config, ["right"])
    write_log(tmp_path, [row(0, rewards=(1.0,))], ["right"], 3)
    (tmp_path / "completions" / "completions_00004.partial").touch()
    log.close()
    assert sent == ["completions_00003.parquet"]
    with pytest.raises(ValueError, match=r"log_completions_hub_repo is 'me/log' .* no completions are logged"):
        tiny.config(tmp_path, log_completions_hub_repo="me/log")
