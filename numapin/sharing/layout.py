"""The layout of data in shared memory. Lists are written and read entry by entry, arrays and tensors as they are.

All else is a pickle, preceded by its length, which refers to long lists, dicts, tensors and the buffers of arrays: they
lie elsewhere in the memory. The position of the root pickle is at the end.
"""

from __future__ import annotations

import copyreg
import io
import marshal
import pickle
import struct
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import ItemsView, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from numbers import Number
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from numapin.errors import UsageError
from numapin.sharing import passing
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from numapin.sharing.sealed import Sealed, Unsealed

_WORD: Final = struct.Struct("<Q")
_LONG: Final = 1000  # entries; shorter lists inside of other data are pickled with it
_LONG_TEXT: Final = 1 << 20
_CHUNK: Final = 64  # entries that are written at once: few, because they are in memory twice more until then
_RUN_BYTES: Final = 1 << 15  # records that iteration decodes at once
_MAX_DEPTH: Final = 20
_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS: Final = frozenset({list, tuple, dict})

Reference = tuple[Any, ...]
"""What a pickle has in place of data that is stored elsewhere: the kind, position and shape."""

# --- writing ---------------------------------------------------------------------------------------------------------


def pack(data: object, draft: Unsealed) -> None:
    """Write data, whose outermost list or dict is never pickled as a whole. Raises UsageError and OSError."""
    if isinstance(data, str) and len(data) >= _LONG_TEXT:
        problem = f"a text of {len(data)} characters cannot be shared: Python copies it into each process"
        raise UsageError(problem, "share its encoded bytes, or a list of its lines")
    if isinstance(data, memoryview) and not data.contiguous:
        data = data.tobytes()
    if type(data) in (bytes, bytearray, memoryview):
        data = pickle.PickleBuffer(data)  # type: ignore[arg-type] # one of these three
    root = draft.put(_Pickler(draft, data, {}).pickled(data), is_aligned=True)
    draft.put(_WORD.pack(root))


