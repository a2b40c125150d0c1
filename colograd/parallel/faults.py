"""Ends all ranks together when one fails or dies while the others wait for it inside a collective.

`on_all_ranks` (in `ranks`) agrees between collectives. Inside a collective ranks can't agree, and a waiting rank can't
be woken. So each rank keeps a TCP connection to rank 0, over which both send signs of life. A rank that fails reports
its failure there; so does a rank that makes no progress (see `watchdog`), and it ends itself. If a process dies, the
system closes its connection. If a machine is lost, its connection times out. If a process is stopped, its signs of life
stop. Rank 0 sends the failure to all others, and they end: by themselves, or after `GRACE` seconds by force, with the
failed rank's message.

There is one `FailureDetector` per process, from the first `waiting` to `leave`. One rank alone has only a watchdog.
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

GRACE = 10.0  # seconds for a rank to end by itself, or to reach the next agreement of ranks
GRACE_OF_HANGING = 5.0  # seconds instead of GRACE if a rank hung, because the others have already waited
DELIVERY = 0.5  # seconds for rank 0 to read a final message before its connection closes
CAUSE = 5.0  # seconds to wait for a connection, for a send, or for the reason of a lost connection
SILENCE = 30  # seconds after which a machine that doesn't answer counts as lost
GONE = ""  # value of `Fault.body` if the rank's process has ended or makes no progress


@dataclass(frozen=True, slots=True)
class Fault:
    """The failure of a rank."""

    rank: int
    body: str  # the section that the rank left by an exception, such as "training 3", or GONE
    text: str
    hangs: bool = False  # the process exists, but makes no progress


@contextlib.contextmanager
def ends_together(what: str) -> Iterator[None]:
    """Decorate a function that all ranks run together, so that it ends on all ranks if one fails in it.

    A rank fails if it raises, dies, or makes no progress for `rank_timeout` seconds. The function then ends on all
    ranks: by `RankError` with that rank's message, or with the process. A decorated function called by another one is
    part of the outer one.

    Args:
        what: the name of the function in messages, such as "training".
    """
    with waiting(what):
        yield


_present: FailureDetector | None = None
_alone = watchdog.Watchdog(end=lambda description: _exit(f"The only rank {description}"))
_numbers = itertools.count(1)  # one per detector; all ranks create and leave them in the same order


def waiting(what: str) -> AbstractContextManager[None]:
    """Return a context whose body ends on all ranks together, as a function with `ends_together` does."""
    global _present
    if world_size() == 1:
        return _alone.inside(what)
    if _present is None:
        atexit.unregister(part)  # registered once, and before `leave`: atexit calls the last function first
        atexit.register(part)
        _present = FailureDetector()
        atexit.register(_present.leave)
    return _present.body(what)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Report a failure in this part of a section at once, not only when the exception leaves the section.

    Needed where other ranks wait for this part.

    Args:
        what: the name of the part in messages.
    """
    try:
        yield
    except RankError:
        raise  # all ranks know it
    except Exception as error:
        if _present is not None and not is_lost_connection(error):  # a lost connection is another rank's failure
            _present.report(what, error)
        raise


stop_listeners: list[Callable[[str, float], None]] = []  # called with another rank's signal and the seconds left


def tell_stop(name: str, seconds: float) -> None:
    """Send the other ranks the name of a signal that this rank received, and the seconds until all must have ended."""
    if _present is not None:
        _present.tell_stop(name, seconds)


def _stop(name: str, seconds: float) -> None:
    for listener in stop_listeners:
        listener(name, seconds)


def leave() -> None:
    """End the failure detection: no collective follows, and ranks may end at any time. A new `waiting` restarts it."""
    global _present
    if _present is not None:
        atexit.unregister(_present.leave)
        _present.leave()
        _present = None


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone. Such an error doesn't name the reason."""
    text = str(error)
    names_library = "/gloo/" in text or "NCCL" in text or "ProcessGroup" in text
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and names_library)


