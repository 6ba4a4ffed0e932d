"""Known values only: None stands for an unknown one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

K = TypeVar("K")
V = TypeVar("V")


def not_none(values: Iterable[V | None]) -> list[V]:
    """Return the values that are not None, in their order."""
    return [value for value in values if value is not None]


def without_none(mapping: Mapping[K, V | None]) -> dict[K, V]:
    """Return the entries whose value is not None, in their order."""
    return {key: value for key, value in mapping.items() if value is not None}
