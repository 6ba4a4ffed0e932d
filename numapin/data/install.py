"""Give torch's own DataLoader our data path, in scripts that stay as they are. Edge.

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

    Frameworks that copy a loader hand the arguments that torch knows to a plain torch DataLoader (Accelerate 1.15's
    prepare and skip_first_batches). This one is compared, printed and pickled as the text that it is, and so tells a
    copy of a numapin.DataLoader from a loader that is torch's on purpose.
    """

    __slots__ = ("options",)
    options: PathOptions

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the options when a loader travels to another process."""
        return mark, (str(self), self.options)


def mark(text: str, options: PathOptions) -> Mark:
    """Return the text, carrying options."""
    marked = Mark(text)
    marked.options = options
    return marked


@dataclass(slots=True)
class _Installed:
    """What this process has taken over: everything or copies only; None before the first call."""

    everything: bool | None = None
    told: bool = False


_STATE: Final = _Installed()


def install(*, only_copies: bool = False) -> None:
    """Let torch's DataLoader have our data path wherever it has workers; with `only_copies`, copies of ours only.

    A second call changes nothing but that. Says so, once a process, when the first loader is taken over.
    """
    if _STATE.everything is None:
        _hook()
    _STATE.everything = bool(_STATE.everything) or not only_copies


def _hook() -> None:
    cls = torch.utils.data.DataLoader
    torchs_own = cls._get_iterator

    def _get_iterator(self: torch.utils.data.DataLoader[Any]) -> _BaseDataLoaderIter:
        copied = getattr(self.pin_memory_device, "options", None)
        if self.num_workers == 0 or not (copied or _STATE.everything):
            return torchs_own(self)
        _tell()
        return iterator_of(self, copied or PathOptions())

    cls._get_iterator = _get_iterator  # type: ignore[method-assign]


def _tell() -> None:
    if not _STATE.told:
        _STATE.told = True
        say("torch's DataLoader gets its batches by numapin's data path here")
