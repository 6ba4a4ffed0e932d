"""A checksum of indices that a sampler drew, to notice that it draws others the second time."""

from __future__ import annotations

from array import array
from types import NoneType
from typing import Any, Final
from zlib import crc32

import torch


def extended(checksum: int, indices: Any) -> int:
    """Return the checksum of all indices up to these, from the checksum of those before."""
    return crc32(_bytes_of(indices), checksum)


def _bytes_of(indices: Any) -> bytes:
    if type(indices) is list:
        try:
            return array("q", indices).tobytes()  # 4 us for 256 numbers, ten times as fast as the other way
        except (TypeError, OverflowError):  # an entry is not a number of at most 64 bits
            pass
    return repr(_plain(indices)).encode(errors="replace")


_PLAIN_TYPES: Final = (NoneType, bool, int, float, complex, str, bytes, range)


def _plain(value: Any) -> Any:
    """Return a value whose text is the same in every process. Of types that we do not know, it is their name."""
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return [[_plain(key), _plain(entry)] for key, entry in value.items()]
    return value if type(value) in _PLAIN_TYPES else type(value).__qualname__