class _Pickler(pickle.Pickler):
    """Pickles one value; long lists, dicts, tensors and arrays in it are written to the memory.

    `written` has the references to the lists, dicts and tensors that any pickle refers to: each is written once. It has
    the objects, too, so that their ids are not given again.
    """

    def __init__(self, draft: Unsealed, outermost: object, written: dict[int, tuple[object, Reference]]) -> None:
        self._draft, self._outermost, self._written = draft, outermost, written
        self._stream = io.BytesIO()
        self._states: dict[int, object] = {}  # by id, which is not given again while the object is here
        super().__init__(self._stream, 5)

    def pickled(self, value: object) -> bytes:
        """Return the pickle of a value, after its length; write what it refers to."""
        self.dump(value)
        return _WORD.pack(self._stream.tell()) + self._stream.getbuffer()

    def persistent_id(self, value: Any) -> Reference | None:  # noqa: ANN401 - any object
        kind = type(value)
        if kind is pickle.PickleBuffer:
            raw = value.raw()
            return "buffer", self._draft.put(raw, is_aligned=True), raw.nbytes
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and kind is torch.Tensor
        is_long = kind in _CONTAINERS and (len(value) >= _LONG or value is self._outermost)
        if not (is_long or is_tensor) or id(value) in self._states:
            return None
        if id(value) not in self._written:
            put = self._put_dict if kind is dict else self._put_tensor if is_tensor else self._put_list
            self._written[id(value)] = value, put(value)
        return self._written[id(value)][1]

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any object
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if type(value) is numpy.memmap:
                value = value.view(numpy.ndarray)  # numpy writes the bytes of a subclass into the pickle
            if value.dtype.hasobject:  # it is restored from a list, for which numpy takes no other sequence
                return pickle.loads, (pickle.dumps(value, 5),)
            if type(value) is numpy.ndarray and not (value.flags.c_contiguous or value.flags.f_contiguous):
                return value.copy().__reduce_ex__(5)  # numpy writes the bytes of others into the pickle
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)) or type(value) in copyreg.dispatch_table:
            return NotImplemented
        reduced = value.__reduce_ex__(5)
        state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
        if type(state) in _CONTAINERS:  # __setstate__ may need this very type; what is in it may be shared
            self._states[id(state)] = state
        return reduced

    def _put_list(self, values: Sequence[object]) -> Reference:
        """Write each entry, and a table of their positions and the end of the last one."""
        chunks = range(0, len(values), _CHUNK)
        is_plain = all(_is_plain(values[at : at + _CHUNK]) for at in chunks)
        # Version 2 has no references: entries are decoded faster, and no string is interned.
        encode: Callable[[Any], bytes] = (lambda value: marshal.dumps(value, 2)) if is_plain else self._pickled_apart
        bounds = array("Q", [0])
        for at in chunks:
            records = list(map(encode, values[at : at + _CHUNK]))
            start = self._draft.put(b"".join(records))
            bounds.pop()  # the end of the chunk before
            bounds.extend(accumulate(map(len, records), initial=start))
        return "list", self._draft.put(bounds, is_aligned=True), len(values), is_plain

    def _pickled_apart(self, value: object) -> bytes:
        return _Pickler(self._draft, self._outermost, self._written).pickled(value)

    def _put_dict(self, values: dict[object, object]) -> Reference:
        """Write the keys, the values, and the sorted hashes of the keys with the number of each key."""
        try:
            hashes = list(map(_hash_of, values))
        except TypeError as error:
            raise UsageError(f"a dict of {len(values)} keys cannot be shared: {error}", "use text or numbers") from None
        order = array("Q", sorted(range(len(hashes)), key=hashes.__getitem__))
        sorted_hashes = array("Q", map(hashes.__getitem__, order))
        positions = [self._draft.put(table, is_aligned=True) for table in (sorted_hashes, order)]
        lists = [self._put_list(list(entries))[1:] for entries in (values, values.values())]
        return "dict", *lists, *positions

    def _put_tensor(self, tensor: Any) -> Reference:  # noqa: ANN401 - torch may be missing
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        if tensor.device.type != "cpu" or layout != "strided" or tensor.is_quantized:
            seen = f"its device is {tensor.device}, its layout {layout}, its dtype {tensor.dtype}"
            hint = "share tensor.cpu(), or its parts, such as values() or unbind()"
            raise UsageError(f"only dense CPU tensors can be shared; {seen}", hint)
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if dense.nbytes and not dense.data_ptr():  # zeros that autograd makes without memory
            dense = dense.clone()
        content = memory.view_of(memory.window(dense.data_ptr(), dense.nbytes, owner=dense)) if dense.nbytes else b""
        position = self._draft.put(content, is_aligned=True)
        return "tensor", position, str(dense.dtype).removeprefix("torch."), tuple(dense.shape), dense.stride()


def _is_plain(values: Iterable[Any]) -> bool:
    """Return whether marshal restores all of the values, in and below containers of ordinary length, as they are.

    It would write others, such as numpy's numbers, as bytes.
    """
    for _ in range(_MAX_DEPTH):
        values = list(values)
        kinds = set(map(type, values))
        if kinds <= _ATOMS:
            return True
        if not kinds <= _ATOMS | _CONTAINERS:
            return False
        nested = [value for value in values if type(value) in _CONTAINERS]
        if max(map(len, nested)) >= _LONG:
            return False
        values = chain.from_iterable(chain(v, v.values()) if type(v) is dict else v for v in nested)
    return False


def _hash_of(key: object) -> int:
    """Return a hash that is the same in all processes, and for equal keys. Raises TypeError for other kinds of keys."""
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    if isinstance(key, tuple):
        return hash(tuple(map(_hash_of, key))) % (1 << 64)
    if not isinstance(key, Number):
        raise TypeError(f"a key is of type {type(key).__name__}")
    if key != key:  # noqa: PLR0124 - NaN, which no key that is read is equal to
        raise TypeError("a key is NaN")
    return hash(key) % (1 << 64)


# --- reading ---------------------------------------------------------------------------------------------------------


def read(sealed: Sealed) -> Any:  # noqa: ANN401 - data of any kind
    """Return the data in shared memory."""
    (start,) = _WORD.unpack_from(sealed, len(sealed) - _WORD.size)
    return _unpickled(sealed, memoryview(sealed)[start:])


