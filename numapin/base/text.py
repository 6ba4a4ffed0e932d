"""Counts and lists of things as text, visible characters, digits of UUIDs, and known values.

Each rank imports this before its program starts, and the launcher's signal handling may: built-ins only.
"""

from __future__ import annotations

from numapin.base import cpu_set

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Final, TypeVar

    K = TypeVar("K")
    V = TypeVar("V")

GPU_PREFIX: Final = "GPU-"
MIG_PREFIX: Final = "MIG-"
_NUM_DIGITS: Final = 32
_DIGITS: Final = frozenset("0123456789abcdef")


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "3 remedies" or "1,200 batches"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}es" if noun.endswith(("ch", "ss")) else f"{number:,} {noun}s"


def listed(noun: str, ids: Collection[int]) -> str:
    """Return "rank 0" or "ranks 0-3,7"."""
    return f"{noun if len(ids) == 1 else f'{noun}s'} {cpu_set.render(ids)}"


# --- visible characters of untrusted text ----------------------------------------------------------------------------


def printable(text: str) -> str:
    """Replace control characters, line breaks, direction marks, lone surrogates and other invisible characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def printable_lines(text: str) -> str:
    """Do the same to a text of several lines; newlines stay, and a tab becomes four spaces."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def ascii_escapes(json_text: str) -> str:
    r"""Write the invisible characters of a JSON text as \uXXXX, which leaves every value as it is.

    Outside of its strings the text may have spaces and newlines only.
    """
    lines = json_text.split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_escaped, line)) for line in lines)


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


# --- UUIDs of GPUs and MIG instances, as CUDA compares them ----------------------------------------------------------


def uuid_digits(text: str, prefix: str = GPU_PREFIX) -> str:
    """Return the hexadecimal digits of a UUID or of its beginning; "" if there are none, or other characters.

    Case and dashes do not matter, and whatever follows the 32 digits is ignored.
    """
    digits = text.removeprefix(prefix).replace("-", "").lower()[:_NUM_DIGITS]
    return digits if _DIGITS.issuperset(digits) else ""


# --- known values only: None stands for an unknown one ---------------------------------------------------------------


def not_none(values: Iterable[V | None]) -> list[V]:
    """Return the values that are not None, in their order."""
    return [value for value in values if value is not None]


def without_none(mapping: Mapping[K, V | None]) -> dict[K, V]:
    """Return the entries whose value is not None, in their order."""
    return {key: value for key, value in mapping.items() if value is not None}
