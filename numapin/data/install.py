"""Give torch's own DataLoader our data path, in unmodified scripts.

This is called by `numapin run --dataloader=numapin` in every rank, and by `numapin.DataLoader` for the copies that
frameworks make of it.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.utils.data

from numapin.base.stderr import say
from numapin.data import torch_names, usage
from numapin.data.casting import cast_batch
from numapin.data.iterator import LaneIterator, iterator_of, pins_elsewhere
from numapin.data.path import PathOptions
from numapin.data.torch_names import _BaseDataLoaderIter
from numapin.data.transform import move_and_transform

if TYPE_CHECKING:
    _Loader: TypeAlias = torch.utils.data.DataLoader[Any]


class Mark(str):  # noqa: SLOT000 - what is in its __dict__ is pickled with it
    """A loader's `pin_memory_device` that also carries our options.

    Frameworks that copy a loader pass the arguments that torch knows to a plain torch DataLoader (Accelerate 1.15's
    prepare and skip_first_batches). A mark compares and prints as plain text, and so distinguishes a copy of a
    numapin.DataLoader from a loader that is deliberately torch's. It keeps the options when it is copied or pickled.
    """

    options: PathOptions


class _Everywhere:
    """Our options for loaders that carry none; None: these are left to torch."""

    options: PathOptions | None = None


def install(*, only_copies: bool = False, balance: bool = False) -> None:
    """Give torch's DataLoader our data path wherever it has workers; with `only_copies`, only copies of our loaders.

    The same goes for torchdata's StatefulDataLoader, if the program has imported it. A second call can only extend that
    to all loaders, and to torchdata's. One line on stderr reports the first loader that is taken over.
    `balance` works as in `numapin.DataLoader`, for all loaders that are not copies.

    If torch lacks a private name that the path needs, loaders stay torch's, and one line on stderr says so.
    """
    if not only_copies:
        before = _Everywhere.options
        _Everywhere.options = PathOptions(balance=balance or (before is not None and before.balance))
    _watch_iterators()
    classes: dict[str, Any] = {torch_names.TORCH: torch.utils.data.DataLoader, torch_names.TORCHDATA: stateful_class()}
    for package, cls in classes.items():
        if cls is not None:
            _take_over(cls, package)


def stateful_class() -> type[_Loader] | None:
    """Return torchdata's loader; None if the program has not imported it."""
    return getattr(sys.modules.get(torch_names.STATEFUL), "StatefulDataLoader", None)


def _warn(message: Warning | str, category: type[Warning] | None = None, *_: object, **__: object) -> None:
    """Warn at the user's line, or at the caller's if there is none: torch's stack level may lead to a line of ours."""
    frame = usage.users_frame() or sys._getframe(1)
    module, seen = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category or UserWarning, frame.f_code.co_filename, frame.f_lineno, module, seen)


@cache  # once for each class
def _take_over(cls: Any, package: str) -> None:
    """Let loaders of this class make their iterators by our function for the package, if the path is on."""
    off = torch_names.explained(package)
    if off:
        _say_once(f"warning: {off}")
        _leave(cls)
        return
    if package == torch_names.TORCHDATA:
        from numapin.data.stateful import iterator_of as iterator_of_it
    else:
        iterator_of_it = iterator_of
    module = sys.modules.get(cls.__module__)
    if getattr(module, "warnings", None) is warnings:
        module.warnings = SimpleNamespace(**{**vars(warnings), "warn": _warn})  # type: ignore[union-attr]
    torchs_own = cls._get_iterator

    def _get_iterator(self: _Loader) -> Any:
        options: PathOptions | None = getattr(self.pin_memory_device, "options", _Everywhere.options)
        if options is None:
            return torchs_own(self)
        if self.num_workers and os.environ.get("RANK", "0") == "0" and not pins_elsewhere(self):
            _say_once("torch's DataLoader uses numapin's data path")
        return iterator_of_it(self, options)

    cls._get_iterator = _get_iterator


def _leave(cls: type[_Loader]) -> None:
    """Leave loaders of this class as they are. Batches of our loaders are still cast, moved and transformed."""
    torchs_own = cls.__iter__

    def __iter__(self: _Loader) -> Any:  # noqa: N807
        options: PathOptions | None = getattr(self.pin_memory_device, "options", None)
        batches: Any = torchs_own(self)
        if options is not None and options.casts:
            batches = map(partial(cast_batch, casts=dict(options.casts)), batches)
        if options is not None:
            batches = map(partial(move_and_transform, options), batches, itertools.count())
        return batches

    cls.__iter__ = __iter__  # type: ignore[method-assign]


@cache  # once
def _watch_iterators() -> None:
    """Note the iterators of torch's own path; those that we made are known already."""
    torchs_own = _BaseDataLoaderIter.__init__

    def __init__(self: _BaseDataLoaderIter, loader: _Loader, *rest: Any, **named: Any) -> None:  # noqa: N807
        if _Everywhere.options is not None and not isinstance(self, LaneIterator):
            is_theirs = isinstance(loader, stateful_class() or ())
            off = torch_names.why_off(torch_names.TORCHDATA if is_theirs else torch_names.TORCH)
            usage.note_other(loader, off or f"{type(loader).__name__} makes its own iterators")
        torchs_own(self, loader, *rest, **named)

    _BaseDataLoaderIter.__init__ = __init__  # type: ignore[method-assign]


@cache
def _say_once(line: str) -> None:
    say(line)
