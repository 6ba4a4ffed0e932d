"""UUIDs of GPUs and MIG instances, as CUDA compares them.

Imports nothing but `Final`: `numapin exec` needs it, and topology/ would cost more to import than the rest of that
command.
"""

from __future__ import annotations

from typing import Final

GPU_PREFIX: Final = "GPU-"
MIG_PREFIX: Final = "MIG-"
_NUM_DIGITS: Final = 32
_DIGITS: Final = frozenset("0123456789abcdef")


def uuid_digits(text: str, prefix: str = GPU_PREFIX) -> str:
    """Return the hexadecimal digits of a UUID or of its beginning; "" if there are none, or other characters.

    Case and dashes do not matter, and whatever follows the 32 digits is ignored.
    """
    digits = text.removeprefix(prefix).replace("-", "").lower()[:_NUM_DIGITS]
    return digits if _DIGITS.issuperset(digits) else ""
