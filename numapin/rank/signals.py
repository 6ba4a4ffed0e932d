"""Signals to the launcher that are meant for the ranks: SIGUSR1 and SIGUSR2.

Below a program that is not Python, such as a shell, the nearest process that handles it counts.

The signals do not end the launcher: from its first statement on (`cli.entry`) they are blocked until it handles them.
The shim of each rank does not import this: its part is in `become.py`.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.stderr import say
from numapin.base.text import listed, printable
from numapin.rank import become
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FORWARDED: Final = tuple(map(signal.Signals, become.FORWARDED))


class SignalMasks(NamedTuple):
    """The signals that a process catches and blocks, as bits, and its parent; see proc_pid_status(5)."""

    caught: int
    blocked: int
    parent: int


def masks_of(pid: int) -> SignalMasks | None:
    """Return a process's masks, None if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return None
    if status["State"].startswith(("Z", "X")):
        return None
    return SignalMasks(int(status["SigCgt"], 16), int(status["SigBlk"], 16), int(status["PPid"]))


class Mailbox:
    """The received signals, and the ranks that have not got them yet. One per process, in its main thread.

    The handler only takes a note, so that it interrupts nothing.
    """

    def __init__(self) -> None:
        self.wrapper: str | None = None
        """The ranks' program, such as a shell, if it is not Python and may start the program that handles signals."""
        self._pids: dict[int, int] = {}
        self._received: list[signal.Signals] = []
        self._undelivered: dict[signal.Signals, set[int]] = {}

    def receive(self, number: int, _: object = None) -> None:
        """Note a signal for the ranks that have a handler."""
        self._received.append(signal.Signals(number))

    def address(self, pids: Mapping[int, int]) -> None:
        """Set the ranks' process ids. Restarted ranks receive signals that were not yet delivered to all ranks."""
        self._pids = dict(pids)
        for number in self._undelivered:
            self._undelivered[number] = set(self._pids)

    def deliver(self) -> None:
        """Send every rank the signals that it has not got yet and can handle; report each new one that is kept."""
        new = []
        while self._received:
            new.append(self._received.pop(0))
            self._undelivered[new[-1]] = set(self._pids)
        for number, ranks in list(self._undelivered.items()):
            ranks -= {rank for rank in sorted(ranks) if self._send(self._pids[rank], number)}
            if not ranks:
                del self._undelivered[number]
            elif number in new:
                where = f" in {printable(self.wrapper)} or below it" if self.wrapper else ""
                handler = f"until a handler{where} is installed: signal.signal(signal.{number.name}, …)"
                say(f"{number.name} is kept for {listed('rank', ranks)} {handler}")

    def _send(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to this child if it can handle it, else to the nearest processes below a wrapper that can.

        Returns whether that is settled. A rank that ended may be restarted.
        """
        generation, takers = [(pid, os.getpid())], list[int]()
        while generation and not takers:
            takers = [child for child, parent in generation if _can_handle(child, parent, number)]
            parents = [child for child, _ in generation] if self.wrapper and not takers else []
            generation = [(below, parent) for parent in parents for below in proc.children_in(parent)]
        is_settled = False
        for taker in takers:
            try:
                os.kill(taker, number)
            except ProcessLookupError:
                continue
            except PermissionError:  # a setuid program
                say(f"the kernel does not let {number.name} through to process {taker}, which is another user's")
            is_settled = True
        return is_settled

    def leave(self, numbers: Iterable[signal.Signals]) -> None:
        """Stop handling these signals, before ranks exist; one that has come already now ends this process."""
        for number in set(numbers) & set(FORWARDED):
            signal.signal(number, signal.SIG_DFL)
            if number in self._received:
                os.kill(os.getpid(), number)


def _can_handle(pid: int, parent: int, number: signal.Signals) -> bool:
    """Return whether a child of `parent` catches a signal, or blocks it, e.g. for sigwait; a shim cannot handle any."""
    masks = masks_of(pid)
    if masks is None or masks.parent != parent:  # the id of a reaped child may belong to another process
        return False
    is_shim = bool(masks.blocked >> (become.SHIM - 1) & 1)
    return not is_shim and bool((masks.caught | masks.blocked) >> (number - 1) & 1)


def open_mailbox() -> Mailbox:
    """Handle the signals from now on, until the end of this process; also those that `cli.entry` has held back."""
    mailbox = Mailbox()
    for number in FORWARDED:
        signal.signal(number, mailbox.receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return mailbox


@contextmanager
def kept_from_children(numbers: Iterable[int] = (*FORWARDED, become.SHIM)) -> Iterator[None]:
    """Block signals in processes started in the block, a rank's until it `accept`s them: they must not end a shim."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
