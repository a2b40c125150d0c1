"""Console output of a run: progress bars, and one line per optimizer step. Each line is also a log record."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from ..usercode.untrusted import clean, printable

PHASES = (
    "publish", "wake", "journal", "generate", "reward", "wait", "pack", "log", "sleep", "offload", "ref_logprobs",
    "teacher_logprobs", "old_logprobs", "train", "sync", "optimizer",
)  # fmt: skip

COLUMNS = 120  # A step's line names phases only while it has at most so many characters.
LONG = 10.0  # A phase prints its first line of progress after so many seconds.
SHORTEST = 0.005  # A step's line leaves out phases of fewer seconds.
RECENT = 20

LOGGER = logging.getLogger("colograd")


class Console(TrainerCallback):
    """Progress bars in a terminal, and log lines. Only the main process writes."""

    def __init__(self, enabled: bool, bars: bool) -> None:
        self.enabled = enabled
        self.bars = enabled and bars and sys.stderr.isatty()
        self._training: Any = tqdm(disable=True)
        self._first = True
        self._ended: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)  # (Time, step number) of the last steps.

    def say(self, line: str, level: int = logging.INFO) -> None:
        if self.enabled:
            with contextlib.suppress(OSError, ValueError):  # Printing fails if a disk is full or a pipe closed.
                tqdm.write(printable(line), file=sys.stdout)
                sys.stdout.flush()
            # A log handler may write UTF-8, which can't encode surrogates, so `clean` removes them.
            LOGGER.log(level, "%s", clean(line), stacklevel=2)

    def warn(self, line: str) -> None:
        self.say(line, logging.WARNING)

    def warn_of_all(self, lines: Iterable[str]) -> None:
        for line in sorted({line for line in lines if line}):
            self.warn(line)

    def progress(self, total: int, name: str, unit: str) -> Progress:
        first = self.enabled and not self.bars and self._first
        return Progress(total, name, unit, self.bars, self.say if first else lambda line: None)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        self._first = False
        if not self.enabled:
            return
        shown = {"reward": metrics.get("reward"), "teacher KL": metrics.get("teacher_kl")}
        aims = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None] or ["reward -"]
        length, total = metrics.get("completions/mean_length", 0.0), metrics.get("step_time", 0.0)
        head = f"step {step}/{max_steps} | {' | '.join(aims)} | length {length:.0f} | {total:.2f} s"
        seconds = {name: metrics[f"time/{name}"] for name in PHASES if metrics.get(f"time/{name}", 0.0) >= SHORTEST}
        rates = {}
        for name, tokens in (("generate", "sampled"), ("train", "packed")):
            if name in seconds and metrics.get(f"train/{tokens}_tokens"):
                rates[name] = f" ({metrics[f'train/{tokens}_tokens'] / seconds[name]:,.0f} tok/s)"
        left = self._time_left(step, max_steps)
        tail = f" | {left}" if left else ""
        # The line names the longest phases, as many as fit. It has token rates only if two phases fit with them.
        longest = sorted(seconds, key=seconds.__getitem__, reverse=True)
        with_rates = [(count, rates) for count in range(len(longest), 1, -1)]
        line = head + tail
        for count, told in [*with_rates, *((count, {}) for count in range(len(longest), 0, -1))]:
            parts = [f"{name} {seconds[name]:.2f}{told.get(name, '')}" for name in seconds if name in longest[:count]]
            if len(fuller := f"{head}: {', '.join(parts)}{tail}") <= COLUMNS:
                line = fuller
                break
        self.say(line)
        if not metrics.get("train/packed_tokens"):
            self.say("no group has a reward difference: nothing to train on, the optimizer steps on zeros")

    def _time_left(self, step: int, max_steps: int) -> str:
        if self._ended and step < self._ended[-1][1]:  # The step number fell: a second training has begun.
            self._ended.clear()
        self._ended.append((time.monotonic(), step))
        (first, first_step), (last, _) = self._ended[0], self._ended[-1]
        if step >= max_steps or step == first_step:
            return ""
        seconds = (last - first) / (step - first_step) * (max_steps - step)
        return f"{duration(seconds)} left ({until(seconds)})"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended.clear()
        self._ended.append((time.monotonic(), state.global_step))
        bar = {"total": state.max_steps, "initial": state.global_step, "unit": "step", "desc": "train"}
        self._training = tqdm(**bar, disable=not self.bars)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.update(state.global_step - self._training.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self._training.set_postfix(reward=f"{logs['reward']:.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.close()


def reward_ends(rewards: Sequence[float]) -> str:
    if len(rewards) < 2:
        return "".join(f", mean reward {reward:.3f}" for reward in rewards)
    last = rewards[-min(5, len(rewards) // 2) :]
    return f", mean reward {rewards[0]:.3f} at first, {sum(last) / len(last):.3f} at last"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def until(seconds: float, now: datetime | None = None) -> str:
    now = now or datetime.now()
    then = now + timedelta(seconds=seconds)
    return then.strftime("%H:%M" if then.date() == now.date() else "%Y-%m-%d %H:%M")


class Progress:
    """Progress of a phase. `update` calls ``tell(line)`` after `LONG` seconds, then whenever the time has doubled."""

    def __init__(self, total: int, name: str, unit: str, shown: bool, tell: Callable[[str], None]) -> None:
        self._bar = tqdm(total=total, unit=unit, desc=name, leave=False, miniters=0, disable=not shown)
        self._of, self._tell, self._next = f"of {total} {unit}{'es' if unit.endswith('ch') else 's'}", tell, LONG
        self._name, self._started = name, time.perf_counter()
        self._done, self._tokens, self._is_sampled = 0, 0, False

    def sampled(self, tokens: int) -> None:
        """Count the ``tokens`` of one engine step. From then on `update` counts completions without their tokens."""
        self._is_sampled = True
        self._tokens += tokens
        self.update(0, done=0)

    def update(self, tokens: int, done: int = 1) -> None:
        self._done, self._tokens = self._done + done, self._tokens + (0 if self._is_sampled else tokens)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = f"{self._tokens / seconds:,.0f} tok/s"
        self._bar.set_postfix_str(rate, refresh=False)
        self._bar.update(done)
        if seconds >= self._next:
            self._tell(f"{self._name}: {self._done} {self._of} in {seconds:.0f} s, {rate}")
            self._next = 2 * seconds

    def close(self) -> None:
        self._bar.close()
