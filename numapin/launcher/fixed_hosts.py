"""Several hosts, each of which knows its number and the address of host 0; they need no rendezvous and no torch.

Before ranks start, the launchers make a roll call: host 0 listens on MASTER_PORT, the others connect and say who they
are, and each gets the number of its first rank. Then host 0 leaves the port to rank 0, which serves torch's store.

The connections stay until the end. A launcher that fails, is stopped or ends without a word ends the others, too, and
all of them learn which rank of which host failed first.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import signal
import socket
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_RANKS
from numapin.base.stderr import say
from numapin.base.text import listed
from numapin.errors import NumapinError, UsageError
from numapin.launcher.connection import Connection, ConnectionEnded, PeerRefused, PeerUnsigned
from numapin.launcher.guardian import DEATH_S
from numapin.launcher.hosts import HostPlace, Hosts, NotMet, interruptible, numbered, public_id
from numapin.launcher.ranks import StopSignal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.launcher.connection import Message
    from numapin.launcher.failure import RanksFailed
    from numapin.launcher.options import Job
    from numapin.launcher.ranks import Alarm

DEFAULT_PORT: Final = 29500  # torch's
_JOIN_S: Final = 900.0  # torch's
_LOOK_S: Final = 0.05  # between two looks for a signal
_RETRY_S: Final = (0.05, 1.0)  # before host 0 is tried again: at first, and at most
_GREETING_S: Final = 10.0  # for a new connection to say who it is
_SAY_AFTER_S, _SAY_EVERY_S = 10.0, 60.0
_SLACK_S: Final = 5.0  # host 0 says first who is missing
_MAX_STRANGERS: Final = 128  # connections more than hosts that have not said yet which host they are
_MAX_TEXT_BYTES: Final = 1200  # of a text in a message, in JSON; a message has two at most
_NUMBERS: Final = ("first_rank", "world_size", "first_role_rank", "role_size")
_HINT: Final = "see what numapin printed on the other hosts"
_MISSING_HINT: Final = (
    "start numapin run on all hosts, or wait for longer with: --rdzv-conf join_timeout=SECONDS; for this host only: "
    "numapin run --standalone …"
)
_UNSIGNED_HINT: Final = (
    "set the same PET_RDZV_ID on all hosts; if that is a launcher of another job, choose a port: --master-port PORT"
)


def _cut(text: str) -> str:
    """Return as much of a text as a message has room for. In JSON a character takes up to 12 bytes."""
    text = text[:_MAX_TEXT_BYTES]
    while len(json.dumps(text)) > _MAX_TEXT_BYTES:
        text = text[: len(text) * 9 // 10]
    return text


class _Caller(NamedTuple):
    """A host as its launcher describes it."""

    number: int
    num_hosts: int  # of the job, by its options
    num_ranks: int
    name: str
    role: str
    job: str  # a digest of what its resource manager calls the job; "" if it did not tell this host its number


class _OtherJob(PeerRefused):
    """A launcher of another job has come, which by chance has the same port."""


class HostFailure(NamedTuple):
    """The failure of a host; without a rank and a reason, its cause is unknown."""

    host: str
    number: int  # of the host
    rank: int | None = None
    reason: str = ""  # the exception or the end of the rank, or of the launcher, in one line
    is_consequence: bool = True  # whether another host's failure may have caused it

    @property
    def name(self) -> str:
        """The rank and its host."""
        rank = "" if self.rank is None else f"rank {self.rank} on "
        return f"{rank}host {self.number} ({self.host})"


class FixedHosts(Hosts):
    """A job on several hosts whose number is fixed. There is one round."""

    def __init__(self, job: Job, num_ranks: int, job_id: str = "") -> None:
        self._job = job
        digest = public_id(job_id)[:16] if job_id else ""
        self._own = _Caller(job.node_rank, job.min_max_nodes[1], num_ranks, os.uname().nodename, job.role, digest)
        self._is_first = job.node_rank == 0
        host, colon, port = job.rdzv_endpoint.rpartition(":")
        addresses = host or job.rdzv_endpoint or job.master_addr
        self._addresses = addresses.replace("[", "").replace("]", "").split(",")
        self._limit_s = _JOIN_S
        try:
            self._port = int(port) if colon else job.master_port or DEFAULT_PORT
            for name in ("timeout", "join_timeout"):
                self._limit_s = float(job.rdzv_conf.get(name, self._limit_s))
            if not 0 < self._port < 1 << 16:
                raise ValueError(f"there is no port {self._port}")  # noqa: TRY301 - as int raises it
            if colon and not host:
                raise ValueError("it names no host")  # noqa: TRY301
            if not 0 <= self._limit_s < math.inf:
                raise ValueError(f"{self._limit_s} is not a time in seconds")  # noqa: TRY301
        except ValueError as error:
            settings = ",".join(f"{name}={value}" for name, value in job.rdzv_conf.items())
            options = {"--rdzv-endpoint": job.rdzv_endpoint, "--rdzv-conf": settings}
            given = " ".join(f"{option} {value}" for option, value in options.items() if value)
            raise UsageError(f"{given}: {error}", "give HOST:PORT and join_timeout=SECONDS") from None
        ignored = [f"--rdzv-conf {name}" for name in job.rdzv_conf if name not in ("timeout", "join_timeout")]
        ignored += ["--local-addr"] if "local_addr" in job.typed else []
        if ignored:
            say(f"warning: hosts of a fixed number make a roll call, on which {', '.join(ignored)} has no effect")
        if _cut(job.role) != job.role:
            raise UsageError(f"--role {job.role[:20]}… is longer than {_MAX_TEXT_BYTES} bytes", "choose a short role")
        self._where = f"{','.join(self._addresses)} port {self._port}"
        self._secret = job.run_id.encode() if job.run_id else None
        self.run_id = public_id(job.run_id) if job.run_id else str(uuid.uuid4())
        # By the number of the host: on host 0, the connections to all others that have not said bye, else to host 0.
        self._connections: dict[int, Connection] = {}
        self._names = {job.node_rank: self._own.name}
        self._is_over = False  # another host has failed or was stopped, or this one has told them that it did
        self._failures: dict[int, HostFailure] = {}  # by the number of the host, in the order of the news
        self._has_reported = set[int]()  # the hosts whose ranks have ended after a failure
        self._first: HostFailure | None = None  # the failure that all hosts report as the first
        if not {"rdzv_endpoint", "master_addr"} & job.typed:
            say(
                f"--nnodes {self._own.num_hosts}: waiting for the other hosts at {self._where}, on this host; name "
                "another with --master-addr HOST"
            )

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    # --- the roll call -----------------------------------------------------------------------------------------------

    def join(self, alarm: Alarm) -> HostPlace:
        """Wait for all hosts. Raises NotMet, and StopSignal if a signal comes meanwhile, here or there."""
        self._alarm = alarm
        self._deadline_s = time.monotonic() + self._limit_s
        self._say_at_s = time.monotonic() + _SAY_AFTER_S
        try:
            return self._call_roll(alarm) if self._is_first else self._answer(alarm)
        except StopSignal as error:
            self._tell_stop(error)
            raise

    def _call_roll(self, alarm: Alarm) -> HostPlace:
        """Wait on host 0 for all others, and give them their numbers."""
        callers, problem = {0: self._own}, ""
        strangers: dict[Connection, float] = {}  # they have not said who they are; until when they may
        opened: dict[int, Connection] = {}  # all connections, by their descriptors
        with self._listening() as listening:
            poll = select.poll()
            poll.register(listening, select.POLLIN)
            while len(callers) < self._own.num_hosts:
                alarm.ring()
                if time.monotonic() > min(self._deadline_s, self._say_at_s):  # the text is long if many are missing
                    missing = {*range(self._own.num_hosts)} - callers.keys()
                    who = f"{listed('host', missing)} of {self._own.num_hosts}"
                    if time.monotonic() > self._deadline_s:
                        text = f"{who} did not come to {self._where} in {self._limit_s:g} s"
                        raise self._refuse_all(f"{text}; {problem}" if problem else text, _MISSING_HINT)
                    self._say_waiting(f"{who} at {self._where}", problem)
                ready = [opened.get(descriptor) for descriptor, _ in poll.poll(_LOOK_S * 1000)]
                if None in ready:
                    try:
                        new = Connection(listening.accept()[0], secret=self._secret, is_server=True)
                    except OSError as error:  # it is gone again, or the limit on open files is reached
                        problem = f"a connection could not be accepted: {error.strerror}"
                        time.sleep(_LOOK_S)
                    else:
                        opened[new.fileno()], strangers[new] = new, time.monotonic() + _GREETING_S
                        poll.register(new, select.POLLIN)
                late = [each for each, until_s in strangers.items() if until_s < time.monotonic()]
                late += [*strangers][: max(0, len(strangers) - _MAX_STRANGERS - self._own.num_hosts)]
                for connection in {*filter(None, ready), *late}:
                    end: ConnectionEnded | PeerRefused | None = None
                    try:
                        self._hear(connection, callers, is_stranger=connection in strangers)
                    except (ConnectionEnded, PeerRefused) as error:
                        end = error
                    known = [number for number, own in self._connections.items() if own is connection]
                    if end is None and connection in late and not known:  # only closed: a slow host comes again
                        end = ConnectionEnded("it did not say in time who it is")
                    if end is not None or known:
                        strangers.pop(connection, None)
                    if end is None:
                        continue
                    if isinstance(end, PeerRefused):
                        problem = f"a connection was refused, because {end}"
                        is_early = int(isinstance(end, _OtherJob))  # host 0 of its job may come yet
                        connection.send("refused", text=_cut(str(end)), again=is_early)
                    elif connection in late:
                        problem = problem or f"a connection was closed, because {end}"
                    for number in known:
                        del self._connections[number], callers[number]  # it may come again
                    poll.unregister(connection)
                    del opened[connection.fileno()]
                    connection.close()
            for connection in strangers:
                connection.close()
        # The port is free now, so no rank of another host takes this launcher for the store.
        places = numbered([(callers[number].role, callers[number].num_ranks) for number in sorted(callers)])
        for number, connection in self._connections.items():
            fields = dict(zip(_NUMBERS, places[number], strict=True))
            connection.send("place", **fields, run_id=self.run_id, name=self._own.name)
        return self._place(places[0], self._addresses[0])

    def _listening(self) -> socket.socket:
        """Return a socket that listens on all addresses, as torch's store will. Raises NotMet."""
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        backlog = max(_MAX_STRANGERS, self._own.num_hosts)
        try:
            listening = socket.create_server(("", self._port), family=family, backlog=backlog, dualstack_ipv6=is_dual)
        except OSError as error:
            is_ports_own = error.errno in (errno.EADDRINUSE, errno.EACCES)  # EACCES: a port below 1024
            another = "choose another one on all hosts: --master-port PORT"
            hint = another if is_ports_own else "see the limits with: ulimit -a"
            reason = os.strerror(error.errno or 0)
            raise NotMet(f"host 0 cannot listen on port {self._port}: {reason}", hint) from None
        listening.setblocking(False)
        return listening

    def _hear(self, connection: Connection, callers: dict[int, _Caller], *, is_stranger: bool) -> None:
        """Take what a host says in the roll call: who it is, or that it was stopped.

        Raises ConnectionEnded, PeerRefused, StopSignal, and NotMet, which all hosts get, for a contradiction.
        """
        while message := connection.receive():
            if message.kind == "stopped" and not is_stranger:
                self._take_stop(message)
            if message.kind != "hello" or not is_stranger:
                raise PeerRefused("it said something unexpected")
            caller = _Caller(
                number=message.number("host"),
                num_hosts=message.number("hosts"),
                num_ranks=message.number("ranks"),
                name=message.text("name"),
                role=message.text("role"),
                job=message.text("job"),
            )
            if caller.job and self._own.job and caller.job != self._own.job:
                raise _OtherJob(f"{_cut(caller.name)} belongs to another job than {self._own.name}, on the same port")
            number, name = caller.number, _cut(caller.name)
            contradiction = ""
            if caller.num_hosts != self._own.num_hosts:
                counts = f"{name} is one of {caller.num_hosts}, {self._own.name} one of {self._own.num_hosts}"
                contradiction = f"the hosts disagree on their number: {counts}"
            elif number in callers:
                contradiction = f"two hosts have the number {number}: {callers[number].name} and {name}"
            elif number >= caller.num_hosts or caller.num_ranks > MAX_RANKS:
                contradiction = f"{name} has the number {number} of {caller.num_hosts}, and {caller.num_ranks} ranks"
            if contradiction:
                connection.send("refused", text=_cut(contradiction))
                raise self._refuse_all(contradiction, "give all hosts the same --nnodes, and each its own --node-rank")
            self._connections[number], callers[number], self._names[number] = connection, caller, name
            is_stranger = False

    def _refuse_all(self, problem: str, hint: str) -> NotMet:
        """Return the error, and let the hosts that have come have the same one."""
        self._send_all("refused", text=_cut(problem))
        return NotMet(problem, hint)

    def _answer(self, alarm: Alarm) -> HostPlace:
        """Say on another host who it is, and return what host 0 answers.

        A launcher with another id does not get this one, so there is nothing to wait for. Where host 0 may have several
        addresses, another one may be right.
        """
        pause_s, problem = _RETRY_S[0], ""
        while True:
            num_unsigned = 0
            for address in self._addresses:
                if problem and time.monotonic() > self._deadline_s:  # each address may take seconds
                    break
                try:
                    place = self._ask(address, alarm)
                except (OSError, UnicodeError) as error:
                    problem = getattr(error, "strerror", None) or str(error)
                except (ConnectionEnded, PeerRefused) as error:
                    problem = str(error)
                    num_unsigned += isinstance(error, PeerUnsigned)
                else:
                    return place
            if num_unsigned == len(self._addresses):
                raise NotMet(f"host 0 at {self._where} was refused, because {problem}", _UNSIGNED_HINT)
            if time.monotonic() > self._deadline_s:
                text = f"host 0 did not answer at {self._where} in {self._limit_s:g} s"
                raise NotMet(f"{text}: {problem}", _MISSING_HINT)
            self._say_waiting(f"host 0 at {self._where}", problem)
            until_s = time.monotonic() + pause_s
            while time.monotonic() < until_s:
                alarm.ring()
                time.sleep(_LOOK_S)
            pause_s = min(2 * pause_s, _RETRY_S[1])

    def _ask(self, address: str, alarm: Alarm) -> HostPlace:
        """Return the place that host 0 gives to this host. Raises OSError, ConnectionEnded, PeerRefused, NotMet."""
        limit_s = max(1, min(_GREETING_S, self._deadline_s - time.monotonic()))
        call = partial(socket.create_connection, (address, self._port), timeout=limit_s)
        opened = interruptible(call, alarm, limit_s)
        host_0 = self._connections[0] = Connection(opened, secret=self._secret, is_server=False)
        until_s, is_asked = min(time.monotonic() + _GREETING_S, self._deadline_s + _SLACK_S), False
        poll = select.poll()
        poll.register(host_0, select.POLLIN)
        try:
            while time.monotonic() < until_s:
                alarm.ring()
                poll.poll(_LOOK_S * 1000)
                message = host_0.receive()
                if message is None:
                    if host_0.is_greeted and not is_asked:
                        own, is_asked = self._own, True
                        fields = {"host": own.number, "hosts": own.num_hosts, "ranks": own.num_ranks}
                        host_0.send("hello", **fields, name=_cut(own.name), role=own.role, job=own.job)
                        until_s = self._deadline_s + _SLACK_S
                    whom = f"host 0 at {self._where}, which says nothing"
                    if is_asked:
                        whom = f"the other hosts; host 0 at {self._where} says which"
                    self._say_waiting(whom, "")
                    continue
                if message.kind == "refused":
                    text = f"host 0 reports: {message.text('text')}"
                    raise PeerRefused(text) if message.optional_number("again") else NotMet(text, _HINT)
                if message.kind == "stopped":
                    self._take_stop(message)
                self.run_id, self._names[0] = message.text("run_id"), _cut(message.text("name"))
                first_rank, world_size, first_role_rank, role_size = (message.number(name) for name in _NUMBERS)
                return self._place((first_rank, world_size, first_role_rank, role_size), address)
            why = "other hosts are missing" if is_asked else "it is not a launcher of numapin"
            raise PeerRefused(why)  # noqa: TRY301
        except (ConnectionEnded, PeerRefused):
            self._connections.pop(0).close()
            raise

    def _place(self, numbers: tuple[int, int, int, int], address: str) -> HostPlace:
        number, num_hosts, num_ranks, *_ = self._own
        return HostPlace(number, num_hosts, num_ranks, *numbers, address, self._port, self.run_id, is_served=False)

    def _say_waiting(self, whom: str, problem: str) -> None:
        """Say from time to time for whom this launcher waits."""
        now_s = time.monotonic()
        if now_s >= self._say_at_s:
            self._say_at_s = now_s + _SAY_EVERY_S
            waited_s = self._limit_s - (self._deadline_s - now_s)
            reason = f": {problem}" if problem else ""
            text = f"waiting for {whom} ({waited_s:.0f} of {self._limit_s:g} s){reason}"
            say(f"{text}; for a job on this host only: numapin run --standalone …")

    # --- news of other hosts -----------------------------------------------------------------------------------------

    def has_failed_elsewhere(self) -> bool:
        """Return whether the job has failed on another host. Raises StopSignal if it was stopped there."""
        self._listen(is_running=True)
        return self._is_over

    def must_wait(self) -> bool:
        """Return whether this host, whose ranks have succeeded, stays until the others have: host 0 passes on news."""
        return self._is_first and bool(self._connections)

    def succeeded(self, alarm: Alarm) -> None:  # noqa: ARG002 - as the other ways to meet
        """Let host 0 know that the ranks of this host have succeeded."""
        self._send_all("bye")

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tell the other hosts at once if an exception in this block is about to end the ranks of this one."""
        try:
            yield
        except StopSignal as error:
            self._tell_stop(error)
            raise
        except BaseException as error:
            if not self._is_over:
                self._is_over = True
                text = _cut(error.message) if isinstance(error, NumapinError) else ""
                own = self._failures[self._own.number] = HostFailure(self._own.name, self._own.number, reason=text)
                self._send_all("failing", host=own.number, name=_cut(own.host), text=text)
            raise

    def agree_on_first(self, failed: RanksFailed, alarm: Alarm) -> RanksFailed:
        """Return the account with the rank that failed first on any host, if the others report in time.

        All hosts give their ranks the same time to end, and report then; host 0 decides.
        """
        first, own = failed.failure.first, HostFailure(self._own.name, self._own.number)
        if first.failed_by_itself:
            is_abort = first.signal_number == signal.SIGABRT and not first.exception  # as NCCL does, if others are lost
            reason = _cut(first.exception.partition("\n")[0] or first.end)
            own = own._replace(rank=first.rank, reason=reason, is_consequence=bool(first.blames_peer) or is_abort)
        self._take_report(own)
        if not self._is_first:
            self._send_all("report", rank=own.rank, text=own.reason, is_consequence=int(own.is_consequence))
        deadline_s = time.monotonic() + self._job.shutdown_timeout_s + DEATH_S
        while self._first is None and time.monotonic() < deadline_s and not alarm.is_urgent():
            self._listen(is_running=False)
            if self._is_first and self._has_reported >= self._connections.keys():
                known = [failure for failure in self._failures.values() if failure.rank is not None or failure.reason]
                others = [failure for failure in self._failures.values() if failure.number != own.number]
                first_of_all = min(known or others or [own], key=lambda failure: failure.is_consequence)
                self._first = first_of_all
                fields = {"host": first_of_all.number, "rank": first_of_all.rank, "text": first_of_all.reason}
                self._send_all("first", **fields, name=_cut(first_of_all.host))
            elif not self._connections:
                break
            else:
                alarm.wait(_LOOK_S)
        decided = self._first
        if decided is None and own.is_consequence:  # this host has no failure of its own to name
            decided = next((failure for failure in self._failures.values() if failure.number != own.number), None)
        if decided is None:
            return failed
        is_own = decided.number == own.number
        elsewhere = None if is_own else decided._replace(reason=decided.reason or "a rank failed")
        return type(failed)(replace(failed.failure, elsewhere=elsewhere, is_settled=True))

    def _listen(self, *, is_running: bool) -> None:
        """Take the news of the other hosts. Raises StopSignal while this host's ranks are running."""
        for number, connection in [*self._connections.items()]:
            try:
                # One that has said bye is no longer among them.
                while number in self._connections and (message := connection.receive()):
                    self._take_news(message, number, is_running=is_running)
            except (ConnectionEnded, PeerRefused) as error:
                self._connections.pop(number).close()
                lost = HostFailure(self._names.get(number, ""), number, None, f"its launcher is gone: {error}", False)
                known = self._failures.get(number)
                if known is not None and known.rank is None and not known.reason:  # it did not come to report
                    self._failures[number] = lost._replace(reason=f"a rank failed, and {lost.reason}")
                self._take_failure(self._failures.get(number, lost))
                self._has_reported.add(number)

    def _take_news(self, message: Message, number: int, *, is_running: bool) -> None:
        """Take one message of a host. Raises PeerRefused, and StopSignal while this host's ranks are running."""
        name = self._names.get(number, "")
        match message.kind:
            case "bye":
                self._connections.pop(number).close()
            case "failing":
                name, number = (name, number) if self._is_first else (message.text("name"), message.number("host"))
                self._take_failure(HostFailure(name, number, reason=message.text("text")))
            case "stopped":
                if is_running:
                    self._take_stop(message)
            case "report" if self._is_first:
                rank, text = message.optional_number("rank"), message.text("text")
                self._take_report(HostFailure(name, number, rank, text, bool(message.number("is_consequence"))))
            case "first" if not self._is_first:
                rank, text = message.optional_number("rank"), message.text("text")
                self._first = HostFailure(message.text("name"), message.number("host"), rank, text)
            case kind:
                raise PeerRefused(f"it said {kind}")

    def _take_failure(self, failure: HostFailure) -> None:
        """Note that a host has failed; the first time, host 0 passes it on."""
        self._failures.setdefault(failure.number, failure)
        if not self._is_over:
            self._is_over = True
            if self._is_first:
                self._send_all("failing", host=failure.number, name=_cut(failure.host), text=failure.reason)

    def _take_report(self, failure: HostFailure) -> None:
        """Note how the ranks of a host have ended."""
        self._has_reported.add(failure.number)
        if failure.rank is not None:
            self._failures[failure.number] = failure

    def _take_stop(self, message: Message) -> None:
        """Raise StopSignal, because a signal has stopped another host, and pass that on."""
        number = message.number("signal")
        if number not in set(self._job.signals):
            raise PeerRefused(f"it was stopped by signal {number}")
        stop, host, name = signal.Signals(number), message.number("host"), _cut(message.text("name"))
        say(f"host {host} ({name}) was stopped by {stop.name}, and so is this one")
        if self._is_first:
            self._send_all("stopped", host=host, name=name, signal=number)
        self._is_over = True
        self._alarm.stop(stop)
        raise StopSignal(stop)

    def _tell_stop(self, error: StopSignal) -> None:
        """Let the other hosts know that a signal has stopped this one."""
        if not self._is_over:
            self._is_over = True
            name = _cut(self._own.name)
            self._send_all("stopped", host=self._own.number, name=name, signal=int(error.number))

    def _send_all(self, kind: str, **fields: int | str | None) -> None:
        for connection in self._connections.values():
            connection.send(kind, **fields)
