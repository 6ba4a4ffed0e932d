"""The program of a rank of `numapin.spawn`, once the shim has bound it.

The caller's script is imported and the function unpickled here, so all memory is allocated, and every thread started,
in a process that is already bound.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Outcome(Enum):
    """The end of a rank's call."""

    RETURNED = auto()
    """`content` is the pickled result."""
    RAISED = auto()
    """`content` is the pickled exception, or empty if a pickle does not preserve the exception."""
    UNLOADABLE = auto()
    """The script could not be imported or the call not be unpickled; `content` as for RAISED."""
    UNPICKLABLE = auto()
    """The result cannot be pickled; `content` as for RAISED."""


class Answer(NamedTuple):
    """The message from a rank; `text` is the traceback of its error."""

    outcome: Outcome
    content: bytes
    text: str


NUM_SIZE_BYTES: Final = 8
"""Length of the little-endian size that precedes the pickled answer."""


class InheritedDescriptor(NamedTuple):
    """A descriptor that the ranks inherit under the same number; what multiprocessing pickles in its place."""

    number: int

    def detach(self) -> int:
        """Return the descriptor, as multiprocessing asks for it when it unpickles."""
        return self.number


def unpickle(content: bytes | memoryview, kind: type[T]) -> T:
    """Unpickle an object that a process of this spawn wrote. Raises TypeError for an object of another type.

    The bytes come over a socket pair that no other process has.
    """
    found = pickle.loads(content)  # written by a rank that this process started, or by itself
    if not isinstance(found, kind):
        msg = f"{type(found).__name__} is not a {kind.__name__}"
        raise TypeError(msg)
    return found


def main() -> None:
    """Make the call and send its outcome. SystemExit and KeyboardInterrupt end the rank without an answer."""
    tracker, pipe, payload = map(int, sys.argv[1:])
    for fd in (payload, pipe):
        os.set_inheritable(fd, False)  # programs that the function starts must not hold the pipe open
    if tracker >= 0:
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]  # as spawn_main
    with socket.socket(fileno=pipe) as connection:
        if not connection.recv(1):
            return  # the parent was interrupted while it started ranks, and may not know this one
        content = pickle.dumps(_answer(payload))
        connection.sendall(len(content).to_bytes(NUM_SIZE_BYTES, "little"))
        connection.sendall(content)


def _answer(payload: int) -> Answer:
    """Load the call, make it, and pickle its result; `failure` is the outcome if the current step raises."""
    failure = Outcome.UNLOADABLE
    try:
        function, arguments = _load(payload)
        failure = Outcome.RAISED
        result = function(*arguments)
        failure = Outcome.UNPICKLABLE
        return Answer(Outcome.RETURNED, pickle.dumps(result, pickle.HIGHEST_PROTOCOL), "")
    except Exception as error:  # the user's import, function and __reduce__ may raise anything
        return _failed(failure, error)


def _load(payload: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Prepare this process as multiprocessing's spawn does, then unpickle the call."""
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as content:  # ranks share the file's position, not a mapping's
        os.close(payload)
        current = process.current_process()
        current._inheriting = True  # type: ignore[attr-defined]  # how a script without a guard is found
        try:
            spawn.prepare(pickle.load(content))  # written by our parent
            function, arguments = pickle.load(content)  # so is this
        finally:
            del current._inheriting  # type: ignore[attr-defined]
    return function, arguments


def _failed(outcome: Outcome, error: Exception) -> Answer:
    user_frames = error.__traceback__ and error.__traceback__.tb_next  # the first frame is this module's
    text = "".join(traceback.format_exception(type(error), error, user_frames))
    return Answer(outcome, _pickled(error), text)


def _pickled(error: Exception) -> bytes:
    """Return the pickled exception, or nothing if a pickle does not preserve its type and text, as is common."""
    try:
        content = pickle.dumps(error)
        copy = unpickle(content, type(error))
    except Exception:  # the class of a user may raise anything
        return b""
    return content if type(copy) is type(error) and str(copy) == str(error) else b""
