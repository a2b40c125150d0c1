"""`AgentSessions`: a rollout source that gets each completion from a run of the user's program (a session)."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import numbers
import os
import reprlib
import shlex
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from ...batch import Group, Logged, Prompt, Rollout
from ...config import GRPOConfig
from ...engine.protocol import Engine
from ...engine.sampling import Sampling
from ...parallel import watchdog
from ...rewards.functions import code_digest
from ...rollout.group_records import NONSENSE, JournalError, RewardedGroup, group_bytes, group_of
from ...rollout.record_file import Record, RecordFile, read_records
from ...usercode.calls import Outcome, place_in
from ...usercode.untrusted import clean, own_copy
from .context import ChatFormat
from .engine.chat_api import ChatAPI
from .programs import CommandProgram, FunctionProgram
from .session import Session, WorkQueue
from .turn_rewards import FAILURE, JUDGED, SESSION, problem_with

POLL = 0.05  # Maximum seconds of one wait for programs' requests while the engine has none.
REWARD = "agent_reward"  # Column of a rollout with the reward that the program returned.
TERMINATED = {  # Exit statuses of a command that a job scheduler's signal ended: -signal, or 128 + signal via a shell.
    status for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) for status in (-number, 128 + number)
}
ARGUMENTS = ("base_url", "api_key", "model", "row")
LARGEST_SCRIPT = 2**20  # Bytes. A larger program, such as an interpreter, isn't read for the agent's digest.
SUFFIX = ".sessions"
HEAD = -1  # `Record.position` of a file's first record, which holds the log's conditions.
PLACE = 4  # Number of first bytes of a record's content, which hold the session's index in its group.


class SessionLog:
    """Ended agent sessions on disk, so that a resumed run doesn't repeat them. Files that were written under other
    ``conditions`` (weights and settings) are deleted. A session that can't be written is repeated after a resume."""

    def __init__(self, folder: Path, rank: int, conditions: Mapping[str, Any]) -> None:
        self._path, self._head = folder / f"rank-{rank:05d}{SUFFIX}", json.dumps(dict(conditions)).encode()
        self._file: RecordFile | None = None
        self._records: dict[tuple[int, int], bytes] = {}  # (prompt's position, session's index in group) -> content.
        for path in sorted(folder.glob(f"rank-*{SUFFIX}")):
            with contextlib.suppress(OSError):  # Another rank may have deleted the file.
                records = read_records(path)
                if next(records, None) != Record(HEAD, self._head):
                    path.unlink()
                    continue
                for position, content in records:
                    self._records[position, int.from_bytes(content[:PLACE], "big")] = content[PLACE:]

    def add(self, prompt: Prompt, index: int, rollout: Rollout) -> None:
        group = Group(prompt.example, (rollout,), prompt.position)
        recorded = RewardedGroup(group, torch.zeros(1, 1), Logged({}, {}))
        with contextlib.suppress(OSError, pa.ArrowException, *NONSENSE):
            if self._file is None:
                self._file = RecordFile(self._path)
                if self._file.is_new:
                    self._file.append(Record(HEAD, self._head))
            self._file.append(Record(prompt.position, index.to_bytes(PLACE, "big") + group_bytes(recorded)))

    def recall(self, prompt: Prompt, size: int) -> dict[int, Rollout]:
        rollouts = {}
        for index in range(size):
            with contextlib.suppress(KeyError, JournalError):  # The record is missing, damaged, or of another prompt.
                rollouts[index] = group_of(self._records[prompt.position, index], prompt).group.rollouts[0]
        return rollouts

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    function: Callable[..., Any] | None
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, program: Any) -> Agent:
        if isinstance(program, str):
            command = tuple(shlex.split(program))
            if not command:
                raise ValueError("`agent` is empty, but must be a function's import path or a command line.")
            return cls(os.path.basename(command[-1]), None, command)
        if not callable(program):
            raise ValueError(f"`agent` is {program!r}, but must be a function, its import path, or a command line.")
        parameters = [p for p in inspect.signature(program).parameters.values() if p.default is p.empty]
        required = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if unknown := [name for name in required if name not in ARGUMENTS]:
            name, names = getattr(program, "__name__", program), ", ".join(ARGUMENTS)
            raise ValueError(
                f"agent {name!r} has a parameter {unknown[0]!r}, but is called only with {names}: rename the "
                "parameter, or give it a default (the dataset's columns are in `row`)."
            )
        return cls(getattr(program, "__name__", type(program).__name__), program)

    def digest(self) -> str:
        if self.function is not None:
            return code_digest(self.function)
        digest = hashlib.blake2b("\0".join(self.command).encode(), digest_size=8)
        program = shutil.which(self.command[0])
        is_script = program is not None and os.path.getsize(program) <= LARGEST_SCRIPT
        for word in (program if is_script else "", *self.command[1:]):
            if word and os.path.isfile(word):
                digest.update(Path(word).read_bytes())
        return digest.hexdigest()

    def start(self, address: str, key: str, model: str, row: Mapping[str, Any]) -> CommandProgram | FunctionProgram:
        if self.function is None:
            environment = {
                "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": address,
                "ANTHROPIC_API_KEY": key, "COLOGRAD_MODEL": model,
            }  # fmt: skip
            return CommandProgram(self.command, environment, dict(row))
        arguments = {"base_url": f"{address}/v1", "api_key": key, "model": model, "row": own_copy(dict(row))}
        parameters = inspect.signature(self.function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: arguments[name] for name in parameters if name in arguments}
        return FunctionProgram(self.function, arguments)


