"""Host memory of every kind, on a chosen node. Buffers live as long as the process."""

from __future__ import annotations

import mmap
import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from numapin.data.locality import find_locality
from numapin.data.slots import map_memfd
from numapin.errors import MachineError
from numapin.plan.request import Memory
from numapin.rank import bind
from numapin.system import pages
from numapin.system.cuda import Driver, driver

if TYPE_CHECKING:
    from numapin.data.locality import Locality


@cache
def bind_to_node(node: int | None) -> Locality:
    """Bind this thread and its future allocations to a node. Call it once, before CUDA starts."""
    home = find_locality(environ={}, node=node, device_index=None)
    if node is not None and home.num_machine_nodes > 1:
        # `buffer` checks the pages, so a refusal needs no report.
        bind.bind_thread(cpus=home.cpus, memory=Memory.PREFERRED, nodes=home.nodes, within=home.within)
    return home


@cache
def buffer(memory: str, num_bytes: int, *, gpu: int, node: int | None) -> torch.Tensor:
    """Return bytes of host memory, the same ones for equal arguments.

    Raises MachineError if the kernel put pages on another node.
    """
    home = bind_to_node(node)
    num_mapped = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if memory == "pinned":
        tensor = torch_pinned(num_mapped)
    elif memory == "slot":
        with os.fdopen(os.memfd_create("numapin-bench"), "r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), num_mapped)
            tensor = map_memfd(file.fileno(), num_mapped)
    else:
        tensor = pageable(num_mapped)
    if memory in ("slot", "registered"):
        tensor.fill_(0)  # registering faults pages in under locks of the whole driver
        working_driver().register(gpu, tensor.data_ptr(), tensor.nbytes)
    tensor.fill_(1)
    found = pages.find_pages(tensor.data_ptr(), tensor.nbytes)
    # The kernel may not know the node of pages that the driver allocated.
    if node is not None and found is not None and set(found) - home.nodes - {None}:
        raise MachineError(f"{memory} memory for node {node} has pages elsewhere, by node: {found}", "see: numactl -H")
    return tensor[:num_bytes]


def working_driver() -> Driver:
    """Return the CUDA driver. Raises MachineError if it cannot be loaded."""
    found = driver()
    if found is None:
        raise MachineError("libcuda.so.1 cannot be used", "check it with: nvidia-smi")
    return found


def pageable(num_bytes: int) -> torch.Tensor:
    """Return pageable memory that was never touched."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def torch_pinned(num_bytes: int) -> torch.Tensor:
    """Return memory that torch pins."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
