"""Exams by name: their data, the judging in workers, the numbers, and whole exams with a real engine."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import exam_cases
import launcher
import pytest
import tiny
import torch
from exam_cases import LETTERS
from paths import ROOT

from colograd import GRPOTrainer
from colograd.apps import eval as command
from colograd.apps.exams.catalogue import EXAMS
from colograd.apps.exams.checking import Checker
from colograd.apps.exams.exam import ExamSpec, parse_specs
from colograd.apps.exams.prompts import load_questions
from colograd.apps.exams.results import Estimate, ExamResult, pass_at, table
from colograd.batch import FinishReason, Group, ModelInput, Rollout
from colograd.reporting.completions import read_log
from colograd.runtime.importing import find_object


def test_an_exam_is_named_with_rows_completions_and_data() -> None:
    spec = ExamSpec.parse("math500[:100]@16=some/file.jsonl", EXAMS)
    assert (spec.exam.name, spec.limit, spec.exam.n, spec.data) == ("math500", 100, 16, "some/file.jsonl")
    assert ExamSpec.parse("gsm8k", EXAMS) == ExamSpec(EXAMS["gsm8k"])
    assert ExamSpec.parse("gsm8k@4", EXAMS, temperature=0.7).exam.n == 4, "at 0 all would be equal"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gsm9k", r"'gsm9k' is no exam: there are gsm8k, .*mbpp_plus\. Did you mean 'gsm8k'\?"),
        ("gsm8k[5]", r"'gsm8k\[5\]' can't be read: write NAME, NAME\[:ROWS\]"),
        ("aime24@0", r"asks for 0 rows or completions"),
        ("gsm8k@4", r"4 completions per question at temperature 0 would be equal"),
    ],
)
def test_a_bad_name_is_one_error_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_specs([text], EXAMS)


def test_every_exam_says_its_source_and_what_to_expect() -> None:
    for exam in EXAMS.values():
        assert exam.source.startswith("https://") and len(exam.published) >= 2
        assert all(0 < each.percent < 100 and each.source.startswith("https://") for each in exam.published)
        assert callable(find_object(exam.check, "the checker", callable))


@pytest.mark.parametrize("name", EXAMS)
def test_questions_are_read_from_files_of_the_datasets_columns(name: str, tmp_path: Path) -> None:
    file = exam_cases.write(tmp_path)[name]
    questions = load_questions(ExamSpec(EXAMS[name], data=str(file)))
    assert len(questions) == len(exam_cases.ROWS[name]) and questions.column_names == ["prompt", "answer"]
    assert len(load_questions(ExamSpec(EXAMS[name], limit=1, data=str(file)))) == 1
    file.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match=f"The exam '{name}' needs the column '.*has 'other'"):
        load_questions(ExamSpec(EXAMS[name], data=str(file)))


def test_the_questions_are_those_of_the_sources() -> None:
    asked = EXAMS["gsm8k"].ask(exam_cases.ROWS["gsm8k"][1], 0)
    assert asked.answer == "1200"
    assert asked.messages[0]["content"].endswith(
        'What is 20 times 60? Let\'s think step by step and output the final answer after "####".'
    )
    assert "$\\boxed{ANSWER}$" in EXAMS["aime24"].ask(exam_cases.ROWS["aime24"][0], 0).messages[0]["content"]


def group_of(texts: list[str], position: int = 0, answer: str = "") -> Group:
    rollouts = tuple(
        Rollout(
            ModelInput((1,)), torch.ones(2, dtype=torch.int32).numpy(), torch.zeros(2), torch.ones(2, dtype=torch.bool),
            FinishReason.LENGTH, 0, columns={"text": text},
        )
        for text in texts
    )  # fmt: skip
    return Group({"prompt": "?", "answer": answer}, rollouts, position)


def test_a_check_that_hangs_dies_or_raises_judges_one_completion_wrong_and_is_counted() -> None:
    exam = dataclasses.replace(LETTERS, check="exam_cases:unruly", seconds=5.0)
    checker = Checker(exam, lambda group: [rollout.columns["text"] for rollout in group.rollouts], workers=2)
    try:
        checking = checker.submit(
            [group_of(["hang", "yes", "die", "no"], 0, "yes"), group_of(["raise", "yes"], 1, "yes")]
        )
        assert checking.result().tolist() == [[0.0], [1.0], [0.0], [0.0], [0.0], [1.0]] and checking.done()
        assert checker.counts == {"late": 1, "died": 1, "raised": 1} and "no such thing" in checker.example
    finally:
        checker.close()


def test_pass_at_k_is_the_mean_over_all_choices_of_k_completions() -> None:
    for n, c in itertools.product((1, 4, 6), range(4)):
        verdicts = [index < c for index in range(n)]
        for k in range(1, n + 1):
            chosen = [any(choice) for choice in itertools.combinations(verdicts, k)]
            assert pass_at(n, min(n, c), k) == pytest.approx(sum(chosen) / len(chosen))


def test_intervals_are_over_questions() -> None:
    result = ExamResult(dataclasses.replace(LETTERS, n=4), {0: 4, 1: 0, 2: 1, 3: 2}, tokens=32)
    values = [1.0, 0.0, 0.25, 0.5]
    assert result.accuracy.mean == pytest.approx(0.4375)
    assert result.accuracy.half == pytest.approx(1.959964 * statistics.stdev(values) / 2)
    assert result.passes()[2].mean == pytest.approx(sum(pass_at(4, c, 2) for c in (4, 0, 1, 2)) / 4)
    assert set(result.passes()) == {2, 4} and result.completions == 16
    assert math.isnan(Estimate.of([1.0]).half) and Estimate.of([1.0]).as_json()["half_width_95"] is None
    lines = table([result])
    assert "43.8 ± 41.8" in lines[1] and "@2 " in lines[1]


def test_a_run_stands_for_its_model_or_its_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds neither a model"):
        command.model_of(str(tmp_path))
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert command.model_of(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    (tmp_path / "model.safetensors").touch()
    assert command.model_of(str(tmp_path)) == str(tmp_path) and command.model_of("org/name") == "org/name"
    (tmp_path / "trainer_state.json").write_text('{"global_step": 9}')  # the run went on after it had saved its model
    assert command.model_of(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 10}')
    assert command.model_of(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "gsm8k"], "the model is missing: colograd eval MODEL --on"),
        (["m"], "--on is missing"),
        (["m", "--on", "gsm8k", "--n", "0"], "--n is 0, but must be at least 1"),
        (["m", "--on", "gsm8k", "--n", "2"], "at temperature 0 would be equal"),
        (["m", "--on", "gsm8k", "gsm8k"], "named twice"),
        (["nowhere/at-all", "--on", "gsm8k", "--dtyp", "float32"], "Did you mean `dtype`"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(said, error)


def arguments_for(folder: Path, out: Path, names: Any = exam_cases.ROWS) -> list[str]:
    files = exam_cases.write(folder)
    settings = ["--max-tokens", "16", "--dtype", "float32", "--vllm_engine_kwargs.max_num_seqs", "1"]
    on = [f"{name}@2={files[name]}" if EXAMS[name].temperature else f"{name}={files[name]}" for name in names]
    return ["--on", *on, *settings, "--json", str(out / "out.json"), "--completions", str(out / "completions.jsonl")]


@pytest.mark.engine
@pytest.mark.parametrize(
    "names",
    [["gsm8k", "mbpp"], pytest.param(["math500", "aime24", "aime25", "gpqa", "mbpp_plus"], marks=pytest.mark.slow)],
)
def test_two_ranks_take_exams(tmp_path: Path, names: list[str]) -> None:
    model = tiny.make_model(tmp_path / "model", context=2048)
    given = arguments_for(tmp_path, tmp_path, names)
    done = launcher.run("colograd.apps.cli", "eval", model, *given, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {exam["exam"]: exam for exam in json.loads((tmp_path / "out.json").read_text())["exams"]}
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    for name in names:
        exam, asked = EXAMS[name], exam_cases.ROWS[name]
        n = 2 if exam.temperature else 1
        assert (found[name]["questions"], found[name]["n"], len(found[name]["right"])) == (len(asked), n, len(asked))
        of_exam = [row for row in rows if row["exam"] == name]
        assert len(of_exam) == n * len(asked) and all(row["tokens"] <= 16 for row in of_exam)
        check = find_object(exam.check, "the checker", callable)
        assert all(row["right"] == check(row["completion"], row["answer"]) for row in of_exam)
        assert f"published, {name}: " in done.stdout and f"\n{name} " in done.stdout


@pytest.mark.slow
@pytest.mark.engine
def test_an_adapter_of_one_rank_writes_what_two_ranks_write(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = tiny.make_model(tmp_path / "model", context=2048)
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    tiny.make_tokenizer().save_pretrained(tmp_path / "adapter")
    written = []
    for ranks in (0, 2):
        out = tmp_path / str(ranks)
        given = arguments_for(tmp_path, out, ["gsm8k", "math500"])
        done = launcher.run("colograd.apps.cli", "eval", tmp_path / "adapter", *given, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "is an adapter, which is merged" in done.stdout
        written.append((out / "completions.jsonl").read_text())
    assert written[0] == written[1] and len(written[0].splitlines()) == 7


@pytest.mark.engine
def test_a_run_takes_exams_beside_its_own_evaluation(
    tiny_model: Path, tmp_path: Path, closing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled and judged by the exam's rules, in the middle of training, and steps go on as without it."""
    monkeypatch.setitem(EXAMS, "letters", LETTERS)
    file = tmp_path / "letters.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{number}"}) + "\n" for number in range(5)))
    args = tiny.config(
        tmp_path / "run", max_steps=2, eval_strategy="steps", eval_steps=1, num_generations_eval=2, log_completions=True
    )
    datasets = {"own": tiny.prompts(2), "letters": f"letters={file}"}
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, args, tiny.prompts(), datasets))
    seen = tiny.remembered_groups(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_letters_accuracy" in entry]
    assert len(logged) == 2 and sum("eval_own_reward" in entry for entry in trainer.state.log_history) == 2
    assert {"eval_letters_pass@2", "eval_letters_pass@4", "eval_letters_accuracy_ci95"} <= logged[0].keys()
    assert "eval_letters_loss" not in logged[0] and logged[0]["eval_letters_completions"] == 20
    assert len(seen) == 2 * (4 + 2), "the exam asks the engine, not a replaced stage"
    files = sorted((tmp_path / "run" / "completions").glob("eval_letters_*.parquet"))
    rows, names = read_log(files[0])
    assert names == ["letters"]
    assert len(rows) == 20
    verdicts = [exam_cases.check(row.completion, "3") for row in rows]
    assert [bool(row.rewards[0]) for row in rows] == verdicts
    assert logged[0]["eval_letters_accuracy"] == pytest.approx(sum(verdicts) / 20)
    assert 0 < sum(verdicts) < 20, "the exam tells completions apart"
    metrics = trainer.evaluate(f"letters[:1]={file}", metric_key_prefix="later")
    assert metrics["later_letters_completions"] == 4


def test_the_page_has_every_exam_with_its_numbers() -> None:
    text = (ROOT / "docs" / "guide" / "evaluation.md").read_text().partition("## The exams")[2]
    for name, exam in EXAMS.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` | "))
        assert exam.path in row or name == "mbpp_plus"
        assert all(f"{each.percent:g}" in row for each in exam.published), row
    (row,) = (line for line in text.splitlines() if line.startswith("| `gsm8k` | "))
    assert all(f"]({each.source})" in row for each in EXAMS["gsm8k"].published)
