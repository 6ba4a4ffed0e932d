"""Map the memory of slots, and allocate memory for batches without one."""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress
from typing import Final

import torch

from numapin.system import memory
from numapin.system.calls import call

_MADV_DONTFORK: Final = 10
_MADV_DOFORK: Final = 11


def map_memfd(fd: int, num_bytes: int) -> torch.Tensor:
    """Map a memfd, shared and writable, as a uint8 tensor. The mapping holds no descriptor, unlike `mmap.mmap`.

    torch unmaps it with its last reference; a finalizer of ours could run while other garbage still reads the memory.
    The kernel may use huge pages where the machine allows that for shared memory. Raises OSError.
    """
    mmap.mmap(fd, num_bytes).close()  # raises where torch would, which leaks a descriptor then (2.13)
    try:
        path = f"/proc/self/fd/{fd}"
        tensor = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"{num_bytes} bytes of a memfd cannot be mapped: {error}") from None
    with suppress(OSError):  # a kernel without huge pages
        call("madvise", tensor.data_ptr(), num_bytes, mmap.MADV_HUGEPAGE)
    return tensor


def ordinary_memory(num_bytes: int) -> memoryview:
    """Return memory of this process, aligned as torch aligns it."""
    owner = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return memory.view_of(memory.window(owner.data_ptr(), num_bytes, owner=owner))


def fault_in(tensor: torch.Tensor) -> None:
    """Fault in every page of a mapping without changing its contents. Raises OSError if the kernel has no memory.

    Before Linux 5.14 it does nothing: pinning faults pages in, too, and so does the first write.
    """
    try:
        memory.populate(tensor.data_ptr(), tensor.nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def hide_from_children(tensor: torch.Tensor, *, hide: bool) -> None:
    """Keep a mapping out of children that are forked from now on, or let them inherit it again."""
    with suppress(OSError):
        call("madvise", tensor.data_ptr(), tensor.nbytes, _MADV_DONTFORK if hide else _MADV_DOFORK)
