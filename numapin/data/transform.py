"""`device_transform`: the user's function, which gets each batch on the device and returns what the loop gets.

It runs in the loop's thread, inside `next()`, so that autocast, inference and gradient mode, the default device and
Ctrl-C are the loop's own. On a GPU it runs on the loader's stream, one batch ahead of the loop and in the loop's order,
so it has to return new tensors: one batch ahead, a buffer that it fills again already holds the next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import ref

import torch

from numapin.data.casting import rebuild
from numapin.data.message import Parcel
from numapin.data.opening import Copier, Mover
from numapin.data.torch_names import ExceptionWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.data.path import PathOptions
    from numapin.system.cuda import Event

Function: TypeAlias = "Callable[[Any], object]"

_PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the memory of tensors which have none of their own."""
_NUM_PROBED: Final = 2  # results of an iterator that are made when they are due, to see whether memory comes again


class Transform:
    """A user's function, applied to the batches of one iterator."""

    def __init__(
        self, function: Function, opener: Copier | Mover, apply: Callable[..., object], warn: Callable[[str], None]
    ) -> None:
        """Take how the function is applied to what the opener returns, which may hold more than the batch."""
        self._function, self._opener, self._apply, self._warn = function, opener, apply, warn
        self._mover = opener if isinstance(opener, Mover) else None
        self._ahead: Parcel | None = None  # its result:
        self._result = _Result()
        self._num_made = 0
        self._returned: set[ref[torch.UntypedStorage]] = set()  # memory of results that is still there
        self._comes_again = False

    def restart(self) -> None:
        """Begin an epoch: what the loop has enqueued before comes before the function's work."""
        self.forget()
        if self._mover is not None:
            self._mover.wait_for_loop()

    def forget(self) -> None:
        """Drop a result that was made ahead and that the loop will not ask for."""
        self._take(None)

    def prepare(self, parcel: object, number: int) -> None:
        """Make the result of the batch that is due next; on the host, where nothing is gained by that, do nothing."""
        if self._mover is None or not isinstance(parcel, Parcel) or self._num_made < _NUM_PROBED or self._comes_again:
            return
        # A slot that is being pinned is waited for when its batch is due, and not before.
        if parcel.begun is not None or parcel.slot is None or parcel.slot.is_settled:
            self._ahead = parcel
            try:
                self._result = self._run(self._mover, parcel, number)
            except BaseException as error:  # noqa: BLE001 - Ctrl-C is raised at the next next(); this one has a batch
                self._result = _Result(error=error)
            if self._comes_again:
                text = f"device_transform of batch {number} filled memory of an earlier batch"
                self._warn(f"{text}, whose values may be wrong now")

    def open(self, data: object, number: int) -> object:
        """Return the result of a batch that is due, or the error, for use by the current stream."""
        if self._mover is None or not isinstance(data, Parcel):  # else opened by torch's pin thread, or an error
            return self._call(self._opener.open(data) if isinstance(data, Parcel) else data, number)
        made = self._take(data)
        if made is not None and made.error is not None:
            raise made.error
        if made is None:
            if self._num_made < _NUM_PROBED or self._comes_again:
                self._mover.wait_for_loop()  # it may still read what the function fills again
            made = self._run(self._mover, data, number)
        if made.event is not None:
            self._mover.hand_over(made.storages, made.event)
        return made.value

    def _take(self, parcel: Parcel | None) -> _Result | None:
        """Return and forget the result that was made ahead; None if it is not this batch's."""
        ahead, result = self._ahead, self._result
        self._ahead, self._result = None, _Result()
        if ahead is not None and ahead is parcel:
            return result
        if result.event is not None and self._mover is not None:
            self._mover.recycle(result.event)
        return None

    def _run(self, mover: Mover, parcel: Parcel, number: int) -> _Result:
        storages: list[torch.UntypedStorage] = []
        with mover.on_stream():
            try:
                value = self._call(mover.open(parcel), number)
                storages += _storages_in(value)
            except Exception:  # noqa: BLE001 - a user's type may raise anything; the loop gets it when the batch is due
                value = ExceptionWrapper(where=f"while batch {number} was opened")
            event = mover.mark()
        self._note(storages)
        return _Result(value, storages, event)

    def _note(self, storages: list[torch.UntypedStorage]) -> None:
        """Notice a function that fills memory again: called ahead, it would overwrite the loop's batch."""
        self._num_made += 1
        found = {ref(storage, self._returned.discard) for storage in storages}
        if not self._comes_again and not self._returned.isdisjoint(found):
            self._comes_again = True
            self._warn(
                "device_transform returned memory that it had returned before, so it is not called ahead of the loop "
                "any more; have it return new tensors, e.g. tensor.clone()"
            )
        self._returned |= found

    def _call(self, opened: object, number: int) -> object:
        """Return what the function makes of a batch, or its error."""
        if isinstance(opened, ExceptionWrapper):
            return opened
        return self._apply(lambda batch: transformed(self._function, batch, number), opened)


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of one batch."""

    value: object = None  # the loop's batch, or a wrapper of the error that was raised while it was opened
    storages: list[torch.UntypedStorage] = field(default_factory=list)  # of its tensors
    event: Event | None = None  # after which it is ready
    error: BaseException | None = None  # Ctrl-C, or another error that is no Exception, instead of a value


def move_and_transform(options: PathOptions, batch: object, number: int) -> object:
    """Return a batch that came without slots, on the device and transformed, in the order of the loop's stream."""
    if options.cuda_device is not None:
        batch = put_on(options.cuda_device, batch)
    if options.device_transform is not None:
        batch = transformed(options.device_transform, batch, number)
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()
    return batch