class FailureDetector:
    """Reports failures of this rank to the others, and ends this rank when another one failed."""

    def __init__(self) -> None:
        self.rank = rank()
        self.grace = min(GRACE, time_limit().total_seconds())
        self.silence = min(SILENCE, int(time_limit().total_seconds()))
        self._key = f"colograd/watch/{next(_numbers)}"
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._counts: collections.Counter[str] = collections.Counter()  # number of sections entered, by name
        self._section = ""  # name and number of the last section, such as "training 3"
        self._inside = ""  # name of the present section; empty outside of sections
        self._has_left = False
        self._hub: _Coordinator | None = None
        self._connection: socket.socket | None = None
        self._is_connected = threading.Event()
        self._sending = threading.Lock()
        self._signs = 0  # number of rank 0's signs of life; 0: not connected, or no longer expected
        self._last_stage = "the start"  # rank 0's stage in its last sign of life
        self._since_sign = watchdog.Idle()  # time since rank 0's last sign of life
        self._watchdog = watchdog.Watchdog(self._end_hanging, self._exchange_signs)
        if self.rank == 0:
            self._hub = _Coordinator(self.silence, self._receive)
            dist.distributed_c10d._get_default_store().set(self._key, self._hub.address)
        else:
            threading.Thread(target=self._listen, name="colograd-ranks", daemon=True).start()
            # Rank 0 doesn't notice the death of an unconnected rank, so wait a while. Rank 0 may start later than that.
            self._is_connected.wait(CAUSE)
        self._watchdog.start()

    # -- the training thread

    @contextlib.contextmanager
    def body(self, what: str) -> Iterator[None]:
        """Run a section that ends on all ranks together. A section inside a section is part of the outer one."""
        if self._inside:
            watchdog.progress(what)
            yield
            return
        with self._changed:
            self._counts[what] += 1
            self._section, self._inside = f"{what} {self._counts[what]}", what
        try:
            if (fault := self._fault()) is not None:  # a rank that won't enter this section
                raise RankError(fault.text)
            with self._watchdog.inside(what):
                yield
        except RankError:
            raise  # all ranks know it
        except BaseException as error:
            if (cause := self._cause(error)) is not None:
                raise RankError(cause.text) from error
            self.report(what, error)
            raise
        finally:
            with self._changed:
                self._inside = ""

    def report(self, what: str, error: BaseException) -> None:
        """Send a failure of this rank to the ranks that wait for it in the present section."""
        text = f"Rank {self.rank} failed in {what}: {type(error).__name__}: {error}"
        self._send_fault(Fault(self.rank, self._section, text))

    def tell_stop(self, name: str, seconds: float) -> None:
        """Send a signal of this rank to the other ranks, through rank 0; see the function `tell_stop`."""
        if self._hub is not None:
            self._hub.tell_stop(name, seconds)
        else:
            with contextlib.suppress(OSError):  # rank 0 is gone, and all ranks detect that
                self._send(stop=name, seconds=seconds)

    def _fault(self) -> Fault | None:
        """Return the first fault of a rank that has left the present section, has ended, or hangs."""
        return next((fault for fault in self._faults if fault.body in (GONE, self._section)), None)

    def _cause(self, error: BaseException) -> Fault | None:
        """Return the other rank's fault that caused this rank's exception, if there is one."""
        if not is_lost_connection(error):
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._fault() is not None, CAUSE)
            return self._fault()

    def leave(self) -> None:
        """Tell rank 0 that this rank's process may end, or that an exception ends it, and close the connection."""
        error = getattr(sys, "last_value", None)  # the exception that ends the process
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
        """Send a fault to all other ranks."""
        if self._hub is not None:
            self._hub.broadcast(fault)
        elif self._is_connected.wait(CAUSE):
            with contextlib.suppress(OSError):  # rank 0 is gone, and all ranks detect that
                self._send(**asdict(fault))

    def _send(self, **message: Any) -> None:
        """Send a message to rank 0, if there is a connection."""
        with self._sending:
            if self._connection is not None:
                self._connection.sendall(_line(**message))

    # -- other threads

    def _receive(self, fault: Fault) -> None:
        """Record a fault of another rank. If the present section needs that rank, end this process after a while."""
        with self._changed:
            self._faults.append(fault)
            self._changed.notify_all()
            section, is_first = self._section, self._fault() is fault
        if is_first:
            threading.Thread(target=self._end, args=(fault, section), name="colograd-ranks-end", daemon=True).start()

    def _end(self, fault: Fault, section: str) -> None:
        """End the process after the grace period, unless it has left the section by then."""
        time.sleep(min(self.grace, GRACE_OF_HANGING) if fault.hangs else self.grace)
        with self._changed:
            waits = self._inside if self._section == section else ""
        if waits:
            suffix = "" if fault.rank == self.rank else f" (rank {self.rank} waited for it in {waits})"
            _exit(fault.text + suffix)

    def _end_hanging(self, description: str) -> None:
        """End this rank by force, because it makes no progress."""
        text = f"Rank {self.rank} {description}"
        self._send_fault(Fault(self.rank, GONE, text, hangs=True))
        time.sleep(DELIVERY)
        _exit(text)

    def _exchange_signs(self, passed: float) -> None:
        """Send a sign of life and check the others' signs. Time counts only in a section, where ranks wait."""
        passed = passed if self._inside else 0.0
        if self._hub is not None:
            for lost in self._hub.exchange_signs(passed):
                self._hub.broadcast(lost)
                self._receive(lost)
            return
        with contextlib.suppress(OSError):  # rank 0 is gone; `_listen` detects it
            self._send(stage=watchdog.stage())
        if self._signs and self._since_sign.is_silent(self._signs, passed):
            lost = _silent(0, self._since_sign.seconds, self._last_stage)
            self._signs = 0  # report it once
            with contextlib.suppress(OSError):  # a stopped rank 0 reads it when it continues
                self._send(**asdict(lost))
            self._receive(lost)

    def _listen(self) -> None:
        """Read rank 0's messages, on all other ranks, until this rank leaves or rank 0 is gone."""
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
                    self._signs = 0  # rank 0 sends no more signs of life
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
        """Connect to rank 0's hub, with the address from the rendezvous store."""
        store = dist.distributed_c10d._get_default_store()
        until = time.monotonic() + time_limit().total_seconds()
        while not store.check([self._key]):  # not `get`, which would block the store for the training thread
            if self._has_left or time.monotonic() > until:
                raise RuntimeError("rank 0 didn't publish its address")
            time.sleep(0.1)
        host, port, token = store.get(self._key).decode().split()
        connection = socket.create_connection((host, int(port)), self.silence)
        connection.settimeout(None)
        _notice_silence(connection, self.silence)
        connection.sendall(_line(token=token, rank=self.rank))
        return connection


