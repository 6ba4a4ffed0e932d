"""Read shared data: lists and dicts decode an entry at each access, tensors and arrays are views of the memory."""

from __future__ import annotations

import io
import marshal
import pickle
from bisect import bisect_left
from collections.abc import ItemsView, Mapping, Sequence, ValuesView
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from numapin.sharing import passing
from numapin.sharing.packing import HEADER, ROOT, hash_of

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        passing.register()
    return value


def _table(sealed: Sealed, position: int, length: int) -> memoryview:
    return memoryview(sealed)[position : position + length * _WORD_BYTES].cast("Q")


def _tensor(sealed: Sealed, reference: Reference) -> object:
    import torch

    _kind, position, dtype, shape = reference
    strides = torch.empty(shape, device="meta").stride()
    passing.register()
    return passing.tensor_at(sealed, position, getattr(torch, dtype), shape, strides)


_LOADS: Final[dict[str, Any]] = {"list": SharedList, "dict": SharedDict, "tensor": _tensor}
"""By the kind of a reference."""
