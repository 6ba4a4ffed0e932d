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
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def listed(noun: str, ids: Collection[int]) -> str:
    """Return "rank 0" or "ranks 0-3,7"."""
    return f"{noun if len(ids) == 1 else f'{noun}s'} {cpu_set.render(ids)}"
