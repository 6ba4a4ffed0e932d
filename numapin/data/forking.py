"""Start an iterator's workers: fork them safely, and restart those whose fork hung.

A forked child inherits the locks that other threads held, and no thread in it releases them: it can hang before its
first line of Python. Only the child's parent can notice. Nothing is lost: the tasks of such a worker are still in its
queue.

CUDA does not work in a forked child: the destructor of torch's CUDAEvent throws there, which aborts the process
(CUDAEvent.h, CUDAFunctions.cpp). So does torch when it frees memory that several streams use, because it records an
event for each of them (CUDACachingAllocator.cpp, insert_events). So a child must not destroy what it inherited, and no
collection may run between the fork and the child's first line.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import multiprocessing.process
import os
import platform
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch

from numapin.data import packing
from numapin.system import memory
from numapin.system.libraries import FORKS_ISSUE, FORKS_MENDED, forks_may_hang
from numapin.system.proc import state_of, waits_forever

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.process import BaseProcess

    from numapin.data.handover import HandedDown
    from numapin.data.queues import ResultQueue, TaskQueue

LOOK_S: Final = 1.0  # between looks at workers that have not started

if "numpy" in sys.modules:
    # Loaded now, and not when torch first seeds it: a worker that another thread forks during the import inherits its
    # lock, and waits for it forever.
    importlib.import_module("numpy.random")


@dataclass(slots=True)
class _Forks:
    """The forks in progress; threads may fork at once, and a signal's handler in the middle of a fork."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    held: dict[int, list[torch.UntypedStorage]] = field(default_factory=dict)  # by the thread that forks
    was_collecting: bool = False


_FORKS: Final = _Forks()
_on_devices: Final[set[ref[torch.UntypedStorage]]] = set()  # those that are alive


@cache
def watch_forks() -> None:
    """Let children that are forked from now on destroy nothing of CUDA."""
    os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_leave_in_child)


def keep_in_children(storage: torch.UntypedStorage) -> None:
    """Let no child that is forked from now on free this device memory, whoever refers to it there."""
    watch_forks()
    _on_devices.add(ref(storage, _on_devices.discard))  # all in C: each batch comes here


def _begin_fork() -> None:
    """Turn garbage collection off if the process uses CUDA, and hold the memory on devices.

    A handler that runs in the child before `_leave_in_child` may collect garbage all the same.
    """
    storages = [reference() for reference in _on_devices.copy()]  # `tuple` may collect garbage, which discards some
    held = [storage for storage in storages if storage is not None]
    for storage in held:
        fix = getattr(storage, "_fix_weakref", None)  # older torch: else the object does not keep the memory
        if fix is not None:
            fix()
    with _FORKS.lock:
        _FORKS.held[threading.get_ident()] = held
        _FORKS.was_collecting = _FORKS.was_collecting or (torch.cuda.is_initialized() and gc.isenabled())
        if _FORKS.was_collecting:
            gc.disable()


def _end_fork() -> None:
    with _FORKS.lock:
        _FORKS.held.pop(threading.get_ident(), None)  # a signal's handler may have forked in between
        if not _FORKS.held and _FORKS.was_collecting:
            _FORKS.was_collecting = False
            gc.enable()


def _leave_in_child() -> None:
    """Freeze what the child inherited, keep its device memory, and let it collect again if its parent did."""
    # As in multiprocessing's own children: at its end, this child would terminate its parent's workers as its own.
    getattr(multiprocessing.process, "_children", set()).clear()
    for storages in _FORKS.held.values():
        for storage in storages:
            memory.keep_forever(storage)
    if is_in_bad_fork():
        gc.freeze()
    if _FORKS.was_collecting:
        gc.enable()
    # Anew, because another thread of the parent may have held the lock.
    _FORKS.lock, _FORKS.held, _FORKS.was_collecting = threading.RLock(), {}, False


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that uses CUDA."""
    return bool(torch.cuda._is_in_bad_fork())  # torch has no public way to ask


def _run_worker(
    page: mmap.mmap | None, number: int, slots: HandedDown, target: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    """Run a worker in its process. A forked one first sets its byte of the shared page."""
    if page is not None:
        page[number] = 1
    packing.handed_down = slots.map()
    target(*arguments)


class SharedByte:
    """A lock-free multiprocessing.Event in a page's last byte; torch's workers look at it for every batch."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page

    def set(self) -> None:
        """Let `is_set` return True."""
        self._page[-1] = 1

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._page[-1] == 1