def put_on(device: torch.device, data: object) -> object:
    """Return a batch with its tensors, and objects that can be moved, copied to a GPU in the order of its stream."""

    def move(value: Any) -> object:  # noqa: ANN401 - anything with `to`
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_contiguous():
            value = value.pin_memory()
        # Of other objects, many have a `to` of their own, which takes the device only.
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)

    storages = torch.UntypedStorage | torch.TypedStorage
    return rebuild(data, move, is_leaf=lambda value: hasattr(value, "to") and not isinstance(value, storages))


def transformed(function: Function, batch: object, number: int) -> object:
    """Return what a device_transform makes of a batch, or its error, which names the batch's number."""
    if isinstance(batch, ExceptionWrapper):  # a worker's error, which torchdata's iterators still have to count
        return batch
    try:
        try:
            return function(batch)
        except StopIteration as error:  # e.g. of next() in it: would end the epoch early, without a word
            raise RuntimeError("device_transform raised StopIteration") from error
    except Exception:  # noqa: BLE001 - it is the user's
        return ExceptionWrapper(where=f"in device_transform of batch {number}")


def _storages_in(value: object) -> set[torch.UntypedStorage]:
    storages = set()
    for tensor in tensors_in(value):
        with suppress(NotImplementedError):  # it has none, as on the device "meta" or in MKL-DNN's layout
            storages.add(tensor.untyped_storage())
    return storages


def tensors_in(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a function may return anything
    """Yield the tensors in a value, in containers and in attributes of objects, but not of callables and modules."""
    seen: dict[int, object] = {}  # the objects, too: another one could get the number of one that is gone
    left = [value]
    others = str | bytes | bytearray | memoryview | range | ModuleType  # numpy's attributes alone would take a second
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, others) or callable(value):
            continue
        seen[id(value)] = value
        if not isinstance(value, torch.Tensor):
            if isinstance(value, Mapping):
                left += value.values()
            elif isinstance(value, Sequence | AbstractSet):
                left += value
            left.append(object.__getstate__(value))  # its attributes: a dict, a tuple with those in slots, or None
            continue
        left.append(getattr(value, "__dict__", None))
        if hasattr(value, "__tensor_flatten__"):
            left += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif value.layout in _PARTS:
            left += [getattr(value, name)() for name in _PARTS[value.layout]]
        else:
            yield value
