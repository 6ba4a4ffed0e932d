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

from numapin import bind
from numapin.data.packing import Packer
from numapin.data.slots import Control, OwnSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.locality import Locality

_LARGE_BYTES: Final = 4 << 20  # below this, handing work to threads costs more than it saves

_state: _Worker | None = None


@dataclass(slots=True)
class _Worker:
    """What this worker process has; one of these, made by `WorkerStart`."""

    packer: Packer
    copy_threads: int
    threads: ThreadPoolExecutor


class Rank:
    """The rank's process, as its workers see it: a pidfd, which cannot be mistaken for a later process."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @classmethod
    def this(cls) -> Rank:
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


def _take_rank(fd: Any) -> Rank:  # noqa: ANN401 - DupFd has no public type
    return Rank(None if fd is None else fd.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The worker_init_fn that every worker of ours runs; the user's own comes last.

    `pins`: batches must end up in pinned memory; `moves`: on a device. `copy_threads` stack a large batch.
    """

    control: Control | None
    rank: Rank
    locality: Locality
    pins: bool
    moves: bool
    copy_threads: int
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
        threads = ThreadPoolExecutor(self.copy_threads, "numapin-copy", partial(torch.set_num_threads, 1))
        _state = _Worker(packer, self.copy_threads, threads)
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
    first = batch[0]
    size = first.shape
    if _can_stack(first) and all(type(tensor) is torch.Tensor and tensor.shape == size for tensor in batch):
        out = _state.packer.allocate(first.dtype, (len(batch), *size)) if _state else None
        if out is not None:
            return _stack(batch, out)
    return _torch_collate(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _stack(batch: Any, out: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a sequence of tensors
    """Stack into `out`; a large batch on as many threads as the rank has CPUs for each worker."""
    parts = _state.copy_threads if _state and out.nbytes >= _LARGE_BYTES else 1
    if parts == 1:
        return torch.stack(batch, 0, out=out)
    assert _state is not None  # noqa: S101 - parts says so
    cuts = [len(batch) * part // parts for part in range(parts + 1)]
    others = [
        _state.threads.submit(torch.stack, batch[first:last], 0, out=out[first:last])
        for first, last in pairwise(cuts[1:])
    ]
    try:
        torch.stack(batch[: cuts[1]], 0, out=out[: cuts[1]])
    finally:
        for other in others:
            other.result()
    return out


def _can_stack(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and get_worker_info() is not None
    )


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