class Context:
    """A multiprocessing context with our queues, and with workers that can be restarted."""

    def __init__(
        self,
        base: Any,
        queues: Iterable[ResultQueue | TaskQueue],
        slots_of: Callable[[int], HandedDown],
        *,
        num_workers: int,
    ) -> None:
        """Take the base, the queues in torch's order, and what returns the slots that a worker takes over."""
        self._base, self._queues, self._slots_of = base, iter(queues), slots_of
        method = base.get_start_method()
        # A byte for each worker that has started, and one for the end of all.
        self._page = mmap.mmap(-1, num_workers + 1) if method == "fork" else None
        self._arguments: list[tuple[object, ...]] = []
        self._num_hangs = [0] * num_workers
        watch_forks()
        # Let the fork server import what a worker needs, once, instead of every worker of every epoch. The user's own
        # modules stay in its list, which multiprocessing can only replace as a whole. A server that runs already has
        # read the list. On a Python that keeps it elsewhere, workers import for themselves, as torch's do.
        server: Any = getattr(forkserver, "_forkserver", None)
        modules: object = getattr(server, "_preload_modules", None)
        if method == "forkserver" and isinstance(modules, list):
            names = (__name__, *(f"numapin.data.{name}" for name in ("worker", "queues", "handover", "locality")))
            server._preload_modules = [*modules, *(name for name in names if name not in modules)]

    def Queue(self) -> ResultQueue | TaskQueue:  # noqa: N802 - multiprocessing's name
        """Return the next queue."""
        return next(self._queues)

    def Process(self, *, target: Callable[..., None], args: tuple[object, ...]) -> BaseProcess:  # noqa: N802 - as Queue
        """Return the next worker's process, not yet started."""
        number = len(self._arguments)
        arguments = (self._page, number, self._slots_of(number), target, args)
        self._arguments.append(arguments)
        return self._base.Process(target=_run_worker, args=arguments)  # type: ignore[no-any-return]

    def Event(self) -> Any:  # noqa: N802 - as Queue
        """Return the event that tells the workers to end. Each looks at it for each batch."""
        return self._base.Event() if self._page is None else SharedByte(self._page)

    def __getattr__(self, name: str) -> object:
        """Return any other attribute of the base context."""
        return getattr(self._base, name)

    def unstarted(self, processes: Sequence[BaseProcess]) -> list[int]:
        """Return the numbers of workers that have not run any of our code."""
        return [number for number in range(len(processes)) if not self._has_started(number)]

    def hung(self, processes: Sequence[BaseProcess]) -> list[int]:
        """Return the numbers of unstarted workers that certainly wait forever, as far as the kernel shows it."""
        machine = platform.machine()
        return [number for number in self.unstarted(processes) if waits_forever(processes[number].pid or 0, machine)]

    def start_again(self, processes: list[Any], number: int) -> str:
        """Replace a hung worker by a new one; return the warning to report, or "" if it has started after all.

        Raises RuntimeError for a worker that has hung too often.
        """
        if not self.end(processes[number], number):
            return ""
        self._num_hangs[number] += 1
        if self._num_hangs[number] == 4:
            raise RuntimeError(
                f"DataLoader worker {number} hung in its fork 4 times: it inherited a lock that is never released; "
                'use multiprocessing_context="forkserver"'
            )
        replacement = self._base.Process(target=_run_worker, args=self._arguments[number], daemon=True)
        replacement.start()
        processes[number] = replacement
        text = f"worker {number} hung in its fork, before it ran anything, and was restarted: it inherited a lock"
        if forks_may_hang(sys.version_info[:3]):
            return (
                f"{text}; Python {platform.python_version()} itself can leave one held ({FORKS_ISSUE}), and so can "
                f'libraries; update it to {FORKS_MENDED} or later, or use multiprocessing_context="forkserver"'
            )
        return f'{text} that a library held; use multiprocessing_context="forkserver" to avoid it'

    def end(self, process: BaseProcess, number: int) -> bool:
        """Kill a worker, unless it has started; return whether it was killed. It holds no lock that others wait for."""
        pid = process.pid
        try:  # the id of a child that was reaped may be another process's
            if pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
        except ChildProcessError:
            return False
        try:
            os.kill(pid, signal.SIGSTOP)  # it must not begin between the check of its byte and the kill
            deadline_s = time.monotonic() + 1  # it takes microseconds, but a SIGCONT from elsewhere may prevent it
            while (state := state_of(pid)) not in {"T", None} and time.monotonic() < deadline_s:
                time.sleep(0.0002)
            if state != "T" or self._has_started(number):
                return False
            process.kill()
        finally:
            with suppress(ProcessLookupError):  # a handler of SIGCHLD has just reaped it
                os.kill(pid, signal.SIGCONT)  # even if a handler raised: a stopped process cannot be ended by SIGTERM
        process.join()
        return True

    def _has_started(self, number: int) -> bool:
        return self._page is None or self._page[number] == 1
