"""Ranks end together, even where one fails or dies while the others wait for it in the middle of an exchange.

`on_all_ranks` (in `ranks`) agrees between exchanges. Within one nobody can be asked, and a rank that waits can't be
woken. So each rank keeps a TCP connection to rank 0, over which signs of life go. A rank that fails says so there, and
so does one that makes no progress (see `watchdog`), which ends itself. Of one that dies the system closes the
connection, of a machine that is gone nothing answers, of a process that is stopped the signs of life are missed. All
others are told, and end: by themselves, or `GRACE` seconds later by force, with the failed rank's message.

There is one `FailureDetector` per process, from the first `waiting` to `leave`; one rank alone has a watchdog only.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from ..runtime import process
from . import watchdog
from .ranks import RankError, part, rank, time_limit, world_size

F = TypeVar("F", bound=Callable[..., Any])

GRACE = 10.0  # seconds in which a rank may end by itself, or come to where ranks agree
GRACE_OF_HANGING = 5.0  # likewise, where the one they wait for has been waited for long enough
DELIVERY = 0.5  # seconds in which last words are read, before their connection is gone
CAUSE = 5.0  # seconds in which the reason for a lost connection comes to be known
SILENCE = 30  # seconds after which a machine that doesn't answer is gone
GONE = ""  # in place of a body: the rank's process has ended


@dataclass(frozen=True, slots=True)
class Fault:
    """What is known of a rank that failed."""

    rank: int
    body: str  # which decorated function it left by an exception, and the how many-th of its name; or GONE
    text: str
    hangs: bool = False  # it lives, and makes no progress


def ends_together(what: str) -> Callable[[F], F]:
    """Decorate a function that all ranks are in together, and that can't end on one without the others.

    Where one rank leaves it by an exception, dies, or makes no progress in it for `rank_timeout` seconds, it ends on
    all: by `RankError` with that rank's message, or with the process. A decorated function in another is part of it.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with waiting(what):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


_present: FailureDetector | None = None
_alone = watchdog.Watchdog(end=lambda said: _exit(f"The only rank {said}"))
_numbers = itertools.count(1)  # of the watches of this process: all ranks begin and end theirs at the same places


def waiting(what: str) -> AbstractContextManager[None]:
    """`ends_together` for a body."""
    global _present
    if world_size() == 1:
        return _alone.inside(what)
    if _present is None:
        atexit.unregister(part)  # once, and before the watch's: what is registered last is called first
        atexit.register(part)
        _present = FailureDetector()
        atexit.register(_present.leave)
    return _present.body(what)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """A part of a body in which the other ranks wait: if this one fails in it, they learn it at once, and not only when
    the exception has left the body."""
    try:
        yield
    except RankError:
        raise  # all know
    except Exception as error:
        if _present is not None and not is_lost_connection(error):  # which is another rank's to tell
            _present.tell(what, error)
        raise


