"""Rebuild nested containers by the rules of torch's `pin_memory`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any


def rebuild(obj: object, change: Callable[[Any], object], *, is_leaf: Callable[[object], bool]) -> object:
    """Return `obj` with every leaf changed. Other objects that are not containers stay as they are.

    A mutable container is copied and filled, so that it keeps its other attributes; others are built from a mapping or
    a list. If a type cannot be built that way, the result is a dict or a list. Strings and bytes are not containers.
    Errors of `change` are passed on.
    """
    if is_leaf(obj):
        return change(obj)
    if isinstance(obj, str | bytes):
        return obj
    if isinstance(obj, Mapping):
        return _mapping(obj, {key: rebuild(value, change, is_leaf=is_leaf) for key, value in obj.items()})
    if isinstance(obj, Sequence):
        return _sequence(obj, [rebuild(value, change, is_leaf=is_leaf) for value in obj])
    return obj


def _mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if not isinstance(obj, MutableMapping):
            return type(obj)(items)  # type: ignore[call-arg]
        clone = copy.copy(obj)
        clone.update(items)
    except TypeError:
        return items
    return clone


def _sequence(obj: Sequence[Any], items: list[Any]) -> Sequence[Any]:
    if isinstance(obj, tuple):
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    try:
        if not isinstance(obj, MutableSequence):
            return type(obj)(items)  # type: ignore[call-arg]
        clone = copy.copy(obj)
        for i, item in enumerate(items):
            clone[i] = item
    except TypeError:
        return items
    return clone