class AgentSessions:
    def __init__(
        self, engine: Engine, agent: Agent, api: ChatAPI, form: ChatFormat, config: GRPOConfig,
        log: Callable[[], SessionLog | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.engine, self.agent, self.api, self.form, self.config = engine, agent, api, form, config
        self.log = log
        self.may_fail = True  # Sessions may fail. `turn_rewards.agent_stages` reads this attribute.
        self.counts: dict[str, float] = defaultdict(float)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        from .endpoint import Endpoint, served  # Imported here, because the web server uvicorn takes time to import.

        self.engine.require(version)
        if not prompts:
            return
        log, size, running = self.log(), sampling.n, list[Session]()
        # Rollouts of ended sessions: prompt's position -> session's index in its group -> rollout.
        over = {prompt.position: {} if log is None else log.recall(prompt, size) for prompt in prompts}
        pairs = [(prompt, index) for prompt in prompts for index in range(size) if index not in over[prompt.position]]
        waiting = [Session(prompt, index, self.form, self.config) for prompt, index in pairs]
        queue = WorkQueue(self.engine)
        endpoint = Endpoint(self.api, queue, sampling, seed, purpose, self.engine.context)

        def stop(sessions: Sequence[Session], why: str) -> None:
            for session in sessions:
                endpoint.close(session, why)
                session.program.stop()  # Also an ended program, whose command may have left processes behind.

        with contextlib.ExitStack() as closing:
            closing.callback(queue.close)
            address = closing.enter_context(served(endpoint.app))
            closing.callback(stop, running, "the generation was aborted")
            while True:
                for prompt in [prompt for prompt in prompts if len(over.get(prompt.position, ())) == size]:
                    rollouts = tuple(rollout for _, rollout in sorted(over.pop(prompt.position).items()))
                    yield Group(prompt.example, rollouts, prompt.position)
                if not over:
                    return
                while waiting and len(running) < (self.config.agent_sessions or self.engine.max_sequences):
                    session = waiting.pop(0)
                    endpoint.sessions[session.key] = session
                    session.began = time.perf_counter()
                    session.program = self.agent.start(address, session.key, self.api.model, session.prompt.example)
                    session.program.future.add_done_callback(lambda _: queue.wake())
                    running.append(session)
                queue.step(POLL)
                watchdog.progress("agents' sessions")
                for session in [*running]:
                    if (outcome := session.outcome()) is None:
                        continue
                    running.remove(session)
                    prompt, index = session.prompt, session.index
                    if outcome.kind == "died" and outcome.value[0] in TERMINATED and not session.is_repeated:
                        # A job scheduler probably signalled all the job's processes: run the session a second time.
                        stop([session], "its program was terminated")
                        waiting.insert(0, Session(prompt, index, self.form, self.config, is_repeated=True))
                        continue
                    late = f"agent_timeout ({outcome.seconds:g} s) is over"
                    stop([session], late if outcome.kind == "late" else "its program has ended")
                    over[prompt.position][index] = rollout = self._end(session, outcome, version)
                    if log is not None:
                        log.add(prompt, index, rollout)

    def _end(self, session: Session, outcome: Outcome, version: int) -> Rollout:
        if outcome.kind == "late":
            self.counts["agent/timeouts"] += 1
        columns, failure = returned(outcome)
        failure = failure or problem_with(columns, len(session.turns))
        self.counts["agent/sessions"] += 1
        self.counts["agent/requests"] += len(session.turns)
        self.counts["agent/seconds"] += time.perf_counter() - session.began
        if failure:
            self.counts["agent/failures"] += 1
            if self.config.agent_on_error == "raise":
                raise RuntimeError(
                    f"agent {self.agent.name!r}, prompt {session.prompt.position}, session {session.index}: "
                    f"{failure} Correct the program, or set agent_on_error: abstain (a group with a failed "
                    "session isn't trained)."
                )
        return session.rollout(version, {**columns, SESSION: session.turns, FAILURE: failure})

    def take_counts(self) -> dict[str, float]:
        taken, self.counts = dict(self.counts), defaultdict(float)
        return taken


def returned(outcome: Outcome) -> tuple[dict[str, Any], str]:
    """Return a session's columns for reward functions, and why its program failed ("" for a success)."""
    none: dict[str, Any] = {REWARD: None}
    if outcome.kind == "late":
        return none, f"it took longer than agent_timeout ({outcome.seconds:g} s)."
    if outcome.kind == "died":
        status, printed = outcome.value
        return none, f"its command ended with status {status}. The end of what it printed:\n{printed}\n"
    if outcome.kind != "value":
        line, traceback = outcome.value
        place = place_in(traceback)
        return none, f"it raised {line}{f' ({place})' if place else ''}. Its traceback:\n{traceback}"
    try:
        value = clean(outcome.value)
    except ValueError as error:
        return none, f"it returned a value whose {error}."
    further = {}
    if isinstance(value, Mapping):
        further = {str(name): each for name, each in value.items() if name != "reward"}
        value = value.get("reward")
    if taken := {REWARD, FAILURE, SESSION, JUDGED} & further.keys():
        return none, f"it returned a dict with {taken.pop()!r}, the trainer's own name for a column: rename the key."
    if value is None:
        return {**none, **further}, ""
    try:
        reward = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # The integer is too large for a float.
        reward = math.nan
    if not math.isfinite(reward):
        return none, (
            f"it returned {reprlib.repr(value)}, but must return a finite number (the reward), None (reward functions "
            "decide), or a dict with `reward` and further columns for reward functions."
        )
    return {REWARD: reward, **further}, ""


def agent_reward(agent_reward: Sequence[Any] = (), **kwargs: Any) -> list[Any]:
    return list(agent_reward)
