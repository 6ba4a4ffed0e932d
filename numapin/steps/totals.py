"""The steps of a process's loops, and the time they wait for batches, published for other processes.

The totals are in a memfd. A process with the right to inspect this one finds it among its descriptors. A memfd leaves
nothing behind, works for jobs of any launcher, and costs about a microsecond per step.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

_NAME: Final = "numapin-steps"
_LINK: Final = f"/memfd:{_NAME} (deleted)"
_MOST_DESCRIPTORS: Final = 4096  # looked at: 20,000 took 0.8 s, and another user's process may have a million
_LAYOUT: Final = struct.Struct("=ddQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """The totals of a process since it started."""

    waited_s: float  # inside next()
    stepped_s: float  # from batch to batch
    num_steps: int = 0
    num_bytes: int = 0  # of slot memory that the batches needed


class Totals:
    """The totals of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # loaders may be used in several threads, and in signal handlers
        self._waited_s = self._stepped_s = 0.0
        self._num_steps = self._num_bytes = 0
        self._page: mmap.mmap | None = None
        with suppress(OSError):  # no descriptor is left, or no file may be as large: the loops run unobserved
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            try:
                os.ftruncate(self._descriptor, mmap.PAGESIZE)
                self._page = mmap.mmap(self._descriptor, mmap.PAGESIZE)
            except OSError:
                os.close(self._descriptor)

    def close(self) -> None:
        """Withdraw the totals."""
        if self._page is not None:
            self._page.close()
            os.close(self._descriptor)
            self._page = None

    def add(self, *, waited_s: float, stepped_s: float, num_bytes: int = 0) -> None:
        """Add a step, and the bytes that arrived since the step before it."""
        with self._lock:
            self._waited_s += waited_s
            self._stepped_s += stepped_s
            self._num_steps += 1
            self._num_bytes += num_bytes
            if self._page is not None:
                packed = _LAYOUT.pack(self._waited_s, self._stepped_s, self._num_steps, self._num_bytes)
                self._page[: _LAYOUT.size] = packed  # at once: beside pack_into, one read in twenty saw zeros or halves


_totals: dict[int, Totals] = {}


def totals_of(pid: int) -> Totals:
    """Return the totals of this process, whose id is `pid`; a forked child begins its own."""
    found = _totals.get(pid)
    if found is None:
        for key in list(_totals):  # inherited: an observer of the child would find its parent's
            inherited = _totals.pop(key, None) if key != pid else None
            if inherited is not None:
                inherited.close()
        made = Totals()
        found = _totals.setdefault(pid, made)
        if found is not made:  # another thread was faster
            made.close()
    return found


def find_waited(pid: int) -> int | None:
    """Return the number of the descriptor with the totals of a process; None if it has none or is gone.

    They are not found behind more than 4096 other descriptors.
    """
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            paths = (Path(entry.path) for entry in islice(entries, _MOST_DESCRIPTORS))
            return next((int(path.name) for path in paths if _is_totals(path)), None)
    except OSError:
        return None


def read_waited(pid: int, descriptor: int) -> Waited | None:
    """Return the totals of a process; None if it is gone or withdrew them."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    if not _is_totals(path):
        return None
    try:
        # By now it may be a pipe, which another user's process put there for an observer that is root to wait for, or a
        # terminal, which would become that observer's own.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as file:
            waited_s, stepped_s, num_steps, num_bytes = _LAYOUT.unpack(file.read(_LAYOUT.size))
    except (OSError, struct.error, TypeError):  # TypeError: an empty pipe gives None
        return None
    return Waited(waited_s=waited_s, stepped_s=stepped_s, num_steps=num_steps, num_bytes=num_bytes)


def _is_totals(path: Path) -> bool:
    try:
        return str(path.readlink()) == _LINK
    except OSError:  # closed in the meantime
        return False
