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
from functools import partial, wraps
from multiprocessing import process, resource_tracker, spawn
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from numapin.rank.hook.numapin_hook_parts import TorchWatch

if TYPE_CHECKING:
    from types import ModuleType

NUM_SIZE_BYTES: Final = 8  # of the little-endian size that precedes the pickled answer
_RENDEZVOUS: Final = "torch.distributed.rendezvous"


class Outcome(Enum):
    """The end of a rank's call."""

    RETURNED = auto()
    RAISED = auto()
    UNLOADABLE = auto()  # the script cannot be imported, or the call not be unpickled
    UNPICKLABLE = auto()  # the result cannot be pickled


class Answer(NamedTuple):
    """The message from a rank."""

    outcome: Outcome
    content: bytes  # the pickled result, or the text of a traceback


def main() -> None:
    """Make the call and send its outcome. SystemExit and KeyboardInterrupt end the rank without an answer."""
    tracker, pipe, payload = map(int, sys.argv[1:])
    for fd in (payload, pipe):
        os.set_inheritable(fd, False)  # programs that the function starts must not hold the pipe open
    if tracker >= 0:
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]  # as spawn_main
    # Before the function runs: it may set these variables to a place of its own, and import torch after that.
    patch = partial(ask_the_caller, served=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    rendezvous = sys.modules.get(_RENDEZVOUS)  # a sitecustomize may have imported it
    if rendezvous is None:
        TorchWatch.todo = {**TorchWatch.todo, _RENDEZVOUS: [patch]}
        sys.meta_path.insert(0, TorchWatch)
    else:
        patch(rendezvous)
    with socket.socket(fileno=pipe) as connection:
        if not connection.recv(1):
            return  # the parent was interrupted while it started ranks, and may not know this one
        answer = pickle.dumps(_answer(payload))
        connection.sendall(len(answer).to_bytes(NUM_SIZE_BYTES, "little"))
        connection.sendall(answer)


def ask_the_caller(rendezvous: ModuleType, *, served: tuple[str, int]) -> None:
    """Make each store of torch at the address and port `served` a client: the caller of `numapin.spawn` serves it.

    TORCHELASTIC_USE_AGENT_STORE=True, as under torchrun, would say so for every port. But functions that were written
    for torch.multiprocessing.spawn name a port of their own, and rank 0 has to serve that.
    """
    store: Any = rendezvous.TCPStore
    torchs_own = store.__init__

    @wraps(torchs_own)
    def init(self: object, host_name: str, port: int, *arguments: object, **named: object) -> None:
        # What follows are world_size and is_master.
        if (host_name.replace("localhost", served[0]), port) == served:
            arguments = (*arguments[:1], False, *arguments[2:]) if len(arguments) > 1 else arguments
            named = {**named, "is_master": False} if "is_master" in named else named
        torchs_own(self, host_name, port, *arguments, **named)

    store.__init__ = init  # of the class, which other modules have imported by then


def _answer(payload: int) -> Answer:
    """Prepare this process as multiprocessing's spawn does, load the call, make it, and pickle its result."""
    failure = Outcome.UNLOADABLE  # the outcome if the current step raises
    try:
        with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as call:  # ranks share the file's position, not a mapping's
            os.close(payload)
            current = process.current_process()
            current._inheriting = True  # type: ignore[attr-defined]  # how a script without a guard is found
            try:
                spawn.prepare(pickle.load(call))
                function, arguments = pickle.load(call)
            finally:
                del current._inheriting  # type: ignore[attr-defined]
        failure = Outcome.RAISED
        result = function(*arguments)
        failure = Outcome.UNPICKLABLE
        return Answer(Outcome.RETURNED, pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # the user's import, function and __reduce__ may raise anything
        user_frames = error.__traceback__ and error.__traceback__.tb_next  # the first frame is this module's
        text = "".join(traceback.format_exception(type(error), error, user_frames))
        return Answer(failure, text.encode(errors="replace"))
