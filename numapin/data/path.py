"""The data path of a loader, kept for its whole life: its place, its pools, its openers, its counts.

It is kept beside the loader, not in it, so that frameworks may copy, pickle and rebuild loaders as they like.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import weakref
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.data.budget import num_ranks_of, read_room
from numapin.data.forking import is_in_bad_fork
from numapin.data.handover import HandedDown
from numapin.data.locality import find_locality
from numapin.data.message import NO_MEMORY, Parcel
from numapin.data.opening import Copier, Lender, Mover, Pinner
from numapin.data.packing import MOST_KEPT
from numapin.data.pool import Pool, PoolSpec
from numapin.data.queues import ResultQueue, TaskQueue
from numapin.data.stats import Counts, Notices, Stats, share_on
from numapin.data.worker import WorkerStart, num_worker_threads, open_pidfd
from numapin.errors import UsageError
from numapin.rank import bind
from numapin.steps.totals import totals_of
from numapin.system import calls, cuda, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection

    from torch.utils.data import DataLoader

    from numapin.data.balance import Balance
    from numapin.data.casting import Casts
    from numapin.data.locality import Locality
    from numapin.data.message import Head
    from numapin.data.slots import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """Our options, as the user gave them; those of `numapin.DataLoader`."""

    device: torch.device | None = None  # for batches; None: they stay on the host
    pinned_budget: int | None = None  # the most bytes to pin; None: as many as the machine allows
    node: int | None = None  # None: found
    strict: bool = False  # whether a refusal is an error
    casts: Casts = ()
    worker_threads: int | None = None  # of each library in a worker; 0: not limited; None: NUMAPIN_WORKER_THREADS, or 1
    balance: bool = False
    device_transform: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        """Refuse a device that cannot be used, switches that are not bools, and invalid or negative numbers."""
        for name in ("strict", "balance"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value!r} is neither True nor False", f"use {name}=True or {name}=False")
        if self.device is not None:
            text = f"device={str(self.device)!r}"
            if self.device.type not in ("cuda", "cpu"):
                raise UsageError(f"{text}: batches can be put on cuda or cpu", 'use device="cuda"')
            if self.device.type == "cuda" and not torch.cuda.is_available():
                raise UsageError(f"{text}: CUDA shows no GPU", "see why with: numapin doctor")
        if self.device_transform is not None and not callable(self.device_transform):
            hint = "pass a function of one batch, which returns what the loop gets"
            raise UsageError(f"device_transform={self.device_transform!r} cannot be called", hint)
        for name, kind, unit, hint in (
            ("pinned_budget", Real, "bytes", "give bytes, such as 8e9; 0 means no slots"),
            ("worker_threads", Integral, "threads", "give a whole number; 0 leaves the libraries as they are"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            is_special = isinstance(value, bool) or (isinstance(value, float) and math.isnan(value))
            if is_special or not isinstance(value, kind):
                raise UsageError(f"{name}={value!r} is not a number of {unit}", hint)
            if value < 0:
                raise UsageError(f"{name}={value}: a number of {unit} cannot be negative", hint)

    @property
    def cuda_device(self) -> torch.device | None:
        """Return the GPU that batches go to; None if they stay on the host."""
        return self.device if self.device is not None and self.device.type == "cuda" else None


_paths: Final[dict[int, DataPath]] = {}  # by id: a subclass may define __eq__, so that its loaders have no hash


def path_of(loader: DataLoader[Any], options: PathOptions) -> DataPath:
    """Return the loader's data path, which is made at the first call and ends with the loader."""
    path = _paths.get(id(loader))
    if path is None or path.pid != os.getpid():  # a forked child must not share its parent's pools
        path = _paths[id(loader)] = DataPath(options)
        weakref.finalize(loader, _end_path, id(loader), path).atexit = False  # at exit the kernel takes all back
    return path


def _end_path(number: int, path: DataPath) -> None:
    """Close the path of a loader that is gone; another loader may get the same id later."""
    if _paths.get(number) is path:
        del _paths[number]
    path.close()


