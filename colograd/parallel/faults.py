"""End all ranks together if one rank fails or dies while other ranks wait in a collective for this rank.

`on_all_ranks` (in `ranks`) exchanges errors between collectives only, and a rank that waits in a collective can't be
woken. So each rank keeps a TCP connection to rank 0. Rank 0 and the rank send each other signs of life (short messages
every few seconds). Rank 0 learns of four kinds of failure. A rank that raises an error, or makes no progress (see
`watchdog`), reports the failure. If a process dies, the system closes the connection. If a machine is lost, the
connection times out. If a process is stopped, its signs of life end. Rank 0 then sends the failed rank's message to all
ranks. Each rank ends by itself, or by force after `GRACE` seconds.

A process has one `FailureDetector`, from the first call of `waiting` to `leave`. A run of one rank has only a watchdog.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
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

GRACE = 10.0  # Seconds after a rank's failure until the ranks that wait for the failed rank are ended by force.
GRACE_OF_HANGING = 5.0  # Seconds in place of GRACE if a rank made no progress, because other ranks waited already.
DELIVERY = 0.5  # Seconds that a failing rank gives rank 0 to read the last message before the process ends.
CAUSE = 5.0  # Seconds to wait for a connection, for a send, or for the reason of a lost connection.
SILENCE = 30  # Seconds without an answer after which a machine counts as lost.
GONE = ""  # Value of `Fault.body` if the rank's process has ended or makes no progress.


@dataclass(frozen=True, slots=True)
class Fault:
    """The failure of a rank, as ranks send it to each other."""

    rank: int
    body: str  # Name of the code that the rank left by an exception, e.g. "training 3". GONE: the process ended.
    text: str
    hangs: bool = False  # True if the process still exists, but makes no progress.


@contextlib.contextmanager
def ends_together(what: str) -> Iterator[None]:
    """Decorate a function that all ranks run together, so that the function ends on all ranks if one rank fails.

    A rank fails if it raises an error, dies, or makes no progress for `rank_timeout` seconds. On each rank, the
    function then raises `RankError` with the failed rank's message, or the process ends. If a decorated function calls
    another decorated function, the inner call counts as part of the outer function.

    Args:
        what: the name of the function in messages, such as "training".
    """
    with waiting(what):
        yield


_present: FailureDetector | None = None
_alone = watchdog.Watchdog(end=lambda description: _exit(f"The only rank {description}"))
_numbers = itertools.count(1)  # all ranks create failure detectors in equal order, so their numbers agree


def waiting(what: str) -> AbstractContextManager[None]:
    """Return a context manager that ends its body on all ranks if one rank fails in the body, as `ends_together`
    does."""
    global _present
    if world_size() == 1:
        return _alone.inside(what)
    if _present is None:
        atexit.unregister(part)  # register `part` before `leave`, because atexit calls the last function first
        atexit.register(part)
        _present = FailureDetector()
        atexit.register(_present.leave)
    return _present.body(what)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Context manager: report an exception in the body to the other ranks at once, not when it leaves `ends_together`.

    Use it where the other ranks wait for the result of the body.

    Args:
        what: the name of the body in messages.
    """
    try:
        yield
    except RankError:
        raise  # a `RankError` is known to all ranks already
    except Exception as error:
        if _present is not None and not is_lost_connection(error):  # a lost connection means that another rank failed
            _present.report(what, error)
        raise


stop_listeners: list[Callable[[str, float], None]] = []  # functions to call if another rank gets a stop signal


def tell_stop(name: str, seconds: float) -> None:
    """Send a signal that this rank received (e.g. SIGTERM) to all other ranks, with the seconds until the run must
    end."""
    if _present is not None:
        _present.tell_stop(name, seconds)


def _stop(name: str, seconds: float) -> None:
    for listener in stop_listeners:
        listener(name, seconds)


def leave() -> None:
    """End the failure detection, because no collective follows and ranks may end at any time. `waiting` restarts it."""
    global _present
    if _present is not None:
        atexit.unregister(_present.leave)
        _present.leave()
        _present = None


def is_lost_connection(error: BaseException) -> bool:
    """Return whether ``error`` comes from a collective that failed because a different rank's process is gone."""
    text = str(error)
    names_library = "/gloo/" in text or "NCCL" in text or "ProcessGroup" in text
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and names_library)


