"""End all ranks together if one rank fails while other ranks wait in a collective.

A rank that waits in a collective can't be woken. So each rank has a TCP connection to rank 0, which passes failures on
to all ranks. A rank that still waits for the failed rank after `GRACE` seconds is ended by force."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from ..runtime import process
from . import watchdog
from .ranks import RankError, part, rank, time_limit, world_size

GRACE = 10.0  # Seconds until a rank that waits for a failed rank is ended by force.
GRACE_OF_HANGING = 5.0  # Seconds as in GRACE, but after a rank hung: fewer, because other ranks have waited already.
DELIVERY = 0.5  # Seconds from a hanging rank's report of its failure to the end of its process.
CAUSE = 5.0  # Maximum seconds to wait for rank 0 at start, for a send, or for the cause of a lost connection.
SILENCE = 30  # Maximum seconds without an answer to TCP until a rank's machine counts as lost.
LEAST_SILENCE = 5.0  # Minimum seconds without a sign of life until a rank counts as failed.
GONE = ""  # `Fault.body` of a rank that has ended or makes no progress.


@dataclass(frozen=True, slots=True)
class Fault:
    rank: int
    body: str  # Section (code that all ranks run together) that failed, e.g. "training 3", or GONE.
    text: str
    hangs: bool = False  # Whether the rank failed because it made no progress. Its process may still exist.


_present: FailureDetector | None = None
_alone = watchdog.Watchdog(end=lambda description: _exit(f"The only rank {description}"))
_numbers = itertools.count(1)  # equal on all ranks, which create failure detectors in the same order


@contextlib.contextmanager
def ends_together(what: str) -> Iterator[None]:
    """Make all ranks leave the body if one fails: other ranks raise `RankError`, or are ended after `GRACE` seconds."""
    global _present
    if world_size() > 1 and _present is None:
        atexit.unregister(part)  # `part` must run after `leave`, and atexit calls the last registered function first
        atexit.register(part)
        _present = FailureDetector()
        atexit.register(_present.leave)
    with _alone.inside(what) if _present is None or world_size() == 1 else _present.body(what):
        yield


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Report an error in the body to the other ranks at once, because other ranks may wait in a collective."""
    try:
        yield
    except Exception as error:
        another_failed = isinstance(error, RankError) or is_lost_connection(error)
        if _present is not None and not another_failed:
            _present.report(what, error)
        raise


# Called with the name of another rank's stop signal, and the seconds to its deadline.
stop_listeners: list[Callable[[str, float], None]] = []


def tell_stop(name: str, seconds: float) -> None:
    if _present is not None:
        _present.send(stop=name, seconds=seconds)


def leave() -> None:
    """End the failure detection until the next `ends_together`, because ranks may now end at any time."""
    global _present
    if _present is not None:
        atexit.unregister(_present.leave)
        _present.leave()
        _present = None


def is_lost_connection(error: BaseException) -> bool:
    text = str(error)
    names_library = "/gloo/" in text or "NCCL" in text or "ProcessGroup" in text
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and names_library)


@dataclass(eq=False, slots=True)
class _Link:
    connection: socket.socket
    rank: int
    last_words: str = ""
    stage: str = "the start"
    silence: float = 0.0  # Seconds without a sign of life, counted only in sections. -inf: reported already.

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # ignore a lost connection: the thread that reads this link detects it
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def send_fault(self, fault: Fault) -> None:
        # A rank that hung also gets its own failure: if its process continues later, it must end.
        if self.rank != fault.rank or fault.hangs:
            self.send(**asdict(fault))


