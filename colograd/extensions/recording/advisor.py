"""Advisor: rules that look for known problems in a run's logged metrics, and raise alarms.

An alarm ends when its rule has found nothing for more than `QUIET` steps.
"""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ...config.sampling import shaping

WINDOW = 5
LEAST = 3
QUIET = 20
STEPS_IN_MEMORY = 200


class Finding(NamedTuple):
    text: str
    severe: bool = False
    good: bool = False


@dataclass(slots=True)
class History:
    """Data of a run for the advisor's rules: settings, metrics, rewards, and whether KV caches were full."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: deque[tuple[int, Mapping[str, float]]] = field(default_factory=lambda: deque(maxlen=STEPS_IN_MEMORY))
    first: list[Mapping[str, float]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # Step -> (sequences that the engine preempted, whether most sequences waited because the KV cache was full).
    rollouts: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        if any(name.startswith("eval") for name in metrics):
            for name, value in metrics.items():
                if (found := re.fullmatch(r"(eval(?:_.+)?)_reward", name)) and _is_number(value):
                    self.evaluations.setdefault(found[1], []).append((step, float(value)))
        elif "reward" in metrics or "step_time" in metrics:
            self.steps.append((step, metrics))
            if len(self.first) < WINDOW:
                self.first.append(metrics)
            if _is_number(reward := metrics.get("reward")):
                self.rewards.append((step, float(reward)))

    def add_rollout(self, step: int, rollout: Mapping[str, Any]) -> None:
        looks = [*zip(*(rollout.get(name) or [] for name in ("running", "waiting", "kv")), strict=False)]
        waits = sum(waiting[1] >= running[1] > 0 and kv[1] >= 0.9 for running, waiting, kv in looks)
        preempted, full = self.rollouts.get(step, (0, False))
        self.rollouts[step] = preempted + (rollout.get("preemptions") or 0), full or 0 < len(looks) <= 2 * waits

    def last(self, name: str, count: int = WINDOW) -> list[float]:
        recent = list(self.steps)[-count:]
        return [float(metrics[name]) for _, metrics in recent if _is_number(metrics.get(name))]

    def at_first(self, name: str) -> float:
        return _mean([float(metrics[name]) for metrics in self.first if _is_number(metrics.get(name))])

    def recently(self, name: str) -> float:
        """Return a metric's mean over the last `WINDOW` logged steps.

        With fewer than `LEAST` values the mean is NaN, so that comparisons such as `>=` are false.
        """
        values = self.last(name)
        return _mean(values) if len(values) >= LEAST else math.nan

    @property
    def is_solved(self) -> bool:
        """Whether the mean reward has risen, and is near or above the setting `pass_threshold_eval`.

        If so, rules don't warn about low entropy, equal rewards or equal completions. Rule `solved` may raise a note.
        """
        now, wanted = self.recently("reward"), self.settings.get("pass_threshold_eval", 1.0)
        passes = _is_number(wanted) and now >= wanted - 0.1 * abs(wanted)
        return passes and now - self.at_first("reward") >= 0.5 * self.at_first("reward_std") > 0

    @property
    def reward_names(self) -> list[str]:
        names = (re.fullmatch(r"rewards/(.+)/abstained", name) for _, m in list(self.steps)[-WINDOW:] for name in m)
        return sorted({found[1] for found in names if found})


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def no_reward_difference(history: History) -> Finding | None:
    share, reward = history.recently("frac_reward_zero_std"), history.recently("reward")
    if not share >= 0.7 or history.is_solved or history.last("teacher_kl"):  # a teacher needs no reward differences
        return None
    shown = "" if math.isnan(reward) else f", at a mean reward of {reward:.3g}"
    return Finding(f"{share:.0%} of the last steps' groups have no reward difference{shown}", severe=share >= 0.95)


def solved(history: History) -> Finding | None:
    share, reward = history.recently("frac_reward_zero_std"), history.recently("reward")
    seen = f"{share:.0%} of the last steps' groups have no reward difference, at a mean reward of {reward:.3g}"
    return Finding(f"{seen}: the task is nearly solved", good=True) if share >= 0.7 and history.is_solved else None


def constant_reward(history: History) -> Finding | None:
    found = []
    for name in [] if history.is_solved else history.reward_names:
        means, stds = history.last(f"rewards/{name}/mean"), history.last(f"rewards/{name}/std")
        if len(means) >= LEAST and not any(stds) and max(means) == min(means):
            found.append(f"{name!r} gave {means[0]:g} to every completion of the last {len(means)} steps")
    return Finding("; ".join(found), severe=len(found) == len(history.reward_names)) if found else None


def failing_reward(history: History) -> Finding | None:
    found = []
    recent = [metrics for _, metrics in list(history.steps)[-LEAST:]]
    for name in history.reward_names if len(recent) == LEAST else ():
        at = f"rewards/{name}"
        failed = [metrics.get(f"{at}/errors", 0) + metrics.get(f"{at}/timeouts", 0) for metrics in recent]
        if all(f"{at}/mean" not in metrics and metrics.get(f"{at}/abstained") for metrics in recent):
            found.append(f"{name!r} abstained for every completion of the last {LEAST} steps")
        elif all(failed):
            found.append(f"{sum(failed):.0f} calls of {name!r} failed or were late in the last {LEAST} steps")
    return Finding("; ".join(found), severe=all("abstained" in text for text in found)) if found else None


def slow_rewards(history: History) -> Finding | None:
    waited, whole = history.recently("time/reward"), history.recently("step_time")
    if not waited >= max(0.4 * whole, 0.2) or not whole:
        return None
    seconds = {name: sum(history.last(f"rewards/{name}/seconds")) for name in history.reward_names}
    most = f", most of it for {max(seconds, key=seconds.__getitem__)!r}" if len(seconds) > 1 else ""
    return Finding(f"rewards take {waited / whole:.0%} of a step ({waited:.1f} of {whole:.1f} s{most})")


def reward_hacked(history: History) -> Finding | None:
    for prefix, values in history.evaluations.items():
        if len(values) < LEAST:
            continue
        best_step, best = max(values, key=lambda entry: entry[1])
        later = [value for step, value in values if step > best_step]
        ends = (best_step, values[-1][0])
        before, now = (_mean([reward for at, reward in history.rewards if at <= step][-WINDOW:]) for step in ends)
        drop, rise = max(0.05 * abs(best), 0.01), max(0.01, 0.02 * abs(before))
        if len(later) >= 2 and all(best - value >= drop for value in later[-2:]) and now - before >= rise:
            return Finding(
                f"{prefix}_reward fell from {best:.3g} at step {best_step} to {later[-1]:.3g}, while the training "
                f"reward rose from {before:.3g} to {now:.3g}"
            )
    return None


def all_truncated(history: History) -> Finding | None:
    share = history.recently("completions/clipped_ratio")
    longest = history.settings.get("max_completion_length")
    if not share >= 0.7 or longest == 1:  # all completions reach a limit of one token
        return None
    return Finding(f"{share:.0%} of the last steps' completions were cut off at {longest} tokens", severe=share >= 0.95)


def length_running_away(history: History) -> Finding | None:
    name = "completions/mean_length"
    before, now = history.at_first(name), history.recently(name)
    if len(history.steps) < 2 * WINDOW or not before or not now >= max(2 * before, before + 16):
        return None
    at_first, recently, spread = history.at_first("reward"), history.recently("reward"), history.at_first("reward_std")
    if recently - at_first > 0.5 * (0.0 if math.isnan(spread) else spread):
        return None
    paid = "" if math.isnan(recently) else f", while the reward went from {at_first:.3g} to {recently:.3g}"
    return Finding(f"completions grew from {before:.0f} to {now:.0f} tokens{paid}")


def duplicates(history: History) -> Finding | None:
    share, flat = history.recently("completions/duplicates"), history.recently("frac_reward_zero_std")
    if not share >= (0.5 if flat >= 0.5 else 0.8) or history.is_solved:
        return None
    return Finding(f"{share:.0%} of the last steps' completions equal another one of their group token by token")


def entropy_collapse(history: History) -> Finding | None:
    before, now = history.at_first("entropy"), history.recently("entropy")
    if len(history.steps) < 2 * WINDOW or not now < min(0.1 * before, 0.1) or history.is_solved:
        return None
    return Finding(f"the entropy fell from {before:.3g} to {now:.2g} nats per token")


def gradient_spike(history: History) -> Finding | None:
    *before, last = history.last("grad_norm", 21) or [0.0]
    before = [norm for norm in before if norm > 0]  # zeros, of steps without reward differences, would lower the median
    limit = history.settings.get("max_grad_norm")
    if len(before) < WINDOW or not _is_number(limit) or last <= max(10 * statistics.median(before), float(limit)):
        return None
    return Finding(
        f"the gradient's norm is {last:.3g}, {last / statistics.median(before):.0f} times that of usual steps"
    )


def sampler_trainer_gap(history: History) -> Finding | None:
    name = "sampling/sampling_logp_difference/mean"
    if shaping(history.settings) and not history.settings.get("vllm_importance_sampling_correction"):
        return None  # settings such as top_p make the sampler's probabilities differ from the trainer's
    before, now = history.at_first(name), history.recently(name)
    share, old = (history.recently(f"carry_over/{old}") for old in ("old_tokens_share", "old_logp_difference"))
    if not math.isnan(share * old):  # without tokens of older weights, which `stale_tokens` judges
        now = max(now - share * old, 0.0) / max(1 - share, 0.1)
    grown = len(history.steps) >= 2 * WINDOW and now > max(3 * before, 0.03)
    if not now > 0.1 and not grown:
        return None
    since = f", {before:.2g} in the first steps" if grown else ""
    text = f"the sampler's and the trainer's log-probabilities differ by {now:.2g} nats on average{since}"
    return Finding(text, severe=now > 0.5)


def stale_tokens(history: History) -> Finding | None:
    names = ("old_tokens_share", "mean_age", "old_logp_difference")
    share, age, difference = (history.recently(f"carry_over/{name}") for name in names)
    if math.isnan(share + age) or not (share > 0.5 or difference > 0.2):
        return None
    moved = f"; of these the log-probabilities have moved by {difference:.2g} nats"
    text = f"{share:.0%} of the last steps' tokens were carried over, {age:.2g} optimizer steps old on average"
    return Finding(text + ("" if math.isnan(difference) else moved), severe=difference > 0.5)


def clipped_away(history: History) -> Finding | None:
    masked = history.recently("sampling/masked_tokens_share")
    masked = masked if masked > 0 else history.recently("sampling/masked_share")
    clipped = history.recently("clip_ratio/region_mean")
    shares = [(clipped, "clipped"), (masked, "masked away by the sampler's correction")]
    share, name = max((each for each in shares if each[0] > 0.3), default=(0.0, ""))
    return Finding(f"{share:.0%} of the tokens of the last steps were {name}", severe=share > 0.6) if name else None


def no_effect(history: History) -> Finding | None:
    rates = history.last("learning_rate")
    if len(rates) >= LEAST and not any(rates):
        return Finding(f"the learning rate was 0 in the last {len(rates)} steps", severe=True)
    if len(history.rewards) < 50 or history.recently("frac_reward_zero_std") > 0.9:
        return None
    before, now = (_mean([reward for _, reward in part]) for part in (history.rewards[:20], history.rewards[-20:]))
    if not abs(now - before) <= 0.02 * history.at_first("reward_std") > 0:
        return None
    for name, change in (("entropy", 0.01), ("completions/mean_length", 0.02)):
        at_first, recently = history.at_first(name), _mean(history.last(name, 20))
        if not at_first or not abs(recently - at_first) <= change * at_first:
            return None
    return Finding(
        f"after {len(history.rewards)} steps reward ({now:.3g}), entropy and length are where they were, at a learning "
        f"rate of {rates[-1] if rates else 0.0:.2g}"
    )


def engine_waits(history: History) -> Finding | None:
    rounds = [*history.rollouts.values()][-LEAST:]
    if len(rounds) == LEAST and all(preempted for preempted, _ in rounds):
        return Finding(f"the engine preempted {sum(n for n, _ in rounds)} sequences in the last {LEAST} rollouts")
    if len(rounds) == LEAST and all(full for _, full in rounds):
        return Finding(f"in the last {LEAST} rollouts most sequences waited for room in a full KV cache")
    return None


# Rule's name -> its texts: ``when`` (its condition, for the documentation), ``why``, ``remedy``, ``source`` (a URL).
TEXTS = tomllib.loads(Path(__file__).with_name("alarms.toml").read_text(encoding="utf-8"))
RULES: dict[str, Callable[[History], Finding | None]] = {name: globals()[name.replace("-", "_")] for name in TEXTS}


class Advisor:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.history = History(settings)
        self._last_finding: dict[str, int] = {}  # rule whose alarm lasts -> latest step known with its problem

    def restore(self, events: Iterable[Mapping[str, Any]], last: int) -> None:
        """Read a run's events up to step ``last``, so that the resumed run doesn't repeat alarms that haven't ended."""
        for event in events:
            kind, step, name = event.get("kind"), event.get("step"), event.get("rule")
            if not isinstance(step, int) or step > last:
                continue
            if kind == "log" and isinstance(metrics := event.get("metrics"), Mapping):
                self.history.add(step, metrics)
            elif kind == "rollout":
                self.history.add_rollout(step, event)
            elif kind == "alarm" and isinstance(name, str):
                self._last_finding[name] = step
            elif kind == "calm":
                self._last_finding.pop(str(name), None)

    def look(self, step: int, metrics: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        """Add a step's metrics. Return the new alarms, and the names of rules whose alarm ended."""
        self.history.add(step, metrics)
        begin, end = [], []
        for name, find in RULES.items():
            seen, last, texts = find(self.history), self._last_finding.get(name), TEXTS[name]
            if seen is not None:
                if last is None:
                    severity = "note" if seen.good else "severe" if seen.severe else "warning"
                    remedy = with_values(texts["remedy"], self.history.settings)
                    alarm = {"rule": name, "severity": severity, "seen": seen.text, "why": texts["why"]}
                    begin.append(alarm | {"remedy": remedy, "source": texts["source"]})
                self._last_finding[name] = step
            elif last is not None and step - last > QUIET:
                del self._last_finding[name]
                end.append(name)
        return begin, end


def with_values(remedy: str, settings: Mapping[str, Any]) -> str:
    """Write each setting's value behind its first mention in a remedy, unless the value is a list or a dict."""
    for name in dict.fromkeys(re.findall(r"`(\w+)`", remedy)):
        value = settings.get(name, [])
        if not isinstance(value, dict | list):
            remedy = remedy.replace(f"`{name}`", f"`{name}` (now {'null' if value is None else value})", 1)
    return remedy
