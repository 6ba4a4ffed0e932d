"""Signals to the launcher that are meant for the ranks: SIGUSR1 and SIGUSR2. Edge.

Comes in: what Slurm and others send the launcher before the time is up. Goes out: the same signal to every rank's own
process, not to what it started (DataLoader workers), and not before the rank's program handles it: an unhandled one
would end it. The launcher itself never ends by them, from before it imports torch on.

The shim of each rank does not import this: what it does about these signals is in `become.py`.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.rank import become

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FORWARDED: Final = tuple(map(signal.Signals, become.FORWARDED))


class Mailbox:
    """The signals that came, and which ranks have not had them yet. One a process, in its main thread."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._came: list[signal.Signals] = []
        self._waiting: dict[signal.Signals, set[int]] = {}
        self._delivers = False

    def receive(self, number: int, frame: object = None) -> None:
        """Take a signal: the handler. Ranks that handle it get it at once."""
        del frame
        came = signal.Signals(number)
        self._came.append(came)
        if not self._delivers:
            self.deliver()
        if waiting := self._waiting.get(came):
            ranks = f"rank{'s' if len(waiting) > 1 else ''} {cpu_set.render(waiting)}"
            _tell(f"{came.name} is kept for {ranks} until a handler is there: signal.signal(signal.{came.name}, …)")

    def address(self, pids: Mapping[int, int]) -> None:
        """Say which processes the ranks are now. Those of a restart get what not all of the former ones had."""
        self._pids = dict(pids)
        self._came.extend(self._waiting)  # as if it came now; in one step, because a handler may change both

    def deliver(self) -> None:
        """Give every rank the signals that it has not had and can take."""
        self._delivers = True  # a signal that comes meanwhile is kept for the loop
        try:
            while self._came:
                self._waiting[self._came.pop(0)] = set(self._pids)
            for number, ranks in list(self._waiting.items()):
                ranks -= {rank for rank in sorted(ranks) if self._give(self._pids[rank], number)}
                if self._pids and not ranks:
                    del self._waiting[number]
        finally:
            self._delivers = False

    def leave(self, numbers: Iterable[signal.Signals]) -> None:
        """Take these no longer: somebody else handles them. What has come already takes its course."""
        for number in set(numbers) & set(FORWARDED):
            signal.signal(number, signal.SIG_DFL)
            if self._waiting.pop(number, None) is not None:
                os.kill(os.getpid(), number)

    @staticmethod
    def _give(pid: int, number: signal.Signals) -> bool:
        """Send it if this child of ours can take it; return whether it did. What is over may be restarted."""
        if not _taken_by(pid) >> (number - 1) & 1:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:  # a setuid program
            _tell(f"the kernel does not let {number.name} through to process {pid}, which is another user's")
        return True


def open_mailbox() -> Mailbox:
    """Take the signals from now on, until the end of this process."""
    mailbox = Mailbox()
    for number in FORWARDED:
        signal.signal(number, mailbox.receive)
    return mailbox


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Start processes that hold these signals back, until they `accept` them: one that comes to all ends no shim."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, become.SHIM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _taken_by(pid: int) -> int:
    """Return the mask of signals that do not end this child of ours: none where there is no such child any more.

    See proc_pid_status(5): SigCgt has a handler; SigBlk is held back, as for sigwait. A process that was reaped may
    have given its number to another; that one is no child of ours.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            told = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return 0
    if int(told["PPid"]) != os.getpid() or told["State"].startswith(("Z", "X")):
        return 0
    caught, blocked = int(told["SigCgt"], 16), int(told["SigBlk"], 16)
    return 0 if blocked >> (become.SHIM - 1) & 1 else caught | blocked


def _tell(text: str) -> None:
    """Write to stderr past Python's buffer, in which a handler may have interrupted somebody."""
    with suppress(OSError):
        os.write(2, f"numapin: {text}\n".encode())
