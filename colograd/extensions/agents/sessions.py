"""`AgentSessions`: a rollout source that runs the user's program, which calls the model over HTTP.

Each completion of a group is a session: one run of the program with its own API key. Hundreds of sessions decode in one
batch, because all requests go into the queue of one engine.
"""

from __future__ import annotations

import hashlib
import inspect
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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...batch import Group, Prompt, Rollout
from ...engine.protocol import Engine
from ...engine.sampling import Sampling
from ...parallel import watchdog
from ...rewards.calling import PARTS as JUDGED
from ...rewards.functions import code_digest
from ...usercode.calls import Outcome, place_in
from ...usercode.copies import own_copy
from ...usercode.untrusted import clean
from .context import ChatFormat
from .decoding import WorkQueue
from .endpoint import Endpoint, served
from .engine.chat_api import ChatAPI
from .programs import CommandProgram, FunctionProgram
from .session import AgentSettings, Session
from .session_log import SessionLog
from .turn_rewards import FAILURE, SESSION, problem_with

POLL = 0.05  # Maximum seconds of a wait while the engine has no requests.
REWARD = "agent_reward"  # Column of a rollout with the program's reward.
TERMINATED = {  # Exit statuses of commands (or their shells) that a scheduler's signal ended.
    status for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) for status in (-number, 128 + number)
}
GIVEN = ("base_url", "api_key", "model", "row")  # Parameters that an agent function may take.
LARGEST_SCRIPT = 2**20  # Maximum bytes of a program's file in the digest. Larger files are interpreters.


