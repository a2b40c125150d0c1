"""Kill a small run again and again, at any moment, and resume it: nothing may be lost or sampled twice.

    python tests/soak/kill.py --kills 50 --seed 0 --ranks 1

Each start of the run is killed (SIGKILL) after a random time, or at a random one of its writes, renames and deletions,
so also within a checkpoint, the journal or the replay of one; one rank of several or all. Then it is resumed. At its
end

- its weights equal the weights of an undisturbed run, bit for bit,
- no group that was in the journal when a rank was killed was sampled or scored again, by the
  reward function's own notes, and every group was scored at least once.

A run that ends before it is killed is followed by another, until `--kills` is reached.

With --stops the run is stopped instead, by SIGTERM, SIGUSR1 or SIGUSR2 to one rank or to all ranks, at any time from
the start of the trainer's constructor to the end of the process. It has `stop_within` (5) seconds, and its rounds take
longer. Every rank must end in time, with status 143, or 0 if it had finished.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]

import launcher  # noqa: E402
import tiny  # noqa: E402

from colograd.rollout.record_file import read_records  # noqa: E402

PROGRAM = Path(__file__).with_name("run.py")
STEPS = 10  # of run.py
PROMPTS = 4  # of each
WITHIN = 5.0  # seconds of a stop
LATEST = 28.0  # seconds from the constructor after which a stop comes at the latest
Group = tuple[int, int]  # step of the weights, position of the prompt


def recorded(run: Path) -> set[Group]:
    """Return the groups in a run's journal."""
    return {
        (int(path.parent.name.removeprefix("step-")), record.position)
        for path in run.glob("_journal/step-????????/rank-*.records")
        for record in read_records(path)
        if record.position >= 0
    }


def told(folder: Path, what: str) -> list[Group]:
    """Return the groups that the ranks noted as sampled or scored."""
    lines = [line for path in folder.glob("told-*.jsonl") for line in path.read_text().splitlines()]
    return [(found["step"], found["position"]) for found in map(json.loads, lines) if found["what"] == what]


def a_kill(draw: random.Random, ranks: int) -> dict[str, Any]:
    """When, and whom."""
    victim = draw.choice([*range(ranks), -1]) if ranks > 1 else 0  # -1: all
    if draw.random() < 0.5:
        return {"victim": victim, "seconds": draw.uniform(0.0, 2.5)}
    return {"victim": victim, "event": draw.randint(1, 150)}


def start(model: Path, run: Path, ranks: int, kill: dict[str, Any] | None) -> bool:
    """Start or resume the run; whether it ended by itself."""
    done = launcher.run(PROGRAM, model, run, json.dumps(kill), ranks=ranks)
    ended = "the run has ended" in done.stdout
    if not ended and kill is None:
        raise SystemExit(f"The run failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    if not ended and "killed by itself" not in done.stderr:
        raise SystemExit(f"The run failed before it was killed ({kill}):\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    return ended


def soak(kills: int, seed: int, ranks: int) -> dict[str, Any]:
    """Raises SystemExit, with what is wrong."""
    draw, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny.make_model(folder / "model")
        assert start(model, folder / "whole", ranks, None)
        expected = (folder / "whole" / "model.safetensors").read_bytes()
        everything = set(told(folder / "whole", "scored"))
        while found["kills"] < kills:
            run = folder / f"run-{found['runs']}"
            found["runs"] += 1
            while True:
                safe = recorded(run)
                before = {what: Counter(told(run, what)) for what in ("sampled", "scored")}
                kill = a_kill(draw, ranks) if found["kills"] < kills else None
                ended = start(model, run, ranks, kill)
                for what, earlier in before.items():
                    if again := safe & set(Counter(told(run, what)) - earlier):
                        raise SystemExit(f"{kill}: {what} again, though recorded: {sorted(again)[:5]}")
                if ended:
                    break
                found["kills"] += 1
                of_rounds = Counter(step for step, _ in recorded(run))
                found["within a round"] += any(0 < count < PROMPTS for count in of_rounds.values())
                found["within writes"] += "event" in (kill or {})
            if (run / "model.safetensors").read_bytes() != expected:
                raise SystemExit(f"run {run.name}: its weights differ from the undisturbed run")
            calls = Counter(told(run, "scored"))
            if set(calls) != everything:
                raise SystemExit(f"run {run.name}: scored other groups than the undisturbed run")
            found["groups"] += len(calls)
            found["scored twice, killed before they were recorded"] += sum(calls.values()) - len(calls)
    return dict(found)


def stops(count: int, seed: int, ranks: int, within: float = WITHIN) -> dict[str, Any]:
    """Raises SystemExit, with what is wrong."""
    draw, found, slowest = random.Random(seed), Counter[str](), 0.0
    settings = {"max_completion_length": 160, "max_steps": 4, "report": False}
    limited = json.dumps({**settings, "stop_within": within, "exit_status_after_stop": 143})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny.make_model(folder / "model")
        whole = launcher.run(PROGRAM, model, folder / "whole", "null", json.dumps(settings), ranks=ranks)
        assert whole.returncode == 0, whole.stderr[-5000:]
        expected = (folder / "whole" / "model.safetensors").read_bytes()
        while found["stops"] < count:
            run = folder / f"run-{found['runs']}"
            found["runs"] += 1
            ended = False
            while not ended:
                victim = draw.choice([*range(ranks), -1])
                number = int(draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)))
                stop = {"victim": victim, "seconds": draw.uniform(0.0, LATEST), "signal": number}
                how = stop if found["stops"] < count else None
                safe, before = recorded(run), {what: Counter(told(run, what)) for what in ("sampled", "scored")}
                with launcher.apart(PROGRAM, model, run, json.dumps(how), limited, ranks=ranks) as started:
                    done = [rank.wait() for rank in started]
                    now = time.time()
                said = "".join(f"\n{rank.stdout[-2000:]}\n{rank.stderr[-3000:]}" for rank in done)
                for what, earlier in before.items():
                    if again := safe & set(Counter(told(run, what)) - earlier):
                        raise SystemExit(f"{stop}: {what} again, though recorded: {sorted(again)[:5]}")
                ended = all(rank.returncode == 0 for rank in done)
                if ended:
                    continue
                if not {rank.returncode for rank in done} <= {0, 143}:
                    raise SystemExit(f"{stop}: statuses {[rank.returncode for rank in done]}{said}")
                seconds = now - min(float(sent) for sent in re.findall(r"signal sent at ([\d.]+)", said))
                slowest = max(slowest, seconds)
                if seconds > within:
                    raise SystemExit(f"{stop}: ended after {seconds:.1f} s{said}")
                found["stops"] += 1
                found["by force"] += "as its time is over" in said
                found["cut"] += "the round was cut" in said
                found["outside the training"] += "no training was under way" in said
            if (run / "model.safetensors").read_bytes() != expected:
                raise SystemExit(f"run {run.name}: its weights differ from the undisturbed run")
    return dict(found) | {"seconds at most": round(slowest, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kill.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stops", type=int, default=0, help="stop the run so many times instead")
    parser.add_argument("--within", type=float, default=WITHIN, help="seconds that a stop may take")
    options = parser.parse_args(argv)
    if options.stops:
        found = stops(options.stops, options.seed, options.ranks, options.within)
    else:
        found = soak(options.kills, options.seed, options.ranks)
    print(
        f"{options.ranks} rank(s), seed {options.seed}: "
        + ", ".join(f"{count} {name}" for name, count in found.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
