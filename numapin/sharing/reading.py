"""Read shared data: lists and dicts decode an entry at each access, tensors and arrays are views of the memory.

multiprocessing passes the views to new processes by reference. A new process that is not forked gets its arguments as a
pickle, which would contain a copy of each array. What processes send each other later, such as batches, is copied: a
descriptor of the memory can be passed only at their start.
"""

from __future__ import annotations

import io
import marshal
import pickle
import sys
import warnings
from bisect import bisect_left
from collections.abc import ItemsView, Mapping, Sequence, ValuesView
from functools import partial
from importlib import import_module
from itertools import repeat
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from numapin.sharing.packing import HEADER, ROOT, hash_of
from numapin.sharing.sealed import MAPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import torch

    from numapin.sharing.packing import Reference
    from numapin.sharing.sealed import Sealed


_WORD_BYTES: Final = 8


def read(sealed: Sealed) -> Any:  # noqa: ANN401 - data of any kind
    """Return the data in shared memory."""
    (start,) = ROOT.unpack_from(sealed, len(sealed) - ROOT.size)
    return _unpickled(sealed, memoryview(sealed)[start:])


class SharedList(Sequence[Any]):
    """A list or tuple in shared memory. It cannot be changed; each access creates a new copy of the entry."""

    __slots__ = ("_bytes", "_decode", "_reference", "_sealed", "_starts")

    def __init__(self, sealed: Sealed, reference: Reference) -> None:
        _kind, position, length, is_plain = reference
        self._sealed, self._reference = sealed, reference
        self._bytes, self._starts = memoryview(sealed), _table(sealed, position, length)
        self._decode = marshal.loads if is_plain else partial(_unpickled, sealed)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - what memoryview takes: also numpy's and torch's integers
        """Return an entry; for a slice, a list of entries."""
        start = self._starts[index]
        if start.__class__ is memoryview:
            return list(self._decoded(start))
        return self._decode(self._bytes[start:])

    def __iter__(self) -> Iterator[Any]:
        """Yield the entries."""
        return self._decoded(self._starts)

    def _decoded(self, starts: memoryview) -> Iterator[Any]:
        return map(self._decode, map(self._bytes.__getitem__, map(slice, starts, repeat(None))))

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the memory to a process that multiprocessing is starting."""
        return type(self), (self._sealed, self._reference)

    def __deepcopy__(self, memo: object) -> SharedList:
        """Return self: it is immutable."""
        return self

    def __repr__(self) -> str:
        """Return the number of entries."""
        return f"<numapin.share: list of {len(self)} entries>"


class _Items(ItemsView[Any, Any]):
    """The items of a dict; iteration looks up no key."""

    def __init__(self, shared: SharedDict) -> None:
        super().__init__(shared)
        self._shared = shared

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the items in the order of the keys."""
        return zip(self._shared, self._shared.entries, strict=True)


class _Values(ValuesView[Any]):
    """The values of a dict; iteration looks up no key."""

    def __init__(self, shared: SharedDict) -> None:
        super().__init__(shared)
        self._shared = shared

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in the order of the keys."""
        return iter(self._shared.entries)


class SharedDict(Mapping[Any, Any]):
    """A dict in shared memory. It cannot be changed; each access creates a new copy of the value."""

    __slots__ = ("_hashes", "_keys", "_order", "_reference", "_sealed", "entries")

    def __init__(self, sealed: Sealed, reference: Reference) -> None:
        _kind, keys, values, hashes, order = reference
        self._sealed, self._reference = sealed, reference
        self._keys, self.entries = SharedList(sealed, keys), SharedList(sealed, values)
        self._hashes, self._order = (_table(sealed, position, len(self._keys)) for position in (hashes, order))

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys in their order."""
        return iter(self._keys)

    def items(self) -> ItemsView[Any, Any]:
        """Return a view of the items."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Return a view of the values."""
        return _Values(self)

    def __getitem__(self, key: object) -> Any:  # noqa: ANN401 - data of any kind
        """Return the value of a key."""
        try:
            wanted = hash_of(key)
        except TypeError:
            raise KeyError(key) from None
        for at in range(bisect_left(self._hashes, wanted), len(self._hashes)):
            if self._hashes[at] != wanted:
                break
            number = self._order[at]
            if self._keys[number] == key:
                return self.entries[number]
        raise KeyError(key)

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the memory to a process that multiprocessing is starting."""
        return type(self), (self._sealed, self._reference)

    def __deepcopy__(self, memo: object) -> SharedDict:
        """Return self: it is immutable."""
        return self

    def __repr__(self) -> str:
        """Return the number of keys."""
        return f"<numapin.share: dict of {len(self)} keys>"


class _Unpickler(pickle.Unpickler):
    """Unpickles what this user's first rank has written; the memory was sealed after that."""

    def __init__(self, sealed: Sealed, content: memoryview, buffers: list[memoryview]) -> None:
        super().__init__(io.BytesIO(content), buffers=buffers)
        self._sealed = sealed

    def persistent_load(self, reference: Reference) -> object:
        return _LOADS[reference[0]](self._sealed, reference)


