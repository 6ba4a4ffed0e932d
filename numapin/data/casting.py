"""Change the tensors in containers, and narrow those of batches, e.g. float32 to bfloat16.

Values are rounded as `Tensor.to` rounds, to the nearest one and ties to even, which is what autocast does on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Casts: TypeAlias = tuple[tuple[torch.dtype, torch.dtype], ...]
"""Pairs of a dtype and the narrower one that replaces it."""

_SOURCES: Final = (torch.float64, torch.float32)
_TARGETS: Final = (torch.float32, torch.bfloat16, torch.float16)
_FROM, _TO = "torch.float64 and torch.float32", "torch.float32, torch.bfloat16 and torch.float16"
_HINT: Final = "use e.g. cast=torch.bfloat16, or cast={torch.float32: torch.bfloat16} to leave float64 tensors alone"


def casts_of(cast: Any) -> Casts:  # noqa: ANN401 - a user may pass anything
    """Return the pairs for a user's `cast`: None, a dtype for all wider floating-point tensors, or a mapping.

    Raises UsageError for something else, and for a pair that would not make floating-point tensors smaller.
    """
    if cast is None:
        return ()
    if not isinstance(cast, Mapping):
        if cast not in _TARGETS:
            raise UsageError(f"cast={cast}: tensors can be cast to {_TO}", _HINT)
        return tuple((source, cast) for source in _SOURCES if cast.itemsize < source.itemsize)
    for source, target in cast.items():
        if source not in _SOURCES:
            raise UsageError(f"cast from {source}: only {_FROM} tensors can be cast", _HINT)
        if target not in _TARGETS:
            raise UsageError(f"cast to {target}: tensors can be cast to {_TO}", _HINT)
        if target.itemsize >= source.itemsize:
            raise UsageError(f"cast from {source} to {target}: that does not make tensors smaller", _HINT)
    return tuple(cast.items())


def cast_tensor(tensor: torch.Tensor, casts: Mapping[torch.dtype, torch.dtype]) -> torch.Tensor:
    """Return a tensor in its narrower dtype; the tensor itself if it has none."""
    target = casts.get(tensor.dtype)
    if target is None:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:  # it must stay a leaf: others cannot be sent to another process
        return tensor.detach().to(target).requires_grad_()
    return tensor.to(target)


def cast_batch(data: object, casts: Mapping[torch.dtype, torch.dtype]) -> object:
    """Return a batch with the tensors in its containers cast."""
    return rebuild(
        data, lambda tensor: cast_tensor(tensor, casts), is_leaf=lambda value: isinstance(value, torch.Tensor)
    )


def collate_and_cast(
    collate: Callable[[Any], object], casts: Mapping[torch.dtype, torch.dtype], samples: object
) -> object:
    """Return what a collate_fn returns, with the tensors in its containers cast."""
    return cast_batch(collate(samples), casts)


def rebuild(obj: object, change: Callable[[Any], object], *, is_leaf: Callable[[object], bool]) -> object:
    """Return `obj` with every leaf changed, by the rules of torch's `pin_memory`.

    Other objects that are not containers stay as they are; so do strings and bytes. A mutable container is copied and
    filled, so that it keeps its other attributes; others are built from a mapping or a list. If a type cannot be built
    that way, the result is a dict or a list. Errors of `change` are passed on.
    """
    if is_leaf(obj):
        return change(obj)
    if isinstance(obj, str | bytes) or not isinstance(obj, Mapping | Sequence):
        return obj
    items: Any
    if isinstance(obj, Mapping):
        items = {key: rebuild(value, change, is_leaf=is_leaf) for key, value in obj.items()}
    else:
        items = [rebuild(value, change, is_leaf=is_leaf) for value in obj]
    if isinstance(obj, tuple):
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    try:
        if not isinstance(obj, MutableMapping | MutableSequence):
            return type(obj)(items)  # type: ignore[call-arg]
        clone = copy.copy(obj)
        if isinstance(clone, MutableMapping):
            clone.update(items)
        else:
            for i, item in enumerate(items):
                clone[i] = item
    except TypeError:
        return items
    return clone
