"""Write data into shared memory: lists entry by entry, arrays as they are, and all else as pickles that refer to these.

The end of the memory has the position of the root pickle. A pickle is preceded by its length and the spans of the
arrays that it refers to, which lie elsewhere in the memory (pickle's protocol 5).
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
from itertools import accumulate, chain, islice
from numbers import Number
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from numapin.errors import UsageError
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numapin.sharing.sealed import Unsealed

HEADER: Final = struct.Struct("<QQ")  # bytes of the pickle, number of its spans
ROOT: Final = struct.Struct("<Q")
_LONG: Final = 1000  # entries; shorter lists inside of other data are pickled with it
_LONG_TEXT: Final = 1 << 20
_CHUNK: Final = 4096  # entries that are written at once
_MAX_DEPTH: Final = 20
_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS: Final = frozenset({list, tuple, dict})

Reference = tuple[Any, ...]
"""A pickle's stand-in for data that is stored elsewhere: kind, position and shape."""


def pack(data: object, draft: Unsealed) -> None:
    """Write data, whose outermost list or dict is never pickled as a whole. Raises UsageError and OSError."""
    if isinstance(data, str) and len(data) >= _LONG_TEXT:
        problem = f"a text of {len(data)} characters cannot be shared: Python copies it into each process"
        raise UsageError(problem, "share its encoded bytes, or a list of its lines")
    writer = Writer(draft)
    if isinstance(data, memoryview) and not data.contiguous:
        data = data.tobytes()
    if type(data) in (bytes, bytearray, memoryview):
        data = pickle.PickleBuffer(data)  # type: ignore[arg-type] # one of these three
    writer.outermost = data
    draft.put(ROOT.pack(draft.put(writer.pickled(data), is_aligned=True)))


class Writer:
    """Data on its way into the memory. What is referred to twice is written once."""

    def __init__(self, draft: Unsealed) -> None:
        self.draft = draft
        self.outermost: object = None
        self._written: dict[int, tuple[object, Reference]] = {}  # with the object, whose id is not given again then

    def pickled(self, value: object) -> bytes:
        """Return the pickle of a value, with its header; write what it refers to."""
        pickler = _Pickler(self)
        pickler.dump(value)
        content = pickler.stream.getbuffer()
        return b"".join((HEADER.pack(len(content), len(pickler.spans) // 2), pickler.spans.tobytes(), content))

    def refer(self, value: Any) -> Reference | None:  # noqa: ANN401 - data of any kind
        """Write a value that is to lie outside of the pickle, and return the reference; None: it is to be pickled."""
        kind = type(value)
        is_long = kind in _CONTAINERS and (len(value) >= _LONG or value is self.outermost)
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and kind is torch.Tensor
        if not is_long and not is_tensor:
            return None
        if id(value) not in self._written:
            put = self._put_dict if kind is dict else self._put_list if is_long else self._put_tensor
            self._written[id(value)] = value, put(value)
        return self._written[id(value)][1]

    def _put_list(self, values: Sequence[object]) -> Reference:
        """Write each entry, and a table of their positions."""
        chunks = range(0, len(values), _CHUNK)
        is_plain = all(_is_plain(values[at : at + _CHUNK]) for at in chunks)
        # Version 2 has no references: entries are decoded faster, and no string is interned.
        encode: Callable[[Any], bytes] = (lambda value: marshal.dumps(value, 2)) if is_plain else self.pickled
        starts = array("Q")
        for at in chunks:
            chunk = values[at : at + _CHUNK]
            records = list(map(encode, chunk))
            start = self.draft.put(b"".join(records))
            starts.extend(accumulate(islice(map(len, records), len(records) - 1), initial=start))
        return "list", self.draft.put(starts, is_aligned=True), len(values), is_plain

    def _put_dict(self, values: dict[object, object]) -> Reference:
        """Write the keys, the values, and the sorted hashes of the keys with the number of each key."""
        try:
            hashes = list(map(hash_of, values))
        except TypeError as error:
            raise UsageError(f"a dict of {len(values)} keys cannot be shared: {error}", "use text or numbers") from None
        order = array("Q", sorted(range(len(hashes)), key=hashes.__getitem__))
        sorted_hashes = array("Q", map(hashes.__getitem__, order))
        positions = [self.draft.put(table, is_aligned=True) for table in (sorted_hashes, order)]
        return "dict", self._put_list(list(values)), self._put_list(list(values.values())), *positions

    def _put_tensor(self, tensor: Any) -> Reference:  # noqa: ANN401 - torch may be missing
        if tensor.device.type != "cpu" or "strided" not in str(tensor.layout) or tensor.is_quantized:
            seen = f"its device is {tensor.device}, its layout {tensor.layout}"
            raise UsageError(f"only dense CPU tensors can be shared; {seen}", "share tensor.cpu(), or its values()")
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        content = memory.view_of(memory.window(dense.data_ptr(), dense.nbytes, owner=dense)) if dense.nbytes else b""
        dtype = str(dense.dtype).removeprefix("torch.")
        return "tensor", self.draft.put(content, is_aligned=True), dtype, tuple(dense.shape)


class _Pickler(pickle.Pickler):
    """Pickles one value; long lists, dicts, tensors and arrays in it are written to the memory."""

    def __init__(self, writer: Writer) -> None:
        self.stream, self.spans, self._writer = io.BytesIO(), array("Q"), writer
        self._states: dict[int, object] = {}  # by id, which is not given again while the object is here
        super().__init__(self.stream, 5, buffer_callback=self._put_buffer)

    def persistent_id(self, value: object) -> Reference | None:
        return None if id(value) in self._states else self._writer.refer(value)

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any object
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
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

    def _put_buffer(self, buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        self.spans.extend((self._writer.draft.put(raw, is_aligned=True), raw.nbytes))


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


def hash_of(key: object) -> int:
    """Return a hash that is the same in all processes, and for equal keys. Raises TypeError for other kinds of keys."""
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    if isinstance(key, tuple):
        return hash(tuple(map(hash_of, key))) % (1 << 64)
    if isinstance(key, Number):
        if key != key:  # noqa: PLR0124 - NaN, which no key that is read is equal to
            raise TypeError("a key is NaN")
        return hash(key) % (1 << 64)
    raise TypeError(f"a key is of type {type(key).__name__}")
