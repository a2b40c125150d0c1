"""The advisor: each rule with a made-up log that raises it and one that doesn't; two real runs with a fault put in."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import tiny

from colograd import GRPOConfig, GRPOTrainer
from colograd.config import ModelConfig, ScriptArguments
from colograd.extensions.recording.advisor import QUIET, RULES, TEXTS, Advisor
from colograd.extensions.recording.event_log import events_of

# Metrics of a healthy step.
WELL = {
    "reward": 0.5,
    "reward_std": 0.4,
    "rewards/right/mean": 0.5,
    "rewards/right/std": 0.4,
    "rewards/right/abstained": 0.0,
    "rewards/right/seconds": 0.1,
    "frac_reward_zero_std": 0.3,
    "completions/mean_length": 100.0,
    "completions/clipped_ratio": 0.1,
    "completions/duplicates": 0.1,
    "entropy": 1.0,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
    "sampling/sampling_logp_difference/mean": 0.01,
    "sampling/masked_share": 0.02,
    "sampling/masked_tokens_share": 0.03,
    "clip_ratio/region_mean": 0.0,
    "step_time": 10.0,
    "time/reward": 0.5,
}  # fmt: skip
STALE = {
    "carry_over/old_tokens_share": 0.6,
    "carry_over/mean_age": 1.2,
    "carry_over/old_logp_difference": 0.1,
}
FEW_STALE = STALE | {
    "carry_over/old_tokens_share": 0.4,
    "carry_over/old_logp_difference": 0.18,
}
SETTINGS = {
    "max_completion_length": 256,
    "max_grad_norm": 1.0,
    "vllm_importance_sampling_mode": "sequence_mask",
    "learning_rate": 1e-6,
}


def alarms(steps: Iterable[dict[str, Any]], rollouts: Any = (), evaluations: Any = ()) -> list[dict[str, str]]:
    """Alarms of a run whose steps differ from a healthy step in the given metrics."""
    advisor, found = Advisor(SETTINGS), []
    evaluations = dict(evaluations)
    for rollout in rollouts:
        advisor.history.add_rollout(rollout["step"], rollout)
    for number, changes in enumerate(steps, start=1):
        metrics = {name: value for name, value in (WELL | changes).items() if value is not None}
        found += advisor.look(number, metrics)[0]
        if number in evaluations:
            found += advisor.look(number, {"eval_reward": evaluations[number], "eval_loss": 0.1})[0]
    return found


def rollouts(count: int = 3, **changes: Any) -> list[dict[str, Any]]:
    quiet = {"running": [[0, 8], [1, 8]], "waiting": [[0, 0], [1, 0]], "kv": [[0, 0.1], [1, 0.4]], "preemptions": 0}
    ranks = range(64)  # the rule needs three rounds of all ranks
    return [{"step": n, "rank": rank, **quiet, **changes} for n in range(1, count + 1) for rank in ranks]


FULL = {"waiting": [[0, 9], [1, 8]], "kv": [[0, 0.97], [1, 0.99]]}

RISING, FALLING = ([{"reward": start + slope * n} for n in range(40)] for start, slope in ((0.3, 0.01), (0.5, -0.01)))
SOLVED: list[dict[str, Any]] = [
    *[{"reward": 0.3}] * 5,
    *[{"reward": 0.95}] * 5,
    *[{"reward": 0.95, "frac_reward_zero_std": 0.8}] * 5,
]
# rule -> a log that raises it (severity, what is in the alarm), and logs that are near and don't
RAISED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no-reward-difference": ("severe", {"steps": [{"frac_reward_zero_std": 1.0}] * 3}, "100% .* a mean reward of 0.5"),
    "solved": (
        "note",
        {"steps": SOLVED},
        "70% .* at a mean reward of 0.95: the task is nearly solved",
    ),
    "constant-reward": (
        "severe",
        {"steps": [{"rewards/right/mean": 1.0, "rewards/right/std": 0.0}] * 3},
        "'right' gave 1 to every completion of the last 3 steps",
    ),
    "failing-reward": (
        "severe",
        {"steps": [{"rewards/right/mean": None, "rewards/right/std": None, "rewards/right/abstained": 32.0}] * 3},
        "'right' abstained for every completion of the last 3 steps",
    ),
    "slow-rewards": (
        "warning",
        {"steps": [{"time/reward": 6.0, "rewards/other/seconds": 1.0, "rewards/other/abstained": 0.0}] * 3},
        r"60% of a step \(6.0 of 10.0 s, most of it for 'other'\)",
    ),
    "reward-hacked": (
        "warning",
        {
            "steps": RISING,
            "evaluations": {10: 0.5, 20: 0.6, 30: 0.5, 40: 0.4},
        },
        "eval_reward fell from 0.6 at step 20 to 0.4, while the training reward rose from 0.47 to 0.67",
    ),
    "all-truncated": ("severe", {"steps": [{"completions/clipped_ratio": 1.0}] * 3}, "100% .* cut off at 256 tokens"),
    "length-running-away": (
        "warning",
        {"steps": [{"completions/mean_length": 100.0 + 20 * number} for number in range(20)]},
        "completions grew from 140 to .* tokens, while the reward went from 0.5 to 0.5",
    ),
    "duplicates": ("warning", {"steps": [{"completions/duplicates": 0.85}] * 3}, "85% .* token by token"),
    "entropy-collapse": (
        "warning",
        {"steps": [{"entropy": 0.8 * 0.7**number} for number in range(16)]},
        "the entropy fell from 0.444 to 0.037 nats",
    ),
    "gradient-spike": ("warning", {"steps": [{}] * 6 + [{"grad_norm": 30.0}]}, "norm is 30, 60 times"),
    "sampler-trainer-gap": (
        "warning",
        {"steps": [{"sampling/sampling_logp_difference/mean": 0.005 * 1.2**number} for number in range(16)]},
        r"differ by 0.03\d nats on average, 0.0074 in the first steps",
    ),
    "stale-tokens": (
        "warning",
        {"steps": [STALE] * 3},
        "60% of the last steps' tokens were carried over, 1.2 optimizer steps old .* moved by 0.1 nats",
    ),
    "clipped-away": (
        "severe",
        {"steps": [{"sampling/masked_share": 0.2, "sampling/masked_tokens_share": 0.7}] * 3},
        "70% of the tokens of the last steps were masked away",
    ),
    "no-effect": ("warning", {"steps": [{}] * 60}, r"after 50 steps reward \(0.5\), .* at a learning rate of 1e-06"),
    "engine-waits": ("warning", {"steps": [{}], "rollouts": rollouts(preemptions=4)}, "preempted 768 sequences"),
}  # fmt: skip
ALSO = {
    "failing-reward": {"steps": [{"rewards/right/errors": 2.0}] * 3},
    "duplicates": {"steps": [{"completions/duplicates": 0.6, "frac_reward_zero_std": 0.6}] * 3},
    "sampler-trainer-gap": {"steps": [{"sampling/sampling_logp_difference/mean": 0.2}] * 3},
    "clipped-away": {"steps": [{"sampling/masked_share": 0.4, "sampling/masked_tokens_share": None}] * 3},
    "no-effect": {"steps": [{"learning_rate": 0.0}] * 3},
    "engine-waits": {"steps": [{}], "rollouts": rollouts(**FULL)},
}
NOT_RAISED: dict[str, list[dict[str, Any]]] = {
    "no-reward-difference": [
        {"steps": [{"frac_reward_zero_std": share} for share in (1.0, 0.2, 0.3, 1.0)]},
        {"steps": SOLVED},
        {"steps": [{"frac_reward_zero_std": 1.0, "teacher_kl": 0.2}] * 3},
    ],
    "solved": [{"steps": [{"frac_reward_zero_std": 0.8}] * 5}, {"steps": [{"reward": 0.95}] * 9}],
    "constant-reward": [
        {"steps": [{"rewards/right/mean": number / 3, "rewards/right/std": 0.0} for number in range(3)]},
        {"steps": [{"rewards/right/mean": 1.0, "rewards/right/std": 0.0}] * 2},
    ],
    "failing-reward": [
        {"steps": [{"rewards/right/abstained": 16.0}] * 5},
        {"steps": [{"rewards/right/errors": float(number % 2)} for number in range(6)]},
    ],
    "slow-rewards": [{"steps": [{"time/reward": 3.0}] * 5}, {"steps": [{"time/reward": 0.1, "step_time": 0.2}] * 5}],
    "reward-hacked": [
        {"steps": RISING, "evaluations": {10: 0.5, 20: 0.6, 30: 0.59, 40: 0.59}},
        {"steps": FALLING, "evaluations": {10: 0.5, 20: 0.6, 30: 0.5, 40: 0.4}},
        {"steps": RISING, "evaluations": {20: 0.6, 30: 0.7, 40: 0.4}},
    ],
    "all-truncated": [{"steps": [{"completions/clipped_ratio": 0.6}] * 5}],
    "length-running-away": [
        {"steps": [{"completions/mean_length": 100 + 20 * n, "reward": 0.2 + n / 30} for n in range(20)]},
        {"steps": [{"completions/mean_length": 4.0 + n / 2} for n in range(20)]},
    ],
    "duplicates": [
        {"steps": [{"completions/duplicates": 0.6}] * 5},
        {"steps": [{"reward": 0.3}] * 5 + [{"reward": 0.95, "completions/duplicates": 0.9}] * 5},  # it is solved
    ],
    "entropy-collapse": [
        {"steps": [{"reward": 0.3}] * 5 + [{"reward": 0.95, "entropy": 0.02}] * 10},
        {"steps": [{"entropy": 0.08 - number / 400} for number in range(20)]},
        {"steps": [{"entropy": 3.0 * 0.9**number} for number in range(24)]},
    ],
    "gradient-spike": [
        {"steps": [{}] * 6 + [{"grad_norm": 3.0}]},
        {"steps": [{"grad_norm": 0.01}] * 6 + [{"grad_norm": 0.5}]},
        {"steps": [{"grad_norm": 0.0}] * 6 + [{"grad_norm": 5.0}]},
    ],
    "sampler-trainer-gap": [
        {"steps": [{"sampling/sampling_logp_difference/mean": 0.05}] * 20},
        # As much as the old tokens alone make: 60 % of 0.25, and 40 % of 0.01.
        {
            "steps": [
                STALE
                | {"carry_over/old_logp_difference": 0.25, "sampling/sampling_logp_difference/mean": 0.154}
            ]
            * 5
        },
    ],
    "stale-tokens": [{"steps": [FEW_STALE] * 3}],
    "clipped-away": [{"steps": [{"sampling/masked_share": 0.25, "clip_ratio/region_mean": 0.2}] * 5}],
    "no-effect": [
        {"steps": [{"reward": 0.3 + number / 200} for number in range(60)]},
        {"steps": [{"entropy": 1.0 + number / 1000} for number in range(60)]},
        {"steps": [{"learning_rate": number / 1e7} for number in range(5)]},
    ],
    "engine-waits": [
        {"steps": [{}], "rollouts": rollouts()},
        {"steps": [{}], "rollouts": [*rollouts(2, preemptions=4), *rollouts(3)[-64:]]},
        {"steps": [{}], "rollouts": rollouts(**(FULL | {"kv": [[0, 0.2], [1, 0.3]]}))},
    ],
}  # fmt: skip


def test_every_rule_has_its_logs() -> None:
    assert sorted(RULES) == sorted(TEXTS) == sorted(RAISED) == sorted(NOT_RAISED) and set(ALSO) <= set(RULES)


@pytest.mark.parametrize("name", RAISED)
def test_a_rule_is_raised_with_its_numbers_and_once(name: str) -> None:
    severity, log, seen = RAISED[name]
    (alarm,) = (alarm for alarm in alarms(**log) if alarm["rule"] == name)
    assert re.search(seen, alarm["seen"]), alarm["seen"]
    assert alarm["severity"] == severity and alarm["why"] and alarm["remedy"] and alarm["source"].startswith("https://")
    longer = {**log, "steps": [*log["steps"], *log["steps"][-1:] * 5]}
    assert sum(alarm["rule"] == name for alarm in alarms(**longer)) == 1


@pytest.mark.parametrize("name", ALSO)
def test_a_rule_has_more_than_one_way_to_be_raised(name: str) -> None:
    assert name in [alarm["rule"] for alarm in alarms(**ALSO[name])]


@pytest.mark.parametrize("name", NOT_RAISED)
def test_a_rule_is_not_raised_by_a_log_that_is_near(name: str) -> None:
    for log in NOT_RAISED[name]:
        assert name not in [alarm["rule"] for alarm in alarms(**log)], log


def test_a_run_in_which_all_is_well_raises_nothing() -> None:
    rising = [{"reward": 0.3 + 0.01 * number, "entropy": 1 - 0.01 * number} for number in range(40)]
    assert alarms(rising, rollouts(), {10: 0.4, 20: 0.5, 30: 0.6}) == []
    assert alarms([dict.fromkeys(WELL)] * 40) == [], "a log with nothing in it"


def test_an_alarm_ends_when_it_has_been_quiet_and_may_come_again() -> None:
    advisor, said = Advisor(SETTINGS), []
    bad, well = {**WELL, "completions/clipped_ratio": 1.0}, {**WELL, "reward": 0.6}
    for step in range(1, 60):
        begin, end = advisor.look(step, bad if step <= 5 or step > 50 else well)
        said += [(step, alarm["rule"]) for alarm in begin] + [(step, f"-{name}") for name in end]
    ended = next(step for step, name in said if name == "-all-truncated")
    assert said[0] == (3, "all-truncated") and 5 + QUIET < ended < 12 + QUIET
    assert [name for _, name in said if "truncated" in name] == ["all-truncated", "-all-truncated", "all-truncated"]


def test_a_resumed_run_remembers_what_it_saw_and_said() -> None:
    events: list[dict[str, Any]] = [{"kind": "start", "step": 0}, {"kind": "log", "step": "?", "metrics": None}]
    bad = WELL | {"completions/clipped_ratio": 1.0}
    events += [{"kind": "log", "step": step, "metrics": bad} for step in (1, 2, 3)]
    events += [{"kind": "alarm", "step": 3, "rule": "all-truncated"}, {"kind": "rollout", "step": 1, "preemptions": 1}]
    advisor = Advisor(SETTINGS)
    events.append({"kind": "log", "step": 4, "metrics": bad})
    advisor.restore(events, last=3)
    assert len(advisor.history.steps) == 3 and len(advisor.history.rollouts) == 1
    assert advisor.look(4, bad) == ([], []), "it was said"


def test_remedies_name_keys_that_there_are_with_their_values() -> None:
    others = {"dapo", "kv_cache_memory_bytes"}
    knobs = {
        field.name for group in (GRPOConfig, ModelConfig, ScriptArguments) for field in dataclasses.fields(group)
    } | others
    for name, texts in TEXTS.items():
        named = re.findall(r"`(\w+)(?::[^`]*)?`", texts["remedy"])
        assert named and set(named) - {"colograd"} <= knobs, (name, set(named) - knobs)
    (alarm,) = alarms([{"completions/clipped_ratio": 1.0}] * 3)
    assert "Raise `max_completion_length` (now 256), look whether" in alarm["remedy"]


# -- real runs


def run(model: Path, folder: Path, reward: Any, caplog: pytest.LogCaptureFixture, **changes: Any) -> Any:
    """The alarms in the record of four steps, and the lines of the log."""
    with caplog.at_level(logging.WARNING, logger="colograd"):
        trainer = GRPOTrainer(str(model), reward, tiny.config(folder, **changes), tiny.prompts())
        try:
            trainer.train()
        finally:
            trainer.close()
    found = {event["rule"]: event for event in events_of(folder) if event["kind"] == "alarm"}
    return found, [record.getMessage() for record in caplog.records if record.getMessage().startswith("advisor")]


@contextlib.contextmanager
def opened(report: Path) -> Iterator[list[str]]:
    """The alarms at the top of the run's report page, as a browser shows them."""
    if browser.found() is None:
        pytest.skip("all but the page passed: there is no browser")
    with browser.Browser() as page:
        page.open(report.as_uri())
        yield page.run("[...document.querySelectorAll('.alarm-line')].map((e) => e.innerText)")


