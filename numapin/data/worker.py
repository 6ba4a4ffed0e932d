"""The set-up of a DataLoader worker: it runs before torch's loop."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import connection
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import get_worker_info

from numapin.data import packing
from numapin.data.forking import is_in_bad_fork
from numapin.data.packing import LARGE_BYTES, SLOT_NAME, Packer, WorkerSlots, is_plain
from numapin.data.torch_names import _DatasetKind, collate, collate_tensor_fn
from numapin.errors import UsageError
from numapin.rank import bind
from numapin.system import memory, proc
from numapin.system.thread_limits import limit_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.data.casting import Casts
    from numapin.data.handover import Handover
    from numapin.data.locality import Locality

    CollateMap = dict[type | tuple[type, ...], Callable[..., Any]]

_VARIABLE: Final = "NUMAPIN_WORKER_THREADS"
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The worker_init_fn that every worker of ours runs; the user's own comes last."""

    arrivals: Handover | None  # hands new slots to the rank; None: slots are turned off
    serial: int  # that this start of workers shares with no other of the loader
    rank: connection.Connection | None  # its pidfd: the worker ends with it
    locality: Locality
    pins: bool  # whether batches must end up in pinned memory
    moves: bool  # whether batches must end up on a device
    num_copy_threads: int  # that stack a large batch
    num_library_threads: int  # of numpy's BLAS, OpenMP, MKL and OpenCV; 0: their own default
    casts: Casts
    then: Callable[[int], None] | None  # the user's own worker_init_fn

    def __call__(self, worker: int) -> None:
        """Set this worker up. Raises only the errors of the user's own function."""
        where = self.locality
        # The rank has reported refusals.
        bind.bind_thread(cpus=where.cpus, memory=where.memory, nodes=where.nodes, within=where.within)
        if self.rank is not None:
            threading.Thread(target=_exit_after, args=(self.rank,), name="numapin-watch", daemon=True).start()
        limit_libraries(self.num_library_threads)
        # Descriptors of slots that the rank had at the fork would keep memory that the rank gives back. Nothing in a
        # forked child uses them: what it inherits of the rank's pools does nothing in another process.
        for fd in proc.open_files("self", f"/memfd:{SLOT_NAME}"):
            os.close(fd)
        if is_in_bad_fork():
            # GPU devices inherited by fork would keep the rank's GPU memory after its end, and CUDA cannot be used here
            # anyway. The numbers stay taken, so that a library that still has them cannot hit another file.
            with suppress(OSError), Path(os.devnull).open("rb") as null:
                for fd in proc.open_files("self", "/dev/nvidia"):
                    os.dup2(null.fileno(), fd, inheritable=False)
        slots = None
        if self.arrivals is not None:
            is_for_gpu = self.pins or self.moves
            slots = WorkerSlots(
                self.arrivals, where, packing.handed_down, serial=self.serial + worker, makes_small=is_for_gpu
            )
            packing.handed_down = {}  # else it would keep those mapped that the rank gives up
        packing.own = packer = Packer(slots, worker=worker, pins=self.pins, moves=self.moves, casts=self.casts)
        os.register_at_fork(after_in_child=packer.refuse_in_child)
        if slots is not None:
            os.register_at_fork(after_in_parent=slots.note_fork)
            Stacker(packer, num_threads=self.num_copy_threads).install()
        if self.then is not None:
            self.then(worker)


def open_pidfd() -> connection.Connection | None:
    """Return this process as its workers see it, which cannot be mistaken for a later process.

    It travels to processes that are started. Kernels before 5.3 have no pidfd; nothing is watched there.
    """
    try:
        return connection.Connection(os.pidfd_open(os.getpid()))
    except OSError:
        return None


def _exit_after(process: connection.Connection) -> None:
    """End this process as soon as another one has ended, whatever ended it and whichever thread forked this one."""
    connection.wait([process])
    os._exit(1)


def num_worker_threads(wanted: int | None, environ: Mapping[str, str]) -> int:
    """Return the threads that each library in a worker may use; 0: the library's default. Raises UsageError.

    One by default, like torch's own in a worker: the workers are the parallelism.
    """
    if wanted is not None:
        return wanted
    text = environ.get(_VARIABLE, "1")
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{_VARIABLE}={text!r} is not a number of threads", f"use e.g. {_VARIABLE}=1")
    return int(text)


def limit_libraries(num_threads: int) -> None:
    """Let libraries other than torch use `num_threads` threads in this worker; 0: leave them as they are.

    torch keeps the one thread that its worker loop has set, even where it shares its OpenMP runtime with another
    library: with more, GNU's runtime hangs in a forked process.
    """
    if num_threads == 0:
        return
    torchs = torch.get_num_threads()
    limit_threads(num_threads, os.environ)
    set_for_opencv = getattr(sys.modules.get("cv2"), "setNumThreads", None)
    if set_for_opencv is not None:
        set_for_opencv(num_threads)
    torch.set_num_threads(torchs)


