"""Set up a worker, by its worker_init_fn. Edge.

Comes in: `WorkerStart`, from the rank. Goes out: a worker on the rank's CPUs and memory whose batches are collated into
slots, and which ends when the rank does.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch._utils import ExceptionWrapper

from numapin.data.worker import state
from numapin.data.worker.garbage import is_in_bad_fork
from numapin.data.worker.packing import Packer
from numapin.data.worker.slots import SLOT_NAME, WorkerSlots
from numapin.data.worker.stacking import Stacker
from numapin.data.worker.threads import limit_libraries
from numapin.rank import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from numapin.data.casting import Casts
    from numapin.data.locality import Locality
    from numapin.data.slots.handover import Handover
    from numapin.data.wire.grant import Grant
    from numapin.data.worker.owner import OwnerProcess
    from numapin.data.worker.state import DatasetStart

_packer: Packer | None = None  # this worker's, made by `WorkerStart`


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The worker_init_fn that every worker of ours runs; the user's own comes last.

    Attributes:
        arrivals: The socket that hands new slots to the rank. None: slots are turned off.
        serial: A number that this start of workers shares with no other of the loader.
        rank: The process that the worker ends with.
        locality: The CPUs and the memory policy.
        pins: Whether batches must end up in pinned memory.
        moves: Whether batches must end up on a device.
        num_copy_threads: The threads that stack a large batch.
        can_be_ahead: Whether a worker has several tasks at once, so that one that was idle is ahead of the loop.
        num_library_threads: The threads of numpy's BLAS, OpenMP, MKL and OpenCV. 0: their own default.
        casts: The dtypes to narrow.
        dataset: Where the dataset begins. None: its state is not asked for.
        then: The user's own worker_init_fn.
    """

    arrivals: Handover | None
    serial: int
    rank: OwnerProcess
    locality: Locality
    pins: bool
    moves: bool
    num_copy_threads: int
    can_be_ahead: bool
    num_library_threads: int
    casts: Casts
    dataset: DatasetStart | None
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Set this worker up. Raises only the errors of the user's own function."""
        global _packer  # noqa: PLW0603 - one per process, like torch's own worker info
        where = self.locality
        # The rank has reported refusals.
        bind.bind_thread(cpus=where.worker_cpus, memory=where.memory, nodes=where.nodes, within=where.within)
        self.rank.end_with()
        limit_libraries(self.num_library_threads)
        _close_inherited_slots()
        if is_in_bad_fork():
            _release_gpus()
        slots = None
        if self.arrivals is not None:
            slots = WorkerSlots(self.arrivals, where, serial=self.serial + worker)
        _packer = Packer(slots, worker=worker, pins=self.pins, moves=self.moves, casts=self.casts)
        os.register_at_fork(after_in_child=_packer.refuse_in_child, after_in_parent=_packer.note_fork)
        if slots:
            Stacker(_packer, num_threads=self.num_copy_threads, can_be_ahead=self.can_be_ahead).install()
        state.begin(self.dataset, worker)
        if self.then is not None:
            self.then(worker)


def accept(grant: Grant, handover: Handover, *, was_idle: bool) -> None:
    """Take over the slot that came with a task; `was_idle`: the worker waited for it after another one of the epoch."""
    if _packer is not None:
        _packer.accept(grant, handover)
        _packer.was_idle = was_idle


def allocate(dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
    """Return an uninitialized tensor in the memory of the batch that is being made; None if it has no room."""
    return None if _packer is None else _packer.allocate(dtype, size)


def end_without_batch() -> None:
    """Release the memory that was allocated for a batch that does not come."""
    if _packer is not None:
        _packer.finish()


def pack(number: int, batch: object, *, where: str) -> bytes:
    """Return the message for a batch. If it cannot be pickled, the rank raises that error when the batch is due.

    torch's own queue prints such an error in the worker, and the rank waits forever.
    """
    packer = _packer or Packer(None, worker=0, pins=False, moves=False)
    try:
        return packer.pack(number, batch)
    except Exception as error:  # a user's __reduce__ may raise anything
        wrapped = ExceptionWrapper(where=where)
        try:
            return packer.pack(number, wrapped)
        except Exception:  # the error itself cannot be pickled
            wrapped.exc_type, wrapped.exc_msg = RuntimeError, f"{type(error).__name__}: {wrapped.exc_msg}"
            return packer.pack(number, wrapped)


def _release_gpus() -> None:
    """Replace GPU devices inherited by fork by /dev/null: they would keep the rank's GPU memory after its end.

    CUDA cannot be used in a forked child anyway. The numbers stay taken, so that a library that still has them cannot
    hit another file.
    """
    with suppress(OSError), Path(os.devnull).open("rb") as null:
        for fd in _open_files("/dev/nvidia"):
            os.dup2(null.fileno(), fd, inheritable=False)


def _close_inherited_slots() -> None:
    """Close the descriptors of slots that the rank had at the fork: they would keep memory that the rank gives back.

    Nothing in a forked child uses them: what it inherits of the rank's pools does nothing in another process.
    """
    for fd in _open_files(f"/memfd:{SLOT_NAME}"):
        os.close(fd)


def _open_files(prefix: str) -> list[int]:
    """Return the descriptors of this process whose files have paths that begin with `prefix`."""
    found: list[int] = []
    with suppress(OSError):  # /proc is hidden
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the iteration itself
                if str(entry.readlink()).startswith(prefix):
                    found.append(int(entry.name))
    return found
