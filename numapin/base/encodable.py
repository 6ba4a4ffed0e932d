"""Text for streams whose encoding lacks some of its characters."""

from __future__ import annotations

import codecs
from typing import Final

NAME: Final = "numapin.encodable"
"""The name of the handler among Python's, once `register` was called."""
_STAND_INS: Final = {"…": "...", "±": "+-", "·": "-"}  # of our own messages; rich replaces the lines that it draws
_ESCAPED_BYTES: Final = range(0xDC80, 0xDD00)  # bytes of names that were not text, see PEP 383


def register() -> None:
    """Make the handler known to Python's encoders."""
    codecs.register_error(NAME, _replace)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands in for the characters that cannot be encoded, and where encoding continues."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    if ord(first) in _ESCAPED_BYTES:
        return bytes([ord(first) - 0xDC00]), error.start + 1
    return _STAND_INS.get(first) or ascii(first)[1:-1], error.start + 1