class _Shared:
    """Data that a reference describes: the memory, and positions and lengths in it."""

    __slots__ = ("_reference",)
    _reference: Reference

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the memory to a process that multiprocessing is starting."""
        return type(self), self._reference

    def __deepcopy__(self, memo: object) -> Self:
        """Return self: it is immutable."""
        return self


class SharedList(_Shared, Sequence[Any]):
    """A list or tuple in shared memory. It cannot be changed; each access creates a new copy of the entry."""

    __slots__ = ("_bounds", "_bytes", "_decode", "_is_plain", "_starts")

    def __init__(self, sealed: Sealed, position: int, length: int, is_plain: bool) -> None:  # noqa: FBT001 - as written
        self._reference = sealed, position, length, is_plain
        self._bytes, self._bounds = memoryview(sealed), _table(sealed, position, length + 1)
        self._starts, self._is_plain = self._bounds[:-1], is_plain
        self._decode: Callable[[Any], Any] = marshal.loads if is_plain else partial(_unpickled, sealed)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - what memoryview takes: also numpy's and torch's integers
        """Return an entry; for a slice, a list of entries."""
        try:
            return self._decode(self._bytes[self._starts[index] :])
        except TypeError:
            if not isinstance(index, slice):
                raise
        return [self[number] for number in range(len(self))[index]]

    def __iter__(self) -> Iterator[Any]:
        """Yield the entries. Plain records in a row are decoded at once: marshal writes a list as they are written."""
        if not self._is_plain:
            yield from map(self.__getitem__, range(len(self)))
            return
        first, bounds = 0, self._bounds
        while first < len(self):
            last = max(first + 1, bisect_right(bounds, bounds[first] + _RUN_BYTES, first) - 1)
            start = b"[" + (last - first).to_bytes(4, "little")
            yield from self._decode(b"".join((start, self._bytes[bounds[first] : bounds[last]])))
            first = last

    def __repr__(self) -> str:
        """Return the number of entries."""
        return f"<numapin.share: list of {len(self)} entries>"


class _Items(ItemsView[Any, Any]):
    """The items of a dict; iteration looks up no key."""

    _mapping: SharedDict

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the items in the order of the keys."""
        return zip(self._mapping, self._mapping.entries, strict=True)


class SharedDict(_Shared, Mapping[Any, Any]):
    """A dict in shared memory. It cannot be changed; each access creates a new copy of the value."""

    __slots__ = ("_hashes", "_keys", "_order", "entries")

    def __init__(self, sealed: Sealed, keys: Reference, entries: Reference, hashes: int, order: int) -> None:
        self._reference = sealed, keys, entries, hashes, order
        self._keys, self.entries = SharedList(sealed, *keys), SharedList(sealed, *entries)
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

    def values(self) -> SharedList:  # type: ignore[override] # it has all that a ValuesView has
        """Return the values, which are a list in shared memory."""
        return self.entries

    def __getitem__(self, key: object) -> Any:  # noqa: ANN401 - data of any kind
        """Return the value of a key."""
        try:
            wanted = _hash_of(key)
        except TypeError:
            raise KeyError(key) from None
        for at in range(bisect_left(self._hashes, wanted), len(self)):
            if self._hashes[at] != wanted:
                break
            if self._keys[self._order[at]] == key:
                return self.entries[self._order[at]]
        raise KeyError(key)

    def __repr__(self) -> str:
        """Return the number of keys."""
        return f"<numapin.share: dict of {len(self)} keys>"


class _Unpickler(pickle.Unpickler):
    """Unpickles what this user's first rank has written; the memory was sealed after that."""

    sealed: Sealed

    def persistent_load(self, reference: Reference) -> object:
        kind, *place = reference
        return _KINDS[kind](self.sealed, *place)


def _unpickled(sealed: Sealed, content: memoryview) -> Any:  # noqa: ANN401 - data of any kind
    """Return the value of the pickle at the start of some bytes; arrays in it are read-only views of the memory."""
    (num_bytes,) = _WORD.unpack_from(content)
    unpickler = _Unpickler(io.BytesIO(content[_WORD.size : _WORD.size + num_bytes]))
    unpickler.sealed = sealed
    return unpickler.load()


def _table(sealed: Sealed, position: int, length: int) -> memoryview:
    return memoryview(sealed)[position : position + length * _WORD.size].cast("Q")


_KINDS: Final[dict[str, Any]] = {
    "list": SharedList,
    "dict": SharedDict,
    "tensor": passing.tensor_at,
    "buffer": passing.view_at,
}
"""By the kind of a pickle's reference to data outside of it."""
