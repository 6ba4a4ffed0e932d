"""What a loader has for its whole life: where its memory belongs, its rings, what opens batches, its counts. Edge.

Comes in: a torch DataLoader and our options. Goes out: for each iterator a `Lane`, through which its batches come.

Kept beside the loader, not in it, so that frameworks may copy, pickle and rebuild loaders as they like.
"""

from __future__ import annotations

import os
import platform
import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.base.stderr import say
from numapin.data.budget import num_ranks_of, read_room
from numapin.data.locality import Locality, find_locality
from numapin.data.loop_times import totals_of
from numapin.data.opening.device import Mover
from numapin.data.opening.host import Copier, Lender, Opener, Parcel
from numapin.data.slots.memory import RingSpec
from numapin.data.slots.ring import Ring
from numapin.data.stats import Counts, Stats
from numapin.data.wire.parcel import Head, Miss
from numapin.data.wire.queues import ResultQueue
from numapin.data.worker.setup import OwnerProcess, WorkerStart
from numapin.errors import BindingRefused, UsageError
from numapin.rank import bind
from numapin.system import calls, cuda, memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.data import DataLoader

_MAX_COPY_THREADS: Final = 4

_NO_STORES: Final = (
    f"libstores.so cannot be loaded, so large batches take a third more of the memory bus; {calls.INSTALL_STORES}"
)