def _unpickled(sealed: Sealed, content: memoryview) -> Any:  # noqa: ANN401 - data of any kind
    """Return the value of the pickle at the start of some bytes; arrays in it are read-only views of the memory."""
    num_bytes, num_spans = HEADER.unpack_from(content)
    end = HEADER.size + 2 * num_spans * _WORD_BYTES
    spans = iter(content[HEADER.size : end].cast("Q"))
    view = memoryview(sealed).toreadonly()
    buffers = [view[start : start + size] for start, size in zip(spans, spans, strict=True)]
    value = _Unpickler(sealed, content[end : end + num_bytes], buffers).load()
    if buffers:
        register()
    return value


def _table(sealed: Sealed, position: int, length: int) -> memoryview:
    return memoryview(sealed)[position : position + length * _WORD_BYTES].cast("Q")


def _tensor(sealed: Sealed, reference: Reference) -> object:
    import torch

    _kind, position, dtype, shape = reference
    strides = torch.empty(shape, device="meta").stride()
    register()
    return tensor_at(sealed, position, getattr(torch, dtype), shape, strides)


_LOADS: Final[dict[str, Any]] = {"list": SharedList, "dict": SharedDict, "tensor": _tensor}
"""By the kind of a reference."""


# --- passing arrays to new processes ---------------------------------------------------------------------------------

_COLLATES: Final = r"torch\.utils\.data\._utils\.collate"
_PROTOCOL: Final = 4  # numpy's and Arrow's way without buffers out of the pickle
_registered: Final[set[str]] = set()

Reduced = Any
"""The function and arguments from which pickle rebuilds an object."""


def register() -> None:
    """Let multiprocessing pass arrays that lie in shared memory by reference, for each library that is loaded."""
    for library, reduce_one in _LIBRARIES.items():
        module = sys.modules.get(library)
        if module is not None and library not in _registered:
            _registered.add(library)
            kind = {"numpy": "ndarray", "torch": "Tensor", "pyarrow": "Buffer"}[library]
            ForkingPickler.register(getattr(module, kind), reduce_one)
            if library == "numpy":  # torch.as_tensor warns of a crash that a write to this memory cannot cause
                warnings.filterwarnings("ignore", "The given NumPy array is not writable", module=_COLLATES)


def _find(address: int, num_bytes: int) -> tuple[Sealed, int] | None:
    """Return the shared memory that has an array, and the array's position in it."""
    for sealed in tuple(MAPPED) if num_bytes else ():
        if sealed.address <= address < sealed.address + len(sealed):
            return sealed, address - sealed.address
    return None


def _reduce_array(array: np.ndarray[Any, Any]) -> Reduced:
    found = _find(array.ctypes.data, array.nbytes)
    if found is None or get_spawning_popen() is None or array.flags.writeable or min(array.strides, default=0) < 0:
        return array.__reduce_ex__(_PROTOCOL)
    return _array_at, (*found, array.dtype, array.shape, array.strides)


def _array_at(
    sealed: Sealed, position: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> object:
    import numpy as np

    register()
    return np.ndarray(shape, dtype, memoryview(sealed).toreadonly(), position, strides)


def _reduce_tensor(tensor: torch.Tensor) -> Reduced:
    from torch.multiprocessing.reductions import reduce_tensor

    is_dense = tensor.device.type == "cpu" and "strided" in str(tensor.layout) and not tensor.requires_grad
    found = _find(tensor.data_ptr(), tensor.nbytes) if is_dense else None
    if found is None:
        return reduce_tensor(tensor)
    if get_spawning_popen() is None:
        return reduce_tensor(tensor.clone())  # torch sends the whole storage of a tensor: here, all shared data
    return tensor_at, (*found, tensor.dtype, tuple(tensor.shape), tensor.stride())


def tensor_at(
    sealed: Sealed, position: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor at a position of shared memory. A write to it changes this process's copy of the page only."""
    import torch

    register()
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.frombuffer(sealed, dtype=dtype, count=count, offset=position).as_strided(shape, strides)


def _reduce_buffer(buffer: Any) -> Reduced:  # noqa: ANN401 - pyarrow is optional
    found = _find(buffer.address, buffer.size) if buffer.is_cpu else None
    if found is None or get_spawning_popen() is None:
        return buffer.__reduce_ex__(_PROTOCOL)
    return _buffer_at, (*found, buffer.size)


def _buffer_at(sealed: Sealed, position: int, num_bytes: int) -> object:
    pyarrow = import_module("pyarrow")
    register()
    return pyarrow.py_buffer(memoryview(sealed).toreadonly()[position : position + num_bytes])


_LIBRARIES: Final[dict[str, Callable[[Any], Reduced]]] = {
    "numpy": _reduce_array,
    "torch": _reduce_tensor,
    "pyarrow": _reduce_buffer,
}