class FailureDetector:
    """Reports a failure of this rank to all other ranks, and ends this rank's process if a different rank failed."""

    def __init__(self) -> None:
        self.rank = rank()
        self.grace = min(GRACE, time_limit().total_seconds())
        self.silence = min(SILENCE, int(time_limit().total_seconds()))
        self._key = f"colograd/watch/{next(_numbers)}"
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._counts: collections.Counter[str] = collections.Counter()  # How often each section ran.
        self._section = ""  # Last section (code that all ranks run together) and its number, e.g. "training 3".
        self._inside = ""  # Name of the section that runs now, or "".
        self._has_left = False
        self._hub: _Coordinator | None = None
        self._connection: socket.socket | None = None
        self._is_connected = threading.Event()
        self._sending = threading.Lock()
        self._signs = 0  # Number of messages ("signs of life") from rank 0. 0 means: not connected, or none expected.
        self._last_stage = "the start"  # Description of rank 0's progress in its last message.
        self._since_sign = watchdog.Idle()  # Time since the last message from rank 0.
        self._watchdog = watchdog.Watchdog(self._end_hanging, self._exchange_signs)
        if self.rank == 0:
            self._hub = _Coordinator(self.silence, self._receive)
            dist.distributed_c10d._get_default_store().set(self._key, self._hub.address)
        else:
            threading.Thread(target=self._listen, name="colograd-ranks", daemon=True).start()
            # Wait for the connection, because rank 0 can't detect the death of a rank that hasn't connected. Don't wait
            # longer, because rank 0 may start much later.
            self._is_connected.wait(CAUSE)
        self._watchdog.start()

    # Methods that the training thread calls.

    @contextlib.contextmanager
    def body(self, what: str) -> Iterator[None]:
        """Run a section (code that all ranks run together, and that ends on all ranks if one rank fails). A section
        inside a section is part of the outer section."""
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
            raise  # a `RankError` is known to all ranks already
        except BaseException as error:
            if (cause := self._cause(error)) is not None:
                raise RankError(cause.text) from error
            self.report(what, error)
            raise
        finally:
            with self._changed:
                self._inside = ""

    def report(self, what: str, error: BaseException) -> None:
        """Send an error of this rank to all other ranks. ``what`` names the code that raised, such as "training"."""
        text = f"Rank {self.rank} failed in {what}: {type(error).__name__}: {error}"
        self._send_fault(Fault(self.rank, self._section, text))

    def tell_stop(self, name: str, seconds: float) -> None:
        """Send a stop signal that this rank received to all other ranks, through rank 0, with the seconds left."""
        if self._hub is not None:
            self._hub.tell_stop(name, seconds)
        else:
            with contextlib.suppress(OSError):  # if rank 0 is gone, all ranks detect its failure
                self._send(stop=name, seconds=seconds)

    def _fault(self) -> Fault | None:
        """Return the first failure of a rank that this rank waits for: the failed rank has left the present section
        (code that all ranks run together), has ended, or makes no progress."""
        return next((fault for fault in self._faults if fault.body in (GONE, self._section)), None)

    def _cause(self, error: BaseException) -> Fault | None:
        """Return the failure of a different rank that caused this rank's exception, or None."""
        if not is_lost_connection(error):
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._fault() is not None, CAUSE)
            return self._fault()

    def leave(self) -> None:
        """Close the connection after telling rank 0 that this rank ends: as planned, or by an uncaught exception."""
        error = getattr(sys, "last_value", None)  # the uncaught exception that ends the process
        if error is not None:
            self._send_fault(Fault(self.rank, GONE, f"Rank {self.rank} failed: {type(error).__name__}: {error}"))
        self._has_left = True
        self._watchdog.close()
        if self._hub is not None:
            self._hub.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._send(bye=True)
                self._connection.shutdown(socket.SHUT_RDWR)

    def _send_fault(self, fault: Fault) -> None:
        """Send a rank's failure to all other ranks: directly from rank 0, or through rank 0."""
        if self._hub is not None:
            self._hub.broadcast(fault)
        elif self._is_connected.wait(CAUSE):
            with contextlib.suppress(OSError):  # if rank 0 is gone, all ranks detect its failure
                self._send(**asdict(fault))

    def _send(self, **message: Any) -> None:
        """Send a message to rank 0 as a line of JSON, if this rank is connected."""
        with self._sending:
            if self._connection is not None:
                self._connection.sendall(_line(**message))

    # Methods that other threads of this process call.

    def _receive(self, fault: Fault) -> None:
        """Record the failure of a different rank. If this rank waits for the failed rank, start a thread that ends this
        process after the grace period."""
        with self._changed:
            self._faults.append(fault)
            self._changed.notify_all()
            section, is_first = self._section, self._fault() is fault
        if is_first:
            threading.Thread(target=self._end, args=(fault, section), name="colograd-ranks-end", daemon=True).start()

    def _end(self, fault: Fault, section: str) -> None:
        """Wait for the grace period. Then end this process by force, unless it has finished ``section``, the code in
        which it waits for the failed rank."""
        time.sleep(min(self.grace, GRACE_OF_HANGING) if fault.hangs else self.grace)
        with self._changed:
            waits = self._inside if self._section == section else ""
        if waits:
            suffix = "" if fault.rank == self.rank else f" (rank {self.rank} waited for it in {waits})"
            _exit(fault.text + suffix)

    def _end_hanging(self, description: str) -> None:
        """Report that this rank makes no progress to all ranks, then end this process by force."""
        text = f"Rank {self.rank} {description}"
        self._send_fault(Fault(self.rank, GONE, text, hangs=True))
        time.sleep(DELIVERY)
        _exit(text)

    def _exchange_signs(self, passed: float) -> None:
        """Send a sign of life (a short message), and check when other ranks sent a sign of life last. Time (``passed``
        seconds since the last call) counts only in code that all ranks run together, where ranks wait for each
        other."""
        passed = passed if self._inside else 0.0
        if self._hub is not None:
            for lost in self._hub.exchange_signs(passed):
                self._hub.broadcast(lost)
                self._receive(lost)
            return
        with contextlib.suppress(OSError):  # If rank 0 is gone, `_listen` detects its failure.
            self._send(stage=watchdog.stage())
        if self._signs and self._since_sign.is_silent(self._signs, passed):
            lost = _silent(0, self._since_sign.seconds, self._last_stage)
            self._signs = 0  # Report the failure of rank 0 only once.
            with contextlib.suppress(OSError):  # If rank 0 is suspended, it reads this message after it continues.
                self._send(**asdict(lost))
            self._receive(lost)

    def _listen(self) -> None:
        """Read the messages from rank 0 (runs on all other ranks), until this rank leaves or rank 0 is gone."""
        try:
            self._connection, self._signs = self._connect(), 1
        except (OSError, RuntimeError) as error:
            if not self._has_left:
                print(f"ranks: rank {self.rank} can't receive failures of other ranks: {error}", file=sys.stderr)
            return
        finally:
            self._is_connected.set()
        reason = ""
        try:
            for line in self._connection.makefile("rb"):
                message = json.loads(line)
                if "bye" in message:
                    self._signs = 0  # rank 0 has left, and sends no more messages
                    return
                if "stage" in message:
                    self._last_stage = message["stage"]
                    self._signs += 1
                elif "stop" in message:
                    _stop(message["stop"], message["seconds"])
                else:
                    self._receive(Fault(**message))
        except OSError as error:
            reason = str(error)
        if not self._has_left:
            self._receive(_missed(0, reason))

    def _connect(self) -> socket.socket:
        """Connect to rank 0, at the address that rank 0 has written to the process group's store."""
        store = dist.distributed_c10d._get_default_store()
        until = time.monotonic() + time_limit().total_seconds()
        while not store.check([self._key]):  # `get` would block the store for the training thread
            if self._has_left or time.monotonic() > until:
                raise RuntimeError("rank 0 didn't write its network address to the process group's store")
            time.sleep(0.1)
        host, port, token = store.get(self._key).decode().split()
        connection = socket.create_connection((host, int(port)), self.silence)
        connection.settimeout(None)
        _notice_silence(connection, self.silence)
        connection.sendall(_line(token=token, rank=self.rank))
        return connection