@cache
def _this_rank(pid: int) -> Connection | None:
    del pid  # the key: a forked child is another process
    return open_pidfd()


_lanes: Final[set[Lane]] = set()  # not ended yet


class Lane:
    """The way of one iterator's batches: its pool of slots, its queues, and its opener.

    It is alive until it is ended, even if its iterator is garbage in a cycle of references. Otherwise its pipes and
    sockets could be closed before the iterator ends its workers: it would then use closed descriptors, or numbers that
    other files have since taken. So it must not refer to the iterator or the loader.
    """

    def __init__(
        self, path: DataPath, opener: Copier | Mover, pool: Callable[[], Pool | None], result_queue: type[ResultQueue]
    ) -> None:
        """Take a pool last: if the queue cannot be made, no pool has to be given back."""
        self._path, self.opener = path, opener
        self.balance: Balance | None = None
        self._ahead: set[weakref.ref[Parcel]] = set()  # not the opener's: another iterator may be kept in mid-epoch
        self.results = result_queue(self._accept)
        self._tasks: list[TaskQueue] = []  # alive until torch's iterator closes them
        self.pool = pool()
        _lanes.add(self)

    def queues(self) -> Iterator[ResultQueue | TaskQueue]:
        """Yield the queues in the order in which torch's iterator asks for them: results, then one per worker."""
        yield self.results
        for worker in itertools.count():
            queue = TaskQueue(None if self.pool is None else partial(self.pool.grant, worker))
            self._tasks.append(queue)
            yield queue

    def slots_of(self, worker: int) -> HandedDown:
        """Return the slots that a new worker takes over."""
        return HandedDown(list if self.pool is None else partial(self.pool.files_of, worker))

    def _accept(self, head: Head, body: bytes) -> Parcel:
        """Count a batch; report why it did not travel in a slot, or why the worker's next ones are copied into one."""
        if self.balance is not None:
            self.balance.note_arrival(head.worker)
        self._path.counts.note_arrival(head)
        if head.miss is not None:
            self._path.notices.report_miss(head.miss)
        if len(head.report.kept) > MOST_KEPT:
            self._path.notices.warn(
                f"your dataset or collate_fn keeps batch memory: more than {MOST_KEPT} batches in a worker, e.g. in a "
                "cache; its next batches are copied once more; to avoid that, keep copies: tensor.clone()"
            )
        view, slot = (NO_MEMORY, None) if self.pool is None else self.pool.lend(head)
        parcel = Parcel(head, body, view, slot)
        self.opener.arrived(parcel, self._ahead)
        return parcel

    def reclaim(self) -> None:
        """Take back slots that are no longer needed."""
        self.opener.poll()
        if self.pool is not None:
            self.pool.reclaim()

    def end(self, *, workers_are_gone: bool) -> None:
        """Give the pool back. It is not used again if a living worker may still write to it."""
        _lanes.discard(self)
        pool, self.pool = self.pool, None
        is_usable = False
        try:
            for head in self.results.forget():
                if pool is not None:
                    pool.note_inherited(head)
            is_usable = workers_are_gone  # not after an error above: a child may read a slot that was not marked
            self.opener.drain()
        finally:
            try:
                self.results.close()
            finally:
                if pool is not None:
                    self._path.take_back(pool, is_usable=is_usable)


