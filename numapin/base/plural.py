"""Counts and lists of things as text.

The launcher's signal handling and the shims may import this: built-ins only.
"""

from __future__ import annotations

from numapin.base import cpu_set

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "3 remedies" or "1,200 batches"."""
    plural = _plural(noun)
    return f"{number:,} {noun if number == 1 else plural}"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"


def listed(noun: str, ids: Collection[int]) -> str:
    """Return "rank 0" or "ranks 0-3,7"."""
    return f"{noun if len(ids) == 1 else f'{noun}s'} {cpu_set.render(ids)}"
