"""How long a process's loops wait for batches, where other processes can read it. Edge.

Comes in: the steps of every `numapin.DataLoader` of this process. Goes out: `Waited`, which `numapin top` reads.

The totals are in a memfd, which anybody who may look at the process finds among its descriptors: it leaves nothing
behind, works in a job that others started, and costs a step well under a microsecond.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NAME: Final = "numapin-steps"
_LINK: Final = f"/memfd:{_NAME} (deleted)"
_LAYOUT: Final = struct.Struct("=dd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What the loops of a process did since it started: the time from batch to batch, and of it that inside next()."""

    waited_s: float
    stepped_s: float


class Totals:
    """The totals of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # loaders may be used in several threads
        self._waited_s = self._stepped_s = 0.0
        self._page: mmap.mmap | None = None
        try:
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except OSError:  # no descriptor is left: a loop that nobody can watch is a loop all the same
            return
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(self._descriptor, mmap.PAGESIZE)

    def close(self) -> None:
        """Let nobody find them any more."""
        if self._page is not None:
            self._page.close()
            os.close(self._descriptor)
            self._page = None

    def add(self, *, waited_s: float, stepped_s: float) -> None:
        """Add a step."""
        with self._lock:
            self._waited_s += waited_s
            self._stepped_s += stepped_s
            if self._page is not None:
                _LAYOUT.pack_into(self._page, 0, self._waited_s, self._stepped_s)


_totals: dict[int, Totals] = {}


def totals_of(pid: int) -> Totals:
    """Return the totals of this process, whose id is `pid`; a forked child begins its own."""
    if pid not in _totals:
        while _totals:  # inherited: whoever looks at the child would find its parent's
            _totals.popitem()[1].close()
        _totals[pid] = Totals()
    return _totals[pid]


def find_waited(pid: int) -> int | None:
    """Return the number of the descriptor that has the totals of a process; None where it has none, or is gone."""
    try:
        return next((int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if _leads_to(path)), None)
    except OSError:
        return None


def read_waited(pid: int, descriptor: int) -> Waited | None:
    """Return the totals of a process; None where it is gone or closed them."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    if not _leads_to(path):
        return None
    try:
        with path.open("rb") as file:
            waited_s, stepped_s = _LAYOUT.unpack(file.read(_LAYOUT.size))
    except (OSError, struct.error):
        return None
    return Waited(waited_s=waited_s, stepped_s=stepped_s)


def _leads_to(path: Path) -> bool:
    try:
        return str(path.readlink()) == _LINK
    except OSError:  # closed meanwhile
        return False