@dataclass(eq=False, slots=True)
class _Caller:
    """Rank 0's state of another rank's connection."""

    connection: socket.socket
    rank: int = -1  # -1 until the first message
    pending: bytes = b""  # the start of an incomplete line
    last_words: str = ""  # text of the last fault it reported
    signs: int = 0  # number of signs of life
    stage: str = "the start"  # stage in its last sign of life
    silence: watchdog.Idle = field(default_factory=watchdog.Idle)


class _Coordinator:
    """Rank 0's hub: sends the faults of each rank to all others.

    Args:
        silence: seconds after which a machine that doesn't answer counts as lost.
        receive: is called with each fault of another rank, in the hub's thread.
    """

    def __init__(self, silence: int, receive: Callable[[Fault], None]) -> None:
        self._silence, self._receive = silence, receive
        several_nodes = process.local_world_size() < world_size()
        host = os.environ["MASTER_ADDR"] if several_nodes else "127.0.0.1"
        self._server = _server() if several_nodes else socket.create_server((host, 0))
        self._token = secrets.token_hex(16)  # other programs can connect to the port as well
        self.address = f"{host} {self._server.getsockname()[1]} {self._token}"
        self._callers: list[_Caller] = []
        self._faults: list[Fault] = []  # all faults so far, for ranks that connect later
        self._lock = threading.Lock()
        self._stop, self._stopped = socket.socketpair()
        threading.Thread(target=self._run, name="colograd-ranks-hub", daemon=True).start()

    def broadcast(self, fault: Fault) -> None:
        """Send a fault to all other ranks except the failed one."""
        with self._lock:
            self._faults.append(fault)
            for caller in self._callers:
                self._send_fault(caller, fault)

    def tell_stop(self, name: str, seconds: float) -> None:
        """Send a signal's name to all other ranks; see the function `tell_stop`."""
        with self._lock:
            for caller in self._callers:
                self._send(caller, stop=name, seconds=seconds)

    def exchange_signs(self, passed: float) -> list[Fault]:
        """Send a sign of life to all other ranks, and return the faults of ranks that sent none for too long.

        Args:
            passed: seconds since the last call.
        """
        lost = []
        with self._lock:
            for caller in self._callers:
                self._send(caller, stage=watchdog.stage())
                if caller.signs and caller.silence.is_silent(caller.signs, passed):
                    lost.append(_silent(caller.rank, caller.silence.seconds, caller.stage))
                    caller.signs = 0  # report it once
        return lost

    def close(self) -> None:
        """Close the hub when rank 0 leaves. The others continue without failure detection."""
        with self._lock:
            for caller in self._callers:
                self._send(caller, bye=True)
        self._stop.close()

    def _spread(self, fault: Fault) -> None:
        """Send a fault to the other ranks and to this one."""
        self.broadcast(fault)
        self._receive(fault)

    def _send_fault(self, caller: _Caller, fault: Fault) -> None:
        if caller.rank != fault.rank or fault.hangs:  # a stopped process reads why the others ended when it continues
            self._send(caller, **asdict(fault))

    def _send(self, caller: _Caller, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the hub's thread will report this rank as lost
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
                        connection.settimeout(CAUSE)  # limits a send to a process that doesn't read
                        _notice_silence(connection, self._silence)
                        selector.register(connection, selectors.EVENT_READ, _Caller(connection))
                    elif not self._read(key.data):
                        selector.unregister(key.data.connection)
                        key.data.connection.close()

    def _read(self, caller: _Caller) -> bool:
        """Read a connection's messages. Return False to close it: the process is no rank, has left, or is gone."""
        reason = ""
        try:
            data = caller.connection.recv(65536)
        except OSError as error:
            data, reason = b"", str(error)
        *lines, caller.pending = (caller.pending + data).split(b"\n")
        try:
            if not all(self._handle(caller, json.loads(line)) for line in lines):
                return False
        except (ValueError, TypeError, KeyError):  # a process that is no rank of this run
            return False
        if not data and caller in self._callers:
            with self._lock:
                self._callers.remove(caller)
            last_fault = Fault(caller.rank, GONE, caller.last_words)
            self._spread(last_fault if caller.last_words else _missed(caller.rank, reason))
        return bool(data)

    def _handle(self, caller: _Caller, message: dict[str, Any]) -> bool:
        """Handle a message. Return False to close the connection."""
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
    """Return the fault of a rank after its connection closed, with the ``reason`` if it is known."""
    detail = f" ({reason})" if reason else ""
    text = (
        f"Rank {lost} ended without a word{detail}: it was killed, ran out of memory, or its machine is gone. See also "
        "that rank's output."
    )
    return Fault(lost, GONE, text)


def _silent(lost: int, seconds: float, stage: str) -> Fault:
    """Return the fault of a rank that sent its last sign of life ``seconds`` ago, in ``stage``."""
    text = (
        f"Rank {lost} hasn't been heard of for {seconds:,.0f} s (rank_timeout), last in {stage}: its process is "
        "stopped, or in a call that blocks all of its threads."
    )
    return Fault(lost, GONE, text, hangs=True)


def _line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _server() -> socket.socket:
    """Open a server socket on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _notice_silence(connection: socket.socket, seconds: int) -> None:
    """Let the system probe the other machine, and close the connection after ``seconds`` without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, seconds // 6)
    options = {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 1000 * seconds}
    for option, value in options.items():
        if hasattr(socket, option):  # some systems lack some options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _exit(message: str) -> NoReturn:
    """End this process by force, even while one of its threads waits in a collective."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    print(f"colograd: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
