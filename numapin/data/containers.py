"""Rebuild nested containers, as torch's `pin_memory` looks into them. Pure.

Comes in: whatever a loader yields, and what to do with its leaves. Goes out: the same shape of containers, of the same
types as far as these can be built, with the leaves replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any


def rebuild(obj: Any, change: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool]) -> Any:  # noqa: ANN401
    """Return `obj` with every leaf changed; what is neither a leaf nor a container stays as it is.

    A mutable container is copied and filled, so that what else it carries stays; others are built from a mapping or a
    list. One whose type cannot be built that way becomes a dict or a list. Strings and bytes are no containers. Errors
    of `change` come through.
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
