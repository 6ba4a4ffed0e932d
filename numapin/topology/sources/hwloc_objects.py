"""Objects of hwloc XML: what every part of its reader needs."""

from __future__ import annotations

import re
from itertools import filterfalse
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numapin.topology.sources.xmlfile import Element

    Placed = tuple[Element, tuple[Element, ...]]
    """An object, and the elements above it, nearest first."""

NUMBER: Final = re.compile(r"[0-9]{1,18}")


def kind_of(element: Element) -> str | None:
    """Return the type of an object."""
    return element.attributes.get("type")


def of_kind(elements: Iterable[Element], kind: str) -> list[Element]:
    """Return the objects of a type."""
    return [element for element in elements if kind_of(element) == kind]


def placed_of_kind(objects: list[Placed], kind: str) -> Iterator[Placed]:
    """Return the objects of a type, with those above them."""
    return (placed for placed in objects if kind_of(placed[0]) == kind)


def info(element: Element, name: str) -> str | None:
    """Return an info value of an object."""
    values = (entry.text("value") for entry in element.named("info") if entry.text("name") == name)
    return next(values, None)


def square(matrix: Element, size: int) -> list[list[int]]:
    """Return the rows of a matrix. Raises MachineFileError if it is not square or too large."""
    if size > MAX_NODES:
        raise matrix.error(f"distances of {size} objects; at most {MAX_NODES} are accepted")
    values = numbers(matrix, "u64values", NUMBER)
    if len(values) != size * size:
        raise matrix.error(f"{len(values)} values for {size} objects, expected {size * size}")
    return [values[start : start + size] for start in range(0, len(values), size or 1)]


def words_in(matrix: Element, tag: str) -> Iterator[str]:
    """Yield the words in the elements of a name."""
    return (word for part in matrix.named(tag) for word in "".join(part.texts).split())


def numbers(matrix: Element, tag: str, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the elements of a name; one may follow a type, as in "OSDev:3"."""
    words = list(words_in(matrix, tag))
    if len(words) > MAX_NODES**2:
        raise matrix.error(f"{len(words)} numbers in <{tag}>; at most {MAX_NODES**2} are accepted")
    bad = next(filterfalse(pattern.fullmatch, words), None)
    if bad is not None:
        raise matrix.error(f"{bad[:40]!r} in <{tag}> is not a number")
    return [int(word.rpartition(":")[2]) for word in words]
