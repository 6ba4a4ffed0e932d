"""Meet the other ranks of the host: they connect to a socket of the first rank, which sends them descriptors.

The socket is abstract: it leaves no file behind, however the ranks end. Its name is a hash of the job, the attempt and
the call. Each side checks that the other one runs as the same user, and in a PID namespace that it can see: containers
with the host's network may have the same root. Another user of the host may occupy a name that he can guess, as he may
occupy MASTER_PORT; the call fails then.
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
    from collections.abc import Mapping
    from typing import Self

_JOB: Final = (
    *("NUMAPIN_RUN_DIR", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "FLUX_JOB_ID", "PALS_APID", "PBS_JOBID", "LSB_JOBID"),
    "TORCHELASTIC_RESTART_COUNT",
)
_MAX_MESSAGE_BYTES: Final = 65536
_IN_ALL: Final = "call it in all ranks, in the same order, or raise timeout_s"
_SEE_FIRST: Final = "see the error of that rank"


class Hello(NamedTuple):
    """A rank's request: its node, its arguments, and the type and length of the data it passed; "": none."""

    rank: int
    node: int
    placement: str
    data: str


def find_seat(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's local rank and the number of ranks; without a launcher, 0 and 1. Raises UsageError."""
    if environ.keys().isdisjoint(RANK_VARIABLES) and not is_in_step(environ):
        return 0, 1
    task = find_task(environ)
    if task.size is None:
        hint = "set LOCAL_WORLD_SIZE, or start the ranks with: numapin run, torchrun or srun"
        raise UsageError(f"the number of ranks on this host is unknown: {' '.join(task.settings)}", hint)
    if "TORCHELASTIC_RUN_ID" in environ and task.rank == 0:
        # torchrun's --virtual-local-rank sets LOCAL_RANK=0 in all ranks. RANK gives the place if all hosts have as many
        # ranks as this one, and RANK is ordered by host.
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        rank, world, host, num_hosts = (parse_count(environ.get(name, "")) for name in names)
        is_even = num_hosts is not None and world == task.size * num_hosts
        if rank is not None and is_even and rank // task.size == host:
            return rank % task.size, task.size
    return task.rank, task.size


def address_of(environ: Mapping[str, str], name: str) -> str:
    """Return the socket's address for a call. torchrun's error files lie in a folder with a secret, random name."""
    errors = str(Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent)
    parts = [str(os.geteuid()), errors, *(environ.get(each, "") for each in _JOB), name]
    return f"\0numapin-share-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


class FirstRank:
    """The first rank's side. It listens before the data is made, so that the others see whether it still runs."""

    def __init__(self, address: str, num_ranks: int) -> None:
        self._missing = set(range(1, num_ranks))
        self._waiting: dict[Hello, socket.socket] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Else the other ranks would not see this process end while one runs that it has forked.
        os.register_at_fork(after_in_child=self._close)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            seen = "in use, by another call or another user" if error.errno == errno.EADDRINUSE else error.strerror
            raise NumapinError(f"the socket for numapin.share is {seen}", 'give the call another name="…"') from None
        self._socket.listen(num_ranks)

    def __enter__(self) -> Self:
        """Return this side."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the socket. After an error, tell it to the ranks that wait: each reports the cause."""
        if error is not None:
            message, hint = f"local rank 0 did not share its data: {type(error).__name__}: {error}", _SEE_FIRST
            if isinstance(error, NumapinError):
                message, hint = error.message, error.hint
            with suppress(OSError):  # those that have not connected yet wait for their time limit
                while True:
                    self._accept(0)
            failure = json.dumps([isinstance(error, UsageError), message[:2000], hint]).encode()  # fits into a message
            for connection in self._waiting.values():
                with suppress(OSError):
                    connection.send(failure)
        self._close()

    def _close(self) -> None:
        for each in (self._socket, *self._waiting.values()):
            each.close()

    def wait(self, placement: str, data: str, timeout_s: float) -> set[int]:
        """Wait for all other ranks, and return their nodes. Raises NumapinError."""
        until_s = time.monotonic() + min(timeout_s, 1e6)  # sockets take neither an infinite time nor a month
        while self._missing:
            try:
                self._accept(max(0.001, until_s - time.monotonic()))
            except TimeoutError:
                ranks = ", ".join(map(str, sorted(self._missing)))
                problem = f"local rank {ranks} did not call numapin.share within {timeout_s:g} s"
                raise NumapinError(problem, _IN_ALL) from None
            self._missing -= {hello.rank for hello in self._waiting}
        for rank, _node, its_placement, its_data in self._waiting:
            if its_placement != placement:
                seen = f"called it with {placement=}, and local rank {rank} with placement={its_placement!r}"
            elif its_data and data and its_data != data:
                seen = f"passed {data}, and local rank {rank} passed {its_data}"
            else:
                continue
            problem = f"the ranks do not share the same data: local rank 0 {seen}"
            raise UsageError(problem, "pass a function that makes the data: only the first rank calls it")
        return {hello.node for hello in self._waiting}

    def send(self, descriptors: Mapping[int, int]) -> None:
        """Send each rank the descriptor for its node."""
        self._socket.close()  # a rank that has the data may call again with the same name: that is another meeting
        for hello, connection in self._waiting.items():
            with suppress(ConnectionError):  # that rank has died: the launcher reports it
                socket.send_fds(connection, [b"[]"], [descriptors[hello.node]])

    def _accept(self, timeout_s: float) -> None:
        """Accept a rank's request. Raises TimeoutError, and other OSErrors of the listening socket."""
        self._socket.settimeout(timeout_s)
        connection, _address = self._socket.accept()
        connection.settimeout(60)  # a rank sends its request as soon as it is connected
        try:
            content = connection.recv(_MAX_MESSAGE_BYTES) if _is_own(connection) else b""
            self._waiting[Hello(*json.loads(content))] = connection
        except (OSError, ValueError, TypeError):  # another user or container, a rank that has died, or another program
            connection.close()


def ask(address: str, hello: Hello, timeout_s: float) -> int:
    """Return the descriptor that the first rank sends. Raises NumapinError."""
    content = b""
    descriptors: list[int] = []
    with _connect(address, timeout_s) as connection:
        if not _is_own(connection):
            hint = 'start the ranks of a host in one container, or give the call another name="…"'
            raise NumapinError("the socket for numapin.share belongs to another user or container", hint)
        with suppress(ConnectionError):  # the first rank has ended
            connection.send(json.dumps(hello).encode())
            flags = socket.MSG_CMSG_CLOEXEC
            content, descriptors, *_rest = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1, flags)
    if descriptors:
        return descriptors[0]
    if not content:
        raise NumapinError("the first rank of this host ended before it had shared the data", _SEE_FIRST)
    failure = json.loads(content)
    if not failure:
        raise NumapinError("the shared memory was not received: too many open files", "raise the limit: ulimit -n")
    is_usage, message, hint = failure
    raise (UsageError if is_usage else NumapinError)(message, hint)


def _connect(address: str, timeout_s: float) -> socket.socket:
    until_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(None)  # whatever the user's default is: data may take long to make
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionRefusedError):  # as with AppArmor
                raise NumapinError(
                    f"the first rank of this host cannot be reached: {error.strerror}", _SEE_FIRST
                ) from None
        else:
            return connection
        if time.monotonic() > until_s:
            problem = f"the first rank of this host did not call numapin.share within {timeout_s:g} s"
            raise NumapinError(problem, _IN_ALL)
        time.sleep(0.02)


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other side runs as this user, and in this PID namespace or below: else its id is 0."""
    pid, user, _group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(pid != 0 and user == os.geteuid())