@dataclass(eq=False, slots=True)
class _Caller:
    """The state that rank 0 keeps for the connection of each other rank."""

    connection: socket.socket
    rank: int = -1  # Index of the connected rank, or -1 before the first message.
    pending: bytes = b""  # Received bytes of an incomplete line.
    last_words: str = ""  # Text of the last failure that the connected rank reported.
    signs: int = 0  # Number of "signs of life" (short messages) from the connected rank.
    stage: str = "the start"  # Description of the connected rank's progress in its last message.
    silence: watchdog.Idle = field(default_factory=watchdog.Idle)


class _Coordinator:
    """Rank 0's server for the connections of all other ranks. It sends each rank's failure to all other ranks.

    Args:
        silence: seconds without an answer after which a machine counts as lost.
        receive: function that the server's thread calls with each failure of a rank other than 0.
    """

    def __init__(self, silence: int, receive: Callable[[Fault], None]) -> None:
        self._silence, self._receive = silence, receive
        several_nodes = process.local_world_size() < world_size()
        host = os.environ["MASTER_ADDR"] if several_nodes else "127.0.0.1"
        self._server = _server() if several_nodes else socket.create_server((host, 0))
        self._token = secrets.token_hex(16)  # secret of this run, because any program can connect to the port
        self.address = f"{host} {self._server.getsockname()[1]} {self._token}"
        self._callers: list[_Caller] = []
        self._faults: list[Fault] = []  # all reported failures, to send to ranks that connect later
        self._lock = threading.Lock()
        self._stop, self._stopped = socket.socketpair()
        threading.Thread(target=self._run, name="colograd-ranks-hub", daemon=True).start()

    def broadcast(self, fault: Fault) -> None:
        """Send a rank's failure to all other ranks except the failed rank."""
        with self._lock:
            self._faults.append(fault)
            for caller in self._callers:
                self._send_fault(caller, fault)

    def tell_stop(self, name: str, seconds: float) -> None:
        """Send the name of a stop signal and the seconds left to all other ranks."""
        with self._lock:
            for caller in self._callers:
                self._send(caller, stop=name, seconds=seconds)

    def exchange_signs(self, passed: float) -> list[Fault]:
        """Send a sign of life to all other ranks. Return a failure for each rank that sent none for `rank_timeout`.

        Args:
            passed: seconds since the last call.
        """
        lost = []
        with self._lock:
            for caller in self._callers:
                self._send(caller, stage=watchdog.stage())
                if caller.signs and caller.silence.is_silent(caller.signs, passed):
                    lost.append(_silent(caller.rank, caller.silence.seconds, caller.stage))
                    caller.signs = 0  # Report a rank's failure only once.
        return lost

    def close(self) -> None:
        """Close the server, because rank 0 leaves. All other ranks continue without failure detection."""
        with self._lock:
            for caller in self._callers:
                self._send(caller, bye=True)
        self._stop.close()

    def _spread(self, fault: Fault) -> None:
        """Send a rank's failure to all other ranks, and handle the failure on rank 0."""
        self.broadcast(fault)
        self._receive(fault)

    def _send_fault(self, caller: _Caller, fault: Fault) -> None:
        if caller.rank != fault.rank or fault.hangs:  # a hanging rank may go on
            self._send(caller, **asdict(fault))

    def _send(self, caller: _Caller, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the server's thread detects a lost connection
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
                        connection.settimeout(CAUSE)  # time limit of a send to a process that doesn't read
                        _notice_silence(connection, self._silence)
                        selector.register(connection, selectors.EVENT_READ, _Caller(connection))
                    elif not self._read(key.data):
                        selector.unregister(key.data.connection)
                        key.data.connection.close()

    def _read(self, caller: _Caller) -> bool:
        """Read a connection's messages. Return False to close the connection, because the process isn't a rank of this
        run, has left, or is gone."""
        reason = ""
        try:
            data = caller.connection.recv(65536)
        except OSError as error:
            data, reason = b"", str(error)
        *lines, caller.pending = (caller.pending + data).split(b"\n")
        try:
            if not all(self._handle(caller, json.loads(line)) for line in lines):
                return False
        except (ValueError, TypeError, KeyError):  # the sender isn't a rank of this run
            return False
        if not data and caller in self._callers:
            with self._lock:
                self._callers.remove(caller)
            last_fault = Fault(caller.rank, GONE, caller.last_words)
            self._spread(last_fault if caller.last_words else _missed(caller.rank, reason))
        return bool(data)

    def _handle(self, caller: _Caller, message: dict[str, Any]) -> bool:
        """Handle a message from a rank. Return False if the connection must be closed."""
        if caller.rank < 0:
            if message["token"] != self._token:
                return False
            with self._lock:
                caller.rank, caller.signs = message["rank"], 1
                self._callers.append(caller)
                for fault in self._faults:
                    self._send_fault(caller, fault)
        elif "bye" in message:
            with self._lock:
                self._callers.remove(caller)
            return False
        elif "stage" in message:
            caller.stage = message["stage"]
            caller.signs += 1
        elif "stop" in message:
            _stop(message["stop"], message["seconds"])
            self.tell_stop(message["stop"], message["seconds"])
        else:
            fault = Fault(**message)
            caller.last_words = fault.text
            self._spread(fault)
        return True


def _missed(lost: int, reason: str) -> Fault:
    """Return the failure of the rank ``lost`` after its connection closed, with the ``reason`` if it is known."""
    detail = f" ({reason})" if reason else ""
    text = (
        f"Rank {lost} ended without a word{detail}: it was killed, ran out of memory, or its machine is gone. See also "
        "that rank's output."
    )
    return Fault(lost, GONE, text)


def _silent(lost: int, seconds: float, stage: str) -> Fault:
    """Return the failure of the rank ``lost``, which sent its last sign of life ``seconds`` ago, in ``stage``."""
    text = (
        f"Rank {lost} hasn't been heard of for {seconds:,.0f} s (rank_timeout), last in {stage}: its process is "
        "stopped, or in a call that blocks all of its threads."
    )
    return Fault(lost, GONE, text, hangs=True)


def _line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _server() -> socket.socket:
    """Open a TCP server socket on all network addresses of this machine, with a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _notice_silence(connection: socket.socket, seconds: int) -> None:
    """Make the system probe the machine at the other end, and close the connection after ``seconds`` without answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, seconds // 6)
    options = {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 1000 * seconds}
    for option, value in options.items():
        if hasattr(socket, option):  # some systems lack some of these socket options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _exit(message: str) -> NoReturn:
    """Print an error and end this process by force with status 1, even while a thread waits in a collective."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    print(f"colograd: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
