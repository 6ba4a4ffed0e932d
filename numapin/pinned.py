"""Page-locked memory on a chosen NUMA node, for user code.

Pinning takes 0.3 to 0.5 s per GB. So memory that is freed stays page-locked, and serves a later `empty` of its node,
in any thread, if it is at most twice as large. It goes back to the system after five idle minutes, as far as new
memory would exceed the `budget` beside it or more would wait than was ever in use, and with `trim`. The batches of a
DataLoader use the loader's slots instead.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from numapin.base.text import printable
from numapin.data.budget import num_ranks_of, read_room
from numapin.data.locality import Locality, find_locality
from numapin.data.pinning import Locked, reclaimer, sizes_of, whole_pages
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.system.cuda import CudaRefused, driver
from numapin.system.memory import address_of
from numapin.system.pages import PINNED, check, find_pages, move_pages, place
from numapin.system.refusals import SYS_NICE

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from numapin.data.pinning import Reclaimer
    from numapin.system.cuda import Driver
    from numapin.system.pages import Placement

T = TypeVar("T")

_LIVE: Final = Path("/")
_OF_ITS_OWN: Final = 128 << 10  # bytes from which on malloc maps memory; the pages of less may be others', too
_SEE_BUDGET: Final = "see what may be locked here: numapin.pinned.budget()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that this rank may pin. RLIMIT_MEMLOCK plays no part: NVIDIA's open driver ignores it.

    Attributes:
        limit_bytes: The bytes that may be pinned in addition to those pinned now. None: the machine shows no limit.
        pinned_bytes: The bytes that numapin has pinned in this process.
        idle_bytes: Those of them that wait for reuse: see `trim`.
        torch_pinned_bytes: The bytes that torch's own allocator has pinned, cached blocks included. None: this torch
            does not report it.
        reason: Where the limit comes from.
    """

    limit_bytes: int | None
    pinned_bytes: int
    idle_bytes: int
    torch_pinned_bytes: int | None
    reason: str


