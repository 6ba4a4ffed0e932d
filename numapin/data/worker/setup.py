"""What is installed in a worker, by its worker_init_fn. Edge.

Comes in: `WorkerStart`, from the rank. Goes out: a worker on the rank's CPUs and memory whose batches are collated into
slots, and which ends when the rank does.
"""

from __future__ import annotations

import gc
import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate

from numapin.data.slots.control import Control, OwnSlots
from numapin.data.worker.packing import LARGE_BYTES, Packer, is_plain
from numapin.rank import bind
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.data.locality import Locality

_state: _Worker | None = None


@dataclass(slots=True)
class _Worker:
    """What this worker process has; one of these, made by `WorkerStart`."""

    packer: Packer
    num_copy_threads: int
    pool: ThreadPoolExecutor


class OwnerProcess:
    """The rank's process, as its workers see it: a pidfd, which cannot be mistaken for a later process."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @classmethod
    def this(cls) -> OwnerProcess:
        """Return this process; on kernels before 5.3 there is nothing to watch."""
        try:
            return cls(os.pidfd_open(os.getpid()))
        except OSError:
            return cls(None)

    def __reduce__(self) -> tuple[object, ...]:
        """Give the descriptor to a process that is being started."""
        return _take_rank, (DupFd(self._fd) if self._fd is not None and get_spawning_popen() is not None else None,)

    def end_with(self) -> None:
        """End this process as soon as the rank has ended, whatever ended it and whichever thread forked us."""
        if self._fd is not None:
            threading.Thread(target=self._watch, args=(self._fd,), name="numapin-watch", daemon=True).start()

    def close(self) -> None:
        """Close the descriptor in this process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @staticmethod
    def _watch(fd: int) -> None:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        ended.poll()
        os._exit(1)


def _take_rank(fd: Any) -> OwnerProcess:  # noqa: ANN401 - DupFd has no public type
    return OwnerProcess(None if fd is None else fd.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The worker_init_fn that every worker of ours runs; the user's own comes last.

    `pins`: batches must end up in pinned memory; `moves`: on a device. `num_copy_threads` stack a large batch.
    """

    control: Control | None
    rank: OwnerProcess
    locality: Locality
    pins: bool
    moves: bool
    num_copy_threads: int
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Set this worker up. Raises what the user's own function raises, and nothing else."""
        global _state  # noqa: PLW0603 - one per process, like torch's own worker info
        where = self.locality
        bind.bind_thread(cpus=where.cpus, memory=where.memory, nodes=where.nodes)  # the rank has told what is refused
        self.rank.end_with()
        if _is_in_bad_fork():
            _let_go_of_gpus()
        slots = OwnSlots(self.control, worker) if self.control else None
        packer = Packer(slots, worker=worker, pins=self.pins, moves=self.moves)
        # torch's number of threads is a thread's own
        threads = ThreadPoolExecutor(self.num_copy_threads, "numapin-copy", partial(torch.set_num_threads, 1))
        _state = _Worker(packer, self.num_copy_threads, threads)
        if slots:
            collate.default_collate_fn_map[torch.Tensor] = collate_tensor
        if self.then is not None:
            self.then(worker)


def begin(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run a worker. What it inherited by fork is not its to collect: destroying a CUDA event would abort it."""
    if _is_in_bad_fork():
        gc.freeze()
    target(*arguments)


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that uses CUDA."""
    return bool(torch.cuda._is_in_bad_fork())  # noqa: SLF001 - torch has no public way to ask


def pack(number: int, batch: object, *, where: str) -> bytes:
    """Return the message for a batch. What cannot be pickled becomes an error that the rank raises at its turn.

    torch's own queue prints such an error in the worker and lets the rank wait for ever.
    """
    packer = _state.packer if _state else Packer(None, worker=0, pins=False, moves=False)
    try:
        return packer.pack(number, batch)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises
        wrapped = ExceptionWrapper(where=where)
        try:
            return packer.pack(number, wrapped)
        except Exception:  # noqa: BLE001 - the error itself cannot be pickled
            wrapped.exc_type, wrapped.exc_msg = RuntimeError, f"{type(error).__name__}: {wrapped.exc_msg}"
            return packer.pack(number, wrapped)


_torch_collate: Final = collate.collate_tensor_fn


def collate_tensor(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:  # noqa: ANN401 - torch's signature
    """Stack tensors as torch's default collate does, straight into the batch's slot where there is room."""
    out = _room_for(batch) if isinstance(batch, list | tuple) and get_worker_info() is not None else None
    if out is None:
        return _torch_collate(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    return _stack(batch, out)


def _room_for(batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return memory for the batch, None where there is none or torch should stack: it words what it refuses."""
    first = batch[0]
    if _state is None or type(first) is not torch.Tensor or not _can_stack(first):
        return None
    shape = first.shape
    if not all(type(other) is torch.Tensor and not other.is_nested and other.shape == shape for other in batch):
        return None
    return _state.packer.allocate(first.dtype, (len(batch), *shape))


def _can_stack(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )


def _stack(batch: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Stack into `out`; a large batch on as many threads as the rank has CPUs for each worker."""
    if _state is None or out.nbytes < LARGE_BYTES:
        return torch.stack(batch, 0, out=out)  # type: ignore[arg-type] # it takes tuples, too
    passes = _state.packer.passes_caches and all(_is_block(tensor, out.dtype) for tensor in batch)
    stack: Callable[..., object] = _stack_past_caches if passes else torch.stack
    num_parts = min(_state.num_copy_threads, len(batch))
    cuts = [len(batch) * part // num_parts for part in range(num_parts + 1)]
    parts = [partial(stack, batch[first:last], out=out[first:last]) for first, last in pairwise(cuts)]
    others = [_begin(_state.pool, part) for part in parts[1:]]
    try:
        parts[0]()
    finally:
        for end in others:
            end()
    return out


def _begin(pool: ThreadPoolExecutor, work: Callable[[], object]) -> Callable[[], object]:
    """Let the pool do something; return what waits for its end, or does it where no thread can be started."""
    try:
        return pool.submit(work).result
    except RuntimeError:
        return work


def _is_block(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor's bytes are those of its elements in their order."""
    return tensor.dtype is dtype and is_plain(tensor) and tensor.is_contiguous()


def _stack_past_caches(batch: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    memory.stack_past_caches(out.data_ptr(), [tensor.data_ptr() for tensor in batch], out.nbytes // len(batch))


def _let_go_of_gpus() -> None:
    """Put /dev/null in the place of GPU devices inherited by fork: they would keep the rank's GPU memory after its end.

    CUDA cannot be used in a forked child anyway. The numbers stay taken, so that a library that still has them cannot
    hit another file.
    """
    with suppress(OSError), Path(os.devnull).open("rb") as nothing:
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                if str(entry.readlink()).startswith("/dev/nvidia"):
                    os.dup2(nothing.fileno(), int(entry.name), inheritable=False)
