"""Stack samples straight into the batch's memory. Edge (writes memory).

Comes in: the tensors that torch's default collate stacks. Goes out: one tensor, in the batch's slot if there is room.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate

from numapin.data.worker.packing import LARGE_BYTES
from numapin.data.worker.storages import is_plain
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.data.worker.packing import Packer

    CollateMap = dict[type | tuple[type, ...], Callable[..., Any]]

_torch_collate: Final = collate.collate_tensor_fn
_IS_NESTED, _SHAPE, _DTYPE = attrgetter("is_nested"), attrgetter("shape"), attrgetter("dtype")


class Stacker:
    """Stacks samples into the memory of a packer's batch."""

    def __init__(self, packer: Packer, *, num_threads: int, can_be_ahead: bool = False) -> None:
        """Stack large batches on `num_threads` threads, or on one if the worker is ahead of the loop."""
        self._packer, self._num_threads, self._can_be_ahead = packer, num_threads, can_be_ahead
        # torch's number of threads is a setting of each thread.
        self._pool = ThreadPoolExecutor(num_threads, "numapin-copy", partial(torch.set_num_threads, 1))

    def install(self) -> None:
        """Let torch's default collate stack tensors here, in this process, unless the user has put in another function.

        Code that stacks into new shared memory, as torch's own function does (for tensors of a subclass; in a user's
        map of functions; PyTorch Geometric), gets a part of the batch's slot instead.
        """
        functions: CollateMap = collate.default_collate_fn_map
        if functions.get(torch.Tensor) is _torch_collate:
            functions[torch.Tensor] = self.collate
        storages: Any = torch.UntypedStorage
        torchs_own = storages._new_shared.__func__  # the one place through which all of them go

        def _new_shared(cls: type, size: int, *, device: torch.device | str = "cpu") -> object:
            is_plain = cls is torch.UntypedStorage and torch.device(device).type == "cpu"
            room = self._packer.allocate(torch.uint8, (size,)) if is_plain else None
            return torchs_own(cls, size, device=device) if room is None else room.untyped_storage()

        storages._new_shared = classmethod(_new_shared)

    def collate(self, batch: object, *, collate_fn_map: CollateMap | None = None) -> torch.Tensor:
        """Stack tensors as torch's default collate does, straight into the batch's slot if there is room."""
        if isinstance(batch, list | tuple) and get_worker_info() is not None:
            out = self._memory_for(batch)
            if out is not None:
                return self.stack(batch, out)
        return _torch_collate(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]

    def _memory_for(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return memory for the batch; None if there is none, or if torch should stack or refuse it."""
        first = batch[0]
        if not _can_stack(first) or not _are_alike(batch):
            return None
        casts = self._packer.casts
        dtype = casts.get(first.dtype, first.dtype)
        if dtype is not first.dtype and dtype in casts:
            return None  # a mapping like {float64: float32, float32: bfloat16}: the pickler would cast it once more
        return self._packer.allocate(dtype, (len(batch), *first.shape))

    def stack(self, batch: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Stack into `out`, cast to its dtype; a large batch on several threads.

        Many threads at once slow the GPU's copies down, so a worker that is ahead of the loop takes its time.
        """
        if out.nbytes < LARGE_BYTES:
            return torch.stack(batch, 0, out=out)  # type: ignore[arg-type] # it takes tuples, too
        stack = self._function_for(batch, out)
        is_ahead = self._can_be_ahead and self._packer.was_idle
        num_parts = 1 if is_ahead else min(self._num_threads, len(batch))
        cuts = [len(batch) * part // num_parts for part in range(num_parts + 1)]
        self._run([partial(stack, batch[first:last], out=out[first:last]) for first, last in pairwise(cuts)])
        return out

    def _function_for(self, batch: Sequence[torch.Tensor], out: torch.Tensor) -> Callable[..., object]:
        """Return what stacks a part of a large batch."""
        if batch[0].dtype is not out.dtype:
            return _stack_cast
        if self._packer.passes_caches and all(_is_block(tensor, out.dtype) for tensor in batch):
            return _stack_past_caches
        return torch.stack

    def _run(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run the first part here and the others on threads; return when all have ended."""
        waits = [self._begin(part) for part in parts[1:]]
        try:
            parts[0]()
        finally:
            for wait in waits:
                wait()

    def _begin(self, work: Callable[[], object]) -> Callable[[], object]:
        """Start work on a thread; return a function that waits for its end, or does it if no thread can be started."""
        try:
            return self._pool.submit(work).result
        except RuntimeError:
            return work


def _can_stack(tensor: object) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )


def _are_alike(batch: Sequence[object]) -> bool:
    """Return whether these are dense tensors of one shape and dtype, without a call into Python code for each."""
    if set(map(type, batch)) != {torch.Tensor} or any(map(_IS_NESTED, batch)):
        return False
    return len(set(map(_SHAPE, batch))) == 1 == len(set(map(_DTYPE, batch)))  # a nested tensor would have no shape


def _is_block(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor's bytes are its elements in their order."""
    return tensor.dtype is dtype and is_plain(tensor) and tensor.is_contiguous()


def _stack_past_caches(batch: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    memory.stack_past_caches(out.data_ptr(), [tensor.data_ptr() for tensor in batch], out.nbytes // len(batch))


def _stack_cast(batch: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    """Cast sample by sample, which takes a fifth less time than torch.stack."""
    for sample, row in zip(batch, out.unbind(), strict=True):
        row.copy_(sample)