def empty(shape: int | Iterable[int], dtype: torch.dtype | None = None, *, node: int | None = None) -> torch.Tensor:
    """Return an uninitialized CPU tensor whose memory is on a chosen node and, if CUDA is available, pinned.

    The memory is in use as long as any tensor, view or numpy array refers to it, and until no device can be reading it.
    Then it waits for reuse: see the head of this module. Forked children share it, and what is in use during a fork is
    never reused. A RuntimeWarning is issued if the kernel puts pages elsewhere.

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
    if device is None:
        memory, placement = _map(num_bytes, home)
        view, shortfalls = memoryview(memory), placement.shortfalls
    else:
        cuda = driver()
        if cuda is None:
            raise NumapinError("torch sees a GPU, but libcuda.so.1 cannot be used here", "check it with: nvidia-smi")
        watch_captures()
        ours, size, shortfalls = reclaimer(cuda), whole_pages(num_bytes), ()
        locked = ours.take(home.nodes, size)
        if locked is None and ours.idle.num_bytes:  # beside them, the new memory may be too much
            room = read_room(_LIVE, nodes=home.nodes, num_ranks=num_ranks_of(os.environ)).num_bytes
            ours.trim(max(ours.idle.excess_bytes, 0 if room is None else size - room))
        while locked is None:
            try:
                locked, shortfalls = _lock(ours, cuda, size, home, device)
            except NumapinError:  # perhaps there is enough without the blocks that wait
                if not ours.trim():
                    raise
        view = None
        try:
            view = memoryview(cast("mmap.mmap", locked.memory))[:num_bytes]
            # When nothing refers to the view any more; at exit the driver releases everything.
            weakref.finalize(view, ours.add, locked).atexit = False
        except BaseException:  # Ctrl-C: registered memory must not be unmapped
            if view is None or not weakref.getweakrefcount(view):
                ours.add(locked)
            raise
    for shortfall in shortfalls:
        warnings.warn(printable(f"numapin.pinned: {shortfall}"), RuntimeWarning, stacklevel=2)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(sizes)


def _lock(ours: Reclaimer, cuda: Driver, num_bytes: int, home: Locality, device: int) -> tuple[Locked, tuple[str, ...]]:
    """Return a new block, and what was not done as asked."""
    num_forks = ours.idle.num_forks
    memory, placement = _map(num_bytes, home)
    address = address_of(memory)
    is_elsewhere = bool(home.nodes) and not home.nodes.issuperset(placement.pages or ())
    locked = Locked(
        memory=memory,
        address=address,
        num_bytes=num_bytes,
        device=device,
        nodes=None if is_elsewhere else home.nodes,  # once it is freed, a new block may get the right node
        num_forks=num_forks,
    )
    try:
        cuda.register(device, address, num_bytes)
        PINNED.add(num_bytes)
        if locked.nodes is not None:
            ours.idle.note_lent(num_bytes)
    except CudaRefused as error:
        raise NumapinError(f"{num_bytes} bytes could not be page-locked: {error.message}", _SEE_BUDGET) from error
    except BaseException:  # Ctrl-C: registered memory must not be unmapped
        with suppress(CudaRefused):  # it is not registered yet
            cuda.unregister(device, address)
        raise
    return locked, placement.shortfalls


def _map(num_bytes: int, home: Locality) -> tuple[mmap.mmap, Placement]:
    """Return new memory with all its pages, and where they are."""
    try:
        # The mapping is shared: otherwise a write after a fork would move a page away from under the device.
        memory = mmap.mmap(-1, num_bytes)
        return memory, _place(address_of(memory), num_bytes, home)
    except (OSError, OverflowError) as error:
        raise NumapinError(f"{num_bytes} bytes could not be allocated: {error}", _SEE_BUDGET) from None


def _place(address: int, num_bytes: int, home: Locality) -> Placement:
    nodes, num_machine_nodes = home.nodes, home.num_machine_nodes
    return place(
        address, num_bytes, nodes=nodes, cpus=home.cpus, num_machine_nodes=num_machine_nodes, within=home.within
    )


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
    from numapin.data.casting import rebuild

    def pin_one(value: Any) -> object:  # noqa: ANN401 - a tensor, or any object that torch would pin
        copy = _pinned_copy(value, node)
        return value.pin_memory() if copy is None else copy

    return cast("T", rebuild(obj, pin_one, is_leaf=lambda value: hasattr(value, "pin_memory")))


def _pinned_copy(value: object, node: int | None) -> torch.Tensor | None:
    """Return a plain tensor's copy, or the tensor itself if it is pinned; None for anything else."""
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return None
    if value.is_quantized or value.requires_grad or value.is_nested:
        return None
    if value.is_pinned():
        return value
    strides = torch.empty_like(value, device="meta").stride()  # dense and in the same order, as in torch
    return empty(value.numel(), value.dtype, node=node).as_strided(value.shape, strides).copy_(value)


def serve_torch() -> ExitStack:
    """Make torch's own code pin memory through `empty`, on the node of the rank or of the current GPU.

    - `Tensor.pin_memory` of plain dense CPU memory returns such memory. FSDP2's `CPUOffloadPolicy()` pins parameters
      with it, torch.distributed.checkpoint the copies of a `BlockingAsyncStager` (also as a `FileSystemWriter`) with
      `cache_staged_state_dict=True`, and torch's DataLoader its batches.
    - The copies that torch.distributed.checkpoint's `DefaultStager` makes and registers itself, of 128 KiB and more,
      are placed on the node first.

    torch still uses its own cache for `torch.empty(pin_memory=True)`, and for copies to the host with
    `non_blocking=True`, such as FSDP2's gradients. A RuntimeWarning names what this torch does not support. While it is
    in effect, a second call changes nothing.

    Returns:
        An ExitStack. Closing it, or leaving its `with` block, restores torch; memory in use stays valid.

    Example:
        ```python
        from numapin import pinned

        pinned.serve_torch()  # before fully_shard(model, offload_policy=CPUOffloadPolicy())
        ```
    """
    import torch

    serving, torchs = ExitStack(), torch.Tensor.pin_memory
    if getattr(torchs, "__module__", None) == __name__:
        return serving

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:  # noqa: ANN401 - as torch types it
        copy, is_for_cuda = None, device is None or torch.device(device).type == "cuda"
        if is_for_cuda and torch.cuda.is_available() and tensor.numel():
            if driver() is None:
                problem = "numapin.pinned: libcuda.so.1 cannot be used: torch pins"
                warnings.warn(printable(problem), RuntimeWarning, stacklevel=2)
            else:
                copy = _pinned_copy(tensor, None)
        if copy is None:
            return torchs(tensor) if device is None else torchs(tensor, device)
        return copy

    _substitute(torch.Tensor, "pin_memory", pin_memory, serving)
    _place_staged(serving)
    return serving


