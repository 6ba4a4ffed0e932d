"""Batches as plain data for comparison, without tensors, so that a description keeps no slot and does not change."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import singledispatch
from itertools import combinations
from typing import Any

import numpy as np
import torch

_WHOLE_BYTES = 64  # longer strings and arrays are described by their start and their digest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A batch as plain data.

    `tree` has every container's type and every leaf; a tensor that occurs twice is represented by one number.
    `sharing` maps pairs of tensors in one storage to their distance in bytes; `overlapping` lists the pairs that
    have bytes in common.
    """

    tree: object
    sharing: dict[tuple[int, int], int]
    overlapping: frozenset[tuple[int, int]]


def describe(batch: object) -> Described:
    tensors: list[torch.Tensor] = []
    tree = _plain(batch, tensors)
    spans = {index: span for index, tensor in enumerate(tensors) if (span := _span(tensor))}
    sharing, overlapping = {}, set()
    for (i, a), (j, b) in combinations(spans.items(), 2):
        (storage, start, end), (others_storage, others_start, others_end) = a, b
        if storage == others_storage:
            sharing[i, j] = others_start - start
        if start < others_end and others_start < end:
            overlapping.add((i, j))
    return Described(tree=tree, sharing=sharing, overlapping=frozenset(overlapping))


def assert_same(ours: Described, theirs: Described, where: str = "batch") -> None:
    """Fail unless `ours` equals torch's batch.

    Tensors that share a storage must still share it, at the same distance. Further tensors may share one (such as a
    slot), but without further overlaps.
    """
    assert ours.tree == theirs.tree, where
    assert ours.overlapping == theirs.overlapping, f"{where}: other tensors have bytes in common"
    assert theirs.sharing.items() <= ours.sharing.items(), f"{where}: tensors no longer share their storage"


def assert_same_batches(ours: Sequence[Described], theirs: Sequence[Described], *, ordered: bool = True) -> None:
    if not ordered:
        ours, theirs = (sorted(batches, key=lambda batch: repr(batch.tree)) for batches in (ours, theirs))
    assert len(ours) == len(theirs), "the number of batches"
    for number, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(mine, torchs, f"batch {number}")


def _span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the addresses of a tensor's storage, of its first element, and after its last; None without memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    end = start + (last + 1) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start, end


def _digest(raw: bytes) -> object:
    return raw if len(raw) <= _WHOLE_BYTES else (len(raw), raw[:8].hex(), hashlib.blake2b(raw).hexdigest())


@singledispatch
def _plain(value: Any, tensors: list[torch.Tensor]) -> object:
    state = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value):
        state = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, type) or callable(value) or not state:
        return type(value), repr(value)
    return type(value), _plain(dict(state), tensors)


@_plain.register
def _(value: torch.Tensor, tensors: list[torch.Tensor]) -> object:
    for number, tensor in enumerate(tensors):
        if tensor is value:
            return "the same tensor", number
    tensors.append(value)
    facts = (type(value), value.dtype, value.layout, value.device, value.requires_grad, value.is_leaf)
    if value.is_nested:  # shape and attributes differ each time: they number all tensors ever made
        return *facts, [_content(part.detach()) for part in value.unbind()]
    told = (tuple(value.shape), value.grad is None, _plain(vars(value), tensors))
    return *facts, *told, _content(value.detach())


def _content(tensor: torch.Tensor) -> object:
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced(), _content(tensor._indices()), _content(tensor._values())
    if tensor.layout is torch.sparse_csr:
        return [_content(part) for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    if tensor.device.type == "meta":
        return tensor.stride()
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a contiguous tensor of one element may have another stride
    return tuple(tensor.shape), tensor.stride(), _digest(flat.view(torch.uint8).numpy().tobytes())


@_plain.register(np.ndarray)
def _(value: np.ndarray[Any, Any], tensors: list[torch.Tensor]) -> object:
    content = _plain(value.tolist(), tensors) if value.dtype.hasobject else _digest(value.tobytes())
    return type(value), value.dtype.descr, value.shape, value.strides, value.flags.writeable, content


@_plain.register
def _(value: Mapping, tensors: list[torch.Tensor]) -> object:  # type: ignore[type-arg]
    return type(value), [(_plain(key, tensors), _plain(item, tensors)) for key, item in value.items()]


@_plain.register(list)
@_plain.register(tuple)
def _(value: Sequence[object], tensors: list[torch.Tensor]) -> object:
    return type(value), [_plain(item, tensors) for item in value]


@_plain.register
def _(value: AbstractSet, tensors: list[torch.Tensor]) -> object:  # type: ignore[type-arg]
    return type(value), sorted(repr(_plain(item, tensors)) for item in value)


@_plain.register(bytes)
@_plain.register(bytearray)
def _(value: bytes, _tensors: list[torch.Tensor]) -> object:
    return type(value), _digest(bytes(value))


@_plain.register(torch.UntypedStorage)
def _(value: torch.UntypedStorage, _tensors: list[torch.Tensor]) -> object:
    return type(value), _digest(torch.tensor(value, dtype=torch.uint8).numpy().tobytes())


@_plain.register(BaseException)
def _(value: BaseException, tensors: list[torch.Tensor]) -> object:
    return type(value), _plain(value.args, tensors)


def name_of(value: object) -> str:
    """Return a test id for this value, the same in every process, because pytest-xdist compares ids."""
    return re.sub(r" at 0x[0-9a-f]+", "", getattr(value, "__name__", str(value)))
