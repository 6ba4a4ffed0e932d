"""`numapin.share`: the first rank of a host makes the data once; all ranks and their workers read the same memory."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import warnings
from collections.abc import Sized
from contextlib import closing, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.text import printable
from numapin.data.locality import find_locality
from numapin.errors import NumapinError, UsageError
from numapin.sharing.layout import pack, read
from numapin.sharing.meeting import FirstRank, Hello, address_of, ask, find_seat
from numapin.sharing.sealed import Sealed, Unsealed, shortfalls_of, usable_nodes
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_MEMORY: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EFBIG})
_calls: Final = count(1)


def share(data: Any, *, name: str = "", placement: str = "interleave", timeout_s: float = 1800) -> Any:  # noqa: ANN401
    """Put data into memory that all ranks of this host and their DataLoader workers share; there is one copy of it.

    All ranks call it, in the same order. The first rank of the host makes the memory, and the call returns when every
    rank has it. Without a launcher, the process is alone. The memory is sealed, and has no name: it is gone when the
    last process that uses it has ended, however that ends.

    A list or tuple comes back as a read-only sequence, a dict as a read-only mapping; each access creates a new copy of
    the entry. Tensors, numpy arrays and Arrow tables come back as views of the memory. numpy's are read-only. Tensors
    require no gradient; a write to one copies the page for this process alone. Bytes come back as a read-only
    memoryview. Any other object is unpickled in each process; the tensors and arrays in it, and lists and dicts of
    1,000 or more entries, are in the shared memory.

    Args:
        data: A function without arguments that makes the data, which only the first rank of the host calls; or the
            data. Other ranks may pass None instead. An object that can be called, such as a torch module, is taken for
            a function: pass `lambda: model`.
        name: A name that identifies the call. "": the number of the call in this process.
        placement: "interleave": the pages alternate between the NUMA nodes, which is equally fast for all ranks.
            "per-node": a copy on the node of each rank, for small data that is read at random all the time.
        timeout_s: The longest time to wait for another rank's call. While the first rank makes the data, the others
            wait for as long as it takes.

    Returns:
        The data, in shared memory. It can be passed to new processes of multiprocessing, with fork, spawn and
        forkserver.

    Raises:
        UsageError: The ranks passed different data, the data cannot be shared, or this is a DataLoader worker.
        NumapinError: A rank did not call it, the first rank failed, or memory ran out.

    Example:
        ```python
        import numapin


        def load() -> list[tuple[str, int]]:
            return [(f"images/{number}.jpg", number % 1000) for number in range(100_000)]


        samples = numapin.share(load)
        path, label = samples[7]
        ```
    """
    if placement not in ("interleave", "per-node"):
        raise UsageError(f"placement={placement!r} is unknown", "choose one of: interleave, per-node")
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        hint = "call it in the rank, and pass the result to the dataset"
        raise UsageError("numapin.share was called in a DataLoader worker", hint)
    nodes = usable_nodes()
    if len(nodes) < 2:
        nodes = CpuSet()  # there is nothing to choose
    is_per_node = placement == "per-node" and bool(nodes)
    own = _own_node(nodes) if is_per_node else 0
    rank, num_ranks = find_seat(os.environ)
    address = address_of(os.environ, name or f"call {next(_calls)}")
    if rank > 0:
        return read(Sealed(ask(address, Hello(rank, own, placement, _described(data)), timeout_s)))
    with FirstRank(address, num_ranks) if num_ranks > 1 else nullcontext() as host:
        targets = CpuSet({own}) if is_per_node else nodes
        sealed = _filled(partial(pack, data() if callable(data) else data), targets)
        if host is not None:
            asked = host.wait(placement, _described(data), timeout_s)
            copies = {own: sealed}
            for node in asked - {own}:
                copies[node] = _filled(partial(Unsealed.put, data=sealed), CpuSet({node}))
            host.send({node: copy.fd for node, copy in copies.items()})
    return read(sealed)


def _filled(fill: Callable[[Unsealed], object], nodes: CpuSet) -> Sealed:
    """Make a memory whose pages alternate between the nodes, if any; warn if they are elsewhere."""
    try:
        with closing(Unsealed(nodes)) as draft:
            fill(draft)
            sealed = draft.finish()
    except OSError as error:
        if error.errno not in _NO_MEMORY:  # raised by a method of the user's
            raise
        problem = f"the shared data cannot be stored: {error.strerror}"
        raise NumapinError(problem, "see: free -h; ulimit -a") from None
    except (AttributeError, TypeError, ValueError, RecursionError, BufferError, pickle.PicklingError) as error:
        problem = f"the data cannot be shared: {type(error).__name__}: {error}"
        raise UsageError(problem, "share lists, dicts, tensors, arrays, or objects that can be pickled") from error
    for shortfall in draft.shortfalls or (shortfalls_of(sealed, nodes) if nodes else ()):
        warnings.warn(printable(f"numapin.share: {shortfall}"), RuntimeWarning, stacklevel=3)
    return sealed


def _own_node(nodes: CpuSet) -> int:
    """Return the node of this rank: the planned one, or else the one that has most of the CPUs it may use."""
    planned = find_locality(environ=os.environ, node=None, device_index=None).nodes & nodes
    usable = os.sched_getaffinity(0)
    return min(planned or nodes, key=lambda node: (-len(usable.intersection(Tree("").node_cpus(node) or ())), node))


def _described(data: object) -> str:
    """Return the type and the length or shape of data; "" if the caller leaves it to the first rank."""
    if data is None or callable(data):
        return ""
    shape = getattr(data, "shape", None)
    if isinstance(shape, tuple):
        size = f" of shape {tuple(shape)}"
    else:
        size = f" of length {len(data)}" if isinstance(data, Sized) else ""
    return f"a {type(data).__name__}{size}"