_HINTS: Final = {
    Miss.NO_SLOT: "the loop keeps more batches than there are slots: .clone() what is kept, or raise pinned_budget=",
    Miss.KEPT: "collate_fn or the dataset keeps tensors of earlier batches: .clone() what is kept there",
    Miss.UNSUPPORTED: "sparse, quantised, nested, subclassed or requires_grad tensors travel in torch's shared memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """Our options, as the user gave them. `device` None: batches stay on the host. `pinned_budget` in bytes."""

    device: torch.device | None = None
    pinned_budget: int | None = None
    node: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.device is not None and self.device.type not in ("cuda", "cpu"):
            raise UsageError(f"device={str(self.device)!r}: batches can be put on cuda or cpu", 'say device="cuda"')
        if self.device is not None and self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"device={str(self.device)!r}: CUDA shows no GPU", "see why with: numapin topo")
        if self.pinned_budget is not None and self.pinned_budget < 0:
            raise UsageError(
                f"pinned_budget={self.pinned_budget}: bytes cannot be fewer than 0", "0 does without a ring"
            )

    @property
    def cuda_device(self) -> torch.device | None:
        """Return the GPU that batches go to, None where they stay on the host."""
        return self.device if self.device is not None and self.device.type == "cuda" else None


_paths: weakref.WeakKeyDictionary[DataLoader[Any], DataPath] = weakref.WeakKeyDictionary()


def path_of(loader: DataLoader[Any], options: PathOptions) -> DataPath:
    """Return the loader's data path, made at the first call; it ends with the loader."""
    path = _paths.get(loader)
    if path is None or path.pid != os.getpid():  # a forked child must not share its parent's rings
        path = _paths[loader] = DataPath(options)
        weakref.finalize(loader, path.close).atexit = False  # at exit the kernel takes everything back
    return path


@cache
def _this_rank(pid: int) -> OwnerProcess:
    del pid  # makes a forked child ask again
    return OwnerProcess.this()


class Lane:
    """One iterator's way: a ring, the queue that batches arrive in, and what opens them."""

    def __init__(self, path: DataPath, ring: Ring | None, opener: Opener) -> None:
        self._path, self.ring, self.opener = path, ring, opener
        self.results = ResultQueue(self._accept)

    def _accept(self, head: Head, body: memoryview) -> Parcel:
        if head.miss == Miss.STARTING and self.ring is not None and self.ring.is_refused:
            head = head._replace(miss=Miss.NO_RING.value)
        self._path.note_arrival(head)
        parcel = Parcel(head, body)
        if self.ring is not None:
            parcel.views = self.ring.lend(head)
            self.ring.want(head)
        self.opener.arrived(parcel)
        return parcel

    def prepare(self) -> None:
        """Begin to make the slots that batches need, once the loop has its first batch: it must not wait for them."""
        if self.ring is not None:
            self.ring.prepare()

    def reclaim(self) -> None:
        """Give the workers what is no longer needed."""
        self.opener.poll()
        if self.ring is not None:
            self.ring.reclaim()

    def end(self, *, workers_are_gone: bool) -> None:
        """Give the ring back; one that a living worker may still write to is not used again."""
        ring, self.ring = self.ring, None
        self.results.forget()
        try:
            self.opener.drain()
        finally:
            self.results.close()
            if ring is not None:
                self._path.take_back(ring, is_usable=workers_are_gone)


class DataPath:
    """One loader's data path."""

    def __init__(self, options: PathOptions) -> None:
        self.options, self.pid = options, os.getpid()
        self.counts, self._totals = Counts(), totals_of(self.pid)
        self._notes: dict[str, None] = {}
        self._refusal: str | None = None
        self._idle: list[Ring] = []
        self._rings: weakref.WeakSet[Ring] = weakref.WeakSet()
        self._mover: Mover | None = None
        self._locality: Locality | None = None
        self._is_closed = False

    def lane(self, loader: DataLoader[Any], *, pins: bool) -> Lane:
        """Return the way for a new iterator."""
        self._is_closed = False
        opener = self._opener(pins=pins)
        return Lane(self, self._take_ring(loader, opener, pins=pins), opener)

    def worker_start(self, lane: Lane, loader: DataLoader[Any], *, pins: bool) -> WorkerStart:
        """Return what the lane's workers run first."""
        if pins and platform.machine() == "x86_64" and not memory.can_pass_caches():
            self.tell(_NO_STORES, is_refusal=False)
        return WorkerStart(
            control=lane.ring.control if lane.ring else None,
            rank=_this_rank(os.getpid()),
            locality=self.locality,
            pins=pins,
            moves=self.options.cuda_device is not None,
            num_copy_threads=_num_copy_threads(loader.num_workers, os.environ),
            then=loader.worker_init_fn,
        )

    @property
    def locality(self) -> Locality:
        """Return where memory, workers and pin thread belong."""
        if self._locality is None:
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            if self.options.cuda_device is not None:
                index = self._device_index
            self._locality = find_locality(environ=os.environ, node=self.options.node, device_index=index)
            if self._locality.cpus or self._locality.memory:  # what is refused there is refused to the workers, too
                trial = threading.Thread(target=self.bind_this_thread, name="numapin-trial")
                trial.start()
                trial.join()
        return self._locality

    @property
    def _device_index(self) -> int:
        device = self.options.cuda_device
        return torch.cuda.current_device() if device is None or device.index is None else device.index

    def bind_this_thread(self) -> None:
        """Bring the calling thread to the rank's node, and let it work beside captures of CUDA graphs."""
        where = self.locality
        for refused in bind.bind_thread(cpus=where.cpus, memory=where.memory, nodes=where.nodes):
            self.tell(refused)
        if torch.cuda.is_initialized() and (driver := cuda.driver()) is not None:
            driver.relax_capture()

    def note_arrival(self, head: Head) -> None:
        """Count a batch, and say at once, once a reason, why one did not travel in a slot."""
        self.counts.note_arrival(head)
        if head.miss is not None and (hint := _HINTS.get(Miss(head.miss))) is not None:
            self.tell(f"a batch travelled outside the ring: {head.miss}; {hint}", is_refusal=False)

    def note_step(self, *, waited_s: float, stepped_s: float | None) -> None:
        """Count a batch that was yielded, for `stats()` and for who watches this process."""
        self.counts.note_step(waited_s=waited_s, stepped_s=stepped_s)
        if stepped_s is not None:
            self._totals.add(waited_s=waited_s, stepped_s=stepped_s)

    def tell(self, text: str, *, is_refusal: bool = True) -> None:
        """Say something once; a refusal is not said but an error at the next batch under `strict`."""
        if text in self._notes:
            return
        self._notes[text] = None
        if is_refusal and self.options.strict:
            self._refusal = self._refusal or text
            return
        say(f"warning: {_rank_label()}{text}")

    def check(self) -> None:
        """Raise BindingRefused under `strict` where something could not be done as asked."""
        if self._refusal is not None:
            raise BindingRefused(self._refusal, "do without strict=True to go on as the kernel allows")

    def take_back(self, ring: Ring, *, is_usable: bool) -> None:
        """Keep a ring for the next iterator, or close it."""
        if not is_usable or self._is_closed:
            ring.close()
            return
        ring.recover()
        self._idle.append(ring)

    def close(self) -> None:
        """Close the rings that no iterator uses; those in use are closed when it gives them back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def stats(self) -> Stats:
        """Return the counts so far."""
        counts, rings = self.counts, list(self._rings)
        pages = sum((ring.pages for ring in rings), start=Counter[int | None]())
        nodes = self.locality.nodes
        is_known = bool(pages) and bool(nodes) and all(ring.is_verified for ring in rings)
        mover = self._mover
        return Stats(
            batches=counts.batches,
            bytes=counts.num_bytes,
            hits=counts.hits,
            misses=dict(counts.misses),
            wait_s_per_batch=counts.waited_s / counts.batches if counts.batches else None,
            wait_share=min(1.0, counts.waited_in_steps_s / counts.stepped_s) if counts.stepped_s else None,
            transfer_gbps=mover.timed_bytes / mover.timed_ms / 1e6 if mover and mover.timed_ms else None,
            slots=sum(ring.num_slots for ring in rings),
            slot_bytes=max((ring.slot_bytes for ring in rings), default=0),
            slots_on_loan=sum(ring.num_on_loan for ring in rings),
            pinned_bytes=sum(ring.pinned_bytes for ring in rings),
            nodes=tuple(sorted(nodes)),
            share_on_node=sum(pages[node] for node in nodes) / sum(pages.values()) if is_known else None,
            placement=self.locality.reason,
            notes=tuple(self._notes),
        )

    def _opener(self, *, pins: bool) -> Opener:
        device = self.options.cuda_device
        if device is not None:
            if self._mover is None:
                driver = cuda.driver()
                if driver is None:
                    raise UsageError(f"device={str(device)!r}: libcuda.so.1 cannot be used", "see: numapin topo")
                self._mover = Mover(torch.device("cuda", self._device_index), driver)
            return self._mover
        if (pins or torch.cuda.is_initialized()) and not _can_lend():
            self.tell(
                "this CUDA driver cannot tell when a slot is free again, so batches are copied; update it to R555"
            )
            return Copier(pins=pins)
        return Lender(pins=pins)

    def _take_ring(self, loader: DataLoader[Any], opener: Opener, *, pins: bool) -> Ring | None:
        if self.options.pinned_budget == 0:
            return None
        needs_cuda = pins or self.options.cuda_device is not None
        spec = RingSpec(
            num_workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
            locality=self.locality,
            device=self._device_index if needs_cuda else 0,
            driver=cuda.driver() if needs_cuda else None,
            reader=_reader if isinstance(opener, Lender) else _no_reader,
            budget_bytes=self._budget_bytes,
            tell=self.tell,
            poison=os.environ.get("NUMAPIN_POISON") == "1",
        )
        while self._idle:
            ring = self._idle.pop()
            if ring.spec == spec:
                return ring
            ring.close()  # made for another number of workers, or not for DMA: both can be changed between epochs
        try:
            ring = Ring(spec)
        except OSError as error:
            self.tell(f"no ring, so batches go torch's way: {error.strerror}; see: ulimit -n")
            return None
        self._rings.add(ring)
        return ring

    def _budget_bytes(self) -> int | None:
        if self.options.pinned_budget is not None:
            return max(0, self.options.pinned_budget - sum(ring.num_bytes for ring in list(self._rings)))
        return read_room(Path("/"), nodes=self.locality.nodes, num_ranks=num_ranks_of(os.environ)).num_bytes


def _num_copy_threads(num_workers: int, environ: Mapping[str, str]) -> int:
    """Return how many CPUs there are for each worker of this rank, if the ranks of this host share them evenly."""
    share = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // num_ranks_of(environ))
    return max(1, min(-(-share // num_workers), _MAX_COPY_THREADS))


def _reader() -> cuda.Driver | None:
    """Return the driver of the GPUs that may be reading what the user copies from; None as long as there are none."""
    driver = cuda.driver() if torch.cuda.is_initialized() else None
    # Without contexts to record only pageable slots are lent, which a copy has left when its call returns.
    return driver if driver is not None and driver.can_record_contexts else None


def _no_reader() -> None:
    """Say that slots are read by our own copies only, which end before the slot is let go of."""


def _can_lend() -> bool:
    driver = cuda.driver()
    return driver is not None and driver.can_record_contexts


def _rank_label() -> str:
    rank = os.environ.get("RANK")
    return f"rank {rank}: " if rank is not None else ""
