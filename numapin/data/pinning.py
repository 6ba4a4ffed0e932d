"""Pin slots, and take freed pinned memory back for reuse or release, on background threads.

Blocks that nothing uses are kept for reuse by the nodes that they are on and by their size. torch's cache rounds a
block up to a power of two, does not know nodes, and keeps its blocks until it is told otherwise. `numapin.pinned`
can be imported without torch, and so can this.
"""

from __future__ import annotations

import atexit
import math
import mmap
import operator
import os
import sys
import threading
import time
from bisect import bisect_left, insort_left
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.formats import gib
from numapin.errors import NumapinError, UsageError
from numapin.system.cuda import CudaRefused, Driver, once_lock
from numapin.system.pages import PINNED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.pool import PoolSpec
    from numapin.data.slots import Slot

_SIZE: Final = operator.attrgetter("num_bytes")
IDLE_S: Final = 300.0
"""Longest wait for reuse: re-registering 10 GB every 5 min costs 0.9 to 1.7 % of the time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # no comparison in Python, in which Ctrl-C could come
class Locked:
    """Memory that is page-locked, registered with the driver for a device, and counted in PINNED."""

    memory: object  # its owner: the last reference unmaps it
    address: int
    num_bytes: int
    device: int  # on whose behalf it is registered; every device can use it
    nodes: CpuSet | None = None  # that all its pages are on; empty: where the policy put them; None: it is not reused
    num_forks: int = 0  # the value of `IdleBlocks.num_forks` when it was lent


class IdleBlocks:
    """The idle blocks of one process. Its methods are for one thread at a time."""

    def __init__(self) -> None:
        self._by_nodes: defaultdict[CpuSet, list[Locked]] = defaultdict(list)  # each from the smallest to the largest
        self._since_s: dict[Locked, float] = {}  # the longest idle first
        self._lent_bytes = self._most_lent_bytes = 0
        self.num_forks = 0
        """Changes with each fork. A child may read what was lent at that time, for as long as it lives."""
        os.register_at_fork(before=self._note_fork, after_in_parent=self._note_fork, after_in_child=self._forget)

    @property
    def num_bytes(self) -> int:
        """Return the size of all of them; for any thread."""
        return sum(block.num_bytes for block in self._since_s.copy())

    def add(self, block: Locked) -> bool:
        """Keep a block that nothing uses; return False if it must not be reused."""
        if block.nodes is not None:  # else it was not counted
            self._lent_bytes -= block.num_bytes
        if block.nodes is None or block.num_forks != self.num_forks:
            return False
        self._since_s[block] = time.monotonic()  # first: after Ctrl-C in between, `drop` still finds it
        insort_left(self._by_nodes[block.nodes], block, key=_SIZE)  # before equal ones: it is taken first
        return True

    def take(self, nodes: CpuSet, num_bytes: int) -> Locked | None:
        """Return the smallest block on `nodes` that holds this many bytes, and is at most twice as large."""
        blocks = self._by_nodes[nodes]
        place = bisect_left(blocks, num_bytes, key=_SIZE)
        if place == len(blocks) or blocks[place].num_bytes > 2 * num_bytes:
            return None
        taken = replace(blocks[place], num_forks=self.num_forks)
        self.note_lent(taken.num_bytes)  # before the block is removed: Ctrl-C in between would lose it
        del self._since_s[blocks[place]]
        del blocks[place]
        return taken

    def note_lent(self, num_bytes: int) -> None:
        """Count a block that is in use from now on."""
        self._lent_bytes += num_bytes
        self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)

    @property
    def excess_bytes(self) -> int:
        """Return by how much all of them exceed what was ever in use at once.

        It should go before a new block is made: batches of varying sizes would leave ever more blocks of which none
        fits the next batch.
        """
        return max(0, self.num_bytes - self._most_lent_bytes)

    def drop(self, *, num_bytes: float = math.inf, since_s: float = math.inf) -> list[Locked]:
        """Remove and return idle blocks, longest idle first, until `num_bytes` are dropped.

        Only those are dropped that have been idle since `since_s` or before.
        """
        dropped: list[Locked] = []
        for block, block_since_s in self._since_s.items():
            if num_bytes <= 0 or block_since_s > since_s:
                break
            num_bytes -= block.num_bytes
            dropped.append(block)
        for block in dropped:
            with suppress(ValueError):  # Ctrl-C has kept `add` from putting it there
                self._by_nodes[block.nodes or CpuSet()].remove(block)
            del self._since_s[block]
        return dropped

    def _note_fork(self) -> None:
        self.num_forks += 1

    def _forget(self) -> None:
        """Unmap all in a child: otherwise what the parent gives back stays until the child ends."""
        self._since_s.clear()
        self._by_nodes.clear()
        self._lent_bytes = self._most_lent_bytes = 0


def sizes_of(shape: int | Iterable[int]) -> tuple[int, ...]:
    """Return the size of each dimension.

    Raises:
        UsageError: A size is negative.
    """
    sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    if any(size < 0 for size in sizes):
        raise UsageError(f"shape {sizes} has a negative size", "pass the size of each dimension")
    return sizes


def whole_pages(num_bytes: int) -> int:
    """Return the size of a block for this many bytes."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