def leave() -> None:
    """No exchange follows: from here on ranks may end when they like, or another watch begins."""
    global _present
    if _present is not None:
        atexit.unregister(_present.leave)
        _present.leave()
        _present = None


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exchange failed, which says that another rank is gone and not why."""
    text = str(error)
    names_library = "/gloo/" in text or "NCCL" in text or "ProcessGroup" in text
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and names_library)


class FailureDetector:
    """Says that this rank failed, and ends it when another one did."""

    def __init__(self) -> None:
        self.rank = rank()
        self.grace = min(GRACE, time_limit().total_seconds())
        self.silence = min(SILENCE, int(time_limit().total_seconds()))
        self._key = f"colograd/watch/{next(_numbers)}"
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._counts: collections.Counter[str] = collections.Counter()  # bodies so far, by what they do
        self._entered = ""  # the last one: what it does, and its number
        self._inside = ""  # what the present body does; empty: there is none
        self._has_left = False
        self._hub: _Coordinator | None = None
        self._connection: socket.socket | None = None
        self._is_connected = threading.Event()
        self._sending = threading.Lock()
        self._signs = 0  # of life, of rank 0, since it was reached
        self._last_stage = "the start"  # of rank 0, as the last of them said
        self._since_sign = watchdog.Idle()  # likewise
        self._watchdog = watchdog.Watchdog(self._end_hanging, self._exchange_signs)
        if self.rank == 0:
            self._hub = _Coordinator(self.silence, self._hear)
            dist.distributed_c10d._get_default_store().set(self._key, self._hub.address)
        else:
            threading.Thread(target=self._listen, name="colograd-ranks", daemon=True).start()
            self._is_connected.wait(CAUSE)  # who dies before that isn't missed; but rank 0 may come late
        self._watchdog.start()

    # -- the thread that trains

    @contextlib.contextmanager
    def body(self, what: str) -> Iterator[None]:
        if self._inside:
            watchdog.progress(what)
            yield
            return
        with self._changed:
            self._counts[what] += 1
            self._entered, self._inside = f"{what} {self._counts[what]}", what
        try:
            if (fault := self._fault()) is not None:  # a rank that will not come
                raise RankError(fault.text)
            with self._watchdog.inside(what):
                yield
        except RankError:
            raise  # all know
        except BaseException as error:
            if (cause := self._cause(error)) is not None:
                raise RankError(cause.text) from error
            self.tell(what, error)
            raise
        finally:
            with self._changed:
                self._inside = ""

    def tell(self, what: str, error: BaseException) -> None:
        """Let the other ranks know what will keep them waiting in the present body."""
        text = f"Rank {self.rank} failed in {what}: {type(error).__name__}: {error}"
        self._say(Fault(self.rank, self._entered, text))

    def _fault(self) -> Fault | None:
        """The first one of a rank that the present body needs and that isn't in it any more."""
        return next((fault for fault in self._faults if fault.body in (GONE, self._entered)), None)

    def _cause(self, error: BaseException) -> Fault | None:
        """The failure of another rank that this one's failure comes from."""
        if not is_lost_connection(error):
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._fault() is not None, CAUSE)
            return self._fault()

    def leave(self) -> None:
        error = getattr(sys, "last_value", None)  # of an exception that ends the process
        if error is not None:
            self._say(Fault(self.rank, GONE, f"Rank {self.rank} failed: {type(error).__name__}: {error}"))
        self._has_left = True
        self._watchdog.close()
        if self._hub is not None:
            self._hub.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._send(bye=True)
                self._connection.shutdown(socket.SHUT_RDWR)

    def _say(self, fault: Fault) -> None:
        if self._hub is not None:
            self._hub.tell(fault)
        elif self._is_connected.wait(CAUSE):
            with contextlib.suppress(OSError):  # rank 0 is gone, which all see
                self._send(**asdict(fault))

    def _send(self, **message: Any) -> None:
        """To rank 0, if it has been reached."""
        with self._sending:
            if self._connection is not None:
                self._connection.sendall(_line(**message))

    # -- other threads

    def _hear(self, fault: Fault) -> None:
        with self._changed:
            self._faults.append(fault)
            self._changed.notify_all()
            entered, is_first = self._entered, self._fault() is fault
        if is_first:
            threading.Thread(target=self._end, args=(fault, entered), name="colograd-ranks-end", daemon=True).start()

    def _end(self, fault: Fault, entered: str) -> None:
        """End the process, unless it leaves the body of the fault by itself."""
        time.sleep(min(self.grace, GRACE_OF_HANGING) if fault.hangs else self.grace)
        with self._changed:
            waits = self._inside if self._entered == entered else ""
        if waits:
            waited = "" if fault.rank == self.rank else f" (rank {self.rank} waited for it in {waits})"
            _exit(fault.text + waited)

    def _end_hanging(self, said: str) -> None:
        """This rank makes no progress: nothing but force ends it."""
        text = f"Rank {self.rank} {said}"
        self._say(Fault(self.rank, GONE, text, hangs=True))
        time.sleep(DELIVERY)
        _exit(text)

    def _exchange_signs(self, passed: float) -> None:
        """Give a sign of life, and look whether the others have, where this rank can have waited for them."""
        passed = passed if self._inside else 0.0
        if self._hub is not None:
            for lost in self._hub.exchange_signs(passed):
                self._hub.tell(lost)
                self._hear(lost)
            return
        with contextlib.suppress(OSError):  # rank 0 is gone, which this one sees
            self._send(stage=watchdog.stage())
        if self._signs and self._since_sign.is_silent(self._signs, passed):
            lost = _silent(0, self._since_sign.seconds, self._last_stage)
            self._signs = 0  # said once
            with contextlib.suppress(OSError):  # it will read it when it goes on
                self._send(**asdict(lost))
            self._hear(lost)

    def _listen(self) -> None:
        """On every rank but 0: until this one leaves, or rank 0 is gone."""
        try:
            self._connection, self._signs = self._connect(), 1
        except (OSError, RuntimeError) as error:
            if not self._has_left:
                print(f"ranks: rank {self.rank} isn't told of others' failures: {error}", file=sys.stderr)
            return
        finally:
            self._is_connected.set()
        why = ""
        try:
            for line in self._connection.makefile("rb"):
                said = json.loads(line)
                if "bye" in said:
                    self._signs = 0  # it may rest from here on
                    return
                if "stage" in said:
                    self._last_stage = said["stage"]
                    self._signs += 1
                else:
                    self._hear(Fault(**said))
        except OSError as error:
            why = str(error)
        if not self._has_left:
            self._hear(_missed(0, why))

    def _connect(self) -> socket.socket:
        store = dist.distributed_c10d._get_default_store()
        until = time.monotonic() + time_limit().total_seconds()
        while not store.check([self._key]):  # and not `get`, which keeps the store from the thread that trains
            if self._has_left or time.monotonic() > until:
                raise RuntimeError("rank 0 didn't say where it listens")
            time.sleep(0.1)
        host, port, token = store.get(self._key).decode().split()
        connection = socket.create_connection((host, int(port)), self.silence)
        connection.settimeout(None)
        _notice_silence(connection, self.silence)
        connection.sendall(_line(token=token, rank=self.rank))
        return connection


