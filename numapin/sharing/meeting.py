"""Meet the other ranks of the host: they connect to a socket of the first rank, which sends them descriptors.

The socket is abstract: it leaves no file behind, however the ranks end. Its name is a hash of the job, the attempt and
the call. Each side checks that the other one runs as the same user. Another user of the host may occupy a name that he
can guess, as he may occupy MASTER_PORT; the call fails then.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.errors import NumapinError, UsageError
from numapin.tasks.identify import RANK_VARIABLES, find_task, is_in_step, parse_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

_JOB: Final = ("NUMAPIN_RUN_DIR", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"
_CREDENTIALS: Final = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_POLL_S: Final = 0.02
_MAX_MESSAGE_BYTES: Final = 65536
_HERE: Final = b"here"
_OTHER_NAME: Final = 'give the call another name="…"'


class Seat(NamedTuple):
    """The place of a rank among those of its host."""

    rank: int
    size: int


class Hello(NamedTuple):
    """A rank's request for the memory.

    Attributes:
        rank: The local rank.
        node: The node of its copy.
        call: The parts of its call that must be the same in all ranks, as text; of the data only if it passed any.
        data: The type and length of the data it passed, as text. "": none.
    """

    rank: int
    node: int
    call: str
    data: str


def find_seat(environ: Mapping[str, str]) -> Seat:
    """Return this process's place; without a launcher, it is alone. Raises UsageError."""
    if environ.keys().isdisjoint(RANK_VARIABLES) and not is_in_step(environ):
        return Seat(0, 1)
    task = find_task(environ)
    if task.size is None:
        hint = "set LOCAL_WORLD_SIZE, or start the ranks with: numapin run, torchrun or srun"
        raise UsageError(f"the number of ranks on this host is unknown: {' '.join(task.settings)}", hint)
    rank = parse_count(environ.get("RANK", ""))
    if "TORCHELASTIC_RUN_ID" in environ and task.rank == 0 and rank is not None:
        # torchrun's --virtual-local-rank sets LOCAL_RANK=0 in all ranks. Its hosts have the same number of ranks each.
        return Seat(rank % task.size, task.size)
    return Seat(task.rank, task.size)


def address_of(environ: Mapping[str, str], name: str) -> str:
    """Return the socket's address for a call. torchrun's error files lie in a folder with a secret, random name."""
    errors = str(Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent)
    parts = [str(os.geteuid()), errors, *(environ.get(each, "") for each in (*_JOB, _ATTEMPT)), name]
    return f"\0numapin-share-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


class Host:
    """The first rank's side. It listens before the data is made, so that the others see whether it still runs."""

    def __init__(self, address: str, seat: Seat) -> None:
        self._seat = seat
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            seen = "in use, by another call or another user" if error.errno == errno.EADDRINUSE else error.strerror
            raise NumapinError(f"the socket for numapin.share is {seen}", _OTHER_NAME) from None
        self._socket.listen(seat.size)

    def __enter__(self) -> Self:
        """Return this side."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the socket: ranks that still wait see that."""
        self._socket.close()

    def serve(self, call: str, data: str, timeout_s: float, descriptor: Callable[[int], int]) -> None:
        """Send all other ranks the descriptor for their node. Raises NumapinError after the time limit."""
        missing = set(range(self._seat.size)) - {self._seat.rank}
        until_s = time.monotonic() + timeout_s
        while missing:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            try:
                connection, _address = self._socket.accept()
            except TimeoutError:
                ranks = ", ".join(map(str, sorted(missing)))
                problem = f"local rank {ranks} did not call numapin.share within {timeout_s:g} s"
                raise NumapinError(problem, "call it in all ranks, in the same order, or raise timeout_s") from None
            with connection, suppress(ConnectionError, TimeoutError):  # that rank has died: the launcher reports it
                connection.settimeout(timeout_s)
                if not _is_own(connection):
                    continue
                hello = Hello(*json.loads(connection.recv(_MAX_MESSAGE_BYTES)))
                problem = _contradiction(hello, self._seat.rank, call, data)
                if problem:
                    connection.send(problem.encode())
                    raise _differ(problem)
                socket.send_fds(connection, [_HERE], [descriptor(hello.node)])
                missing.discard(hello.rank)


def ask(address: str, hello: Hello, timeout_s: float) -> int:
    """Return the descriptor that the first rank sends. Raises NumapinError."""
    with _connect(address, timeout_s) as connection:
        if not _is_own(connection):
            raise NumapinError("the socket for numapin.share belongs to another user", _OTHER_NAME)
        content = b""
        descriptors: list[int] = []
        with suppress(ConnectionError):  # the first rank has ended
            connection.send(json.dumps(hello).encode())
            content, descriptors, *_rest = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1)
    if descriptors:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    if content == _HERE:
        raise NumapinError("the memory could not be received: too many open files", "raise the limit: ulimit -n")
    if content:
        raise _differ(content.decode())
    problem = "the first rank of this host ended, or failed, before it had shared the data"
    raise NumapinError(problem, "see the error of that rank")


def _connect(address: str, timeout_s: float) -> socket.socket:
    until_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(None)  # whatever the user's default is: data may take long to make
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionRefusedError):
                raise NumapinError(f"the first rank's socket cannot be reached: {error.strerror}", "") from None
        else:
            return connection
        if time.monotonic() > until_s:
            problem = f"the first rank of this host did not call numapin.share within {timeout_s:g} s"
            raise NumapinError(problem, "call it in all ranks, in the same order, or raise timeout_s")
        time.sleep(_POLL_S)


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other side runs as this user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(content)[1] == os.geteuid())


def _contradiction(hello: Hello, first: int, call: str, data: str) -> str:
    """Return how a rank's call differs from the first rank's; "": it does not."""
    if hello.call != call:
        return f"local rank {first} called it with {call}, and local rank {hello.rank} with {hello.call}"
    if hello.data and data and hello.data != data:
        return f"local rank {first} passed {data}, and local rank {hello.rank} passed {hello.data}"
    return ""


def _differ(problem: str) -> UsageError:
    hint = "pass a function that makes the data: only the first rank calls it"
    return UsageError(f"the ranks do not share the same data: {problem}", hint)