class Stacker:
    """Stacks samples straight into the memory of a packer's batch."""

    def __init__(self, packer: Packer, *, num_threads: int) -> None:
        """Stack large batches on `num_threads` threads."""
        self._packer, self._num_threads = packer, num_threads
        # torch's number of threads is a setting of each thread.
        self._pool = ThreadPoolExecutor(num_threads, "numapin-copy", partial(torch.set_num_threads, 1))

    def install(self) -> None:
        """Let torch's default collate stack tensors here, in this process, unless the user has put in another function.

        Code that stacks into new shared memory, as torch's own function does (for tensors of a subclass; in a user's
        map of functions; PyTorch Geometric), gets a part of the batch's slot instead. A collate inside a sample gets
        ordinary memory: a dataset that keeps what it made would keep the slots of whole batches, and torch would send
        each tensor in shared memory as a file.
        """
        packer = self._packer
        functions: CollateMap = collate.default_collate_fn_map
        if functions.get(torch.Tensor) is collate_tensor_fn:
            functions[torch.Tensor] = self.collate
        storages: Any = torch.UntypedStorage
        torchs_storage = storages._new_shared.__func__  # the one place through which all of them go
        torchs_fetcher: Callable[..., Any] = _DatasetKind.create_fetcher

        def _new_shared(cls: type, size: int, *, device: torch.device | str = "cpu") -> object:
            if cls is not torch.UntypedStorage or torch.device(device).type != "cpu":
                return torchs_storage(cls, size, device=device)
            room = packer.allocate(torch.uint8, (size,)) if packer.is_collating else None
            return torch.UntypedStorage(size, device="cpu") if room is None else room.untyped_storage()

        def outermost(collate_fn: Callable[[Any], object], samples: object) -> object:
            packer.is_collating = True
            try:
                return collate_fn(samples)
            finally:
                packer.is_collating = False

        def create_fetcher(
            kind: int, dataset: object, auto_collation: object, collate_fn: Callable[[Any], object], *rest: object
        ) -> object:
            info = get_worker_info()
            if auto_collation and info is not None and dataset is info.dataset:
                packer.is_collating, collate_fn = False, partial(outermost, collate_fn)
            return torchs_fetcher(kind, dataset, auto_collation, collate_fn, *rest)

        storages._new_shared = classmethod(_new_shared)
        _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]

    def collate(self, batch: Any, *, collate_fn_map: CollateMap | None = None) -> torch.Tensor:
        """Stack tensors as torch's default collate does, straight into the batch's slot if there is room."""
        out = None
        if self._packer.is_collating and _can_stack(batch):
            casts, dtype = self._packer.casts, batch[0].dtype
            narrow = casts.get(dtype, dtype)
            # For {float64: float32, float32: bfloat16} the pickler would cast it once more.
            if narrow is dtype or (narrow not in casts and len(set(map(_DTYPE, batch))) == 1):
                out = self._packer.allocate(narrow, (len(batch), *batch[0].shape))
        if out is not None and (out.nbytes < LARGE_BYTES or _are_alike(batch)):
            with suppress(RuntimeError):  # torch's own function raises it, e.g. for different shapes
                return self.stack(batch, out)
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]

    def stack(self, batch: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Stack into `out`, cast to its dtype; a large batch on several threads."""
        stack: Callable[..., object] = torch.stack
        if out.nbytes < LARGE_BYTES:
            return torch.stack(batch, 0, out=out)  # type: ignore[arg-type] # it takes tuples, too
        if batch[0].dtype is not out.dtype:
            stack = _stack_cast
        elif self._packer.passes_caches and all(is_plain(tensor) and tensor.is_contiguous() for tensor in batch):
            stack = _stack_past_caches
        num_parts = min(self._num_threads, len(batch))
        cuts = [len(batch) * part // num_parts for part in range(num_parts + 1)]
        first, *others = [partial(stack, batch[begin:end], out=out[begin:end]) for begin, end in pairwise(cuts)]
        try:
            waits = [self._pool.submit(other).result for other in others]
        except RuntimeError:  # no thread can be started, but the work is queued: another thread would do it too late,
            self._pool.shutdown()  # when the batch may have been sent
            self._num_threads = 1
            return self.stack(batch, out)
        try:
            first()
        finally:
            for wait in waits:
                wait()
        return out


def _can_stack(batch: Any) -> bool:
    """Return whether these are tensors, of which the first is dense. torch.stack refuses others that do not fit to it.

    To look at each would take a small batch as long as torch.stack.
    """
    if not isinstance(batch, (list, tuple)) or set(map(type, batch)) != {torch.Tensor}:
        return False
    first = batch[0]
    is_special = first.is_nested or first.is_quantized or first.requires_grad
    return first.layout is torch.strided and first.is_cpu and not is_special


def _are_alike(batch: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have one shape and dtype, so that a large batch can be stacked in parts."""
    has_nested = any(tensor.is_nested for tensor in batch)  # it would have no shape
    return not has_nested and len(set(map(_SHAPE, batch))) == 1 == len(set(map(_DTYPE, batch)))


def _stack_past_caches(batch: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    memory.stack_past_caches(out.data_ptr(), [tensor.data_ptr() for tensor in batch], out.nbytes // len(batch))


def _stack_cast(batch: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    """Cast sample by sample, which takes a fifth less time than torch.stack."""
    for sample, row in zip(batch, out.unbind(), strict=True):
        row.copy_(sample)
