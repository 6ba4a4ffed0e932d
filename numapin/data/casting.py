"""Narrow the floating-point tensors of batches, e.g. float32 to bfloat16.

Values are rounded as `Tensor.to` rounds, to the nearest one and ties to even, which is what autocast does on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from numapin.data import containers
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Casts: TypeAlias = tuple[tuple[torch.dtype, torch.dtype], ...]
"""Pairs of a dtype and the narrower one that replaces it."""

_SOURCES: Final = (torch.float64, torch.float32)
_TARGETS: Final = (torch.float32, torch.bfloat16, torch.float16)
_HINT: Final = "use e.g. cast=torch.bfloat16, or cast={torch.float32: torch.bfloat16} to leave float64 tensors alone"


def casts_of(cast: object) -> Casts:
    """Return the pairs for a user's `cast`: None, a dtype for all wider floating-point tensors, or a mapping.

    Raises:
        UsageError: It is something else, or a pair would not make floating-point tensors smaller.
    """
    if cast is None:
        return ()
    if isinstance(cast, Mapping):
        pairs = tuple(cast.items())
    else:
        pairs = tuple((source, cast) for source in _SOURCES if _is_narrower(cast, source))
        if not pairs:
            raise UsageError(f"cast={cast}: tensors can be cast to {_names(_TARGETS)}", _HINT)
    for source, target in pairs:
        _require_sense(source, target)
    return pairs


def _require_sense(source: object, target: object) -> None:
    if source not in _SOURCES:
        raise UsageError(f"cast from {source}: only {_names(_SOURCES)} tensors can be cast", _HINT)
    if target not in _TARGETS:
        raise UsageError(f"cast to {target}: tensors can be cast to {_names(_TARGETS)}", _HINT)
    if not _is_narrower(target, source):
        raise UsageError(f"cast from {source} to {target}: that does not make tensors smaller", _HINT)


def _is_narrower(target: object, source: object) -> bool:
    if not (isinstance(target, torch.dtype) and isinstance(source, torch.dtype)):
        return False
    return target in _TARGETS and target.itemsize < source.itemsize


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *others, last = map(str, dtypes)
    return f"{', '.join(others)} and {last}"


def cast_tensor(tensor: torch.Tensor, casts: Mapping[torch.dtype, torch.dtype]) -> torch.Tensor:
    """Return a tensor in its narrower dtype; the tensor itself if it has none."""
    target = casts.get(tensor.dtype)
    if target is None:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:  # it must stay a leaf: others cannot be sent to another process
        return tensor.detach().to(target).requires_grad_()
    return tensor.to(target)


class CastingCollate:
    """A collate_fn that casts what another one returns, where batches come from no worker of ours."""

    def __init__(self, collate: Callable[[Any], object], casts: Casts) -> None:
        self._collate, self._casts = collate, dict(casts)

    def __call__(self, samples: object) -> object:
        """Return the batch, with the tensors in its containers cast."""
        return cast_batch(self._collate(samples), self._casts)


def cast_batch(data: object, casts: Mapping[torch.dtype, torch.dtype]) -> object:
    """Return a batch with the tensors in its containers cast."""
    return containers.rebuild(data, lambda tensor: cast_tensor(tensor, casts), is_leaf=_is_tensor)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