def one(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.engine
def test_a_reward_that_is_always_1_is_noticed(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    found, said = run(tiny_model, tmp_path, one, caplog)
    assert found["constant-reward"]["severity"] == found["no-reward-difference"]["severity"] == "severe"
    assert found["constant-reward"]["seen"] == "'one' gave 1 to every completion of the last 3 steps"
    assert found["constant-reward"]["step"] == 3 and "`reward_funcs`" in found["constant-reward"]["remedy"]
    assert len(said) == len(found), "each once"
    shown = capfd.readouterr().out
    assert "advisor: 'one' gave 1 to every completion" in shown
    with opened(tmp_path / "report.html") as lines:
        assert any("'one' gave 1 to every completion" in line for line in lines), lines


@pytest.mark.engine
def test_completions_that_have_no_room_are_noticed(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, said = run(tiny_model, tmp_path, tiny.vowels, caplog, max_completion_length=4)
    assert found["all-truncated"]["seen"].endswith("of the last steps' completions were cut off at 4 tokens")
    assert "`max_completion_length` (now 4)" in found["all-truncated"]["remedy"]
    assert any("all-truncated" in line for line in said) and "constant-reward" not in found
    with opened(tmp_path / "report.html") as lines:
        assert any("cut off at 4 tokens" in line for line in lines), lines
