"""Page-locked memory on a chosen NUMA node, for user code.

It is meant for long-lived buffers: each `empty` maps, faults in and registers separate memory (0.2 to 0.5 s per GB),
rounded up to pages. The batches of a DataLoader use the loader's slots instead.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from numapin.base.text import printable
from numapin.data.arguments import sizes_of
from numapin.data.budget import num_ranks_of, read_room
from numapin.data.locality import Locality, find_locality
from numapin.data.pinning import Locked, reclaimer
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.system.cuda import CudaRefused, driver
from numapin.system.pages import PINNED, find_pages, place
from numapin.system.refusals import SYS_NICE

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

T = TypeVar("T")

_LIVE: Final = Path("/")
_SEE_BUDGET: Final = "see what may be locked here: numapin.pinned.budget()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that this rank may pin. RLIMIT_MEMLOCK plays no part: NVIDIA's open driver ignores it.

    Attributes:
        limit_bytes: The bytes that may be pinned in addition to those pinned now. None: the machine shows no limit.
        pinned_bytes: The bytes that numapin has pinned in this process.
        torch_pinned_bytes: The bytes that torch's own allocator has pinned, cached blocks included. None: this torch
            does not report it.
        reason: Where the limit comes from.
    """

    limit_bytes: int | None
    pinned_bytes: int
    torch_pinned_bytes: int | None
    reason: str


