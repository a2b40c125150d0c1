"""The benchmarks: their prompts, figures and forms; and side by side with TRL on a tiny model."""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launcher
import pytest
import tiny
from paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import checkouts
import contestants
import figures
import side_by_side
import startup


@pytest.mark.parametrize("tokens", [60, 61, 200])
def test_prompts_have_exactly_the_tokens_asked_for_and_differ(tokens: int) -> None:
    tokenizer = tiny.make_tokenizer()
    prompts = side_by_side.make_prompts(tokenizer, tokens, 6, seed=0)
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert len(ids) == tokens
    assert len({str(prompt) for prompt in prompts}) == 6
    assert prompts == side_by_side.make_prompts(tokenizer, tokens, 6, seed=0)


def test_a_prompt_shorter_than_the_template_is_plain_text() -> None:
    tokenizer = tiny.make_tokenizer()
    (prompt,) = side_by_side.make_prompts(tokenizer, 8, 1, seed=0)
    assert isinstance(prompt, str) and len(tokenizer(prompt).input_ids) == 8


def test_a_number_of_tokens_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(ValueError, match="exactly 1 tokens"):
        side_by_side.make_prompts(tiny.make_tokenizer(), 1, 1, seed=0)


def test_the_reward_differs_between_texts_unless_a_group_has_no_signal() -> None:
    texts = ["a", "b", [{"role": "assistant", "content": "a"}]]
    first, second, same = contestants.hash_reward(texts, [True] * 3)
    assert first != second and first == same and 0 <= first < 1
    assert contestants.hash_reward(texts, [False] * 3) == [0.5] * 3


def test_figures_are_medians_over_the_steps_of_all_trials_and_ratios_trl_over_colograd() -> None:
    def trial(*seconds: float) -> dict[str, Any]:
        steps = [{**dict.fromkeys(side_by_side.FIGURES, s), "completion_tokens": 3.0} for s in seconds]
        return {"steps": steps, "recorded": [{"train_s": 2.0, "cpu_s": 1.0, "tokens_through_model": 5}]}

    ours, theirs = side_by_side.summary([trial(1, 2), trial(9)]), side_by_side.summary([trial(4, 6, 8)])
    assert (ours["step_s"], theirs["step_s"]) == (2, 6)
    ratio = side_by_side.ratios({"colograd": ours, "trl": theirs})
    assert ratio["step"] == ratio["train"] == ratio["memory"] == 3 and ratio["train_recorded"] == 1
    settings = dict.fromkeys(
        ("model", "dtype", "machine", "prompts_per_step", "prompt_tokens", "num_generations", "completion_tokens"), 1
    )
    table = side_by_side.report({"colograd": ours, "trl": theirs}, {**settings, "steps": 3, "trials": 2})
    assert "| step, s | 2.00 | 6.00 | 3.0 |" in table


def test_rows_per_microbatch_must_divide_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.parse(["--num-generations", "4", "--prompts-per-step", "2", "--rows-per-microbatch", "3"])
    assert "doesn't divide the 8 completions" in capsys.readouterr().err


def test_peak_memory_is_that_since_the_reset() -> None:
    memory = figures.PeakMemory()
    if memory.cuda:
        pytest.skip("reads the resident set, which is what counts on a CPU")
    memory.reset()
    if not memory.exact:
        pytest.skip("this kernel doesn't let the peak be reset")
    before = memory.peak()
    held = mmap.mmap(-1, 50_000_000)  # pages of its own: in the heap there may be room that was counted before
    held.write(b"1" * 50_000_000)
    assert 45_000_000 < memory.peak() - before < 120_000_000
    assert memory.now() - before > 40_000_000
    held.close()