class DataPath:
    """One loader's data path."""

    def __init__(self, options: PathOptions) -> None:
        self.options, self.pid = options, os.getpid()
        self.notices = Notices(is_strict=options.strict)
        self.counts, self._totals = Counts(), totals_of(self.pid)
        self._num_bytes_told = 0
        self._idle: list[Pool] = []
        self._pools: list[weakref.ref[Pool]] = []  # open, or with batches; replaced, because any thread may read it
        self._budget_bytes = partial(_budget_bytes, weakref.ref(self))  # each pool has it: else there would be a cycle
        self._mover: Mover | None = None
        self._locality: Locality | None = None
        self._is_closed = False

    @property
    def device_index(self) -> int:
        """Return the index of the loader's GPU; the current one if batches stay on the host."""
        device = self.options.cuda_device
        return torch.cuda.current_device() if device is None or device.index is None else device.index

    @property
    def locality(self) -> Locality:
        """Return the place where the loader's memory and threads belong, found when it is first needed."""
        if self._locality is None:
            uses_cuda = self.options.cuda_device is not None or torch.cuda.is_initialized()
            index = self.device_index if uses_cuda else None
            self._locality = find_locality(environ=os.environ, node=self.options.node, device_index=index)
            if self._locality.cpus or self._locality.memory:
                # Report what the kernel refuses to a thread: it refuses the same to the workers.
                thread = Thread(target=self.bind_this_thread, name="numapin-trial")
                thread.start()
                thread.join()
        return self._locality

    def bind_this_thread(self) -> None:
        """Bind the calling thread to the CPUs and nodes, and let it work beside captures of CUDA graphs."""
        where = self.locality
        for refused in bind.bind_thread(cpus=where.cpus, memory=where.memory, nodes=where.nodes, within=where.within):
            self.notices.report_refusal(refused)
        driver = cuda.driver() if torch.cuda.is_initialized() else None
        if driver is not None:
            driver.relax_capture()

    def lane(self, loader: DataLoader[Any], *, pins: bool, result_queue: type[ResultQueue] = ResultQueue) -> Lane:
        """Return the lane of a new iterator."""
        self._is_closed = False
        opener = self._opener(pins=pins)
        spec = PoolSpec(
            num_workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
            locality=self.locality,
            device=self.device_index if pins or self.options.cuda_device is not None else 0,
            driver=cuda.driver() if isinstance(opener, Mover | Pinner) else None,
            reader=_reader,
            budget_bytes=self._budget_bytes,
            report=self.notices.report_refusal,
            poison=os.environ.get("NUMAPIN_POISON") == "1",
        )
        return Lane(self, opener, partial(self._pool, spec), result_queue)

    def worker_start(self, lane: Lane, loader: DataLoader[Any], *, pins: bool) -> WorkerStart:
        """Return the first thing that the lane's workers run."""
        if pins and memory.may_pass_caches(platform.machine()) and not memory.can_pass_caches():
            effect = "libstores.so cannot be loaded, so large batches use a third more memory bandwidth"
            self.notices.warn(f"{effect}; {calls.INSTALL_STORES}")
        return WorkerStart(
            arrivals=lane.pool.arrivals if lane.pool else None,
            serial=lane.pool.next_serial() if lane.pool else 0,
            rank=_this_rank(os.getpid()),
            locality=self.locality,
            pins=pins,
            moves=self.options.cuda_device is not None,
            num_copy_threads=_num_copy_threads(loader.num_workers, os.environ),
            num_library_threads=num_worker_threads(self.options.worker_threads, os.environ),
            casts=self.options.casts,
            then=loader.worker_init_fn,
        )

    def note_step(self, *, waited_s: float, stepped_s: float | None) -> None:
        """Count a batch that was yielded, for `stats()` and for `numapin top`."""
        self.counts.note_step(waited_s=waited_s, stepped_s=stepped_s)
        if stepped_s is not None:
            told, self._num_bytes_told = self._num_bytes_told, self.counts.num_bytes
            self._totals.add(waited_s=waited_s, stepped_s=stepped_s, num_bytes=self._num_bytes_told - told)

    def take_back(self, pool: Pool, *, is_usable: bool) -> None:
        """Keep a pool for the next iterator, or close it."""
        if not is_usable or self._is_closed:
            pool.close()
            return
        pool.recover()
        self._idle.append(pool)

    def close(self) -> None:
        """Close the pools that no iterator uses. The others are closed when their iterators give them back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def slots(self) -> list[Slot]:
        """Return the slots of the pools that are open or still have batches."""
        pools = [reference() for reference in self._pools]
        return [slot for pool in pools if pool is not None for slot in pool.slots]

    def stats(self) -> Stats:
        """Return the counts so far."""
        counts, locality = self.counts, self.locality
        slots = self.slots()
        return Stats(
            batches=counts.batches,
            bytes=counts.num_bytes,
            hits=counts.hits,
            misses={miss.value: count for miss, count in counts.misses.items()},
            wait_s_per_batch=counts.wait_s_per_batch,
            wait_share=counts.wait_share,
            transfer_gbps=None if self._mover is None else self._mover.gbps,
            slots=len(slots),
            slots_made=counts.slots_made,
            slot_bytes=max((slot.num_bytes for slot in slots), default=0),
            slots_on_loan=sum(slot.is_in_use for slot in slots),
            pinned_bytes=sum(slot.pinned_bytes for slot in slots),
            nodes=tuple(sorted(locality.nodes)),
            share_on_node=share_on(locality.nodes, slots),
            placement=locality.reason,
            notes=self.notices.texts,
        )

    def _opener(self, *, pins: bool) -> Copier | Mover:
        device = self.options.cuda_device
        if device is not None:
            if self._mover is None:
                driver, text = cuda.driver(), f"device={str(device)!r}"
                if driver is None and is_in_bad_fork():
                    raise UsageError(
                        f"{text}: this process was forked from one that uses CUDA, so it cannot use CUDA",
                        'start it with multiprocessing.get_context("spawn")',
                    )
                if driver is None:
                    raise UsageError(f"{text}: libcuda.so.1 cannot be used", "see: numapin topo")
                # A device_transform drops it most often at once. The user's own copies may still read it then.
                lends_plain = self.options.device_transform is not None and driver.can_record_contexts
                self._mover = Mover(torch.device("cuda", self.device_index), driver, lends_plain=lends_plain)
            return self._mover
        if not pins and not torch.cuda.is_initialized():
            return Lender(pins=False)
        driver = cuda.driver()
        if driver is None or not driver.can_record_contexts:
            reason, hint = "this CUDA driver cannot report when a slot is free again", "update it to R555 or later"
            if driver is None:
                reason, hint = "libcuda.so.1 cannot be used in this process", "see: numapin topo"
            self.notices.report_refusal(f"{reason}, so batches are copied; {hint}")
            return Copier(pins=pins)
        if pins and self.options.pinned_budget != 0:
            return Pinner(driver, self.device_index)
        return Lender(pins=pins)

    def _pool(self, spec: PoolSpec) -> Pool | None:
        """Return an idle pool of these properties, or a new one; None if none is wanted, or can be made."""
        if self.options.pinned_budget == 0:
            return None
        while self._idle:
            pool = self._idle.pop()
            if pool.spec == spec:
                return pool
            pool.close()  # made for another number of workers, or not for DMA: both can change between epochs
        try:
            pool = Pool(spec)
        except OSError as error:
            self.notices.report_refusal(f"no slots, so torch sends the batches: {error.strerror}; see: ulimit -n")
            return None
        self._pools = [reference for reference in (*self._pools, weakref.ref(pool)) if reference() is not None]
        return pool


def _num_copy_threads(num_workers: int, environ: Mapping[str, str]) -> int:
    """Return the number of CPUs per worker of this rank, at most 4, if the ranks of this host share the CPUs evenly.

    Rounded down: with more threads than CPUs, copies to the GPU take longer (docs/results/loader-threads-h200.txt).
    """
    num_cpus = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // num_ranks_of(environ))
    return max(1, min(num_cpus // num_workers, 4))


def _budget_bytes(reference: weakref.ref[DataPath]) -> int | None:
    """Return how many more bytes may be pinned; None: no bound is known."""
    path = reference()
    if path is None:  # the loader is gone, and its pools are closed
        return None
    if path.options.pinned_budget is not None:
        return max(0, path.options.pinned_budget - sum(slot.pinned_bytes for slot in path.slots()))
    return read_room(Path("/"), nodes=path.locality.nodes, num_ranks=num_ranks_of(os.environ)).num_bytes


def _reader() -> cuda.Driver | None:
    """Return the driver of the GPUs to which the user may be copying from slots; None while there are none.

    Without context events only pageable slots are lent, and a copy from them has ended when its call returns.
    """
    driver = cuda.driver() if torch.cuda.is_initialized() else None
    return driver if driver is not None and driver.can_record_contexts else None