# --- the background threads ------------------------------------------------------------------------------------------

_ENDS_S: Final = 2.0
_NUM_THREADS: Final = 2


class ExitLock:
    """A lock for blocks of background threads, which do nothing once `is_over`. Python's end waits for the last block.

    Enter `lock` itself: Ctrl-C in a method that takes or releases it would leave it locked for good. A thread that is
    in torch when the interpreter ends aborts the process: torch takes the GIL again in destructors, where Python cannot
    end the thread. A thread that hangs in the driver must not keep a failed rank alive, so the wait is short.
    """

    def __init__(self) -> None:
        self.lock, self._pid = Lock(), os.getpid()
        self.is_over = False
        atexit.register(self._end)

    def _end(self) -> None:
        if os.getpid() == self._pid:  # a child that the user forked may have inherited a held lock
            self.is_over = True
            if self.lock.acquire(timeout=_ENDS_S):
                self.lock.release()


class Reclaimer:
    """Takes in page-locked memory once no device can be reading it, for reuse or to release it.

    Its daemon thread sleeps while nothing waits for that, and looks once a minute for blocks that have been idle for
    long.
    """

    def __init__(self, driver: Driver) -> None:
        from numapin.data.quarantine import Quarantine  # brings torch

        self._driver, self._pid = driver, os.getpid()
        self._dead: SimpleQueue[Locked] = SimpleQueue()  # its put is reentrant, so finalizers may call it
        self._exit_lock = ExitLock()
        self._quarantine: Quarantine[Locked] = Quarantine(lambda: driver)
        self.idle = IdleBlocks()
        self._passed: list[Locked] = []  # to be released
        with suppress(RuntimeError):  # no thread can be started: memory waits for the next `take` or `trim`
            Thread(target=self._run, name="numapin-reclaim", daemon=True).start()

    def add(self, locked: Locked) -> None:
        """Take memory that nothing refers to any more; for finalizers, in any thread. A no-op in a forked child."""
        if os.getpid() == self._pid:
            self._dead.put(locked)

    def release_unused(self) -> bool:
        """Release memory that no device can be using, and return whether some has to wait. Never raises.

        It never blocks, except on drivers before R555: they have no context events, so it waits for the devices. While
        torch captures a CUDA graph, the memory waits for its end. When Python ends, nothing is released.
        """
        with self._exit_lock.lock:
            if self._exit_lock.is_over:
                return False
            with suppress(Empty):
                while True:
                    self._quarantine.admit(self._dead.get_nowait())
            with suppress(CudaRefused):
                self._passed += [locked for locked in self._quarantine.passed() if not self.idle.add(locked)]
                self._passed += self.idle.drop(since_s=time.monotonic() - IDLE_S)
            self._release_passed()
            return bool(self._passed or self._quarantine.is_in_use)

    def take(self, nodes: CpuSet, num_bytes: int) -> Locked | None:
        """Return a block for this many bytes that was used before, if there is one."""
        self.release_unused()
        locked = None
        try:
            with self._exit_lock.lock:
                if not self._exit_lock.is_over:
                    locked = self.idle.take(nodes, num_bytes)
        except BaseException:  # Ctrl-C: registered memory must not be unmapped
            if locked is not None:
                self.add(locked)
            raise
        return locked

    def trim(self, num_bytes: float = math.inf) -> int:
        """Release at least this many bytes of idle blocks, if there are as many; return how many were released."""
        self.release_unused()
        with self._exit_lock.lock:
            self._passed += () if self._exit_lock.is_over else self.idle.drop(num_bytes=num_bytes)
            return self._release_passed()

    def _release_passed(self) -> int:
        """Release memory that no device can be reading, until the driver refuses it; return the number of bytes."""
        num_bytes = 0
        while self._passed and not self._exit_lock.is_over:
            locked = self._passed[-1]
            try:
                self._driver.unregister(locked.device, locked.address)
            except CudaRefused as error:
                if error.name != "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED":  # as after Ctrl-C here
                    break
            self._passed.pop()
            PINNED.remove(locked.num_bytes)
            num_bytes += locked.num_bytes
            del locked  # the last reference, which unmaps: not after the lock is released
        return num_bytes

    def _run(self) -> None:
        num_looks = 0  # that found memory which has to wait
        while True:
            # Never without a limit: another thread may have taken in what woke this one.
            pause_s = 0.001 * 2 ** min(num_looks, 10) if num_looks else IDLE_S / 5
            with suppress(Empty):
                self._dead.put(self._dead.get(timeout=pause_s))  # wait for one, and leave it to release_unused
            num_looks = num_looks + 1 if self.release_unused() else 0