def _place_staged(serving: ExitStack) -> None:
    """Place what torch.distributed.checkpoint is about to register with CUDA: see torch/cuda/_pin_memory_utils.py."""
    import torch

    name = "torch.cuda._pin_memory_utils"
    try:
        module = import_module(name)
        register = module.pin_memory
        is_known = list(signature(register).parameters) == ["data_ptr", "size"]
    except (ImportError, AttributeError):
        is_known = False
    if not is_known:
        problem = f"torch {torch.__version__} has no {name}.pin_memory(data_ptr, size)"
        problem = f"numapin.pinned: {problem}: what DefaultStager pins stays where torch puts it"
        warnings.warn(printable(problem), RuntimeWarning, stacklevel=3)
        return

    def pin_memory(data_ptr: int, size: int) -> None:
        home = _home(None, torch.cuda.current_device())
        first, end = whole_pages(data_ptr), (data_ptr + size) // mmap.PAGESIZE * mmap.PAGESIZE
        is_placed = size >= _OF_ITS_OWN and home.nodes and home.num_machine_nodes > 1
        # The contents may be zeroed. What malloc has used before has its pages already: these are moved.
        if is_placed and _place(first, end - first, home).shortfalls:
            with suppress(OSError):  # reported as pages that are elsewhere
                pages = range(first, end, mmap.PAGESIZE)
                move_pages(os.getpid(), pages, min(home.nodes), within=home.nodes)
            found = check(first, end - first, nodes=home.nodes, num_machine_nodes=home.num_machine_nodes)
            for shortfall in found.shortfalls:
                warnings.warn(printable(f"numapin.pinned: {shortfall}"), RuntimeWarning, stacklevel=2)
        register(data_ptr, size)

    _substitute(module, "pin_memory", pin_memory, serving)


def _substitute(owner: object, name: str, value: object, serving: ExitStack) -> None:
    if name in vars(owner):
        serving.callback(setattr, owner, name, getattr(owner, name))
    else:
        serving.callback(delattr, owner, name)
    setattr(owner, name, value)


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


def budget(*, node: int | None = None, num_ranks: int | None = None) -> Budget:
    """Return the memory that this rank may pin, and the memory that it has pinned.

    The limit is half of the free memory, divided among the ranks of this host. The free memory is the smallest of three
    figures: what the cgroup's limits leave, the host's free memory, and the node's.

    Args:
        node: The NUMA node. None: as in `empty`, once CUDA is in use.
        num_ranks: The number of ranks on this host. None: LOCAL_WORLD_SIZE, else one.

    Returns:
        The limit with its reason, and the bytes that are pinned now.

    Raises:
        UsageError: The node does not exist, or `num_ranks` is less than 1.

    Example:
        ```python
        from numapin import pinned

        print(pinned.budget().reason)
        ```
    """
    import torch

    if num_ranks is not None and num_ranks < 1:
        raise UsageError(f"num_ranks={num_ranks}: a host has at least one rank", "pass the number of ranks, or None")
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # no CUDA context for a query
    num_ranks = num_ranks_of(os.environ) if num_ranks is None else num_ranks
    room = read_room(_LIVE, nodes=_home(node, device).nodes, num_ranks=num_ranks)
    read_stats = getattr(torch.cuda, "host_memory_stats", None)
    torchs = None if read_stats is None else read_stats()  # empty before CUDA is initialized: nothing is locked then
    if torchs is not None:  # torch 2.13 renamed the counter
        torchs = int(torchs.get("reserved_bytes.current", torchs.get("allocated_bytes.current", 0)))
    cuda = driver() if device is not None else None
    return Budget(
        limit_bytes=room.num_bytes,
        pinned_bytes=PINNED.total,
        idle_bytes=0 if cuda is None else reclaimer(cuda).idle.num_bytes,
        torch_pinned_bytes=torchs,
        reason=room.reason,
    )


def trim() -> int:
    """Release the pinned memory that waits for reuse.

    Memory that a device may still be reading is not released yet.

    Returns:
        The number of bytes released.

    Example:
        ```python
        from numapin import pinned

        pinned.trim()
        ```
    """
    import torch

    cuda = driver() if torch.cuda.is_initialized() else None
    return 0 if cuda is None else reclaimer(cuda).trim()


@cache
def _home(node: int | None, device: int | None) -> Locality:
    return find_locality(environ=os.environ, node=node, device_index=device)
