"""Tasks of lm-evaluation-harness from local YAML files: names, judgement in workers, numbers, and a real engine."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import benchmark_cases
import launcher
import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.apps import eval as command
from colograd.extensions.evaluation import specs
from colograd.extensions.evaluation.specs import TaskSpec, names_of
from colograd.extensions.recording.completions import read_log
from colograd.rewards.answers import chance_of_pass

pytest.importorskip("lm_eval")


from colograd.extensions.evaluation import sitting
from colograd.extensions.evaluation.harness import HarnessBenchmark, Rules
from colograd.extensions.evaluation.judging import CodeEval, Judge, run_python
from colograd.extensions.evaluation.results import Answer, SuiteResult, TaskResult, table
from colograd.usercode.worker_pool import WorkerPool


def test_a_task_is_named_with_rows_and_completions() -> None:
    assert TaskSpec.parse("mmlu[:100]") == TaskSpec("mmlu", 100, None)
    assert TaskSpec.parse("tasks/mine.yaml@16") == TaskSpec("tasks/mine.yaml", None, 16)
    assert TaskSpec.parse("math500@4") == TaskSpec("minerva_math500", None, 4), "a former exam"
    assert names_of(["math500@4", "tasks/mine.yaml[:5]"]) == {"math500": "math500@4", "mine": "tasks/mine.yaml[:5]"}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["gsm8k[5]"], r"'gsm8k\[5\]' can't be read: write NAME, NAME\[:100\]"),
        (["gsm8k=mine.jsonl"], r"can't be read: .*For data of your own write a YAML file"),
        (["aime24@0"], "requests 0 rows or completions"),
        (["gsm8k", "gsm8k@4"], "'gsm8k' is named twice"),
    ],
)
def test_a_bad_name_is_one_error_with_remedy(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        names_of(texts)


def test_a_missing_harness_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lm_eval is missing: pip install .*colograd\[eval\]"):
        names_of(["gsm8k"])


def loaded(folder: Path, text: str, **changes: Any) -> HarnessBenchmark:
    rules: dict[str, Any] = {"context": 64, "include": (str(folder),)} | changes
    return HarnessBenchmark(text, Rules(tiny.make_tokenizer(), **rules))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return benchmark_cases.write(tmp_path_factory.mktemp("tasks"))


def test_questions_are_the_tasks_prompts_as_tokens(folder: Path) -> None:
    state = torch.get_rng_state()
    (task,) = loaded(folder, "letters[:3]@4").tasks
    assert torch.equal(torch.get_rng_state(), state), "random generators are the run's"
    (request,) = task.questions[2].requests
    tokenizer = tiny.make_tokenizer()
    assert len(task.questions) == 3 and tokenizer.decode(request.prompt) == "<user>q2\n<assistant>"
    assert request.sampling is not None and (request.sampling.n, request.sampling.max_tokens) == (4, 8)
    assert request.sampling.options == {"stop": ["\n"]}
    (choices,) = loaded(folder, "choices").tasks
    parts = [request.parts[0] for request in choices.questions[1].requests]
    assert [tokenizer.decode(target) for _, target in parts] == [" aa", "  1b"]
    assert {tokenizer.decode(context) for context, _ in parts} == {"q1"}, "scored texts have no chat template"


def test_long_prompts_are_cut_at_their_beginning(folder: Path) -> None:
    found = loaded(folder, "letters", context=20)
    assert found.dropped and "cut off, as lm-evaluation-harness does: 5 of 5 of letters" in found.dropped_line()
    assert found.longest == 12 and not loaded(folder, "letters").dropped


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("choices@2", {}, "the task 'choices' is scored by log-probabilities: leave out @2"),
        ("letters@2", {"temperature": 0.0}, "2 completions per question at temperature 0 would be equal"),
        ("nowhere/mine.yaml", {}, "can't be loaded: ValueError: the file doesn't exist"),
    ],
)
def test_an_impossible_task_is_one_error(folder: Path, text: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loaded(folder, text, **changes)


@pytest.mark.slow
def test_a_check_that_hangs_dies_or_raises_counts_as_wrong(tmp_path: Path) -> None:
    (task,) = loaded(benchmark_cases.write(tmp_path, ("", "hang", "die", "raise", "")), "letters").tasks
    pool = WorkerPool("checks", {"letters": Judge(task.task)}, 2, 10.0)
    try:
        calls = [
            pool.submit("letters", {"instances": [r.instance for r in each.requests], "responses": [["abc"]]})
            for each in task.questions
        ]
        outcomes = [call.result() for call in calls]
    finally:
        pool.close()
    assert [outcome.kind for outcome in outcomes] == ["value", "late", "died", "raised", "value"]
    assert outcomes[0].value == {("right", "none"): 1.0}
    verdicts = [outcome.value if outcome.kind == "value" else {} for outcome in outcomes]
    answered = [Answer("letters", row, [verdict]) for row, verdict in enumerate(verdicts)]
    answered[1].failed.append(("late", ""))
    result = TaskResult(task, answered)
    SuiteResult.of(loaded(tmp_path, "letters"), [result])
    assert result.metrics()["accuracy"] == 2 / 5 and "1 failed checks count as wrong answers" in table_of(result)


def table_of(*results: TaskResult) -> str:
    return "\n".join(table([SuiteResult([*results], {})]))


def test_pass_at_k_is_the_mean_over_choices() -> None:
    for n, c in itertools.product((1, 4, 6), range(4)):
        verdicts = [index < c for index in range(n)]
        for k in range(1, n + 1):
            chosen = [any(choice) for choice in itertools.combinations(verdicts, k)]
            assert chance_of_pass(n, min(n, c), k) == pytest.approx(sum(chosen) / len(chosen))


def test_intervals_are_over_questions(folder: Path) -> None:
    benchmark = loaded(folder, "letters[:4]@4")
    rights = (4, 0, 1, 2)
    answered = [
        Answer("letters", row, [{("right", "none"): float(i < c)} for i in range(4)]) for row, c in enumerate(rights)
    ]
    result = TaskResult(benchmark.tasks[0], answered)
    suite = SuiteResult.of(benchmark, [result])
    metrics, values = suite.metrics(), [1.0, 0.0, 0.25, 0.5]
    assert metrics["accuracy"] == metrics["right"] == pytest.approx(0.4375)
    assert metrics["accuracy_ci95"] == pytest.approx(1.959964 * statistics.stdev(values) / 2)
    assert metrics["pass@2"] == pytest.approx(sum(chance_of_pass(4, c, 2) for c in rights) / 4)
    assert "43.8 ± 41.8 %" in table_of(result) and "pass@2 " in table_of(result)


def test_model_written_code_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's tasks find `CodeEval` by the name of the metric that they load."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    right = "import os\ndef add(a, b):\n    assert 'HF_TOKEN' not in os.environ\n    return a + b"
    shares, _ = CodeEval().compute(
        references=["assert add(1, 2) == 3"],
        predictions=[[right, "import os\nos._exit(0)", "x = [0] * 10**12"]],
        k=[1, 2],
    )
    assert shares == {"pass@1": pytest.approx(1 / 3), "pass@2": pytest.approx(2 / 3)}
    assert not run_python("import subprocess, time\nsubprocess.Popen(['sleep', '999'])\ntime.sleep(999)", 1.0)
    assert not run_python("assert 1 == 2, 'two'", 60)


def test_a_run_stands_for_its_newest_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model"):
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
        (["--tasks", "gsm8k"], "the model is missing: name it first, as in `colograd eval MODEL --tasks"),
        (["m"], "--tasks is missing"),
        (["m", "--tasks", "gsm8k", "--limit", "0"], "--limit is 0, but must be at least 1"),
        (["m", "--tasks", "gsm8k,gsm8k"], "named twice"),
        (["m", "--tasks", "gsm8k", "--resume"], "--resume needs the results file of an earlier command"),
        (["nowhere/at-all", "--tasks", "gsm8k", "--dtyp", "float32"], "Did you mean `dtype`"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(said, error)


@pytest.mark.slow
@pytest.mark.engine
def test_two_ranks_take_tasks(tmp_path: Path) -> None:
    """Each rank's engine samples and scores. The run has a group of tasks, and an evaluation is resumed."""
    model = tiny.make_model(tmp_path / "model", context=256)
    tasks = benchmark_cases.write(tmp_path)
    given = ["--include-path", tasks, "--json", tmp_path / "out.json", "--completions", tmp_path / "completions.jsonl"]
    given += ["--dtype", "float32", "--vllm_engine_kwargs.enforce_eager", "true"]
    done = launcher.run("colograd.apps.cli", "eval", model, "--tasks", "letters@2", "both", *given, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    (letters,) = results["letters@2"]["tasks"]
    sampled = [row for row in rows if row["task"] == "letters" and "completion" in row]
    right = [row["metrics"]["right,none"] for row in sampled[: 2 * benchmark_cases.QUESTIONS]]
    assert letters["questions"] == 5 and letters["metrics"]["accuracy"] == pytest.approx(sum(right) / 10)
    for row in sampled:
        assert row["metrics"]["right,none"] == (sum(each.isalpha() for each in row["completion"]) >= 3)
        assert "\n" not in row["completion"] and row["tokens"] <= 8
    assert results["both"]["groups"]["both"]["acc,none"] == results["both"]["tasks"][0]["metrics"]["acc"]
    assert [row["row"] for row in rows if row["task"] == "choices"] == [*range(5)]
    again = launcher.run("colograd.apps.cli", "eval", model, "--tasks", "letters@2", "words", *given, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    assert [*json.loads((tmp_path / "out.json").read_text())["results"]] == ["letters@2", "both", "words"]
    assert "\nletters " not in again.stdout and "bits_per_byte" in again.stdout


@pytest.mark.engine
def test_scores_are_the_models_log_probabilities(
    tiny_model: Path, tmp_path: Path, closing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's task scores equal transformers' log-probabilities, and evaluation changes no sample or step."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(sitting, "MOST_WORKERS", 1)  # each imports the harness, which takes ten seconds
    tasks = benchmark_cases.write(tmp_path)
    args = tiny.config(tmp_path / "run", max_steps=2, eval_strategy="steps", eval_steps=1, log_completions=True)
    datasets = {"own": tiny.prompts(2), "letters": f"{tasks}/letters.yaml@2"}
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, args, tiny.prompts(), datasets))
    found = []
    evaluate = trainer.evaluate
    seen = tiny.remembered_groups(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_letters_accuracy" in entry]
    assert len(logged) == 2 and sum("eval_own_reward" in entry for entry in trainer.state.log_history) == 2
    assert {"eval_letters_pass@2", "eval_letters_accuracy_ci95", "eval_letters_right"} <= logged[0].keys()
    assert logged[0]["eval_letters_completions"] == 10 and "eval_letters_loss" not in logged[0]
    assert all(len(group.example) and "question" not in group.example for group in seen), "a task isn't a stage's"
    files = sorted((tmp_path / "run" / "completions").glob("eval_letters_*.parquet"))
    rows, names = read_log(files[0])
    assert len(rows) == 10 and names == ["eval_letters"]
    assert sum(row.rewards[0] for row in rows) / 10 == pytest.approx(logged[0]["eval_letters_accuracy"])
    metrics = evaluate(f"{tasks}/choices.yaml[:3]", metric_key_prefix="later")
    assert metrics["later_choices_completions"] == 0
    assert all(0 <= metrics[f"later_choices_{name}"] <= 1 for name in ("acc", "acc_norm"))
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    parts = [((1, 2, 3), (4, 5)), ((7,), (8, 9, 10))]
    for context, target in parts:
        logits = model(torch.tensor([[*context, *target]])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        found.append((float(logits.gather(1, torch.tensor(target)[:, None]).sum()), logits.argmax(-1).tolist()))
    scores = trainer.engine.on_engine_leader(lambda: sitting.score(trainer.engine, parts), others=[])
    for (logprob, greedy), (expected, best), (_, target) in zip(scores, found, parts, strict=True):
        assert logprob == pytest.approx(expected, abs=1e-3) and greedy == (best == [*target])