def reclaimer(driver: Driver) -> Reclaimer:
    """Return this process's reclaimer."""
    with once_lock():  # threads that come at once get the same one
        return _reclaimer_of(driver, os.getpid())


@cache
def _reclaimer_of(driver: Driver, _pid: int) -> Reclaimer:
    return Reclaimer(driver)


class Settling:
    """The settling of one pool's slots: each is checked and pinned when it arrives."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec, self._pid = spec, os.getpid()
        self._can_pin, self._pins = spec.driver is not None, Lock()
        self._is_over_budget = self._has_reported = False

    @property
    def is_needed(self) -> bool:
        """Return whether slots have to be checked or pinned."""
        return self._can_pin or self._spec.locality.num_machine_nodes > 1

    def begin(self, slot: Slot) -> None:
        """Have a slot settled on a thread of the process."""
        slot.settled = Event()
        settlers[os.getpid()].submit(slot.settled, partial(self._settle, slot))

    def _settle(self, slot: Slot) -> None:
        """Settle a slot; never raises."""
        spec = self._spec
        try:
            if not slot.is_let_go and os.getpid() == self._pid:
                shortfalls = slot.check(spec.locality)
                if not self._has_reported:  # once: the shares in the texts differ from slot to slot
                    self._has_reported = bool(shortfalls)
                    for shortfall in shortfalls:
                        spec.report(shortfall)
                with self._pins:
                    if spec.driver is not None and self._can_pin and self._has_room(slot.num_bytes):
                        slot.pin(spec.driver, spec.device)
        except Exception as error:  # noqa: BLE001 - also a defect: the other slots must be settled all the same
            self._can_pin = False
            reason = f"{error.message}; {error.hint}" if isinstance(error, NumapinError) else str(error)
            pins = spec.driver is not None
            effect = "batches are not pinned from now on" if pins else "the node of a batch's memory is unknown"
            spec.report(f"{effect}: {reason}")
        finally:
            slot.is_settled = True
            if slot.is_let_go:  # nothing else would unpin it any more
                slot.unpin_later(spec.driver)

    def _has_room(self, num_bytes: int) -> bool:
        budget = self._spec.budget_bytes()
        if budget is None or num_bytes <= budget:
            return True
        if not self._is_over_budget:
            self._is_over_budget = True
            self._spec.report(
                f"the budget for pinned memory is used up: {gib(max(0, budget))} are left, and a batch needs "
                f"{gib(num_bytes)}; batches without pinned memory are copied more slowly; raise pinned_budget=, "
                "use fewer workers, or .clone() batches that the loop keeps; see numapin.pinned.budget()"
            )
        return False


class Settler:
    """Two threads, which exist while there is work: one pins while the other maps the next slot's pages."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Event, Callable[[], None]] = OrderedDict()  # by what is set when one is over
        self._lock = Lock()
        self._idle = [ExitLock() for _ in range(_NUM_THREADS)]  # of threads that do not run

    def submit(self, over: Event, job: Callable[[], None]) -> None:
        """Have a job run, the oldest first, and then set `over`. Raises RuntimeError if no thread can be started."""
        with self._lock:
            self._jobs[over] = job
        self._serve()

    def finish(self, over: Event) -> None:
        """Wait for the end of a job."""
        if over in self._jobs:
            self._serve()  # Ctrl-C may have kept the thread that was meant for it from starting
        over.wait()

    def _serve(self) -> None:
        """Start another thread, up to the limit; if that fails, one that runs does the jobs."""
        if not self._idle:
            return
        try:
            Thread(target=self._run, name="numapin-settle", daemon=True).start()
        except RuntimeError:
            if len(self._idle) == _NUM_THREADS:
                raise

    def _run(self) -> None:
        with self._lock:
            if not self._idle or not self._jobs:
                return
            lock = self._idle.pop()  # here, because after Ctrl-C the starter does not know whether this thread runs
        while True:
            with self._lock:
                if not self._jobs:
                    self._idle.append(lock)
                    return
                over, job = self._jobs.popitem(last=False)
            with lock.lock:
                try:
                    if not lock.is_over:
                        job()
                except BaseException:  # noqa: BLE001 - a defect: report it, and do the other jobs
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
                over.set()
                del job  # it may have the last reference to a slot


settlers: Final = defaultdict[int, Settler](Settler)  # by process: a forked child needs its own
