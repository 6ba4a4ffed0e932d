"""`numapin.share`: the first rank of a host makes the data once; all ranks and their workers read the same memory."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import warnings
from collections.abc import Sized
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.text import printable
from numapin.data.locality import find_locality
from numapin.errors import NumapinError, UsageError
from numapin.sharing.meeting import FirstRank, Hello, address_of, ask, find_seat
from numapin.sharing.packing import pack
from numapin.sharing.reading import read
from numapin.sharing.sealed import Placing, Sealed, Unsealed, copy_to, cpus_of, shortfalls_of, usable_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_MEMORY: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EFBIG})
_calls: Final = count(1)


def share(data: Any, *, name: str = "", placement: str = "interleave", timeout_s: float = 1800.0) -> Any:  # noqa: ANN401
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
    if placement not in set(Placing):
        raise UsageError(f"placement={placement!r} is unknown", f"choose one of: {', '.join(Placing)}")
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        hint = "call it in the rank, and pass the result to the dataset"
        raise UsageError("numapin.share was called in a DataLoader worker", hint)
    placing = Placing(placement)
    nodes = usable_nodes()
    own = _own_node(nodes) if placing is Placing.PER_NODE and len(nodes) > 1 else 0
    seat = find_seat(os.environ)
    call = f"placement={placement!r}"
    address = address_of(os.environ, name or f"call {next(_calls)}")
    if seat.rank > 0:
        hello = Hello(rank=seat.rank, node=own, call=call, data=_described(data))
        return read(Sealed(ask(address, hello, timeout_s)))
    if seat.size == 1:
        return read(_made(data, placing, nodes, own)[0])
    with FirstRank(address, seat) as host:
        sealed, described = _made(data, placing, nodes, own)
        copies = {own: sealed.fd}

        def descriptor(node: int) -> int:
            if node not in copies:
                try:
                    copies[node], shortfalls = copy_to(node, sealed)
                except OSError as error:
                    raise _no_memory(error) from None
                _warn(shortfalls)
            return copies[node]

        try:
            host.serve(call, "" if callable(data) else described, timeout_s, descriptor)
        finally:
            for fd in copies.values():
                if fd != sealed.fd:
                    os.close(fd)
    return read(sealed)


def _made(data: Any, placing: Placing, nodes: CpuSet, own: int) -> tuple[Sealed, str]:  # noqa: ANN401 - of any kind
    """Make the memory; return it, and the type and length of the data."""
    content = data() if callable(data) else data
    is_placed = len(nodes) > 1
    targets = nodes if placing is Placing.INTERLEAVE else CpuSet({own})
    try:
        draft = Unsealed(placing, targets if is_placed else CpuSet())
    except OSError as error:
        raise _no_memory(error) from None
    try:
        pack(content, draft)
        sealed = Sealed(draft.finish())
    except OSError as error:
        if error.errno not in _NO_MEMORY:  # raised by a method of the user's
            raise
        raise _no_memory(error) from None
    except (AttributeError, TypeError, ValueError, RecursionError, BufferError, pickle.PicklingError) as error:
        problem = f"the data cannot be shared: {type(error).__name__}: {error}"
        raise UsageError(problem, "share lists, dicts, tensors, arrays, or objects that can be pickled") from error
    finally:
        draft.abandon()
    if is_placed:
        _warn(draft.shortfalls or shortfalls_of(sealed, placing, targets))
    return sealed, _described(content)


def _own_node(nodes: CpuSet) -> int:
    """Return the node of this rank: the planned one, or else the one that has most of the CPUs it may use."""
    planned = find_locality(environ=os.environ, node=None, device_index=None).nodes & nodes
    return min(planned) if planned else max(sorted(nodes), key=lambda node: len(cpus_of(node)))


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


def _no_memory(error: OSError) -> NumapinError:
    return NumapinError(f"there is no memory for the shared data: {error.strerror}", "see: free -h; ulimit -n")


def _warn(shortfalls: Iterable[str]) -> None:
    for shortfall in dict.fromkeys(shortfalls):
        warnings.warn(printable(f"numapin.share: {shortfall}"), RuntimeWarning, stacklevel=4)