@dataclass(frozen=True, slots=True)
class Agent:
    """The user's agent program: a function, or a command.

    A function gets base_url, api_key, model and row (the dataset's row, a dict), if it has parameters of these names. A
    command has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and COLOGRAD_MODEL in its
    environment, and gets the row as JSON on its standard input.
    """

    name: str
    function: Callable[..., Any] | None
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Any) -> Agent:
        """Return an agent from a function or a command line. Raise if the function needs other parameters."""
        if isinstance(given, str):
            command = tuple(shlex.split(given))
            if not command:
                raise ValueError("agent is empty, but must be a function's import path or a command line.")
            return cls(os.path.basename(command[-1]), None, command)
        if not callable(given):
            raise ValueError(f"agent is {given!r}, but must be a function, its import path, or a command line.")
        needed = [
            parameter.name
            for parameter in inspect.signature(given).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        if unknown := [name for name in needed if name not in GIVEN]:
            raise ValueError(
                f"agent {getattr(given, '__name__', given)!r} takes {unknown[0]!r}, but gets only {', '.join(GIVEN)}: "
                "rename the parameter, or give it a default (the dataset's columns are in `row`)."
            )
        return cls(getattr(given, "__name__", type(given).__name__), given)

    def digest(self) -> str:
        """Return a digest of a function's source, or of a command's words and of the files that the words name.

        The program's file is included if it is small enough for a script. Larger files are interpreters.
        """
        if self.function is not None:
            return code_digest(self.function)
        found = hashlib.blake2b("\0".join(self.command).encode(), digest_size=8)
        program = shutil.which(self.command[0])
        is_script = program is not None and os.path.getsize(program) <= LARGEST_SCRIPT
        for word in (program if is_script else "", *self.command[1:]):
            if word and os.path.isfile(word):
                found.update(Path(word).read_bytes())
        return found.hexdigest()

    def start(self, address: str, key: str, model: str, row: Mapping[str, Any]) -> CommandProgram | FunctionProgram:
        """Start the program for one session. Return the running program."""
        if self.function is None:
            environment = {
                "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": address,
                "ANTHROPIC_API_KEY": key, "COLOGRAD_MODEL": model,
            }  # fmt: skip
            return CommandProgram(self.command, environment, dict(row))
        given = {"base_url": f"{address}/v1", "api_key": key, "model": model, "row": own_copy(dict(row))}
        parameters = inspect.signature(self.function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: given[name] for name in parameters if name in given}
        return FunctionProgram(self.function, given)


class AgentSessions:
    """A rollout source that samples groups of agent sessions.

    Args:
        log: returns the log of finished sessions, or None. Sessions in the log aren't run again.
    """

    def __init__(
        self, engine: Engine, agent: Agent, api: ChatAPI, form: ChatFormat, settings: AgentSettings,
        log: Callable[[], SessionLog | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.engine, self.agent, self.api, self.form, self.settings = engine, agent, api, form, settings
        self.log = log
        self.may_fail = True  # Failed sessions get no reward, see `turn_rewards`.
        self.counts: dict[str, float] = defaultdict(float)  # Sums of the metrics ``agent/...`` since `take_counts`.

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """See `RolloutSource.generate`. The seed of a request depends on the session and the context, not on time."""
        self.engine.require(version)
        if not prompts:  # in an evaluation a rank may have no prompts
            return
        queue = WorkQueue(self.engine)
        endpoint = Endpoint(self.api, queue, sampling, (seed, purpose), self.engine.context, self.settings.refuses)
        with ExitStack() as closing:
            closing.callback(queue.close)
            address = closing.enter_context(served(endpoint.app))
            running = _RunningSessions(self, endpoint, address, version, sampling.n)
            closing.callback(running.close)
            yield from running.open(prompts)
            while running.waiting or running.running:
                running.start()
                queue.step(POLL)
                watchdog.progress("agents' sessions")
                yield from running.finished()

    def take_counts(self) -> dict[str, float]:
        """Return the sums of the metrics ``agent/...`` since the last call of `take_counts`."""
        taken = dict(self.counts)
        self.counts.clear()
        return taken


class _RunningSessions:
    """The unfinished sessions of one call of `AgentSessions.generate`."""

    def __init__(self, parent: AgentSessions, endpoint: Endpoint, address: str, version: int, size: int) -> None:
        self.agent, self.settings, self.counts, self.form = parent.agent, parent.settings, parent.counts, parent.form
        self.model, self.endpoint, self.address, self.version = parent.api.model, endpoint, address, version
        self._log = parent.log()
        self.waiting: list[Session] = []
        self.running: list[Session] = []
        self._over: dict[int, dict[int, Rollout]] = {}  # Ended sessions: prompt's position -> index in the group.
        self._size = size

    def open(self, prompts: Sequence[Prompt]) -> Iterator[Group]:
        """Queue the sessions of all prompts that aren't in the log. Yield groups with all sessions in the log."""
        size = self._size
        for prompt in prompts:
            known = self._log.recall(prompt) if self._log is not None else {}
            done = self._over[prompt.position] = {i: rollout for i, rollout in known.items() if i < size}
            self.waiting += [Session(prompt, i, self.form, self.settings) for i in range(size) if i not in done]
            yield from self._complete(prompt)

    def _complete(self, prompt: Prompt) -> Iterator[Group]:
        """Yield the prompt's group if all its sessions have ended."""
        if len(self._over[prompt.position]) == self._size:
            rollouts = tuple(rollout for _, rollout in sorted(self._over.pop(prompt.position).items()))
            yield Group(prompt.example, rollouts, prompt.position)

    def start(self) -> None:
        """Start waiting sessions until `at_once` sessions run."""
        while self.waiting and len(self.running) < self.settings.at_once:
            session = self.waiting.pop(0)
            self.endpoint.sessions[session.key] = session
            session.began = time.perf_counter()
            session.program = self.agent.start(self.address, session.key, self.model, session.prompt.example)
            session.program.future.add_done_callback(lambda _: self.endpoint.queue.wake())
            self.running.append(session)

    def finished(self) -> Iterator[Group]:
        """End sessions that finished or exceeded the timeout. Yield the groups that became complete."""
        now, limit = time.perf_counter(), self.settings.timeout
        for session in [*self.running]:
            prompt, program = session.prompt, session.program
            if program.future.done():
                outcome = program.future.result()
            elif limit is not None and now > session.began + limit:
                outcome = Outcome("late", None, limit)
            else:
                continue
            self.running.remove(session)
            if outcome.kind == "died" and outcome.value[0] in TERMINATED and not session.is_repeated:
                # A scheduler has sent a signal to all processes of the job. Run the session once more.
                self.endpoint.close(session, "its program was terminated")
                program.stop()
                self.waiting.insert(0, Session(prompt, session.index, self.form, self.settings, is_repeated=True))
                continue
            rollout = self._end(session, outcome)
            self._over[prompt.position][session.index] = rollout
            if self._log is not None:
                self._log.add(prompt, session.index, rollout)
            yield from self._complete(prompt)

    def _end(self, session: Session, outcome: Outcome) -> Rollout:
        late = outcome.kind == "late"
        over = f"agent_timeout ({outcome.seconds:g} s) is over" if late else "its program has ended"
        self.endpoint.close(session, over)
        if late:
            self.counts["agent/timeouts"] += 1
        session.program.stop()  # also kills processes that the command left behind
        columns, failure = returned(outcome)
        failure = failure or problem_with(columns, len(session.turns))
        self.counts["agent/sessions"] += 1
        self.counts["agent/requests"] += len(session.turns)
        self.counts["agent/seconds"] += time.perf_counter() - session.began
        if failure:
            self.counts["agent/failures"] += 1
            if self.settings.raises:
                raise RuntimeError(
                    f"agent {self.agent.name!r}, prompt {session.prompt.position}, session {session.index}: "
                    f"{failure} Correct the program, or set agent_on_error: abstain (groups of failed sessions "
                    "aren't trained)."
                )
        return session.rollout(self.version, {**columns, SESSION: session.turns, FAILURE: failure})

    def close(self) -> None:
        """End all running sessions."""
        for session in self.running:
            self.endpoint.close(session, "the generation was aborted")
            session.program.stop()


def returned(outcome: Outcome) -> tuple[dict[str, Any], str]:
    """Return a program's value as columns for reward functions, and the reason of a failure or ""."""
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
        return none, f"it returned {taken.pop()!r}, which is the trainer's own name: rename it."
    if value is None:
        return {**none, **further}, ""
    try:
        reward = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an integer too large for a float
        reward = math.nan
    if not math.isfinite(reward):
        return none, (
            f"it returned {reprlib.repr(value)}, but must return a finite number (the reward), None (reward functions "
            "decide), or a dict with `reward` and columns for them."
        )
    return {REWARD: reward, **further}, ""


def agent_reward(agent_reward: Sequence[Any] = (), **kwargs: Any) -> list[Any]:
    """Return the reward that each session's program returned, or None where other reward functions decide."""
    return list(agent_reward)