def forked(benchmark: str, *arguments: Any) -> str:
    """What a benchmark printed, run in a process whose imports are done."""
    done = launcher.run(BENCHMARKS / f"{benchmark}.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_log_probabilities_stay_under_the_memory_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark itself, on a smaller vocabulary: tiles are no smaller than with a large one."""
    import logprobs_memory

    def apart(variant: str, labels: int, options: Any) -> dict[str, Any]:
        said = forked("logprobs_memory", *sizes, "--variant", variant, "--labels", labels)
        return json.loads(said.splitlines()[-1])

    sizes = ("--vocabulary", "32000", "--hidden", "64")
    monkeypatch.setattr(logprobs_memory, "measure_apart", apart)
    files = ("--out", str(tmp_path / "f.json"))
    assert logprobs_memory.main([*sizes, "--labels", "2048", "--full-labels", "2048", *files]) == 0
    found = json.loads((tmp_path / "f.json").read_text())["variants"]
    assert found["tiles"]["beyond_bytes"] < 0.3e9 < found["full"]["beyond_bytes"]


def test_steps_of_the_optimizer_are_timed_in_turns(tmp_path: Path) -> None:
    sizes = ("--shapes", "300x200", "77", "--steps", "3", "--limit", "1000")
    said = forked("optimizer", *sizes, "--out", tmp_path / "f.json")
    assert said.count("\n| ") == 5  # header, rule, three contestants
    found = json.loads((tmp_path / "f.json").read_text())
    bytes_each = {name: figures["state_bytes_per_parameter"] for name, figures in found["variants"].items()}
    assert bytes_each == {"split": 10, "foreach": 8, "fused": 8}
    assert all(len(figures["steps"]) == 2 and figures["step_s"] > 0 for figures in found["variants"].values())
    assert 0 < found["ratio"]["split"] < 1000


def test_reward_models_give_the_same_rewards_each_way(tiny_model: Path, tmp_path: Path) -> None:
    """The benchmark itself compares them, and ends where they differ."""
    sizes = ("--model", tiny_model, "--groups", "2", "--max-words", "8", "--trials", "1")
    said = forked("reward_models", *sizes, "--out", tmp_path / "f.json")
    assert said.count("\n| ") == 5  # header, rule, three ways
    assert all(json.loads((tmp_path / "f.json").read_text())[f"processor_s.{way}"] > 0 for way in ("at_once", "padded"))


@pytest.mark.engine
def test_rollouts_are_timed_in_turns_and_rewards_hide_behind_them(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("--prompts", "6", "--completion-tokens", "40", "--mean-tokens", "20", "--trials", "1")
    said = forked("rollouts", "--model", tiny_model, "--dtype", "float32", *sizes, "--json", tmp_path / "f.json")
    assert "| Engine.generate, streaming, trivial reward |" in said
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["throughput"]["shortest"] < found["throughput"]["longest"] == 40, "lengths are spread"
    assert found["ratio"]["throughput"] > 0.3 and 0 < found["ratio"]["streamed_rewards"] <= 1
    (run,) = found["rewards"]
    assert run["reward_s"] >= 6 * found["sleep_s"] and run["hidden_s"] <= run["reward_s"]


@pytest.mark.engine
def test_publishes_are_timed_beside_a_plain_copy_and_the_loader(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import weights

    def apart(way: str, options: Any) -> dict[str, Any]:
        return json.loads(forked("weights", *command, "--way", way).splitlines()[-1])

    command = ["--model", str(tiny_model), "--dtype", "float32", "--publishes", "2", "--eager"]
    monkeypatch.setattr(weights, "measure_apart", apart)
    assert weights.main([*command, "--out", str(tmp_path / "f.json")]) == 0
    assert "| publish, ms |" in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    shared, copied = found["ways"]["shared"], found["ways"]["copied"]
    assert shared["moved_bytes"] == 0 < copied["moved_bytes"] < 2 * shared["weights_bytes"]
    assert copied["weights_bytes"] > shared["weights_bytes"] and found["ratio"]["loader_over_copied"] > 0


@pytest.mark.slow
@pytest.mark.engine
def test_both_trainers_run_side_by_side(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    command = [sys.executable, str(BENCHMARKS / "side_by_side.py"), "--model", str(tiny_model), "--signal", "0.5"]
    command += ["--prompt-tokens", "70", "--completion-tokens", "8", "--num-generations", "4"]
    command += ["--prompts-per-step", "2", "--steps", "2", "--dtype", "float32", "--out", str(tmp_path / "f.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=tiny.clean_environment())
    assert done.returncode == 0
    assert "| tokens through the model |" in done.stdout
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["settings"]["prompt_tokens"] == 70 and found["settings"]["dtype"] == "float32"
    assert {"step", "train", "memory", "train_recorded"} <= found["ratio"].keys()
    ours, theirs = found["trainers"]["colograd"], found["trainers"]["trl"]
    assert all(trainer[name] > 0 for trainer in (ours, theirs) for name in side_by_side.FIGURES)
    # One of two groups carries a signal: its prompt once and at most 4 x 8 completion tokens, in one forward.
    assert ours["forwards"] == 1 and 70 < ours["tokens_recorded"] <= 70 + 4 * 8
    # TRL: every prompt with every completion, padded, through two forwards.
    assert theirs["forwards"] == 2 and theirs["tokens_recorded"] >= 2 * 8 * (70 + 1)


def test_what_a_start_is_divided_into_is_there() -> None:
    for module, functions in startup.STAGES.items():
        for function in functions:
            *owner, name = function.split(".")
            assert name in vars(functools.reduce(getattr, owner, importlib.import_module(module))), function


def test_a_stage_has_the_time_that_no_stage_inside_of_it_has() -> None:
    clock = startup.Clock(time.time() - 5)
    with clock.stage("outer"):
        with clock.stage("inner"):
            time.sleep(0.2)
    assert clock.seconds["interpreter"][0] == pytest.approx(5, abs=1)
    assert clock.seconds["inner"][0] >= 0.2 > clock.seconds["outer"][0]


def test_two_checkouts_differ_where_a_number_does() -> None:
    def answer(rank: int, *losses: float) -> dict[str, Any]:
        numbers = {"losses": [loss.hex() for loss in losses], "completions": ["a" * 64], "weights": "b" * 64}
        span = {"processor": 2.0, "wall": 1.0 + rank}
        return {"runs": {f"ranks, rank {rank}": numbers}, "start": span, "steps": [span, span]}

    before = checkouts.joined([answer(0, 0.5, 0.25), answer(1, 0.5, 0.25)])
    assert before["start"] == {"processor": 4.0, "wall": 2.0} and len(before["runs"]) == 2
    after = checkouts.joined([answer(0, 0.5, 0.25), answer(1, 0.5, 0.25 + 2**-50)])
    (found,) = checkouts.differences({"before": [before], "after": [after]})
    assert (
        found[:2] == ("ranks, rank 1", "losses")
        and "losses from number 2 on: 0.2500000000000009, expected 0.25" in found[2]
    )
    assert not list(checkouts.differences({"before": [before], "after": [before]}))
