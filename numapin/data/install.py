"""Give torch's own DataLoader our data path, in unmodified scripts. Edge.

Comes in: torch's DataLoader class. Goes out: the same class, whose `_get_iterator` asks here first. Called by
`numapin run --dataloader=numapin` in every rank, and by `numapin.DataLoader` for the copies that frameworks make of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.utils.data

from numapin.base.stderr import say
from numapin.data.iterator import iterator_of
from numapin.data.path import PathOptions

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter


class Mark(str):
    """A loader's `pin_memory_device` that also carries our options.

    Frameworks that copy a loader pass the arguments that torch knows to a plain torch DataLoader (Accelerate 1.15's
    prepare and skip_first_batches). A mark compares, prints and pickles as plain text, and so distinguishes a copy of a
    numapin.DataLoader from a loader that is deliberately torch's.
    """

    __slots__ = ("options",)
    options: PathOptions

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the options when a loader travels to another process."""
        return mark, (str(self), self.options)


def mark(text: str, options: PathOptions) -> Mark:
    """Return the text, carrying options."""
    marked = Mark(text)
    marked.options = options
    return marked


@dataclass(slots=True)
class _Installed:
    """The loaders that this process has taken over: all, or copies only; None before the first call. Their balance."""

    everything: bool | None = None
    balance: bool = False
    is_announced: bool = False


_STATE: Final = _Installed()


def install(*, only_copies: bool = False, balance: bool = False) -> None:
    """Give torch's DataLoader our data path wherever it has workers; with `only_copies`, only copies of our loaders.

    A second call can only extend that to all loaders. One line on stderr reports the first loader that is taken over.
    `balance` is that of `numapin.DataLoader`, for all loaders that are not copies.
    """
    if _STATE.everything is None:
        _hook()
    _STATE.everything = bool(_STATE.everything) or not only_copies
    _STATE.balance = _STATE.balance or balance


def _hook() -> None:
    cls = torch.utils.data.DataLoader
    torchs_own = cls._get_iterator

    def _get_iterator(self: torch.utils.data.DataLoader[Any]) -> _BaseDataLoaderIter:
        options: PathOptions | None = getattr(self.pin_memory_device, "options", None)
        is_ours = options is not None or bool(_STATE.everything)
        if self.num_workers == 0 or not is_ours:
            return torchs_own(self)
        _announce()
        return iterator_of(self, options or PathOptions(balance=_STATE.balance))

    cls._get_iterator = _get_iterator  # type: ignore[method-assign]


def _announce() -> None:
    if not _STATE.is_announced:
        _STATE.is_announced = True
        say("torch's DataLoader uses numapin's data path in this process")