@dataclass(eq=False, slots=True)
class _Caller:
    """Another rank's connection, as rank 0 has it."""

    connection: socket.socket
    rank: int = -1  # hasn't been said yet
    pending: bytes = b""
    last_words: str = ""
    signs: int = 0  # of life
    stage: str = "the start"  # as the last of them said
    silence: watchdog.Idle = field(default_factory=watchdog.Idle)


class _Coordinator:
    """On rank 0: tells all ranks what one of them says, or that one hasn't answered for ``silence`` seconds. ``hear``
    is called, in a thread of its own, with what other ranks say."""

    def __init__(self, silence: int, hear: Callable[[Fault], None]) -> None:
        self._silence, self._hear_here = silence, hear
        several_nodes = process.local_world_size() < world_size()
        host = os.environ["MASTER_ADDR"] if several_nodes else "127.0.0.1"
        self._server = _server() if several_nodes else socket.create_server((host, 0))
        self._token = secrets.token_hex(16)  # others may find the port, too
        self.address = f"{host} {self._server.getsockname()[1]} {self._token}"
        self._callers: list[_Caller] = []
        self._told: list[Fault] = []
        self._lock = threading.Lock()
        self._stop, self._stopped = socket.socketpair()
        threading.Thread(target=self._run, name="colograd-ranks-hub", daemon=True).start()

    def tell(self, fault: Fault) -> None:
        """Let all other ranks know, but one that failed itself."""
        with self._lock:
            self._told.append(fault)
            for caller in self._callers:
                self._tell(caller, fault)

    def exchange_signs(self, passed: float) -> list[Fault]:
        """Give all other ranks a sign of life, and find those of which none has come for too long, ``passed`` seconds
        after the last look."""
        lost = []
        with self._lock:
            for caller in self._callers:
                self._send(caller, stage=watchdog.stage())
                if caller.signs and caller.silence.is_silent(caller.signs, passed):
                    lost.append(_silent(caller.rank, caller.silence.seconds, caller.stage))
                    caller.signs = 0  # said once
        return lost

    def close(self) -> None:
        """Rank 0 is done. The others go on without being told of failures."""
        with self._lock:
            for caller in self._callers:
                self._send(caller, bye=True)
        self._stop.close()

    def _spread(self, fault: Fault) -> None:
        self.tell(fault)
        self._hear_here(fault)

    def _tell(self, caller: _Caller, fault: Fault) -> None:
        if caller.rank != fault.rank or fault.hangs:  # a stopped process learns why the others are gone
            self._send(caller, **asdict(fault))

    def _send(self, caller: _Caller, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is about to be missed itself
            caller.connection.sendall(_line(**message))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._server, self._stopped:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self._server:
                        connection, _ = self._server.accept()
                        connection.settimeout(CAUSE)  # for one that doesn't read
                        _notice_silence(connection, self._silence)
                        selector.register(connection, selectors.EVENT_READ, _Caller(connection))
                    elif not self._listens_on(key.data):
                        selector.unregister(key.data.connection)
                        key.data.connection.close()

    def _listens_on(self, caller: _Caller) -> bool:
        """Take what a caller has sent; False: it is no rank, or has left, or is gone."""
        why = ""
        try:
            received = caller.connection.recv(65536)
        except OSError as error:
            received, why = b"", str(error)
        *lines, caller.pending = (caller.pending + received).split(b"\n")
        try:
            if not all(self._understands(caller, json.loads(line)) for line in lines):
                return False
        except (ValueError, TypeError, KeyError):  # not one of ours
            return False
        if not received and caller in self._callers:
            with self._lock:
                self._callers.remove(caller)
            known = Fault(caller.rank, GONE, caller.last_words)
            self._spread(known if caller.last_words else _missed(caller.rank, why))
        return bool(received)

    def _understands(self, caller: _Caller, said: dict[str, Any]) -> bool:
        if caller.rank < 0:
            if said["token"] != self._token:
                return False
            with self._lock:
                caller.rank, caller.signs = said["rank"], 1
                self._callers.append(caller)
                for fault in self._told:
                    self._tell(caller, fault)
        elif "bye" in said:
            with self._lock:
                self._callers.remove(caller)
            return False
        elif "stage" in said:
            caller.stage = said["stage"]
            caller.signs += 1
        else:
            fault = Fault(**said)
            caller.last_words = fault.text
            self._spread(fault)
        return True


def _missed(lost: int, why: str) -> Fault:
    reason = f" ({why})" if why else ""
    text = (
        f"Rank {lost} ended without a word{reason}: it was killed, ran out of memory, or its machine is gone. Its own "
        "output may say more."
    )
    return Fault(lost, GONE, text)


def _silent(lost: int, seconds: float, stage: str) -> Fault:
    text = (
        f"Rank {lost} hasn't been heard of for {seconds:,.0f} s (rank_timeout), last in {stage}: its process is "
        "stopped, or in a call that lets none of its threads run."
    )
    return Fault(lost, GONE, text, hangs=True)


def _line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _server() -> socket.socket:
    """A port on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _notice_silence(connection: socket.socket, seconds: int) -> None:
    """Have the system ask now and then whether the other machine is there, and close the connection if it isn't."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, seconds // 6)
    options = {"TCP_KEEPIDLE": every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 1000 * seconds}
    for option, value in options.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _exit(message: str) -> NoReturn:
    """End this process although a thread of it waits in an exchange."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    print(f"colograd: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
