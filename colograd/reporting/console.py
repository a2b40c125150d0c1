"""What a person sees while a run goes on: progress bars, and one line of phase times per optimizer step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from .metrics import PhaseTimes

# The phases of a step in the order of the line; what they leave is `other`.
PHASES = (
    "publish", "wake", "generate", "reward", "pack", "log", "sleep", "offload", "ref_logprobs", "old_logprobs",
    "train", "sync", "optimizer",
)  # fmt: skip


class Console(TrainerCallback):
    """Bars where a person watches (a terminal), lines everywhere. Only the main process writes."""

    def __init__(self, enabled: bool, bars: bool) -> None:
        self.enabled = enabled
        self.bars = enabled and bars and sys.stderr.isatty()
        self._training: Any = None

    def say(self, line: str) -> None:
        """Print a line without tearing a bar."""
        if self.enabled:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def generation(self, groups: int, what: str = "generate") -> GenerationBar:
        """A bar over the groups of one generation."""
        return GenerationBar(groups, what, self.bars)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        """The line of one optimizer step."""
        if not self.enabled:
            return
        total = metrics.get("step_time", 0.0)
        parts = [f"{name} {metrics.get(f'time/{name}', 0.0):.2f}" for name in PHASES if f"time/{name}" in metrics]
        sampled, trained = metrics.get("train/sampled_tokens", 0.0), metrics.get("train/packed_tokens", 0.0)
        rates = []
        if metrics.get("time/generate"):
            rates.append(f"sampled {sampled / metrics['time/generate']:,.0f} tok/s")
        if metrics.get("time/train") and trained:
            rates.append(f"trained {trained / metrics['time/train']:,.0f} tok/s")
        note = (
            "" if trained else " | no group has a reward difference: nothing to train on, the optimizer steps on zeros"
        )
        reward = metrics.get("reward")
        self.say(
            f"step {step}/{max_steps} | reward {'-' if reward is None else f'{reward:.3f}'} | length "
            f"{metrics.get('completions/mean_length', 0.0):.0f} | {total:.2f} s: "
            f"{', '.join(parts)}{' | ' + ', '.join(rates) if rates else ''}{note}"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bars:
            self._training = tqdm(total=state.max_steps, initial=state.global_step, unit="step", desc="train")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.update(state.global_step - self._training.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._training is not None and logs and "reward" in logs:
            self._training.set_postfix(reward=f"{logs['reward']:.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.close()
            self._training = None


class GenerationBar:
    """Groups finished, with sampled tokens per second."""

    def __init__(self, groups: int, what: str, shown: bool) -> None:
        self._bar = tqdm(total=groups, unit="group", desc=what, leave=False) if shown else None
        self._started, self._tokens = time.perf_counter(), 0

    def update(self, tokens: int) -> None:
        if self._bar is not None:
            self._tokens += tokens
            rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Timekeeper(TrainerCallback):
    """Times the optimizer's phase, and says when a step has ended."""

    def __init__(self, times: PhaseTimes, step_ended: Callable[[], None]) -> None:
        self._times, self._step_ended = times, step_ended
        self._phase: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase = self._times.phase("optimizer")
        self._phase.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.__exit__(None, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_ended()
