"""Reward functions that end in every possible way. Workers import this module."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def lengths(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
    return [len(c) + a for c, a in zip(completions, answer, strict=True)]


def per_answer(session: list[list[dict[str, Any]]]) -> list[list[float]]:
    """Reward each answer by its number in its session."""
    return [[float(number) for number, _ in enumerate(answers)] for answers in session]


def own_ids(completion_ids: list[list[int]], completion_mask: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward the sum of the model's own ids."""
    assert isinstance(completion_mask[0], list)
    pairs = zip(completion_ids, completion_mask, strict=True)
    return [float(sum(token for token, own in zip(*pair, strict=True) if own)) for pair in pairs]


def process_id(completions: list[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


def hanging(**kwargs: Any) -> list[float]:
    while True:
        pass


def when_told(**kwargs: Any) -> list[float]:
    """Sleep longer than any test."""
    time.sleep(600)
    return []


def dying(**kwargs: Any) -> list[float]:
    os._exit(7)


def raising(**kwargs: Any) -> list[float]:
    raise KeyError("no such test case")


def leaving(**kwargs: Any) -> list[float]:
    sys.exit("enough")


def with_alarm(completions: list[str], **kwargs: Any) -> list[float]:
    """Set an alarm, which only a main thread can do."""

    def ring(*args: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return [0.5] * len(completions)
    return [0.0] * len(completions)


def loud(completions: list[str], **kwargs: Any) -> list[float]:
    sys.stderr.write("x" * 2**20)
    return [1.0] * len(completions)


def odd(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [float(len(text)) if int(text) % 2 else None for text in completions]


# -- reward functions that log


def talkative(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    log_extra("answer", [text.upper() for text in completions])
    for text in completions:
        log_extra("length", [len(text)])
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    log_metric("calls", 1)
    return [1.0] * len(completions)


async def talkative_too(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    return talkative(completions, log_extra, log_metric)


def short(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    log_extra("answer", completions[1:])
    return [1.0] * len(completions)


def bare(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    log_extra("answer", "text")
    return [1.0] * len(completions)


def worded(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("share", "a lot")
    return [1.0] * len(completions)


def unbounded(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("share", float("nan"))
    return [1.0] * len(completions)


def presumptuous(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("completions/mean_length", 3)
    return [1.0] * len(completions)


def failing(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    talkative(completions, log_extra, log_metric)
    raise ValueError("after logging")


def late(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    talkative(completions, log_extra, log_metric)
    time.sleep(60)
    return [1.0] * len(completions)


def dead(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    talkative(completions, log_extra, log_metric)
    os._exit(3)


# -- reward functions that a file or the environment controls


def variety(completions: list[Any]) -> list[float]:
    """A reward that differs between random completions."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [len(set(text)) / 10 for text in texts]


def faulty(completions: list[Any], **kwargs: Any) -> Any:
    """End in the way that the file REWARD_FAULT_FILE names."""
    with open(os.environ["REWARD_FAULT_FILE"]) as file:
        case = file.read()
    size = len(completions)
    if case == "megabyte":
        loud(completions)
    if case == "alarm":
        return with_alarm(completions)
    ends = {
        "nothing": None,
        "abstain": [None] * size,
        "nan": [float("nan")] * size,
        "text": ["good"] * size,
        "length": [1.0] * (size + 1),
    }
    return ends.get(case, variety(completions))


def in_order(completions: list[Any], answer: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    """Reward like `variety`, in the order of calls that the folder REWARD_ORDER names by answer."""
    folder, waits_for = json.loads(os.environ.get("REWARD_ORDER", '["", {}]'))
    before = waits_for.get(answer[0])
    while before and not (Path(folder) / before).exists():
        time.sleep(0.01)
    if folder:
        (Path(folder) / answer[0]).touch()
    log_extra("answer", answer)
    log_extra("ended", [time.monotonic()] * len(completions))
    return variety(completions)


def terminated() -> list[Any]:
    """Get the signals of a job, and terminate a program and a forked child."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    program = subprocess.Popen(["sleep", "10000"])
    program.terminate()
    child = os.fork()
    if not child:
        time.sleep(10_000)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    return [program.wait(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
