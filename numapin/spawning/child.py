"""What runs in a rank of `numapin.spawn`, once the shim has bound it. Edge.

Comes in: descriptors of the pickled call and of a socket, as arguments, and the rank's variables. Goes out: one
`Answer` on the socket, after its size. The script of the caller is imported and the function unpickled here, so that
all of it is allocated, and every thread started, where the rank is bound.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import sys
import traceback
from enum import Enum, auto
from multiprocessing import process, resource_tracker, spawn
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from numapin.spawning import meeting

if TYPE_CHECKING:
    from collections.abc import Callable


class Outcome(Enum):
    """How far the rank got."""

    RETURNED = auto()
    """`content` is the pickled result."""
    RAISED = auto()
    """`content` is the pickled exception, or nothing where it cannot be pickled and read back as itself."""
    UNLOADABLE = auto()
    """As above; the call could not be unpickled, or the script not be imported."""
    UNPICKLABLE = auto()
    """The result cannot be pickled."""


class Answer(NamedTuple):
    """What a rank sends: `text` is the traceback of what failed."""

    outcome: Outcome
    content: bytes
    text: str


NUM_SIZE_BYTES: Final = 8
"""How many bytes, little end first, say how large the pickled answer behind them is."""


def main() -> None:
    """Make the call and send its outcome; what is no Exception (SystemExit, KeyboardInterrupt) ends the rank."""
    tracker, payload, pipe, *port = map(int, sys.argv[1:])
    for fd in (payload, pipe):
        os.set_inheritable(fd, False)  # what the function starts must not hold the pipe open
    if tracker >= 0:
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined] # noqa: SLF001 - as spawn_main
    for descriptor in port:  # rank 0 has it
        meeting.serve_on(descriptor)
    with socket.socket(fileno=pipe) as connection:
        if not connection.recv(1):
            return  # the parent was interrupted while it started ranks, and may not know this one
        content = pickle.dumps(_answer(payload))
        connection.sendall(len(content).to_bytes(NUM_SIZE_BYTES, "little"))
        connection.sendall(content)


def _answer(payload: int) -> Answer:
    try:
        function, arguments = _load(payload)
    except Exception as error:  # noqa: BLE001 - importing a script can raise anything
        return _failed(Outcome.UNLOADABLE, error)
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 - so can the function
        return _failed(Outcome.RAISED, error)
    try:
        return Answer(Outcome.RETURNED, pickle.dumps(result, pickle.HIGHEST_PROTOCOL), "")
    except Exception as error:  # noqa: BLE001 - so can a __reduce__
        return _failed(Outcome.UNPICKLABLE, error)


def _load(payload: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Prepare this process as multiprocessing's spawn does, then unpickle the call."""
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as content:  # ranks share the file's position, not a mapping's
        os.close(payload)
        this = process.current_process()
        this._inheriting = True  # type: ignore[attr-defined] # noqa: SLF001 - a script without a guard is found out by it
        try:
            spawn.prepare(pickle.load(content))  # noqa: S301 - written by our parent
            call: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.load(content)  # noqa: S301 - so is this
        finally:
            del this._inheriting  # type: ignore[attr-defined] # noqa: SLF001
    return call


def _failed(outcome: Outcome, error: Exception) -> Answer:
    below = error.__traceback__ and error.__traceback__.tb_next  # the first frame is this module's
    text = "".join(traceback.format_exception(type(error), error, below))
    return Answer(outcome, _pickled(error), text)


def _pickled(error: Exception) -> bytes:
    """Return the pickled exception if it comes back as what it is: many lose arguments of their own on the way."""
    try:
        content = pickle.dumps(error)
        again = pickle.loads(content)  # noqa: S301 - what we just wrote
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return b""
    return content if type(again) is type(error) and str(again) == str(error) else b""