class FailureDetector:
    """A detector of failed ranks. Rank 0 has a link to each other rank, and passes failures on."""

    def __init__(self) -> None:
        self.rank = rank()
        self.grace = min(GRACE, time_limit().total_seconds())
        self.silence = min(SILENCE, int(time_limit().total_seconds()))
        self._key = f"colograd/watch/{next(_numbers)}"
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._counts: collections.Counter[str] = collections.Counter()
        self._section = ""
        self._inside = ""
        self._has_left = False
        self._links: list[_Link] = []
        self._sockets: list[socket.socket] = []
        self._told: list[Fault] = []  # Failures so far, which are also sent to ranks that connect later.
        self._sending = threading.Lock()
        self._is_connected = threading.Event()
        self._watchdog = watchdog.Watchdog(self._end_hanging, self._exchange_signs)
        if self.rank == 0:
            self._is_connected.set()
            several_nodes = process.local_world_size() < world_size()
            host, dual = ("", socket.has_dualstack_ipv6()) if several_nodes else ("127.0.0.1", False)
            family = socket.AF_INET6 if dual else socket.AF_INET
            server = socket.create_server((host, 0), family=family, dualstack_ipv6=dual)
            self._sockets.append(server)
            token = secrets.token_hex(16)  # any program can connect to the port, but only ranks know the token
            address = f"{host or os.environ['MASTER_ADDR']} {server.getsockname()[1]} {token}"
            dist.distributed_c10d._get_default_store().set(self._key, address)
            _start(self._accept, server, token)
        else:
            _start(self._connect)
            # Wait, because rank 0 can't detect the death of a rank that hasn't connected. Not for long, because rank 0
            # may start late.
            self._is_connected.wait(CAUSE)
        self._watchdog.start()

    @contextlib.contextmanager
    def body(self, what: str) -> Iterator[None]:
        """Run the body as a section (code that all ranks run together). Inside a section, `body` starts no new one."""
        if self._inside:
            watchdog.progress(what)
            yield
            return
        with self._changed:
            self._counts[what] += 1
            self._section, self._inside = f"{what} {self._counts[what]}", what
        try:
            if (fault := self._fault()) is not None:
                raise RankError(fault.text)
            with self._watchdog.inside(what):
                yield
        except RankError:
            raise
        except BaseException as error:
            if is_lost_connection(error):
                with self._changed:
                    fault = self._changed.wait_for(self._fault, CAUSE)
                if fault is not None:
                    raise RankError(fault.text) from error
            self.report(what, error)
            raise
        finally:
            with self._changed:
                self._inside = ""

    def report(self, what: str, error: BaseException) -> None:
        text = f"Rank {self.rank} failed in {what}: {type(error).__name__}: {error}"
        self._tell(Fault(self.rank, self._section, text))

    def send(self, **message: Any) -> None:
        with self._sending:
            for link in self._links:
                link.send(**message)

    def _fault(self) -> Fault | None:
        return next((fault for fault in self._faults if fault.body in (GONE, self._section)), None)

    def leave(self) -> None:
        error = getattr(sys, "last_value", None)  # the uncaught exception that ends this process, if any
        if error is not None:
            self._tell(Fault(self.rank, GONE, f"Rank {self.rank} failed: {type(error).__name__}: {error}"))
        self._has_left = True
        self._watchdog.close()
        self.send(bye=True)
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # `close` wouldn't wake a thread that waits for the socket

    def _tell(self, fault: Fault) -> None:
        self._is_connected.wait(CAUSE)
        with self._sending:
            self._told.append(fault)
            for link in self._links:
                link.send_fault(fault)

    def _receive(self, fault: Fault) -> None:
        with self._changed:
            self._faults.append(fault)
            self._changed.notify_all()
            section, is_first = self._section, self._fault() is fault
        if is_first:
            _start(self._end, fault, section)

    def _end(self, fault: Fault, section: str) -> None:
        time.sleep(min(self.grace, GRACE_OF_HANGING) if fault.hangs else self.grace)
        with self._changed:
            waits = self._inside if self._section == section else ""
        if waits:
            suffix = "" if fault.rank == self.rank else f" (rank {self.rank} waited for it in {waits})"
            _exit(fault.text + suffix)

    def _end_hanging(self, description: str) -> None:
        text = f"Rank {self.rank} {description}"
        self._tell(Fault(self.rank, GONE, text, hangs=True))
        time.sleep(DELIVERY)
        _exit(text)

    def _exchange_signs(self, passed: float) -> None:
        """Send a sign of life to each connected rank. Report ranks that have been silent for `rank_timeout` seconds.

        ``passed``: seconds since the last call. Silence counts only in sections, where ranks wait for each other."""
        lost, limit = [], watchdog.limit()
        with self._sending:
            for link in self._links:
                link.send(stage=watchdog.stage())
                link.silence += passed if self._inside else 0.0
                if limit is not None and link.silence > max(limit, LEAST_SILENCE):
                    text = (
                        f"Rank {link.rank} hasn't been heard of for {link.silence:,.0f} s (rank_timeout), last in "
                        f"{link.stage}: its process is stopped, or in a call that blocks all of its threads."
                    )
                    lost.append(Fault(link.rank, GONE, text, hangs=True))
                    link.silence = float("-inf")
        for fault in lost:
            self._tell(fault)
            self._receive(fault)

    def _accept(self, server: socket.socket, token: str) -> None:
        with server, contextlib.suppress(OSError):
            while True:
                _start(self._greet, server.accept()[0], token)

    def _greet(self, connection: socket.socket, token: str) -> None:
        _prepare(connection, self.silence)
        # Ignore connections without the run's token: another program has opened them.
        broken = contextlib.suppress(ValueError, TypeError, KeyError, OSError)
        with connection, connection.makefile("rb") as lines, broken:
            greeting = json.loads(lines.readline())
            if greeting["token"] == token:
                self._read(_Link(connection, greeting["rank"]), lines)

    def _connect(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        until = time.monotonic() + time_limit().total_seconds()
        try:
            while not store.check([self._key]):  # `get` would lock the store, which the training thread also uses
                if self._has_left or time.monotonic() > until:
                    raise RuntimeError("rank 0 published no address within `ddp_timeout`: see rank 0's output")
                time.sleep(0.1)
            host, port, token = store.get(self._key).decode().split()
            connection = socket.create_connection((host, int(port)), self.silence)
            connection.settimeout(None)
            _prepare(connection, self.silence)
            link = _Link(connection, 0)
            link.send(token=token, rank=self.rank)
        except (OSError, RuntimeError) as error:
            if not self._has_left:
                print(f"ranks: rank {self.rank} can't receive failures of other ranks: {error}", file=sys.stderr)
            self._is_connected.set()
            return
        with connection, connection.makefile("rb") as lines:
            self._read(link, lines)

    def _read(self, link: _Link, lines: Iterable[bytes]) -> None:
        with self._sending:
            self._links.append(link)
            self._sockets.append(link.connection)
            for fault in self._told:
                link.send_fault(fault)
        self._is_connected.set()
        reason = ""
        try:
            for line in lines:
                message = json.loads(line)
                if "bye" in message:
                    return
                if "stage" in message:
                    link.stage, link.silence = message["stage"], 0.0
                elif "stop" in message:
                    for listener in stop_listeners:
                        listener(message["stop"], message["seconds"])
                    if self.rank == 0:
                        self.send(**message)
                else:
                    fault = Fault(**message)
                    link.last_words = fault.text if fault.rank == link.rank else link.last_words
                    if self.rank == 0:
                        self._tell(fault)
                    self._receive(fault)
        except OSError as error:
            reason = f" ({error})"
        finally:
            with self._sending:
                self._links.remove(link)
        if not self._has_left:
            text = link.last_words or (
                f"Rank {link.rank} ended without a word{reason}: it was killed, ran out of memory, or its machine is "
                "gone. See also that rank's output."
            )
            self._tell(Fault(link.rank, GONE, text))
            self._receive(Fault(link.rank, GONE, text))


def _start(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, name="colograd-ranks", daemon=True).start()


def _prepare(connection: socket.socket, seconds: int) -> None:
    """Make the system close the connection if the other machine doesn't answer for about ``seconds``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CAUSE), 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, seconds // 6)
    options = {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 1000 * seconds}
    for option, value in options.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _exit(message: str) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    print(f"colograd: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