def empty(shape: int | Iterable[int], dtype: torch.dtype | None = None, *, node: int | None = None) -> torch.Tensor:
    """Return an uninitialized CPU tensor whose memory is on a chosen node and, if CUDA is available, pinned.

    The memory lives as long as any tensor, view or numpy array that uses it, and until no device can be reading it.
    Forked children share it. A RuntimeWarning is issued if the kernel puts pages elsewhere.

    Args:
        shape: A size, or several.
        dtype: The data type. None: torch's default.
        node: The NUMA node. None: the rank's node under `numapin run`, else the node of the current GPU. If that is
            unknown, the memory policy decides.

    Returns:
        The tensor.

    Raises:
        UsageError: A size is negative, or the node does not exist.
        NumapinError: Memory ran out, or the driver refused to pin it.

    Example:
        ```python
        import torch
        from numapin import pinned

        buffer = pinned.empty((256, 3, 224, 224), torch.uint8, node=0)
        ```
    """
    import torch

    from numapin.data.quarantine import watch_captures

    sizes = sizes_of(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    num_bytes = math.prod(sizes) * dtype.itemsize
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    home = _home(node, device)
    if num_bytes == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    cuda = None
    if device is not None:
        cuda = driver()
        if cuda is None:
            raise NumapinError("torch sees a GPU, but libcuda.so.1 cannot be used here", "check it with: nvidia-smi")
        watch_captures()
        reclaimer(cuda).release_unused()
    try:
        # The mapping is shared: otherwise a write after a fork would move a page away from under the device.
        view = memoryview(mmap.mmap(-1, num_bytes))
        flat = torch.frombuffer(view, dtype=torch.uint8)
        placement = place(
            flat.data_ptr(),
            num_bytes,
            nodes=home.nodes,
            cpus=home.cpus,
            num_machine_nodes=home.num_machine_nodes,
            within=home.within,
        )
    except (OSError, OverflowError) as error:
        raise NumapinError(f"{num_bytes} bytes could not be allocated: {error}", _SEE_BUDGET) from None
    for shortfall in placement.shortfalls:
        warnings.warn(printable(f"numapin.pinned: {shortfall}"), RuntimeWarning, stacklevel=2)
    if cuda is not None and device is not None:
        address = flat.data_ptr()
        try:
            cuda.register(device, address, num_bytes)
        except CudaRefused as error:
            raise NumapinError(f"{num_bytes} bytes could not be page-locked: {error.message}", _SEE_BUDGET) from error
        PINNED.add(num_bytes)
        locked = Locked(memory=view.obj, address=address, num_bytes=num_bytes, device=device)
        # When nothing refers to the view any more; at exit the driver releases everything.
        weakref.finalize(view, reclaimer(cuda).add, locked).atexit = False
    return flat.view(dtype).view(sizes)


def pin(obj: T, *, node: int | None = None) -> T:
    """Return a batch with every tensor in it copied to pinned memory on a chosen node.

    Containers are searched by the rules of torch's `pin_memory`: mappings, sequences and named tuples keep their type,
    an object with a `pin_memory` method is replaced by that method's result, and anything else (numpy arrays, strings,
    None) stays as it is. torch's own `Tensor.pin_memory` handles tensors that are not plain dense CPU memory (sparse,
    quantized, subclasses, requires_grad, CUDA).

    Args:
        obj: A tensor, or containers of tensors.
        node: The NUMA node, as in `empty`.

    Returns:
        The same structure. Tensors that were already pinned are the same objects.

    Raises:
        UsageError: The node does not exist.
        NumapinError: Memory ran out, or the driver refused to pin it.

    Example:
        ```python
        import torch
        from numapin import pinned

        batch = pinned.pin({"images": torch.ones(4), "labels": [torch.zeros(2)]})
        ```
    """
    import torch

    from numapin.data.casting import rebuild

    def pin_one(value: Any) -> object:  # noqa: ANN401 - a tensor, or any object that torch would pin
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not is_plain or value.is_quantized or value.requires_grad:
            return value.pin_memory()
        if value.is_pinned():
            return value
        strides = torch.empty_like(value, device="meta").stride()  # dense and in the same order, as in torch
        return empty(value.numel(), value.dtype, node=node).as_strided(value.shape, strides).copy_(value)

    return cast("T", rebuild(obj, pin_one, is_leaf=lambda value: hasattr(value, "pin_memory")))


def where(tensor: torch.Tensor) -> dict[int | None, int]:
    """Count the pages of a CPU tensor's storage on each node, as the kernel reports them.

    Args:
        tensor: A dense CPU tensor. Its whole storage is counted, including parts used by other views and pages that
            it covers only in part.

    Returns:
        The number of pages by node. The key None counts pages that were never touched.

    Raises:
        UsageError: The tensor is not on the CPU, or not dense.
        MachineError: The kernel refuses to report it, e.g. under Docker's seccomp profile.

    Example:
        ```python
        import torch
        from numapin import pinned

        print(pinned.where(torch.ones(1 << 20)))
        ```
    """
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        seen = f"this tensor's .device is {tensor.device} and its .layout {tensor.layout}"
        raise UsageError(f"where() needs a dense CPU tensor; {seen}", "pass its CPU copy, or its values()")
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return {}
    pages = find_pages(storage.data_ptr(), storage.nbytes())
    if pages is None:
        raise MachineError(
            f"the kernel does not report the nodes of this tensor's {storage.nbytes()} bytes: move_pages is refused",
            SYS_NICE,
        )
    return pages


def budget(*, node: int | None = None, num_ranks: int | None = None, root: Path = _LIVE) -> Budget:
    """Return the memory that this rank may pin, and the memory that it has pinned.

    The limit is half of the free memory, divided among the ranks of this host. The free memory is the smallest of three
    figures: what the cgroup's limits leave, the host's free memory, and the node's.

    Args:
        node: The NUMA node. None: as in `empty`, once CUDA is in use.
        num_ranks: The number of ranks on this host. None: LOCAL_WORLD_SIZE, else one.
        root: The folder that contains `proc/` and `sys/`; by default the live host.

    Returns:
        The limit with its reason, and the bytes that are pinned now.

    Raises:
        UsageError: The node does not exist.

    Example:
        ```python
        from numapin import pinned

        print(pinned.budget().reason)
        ```
    """
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # no CUDA context for a query
    is_live = root == _LIVE
    home = _home(node, device) if is_live else find_locality(environ={}, node=node, device_index=device, root=root)
    num_ranks = num_ranks_of(os.environ) if num_ranks is None else num_ranks
    room = read_room(root, nodes=home.nodes, num_ranks=num_ranks)
    read_stats = getattr(torch.cuda, "host_memory_stats", None)
    torchs = None if read_stats is None else read_stats()  # empty before CUDA is initialized: nothing is locked then
    if torchs is not None:  # torch 2.13 renamed the counter
        torchs = int(torchs.get("reserved_bytes.current", torchs.get("allocated_bytes.current", 0)))
    return Budget(limit_bytes=room.num_bytes, pinned_bytes=PINNED.total, torch_pinned_bytes=torchs, reason=room.reason)


@cache
def _home(node: int | None, device: int | None) -> Locality:
    return find_locality(environ=os.environ, node=node, device_index=device)
