"""A small run that records its samples and scores, and is killed or stopped. Started by kill.py.

python run.py MODEL RUN_DIR KILL [SETTINGS]

KILL: JSON, null or {victim, seconds} or {victim, event}; or a list of these, one for each of torchrun's attempts. With
{signal}, it is sent instead of SIGKILL. SETTINGS: JSON, of the GRPOConfig.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
from kill import PROMPTS, STEPS

from colograd import GRPOTrainer
from colograd.parallel import faults

MODEL, RUN_DIR, KILL = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
SETTINGS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
if isinstance(KILL, list):
    KILL = dict(enumerate(KILL)).get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")  # as sys.audit names them


def tell(what: str, step: int, position: int) -> None:
    """One line, there for good when this returns."""
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"what": what, "step": step, "position": position, "ranks": RANKS}) + "\n"
    descriptor = os.open(RUN_DIR / f"told-{RANK}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def die() -> None:
    os.write(2, b"\nkilled by itself\n")  # kill.py finds this line among other ranks' messages
    if "signal" in KILL:
        print(f"signal sent at {time.time()}", flush=True)
        os.kill(os.getpid(), KILL["signal"])
        return
    if KILL["victim"] < 0:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def await_death() -> None:
    """Kill this process at the moment in KILL. A stop's time begins when the trainer's constructor handles signals."""
    if KILL is None or KILL["victim"] not in (RANK, -1) or ("signal" not in KILL and KILL["victim"] < 0 and RANK):
        return
    if "seconds" in KILL:

        def wait() -> None:
            while "signal" in KILL and not faults.stop_listeners:
                time.sleep(0.001)
            time.sleep(KILL["seconds"])
            die()

        threading.Thread(target=wait, daemon=True).start()
        return
    seen = [0]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(RUN_DIR) in str(arguments[0]) and "told-" not in str(arguments[0]):
            seen[0] += 1
            if seen[0] == KILL["event"]:
                die()

    sys.addaudithook(count)


class Telling(GRPOTrainer):
    """A trainer that records its samples."""

    def generate(self, prompts):
        for group in super().generate(prompts):
            tell("sampled", self.state.global_step, group.position)
            yield group


def reward(completions: list[Any], row: list[int], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Called once per group; the stream goes through the rows in order, again and again."""
    tell("scored", trainer_state.global_step, row[0])
    return tiny.vowels(completions)


def main() -> None:
    if KILL is not None and "signal" in KILL:
        await_death()
    prompts = tiny.prompts(PROMPTS * STEPS)
    trainer = Telling(
        MODEL,
        reward,
        tiny.config(
            RUN_DIR,
            max_steps=SETTINGS.pop("max_steps", STEPS),
            shuffle_dataset=False,
            save_strategy="steps",
            save_steps=3,
            save_total_limit=2,
            **tiny.ONE_BY_ONE,
            **SETTINGS,
        ),
        prompts.add_column("row", list(range(len(prompts)))),
    )
    if KILL is None or "signal" not in KILL:
        await_death()
    trainer.train(resume_from_checkpoint="auto")
    if trainer.checkpointer.stop_signal.received and trainer.state.global_step < trainer.state.max_steps:
        sys.exit(trainer.checkpointer.stop_signal.status)
    trainer.save_model(str(RUN_DIR))
    trainer.close()
    print("the run has ended")


if __name__ == "__main__":
    main()
