"""Run a loader and record everything by which its user could distinguish it from torch's."""

from __future__ import annotations

import itertools
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.contract.describe import Described, assert_same_batches, describe

TORCH = DataLoader
LoaderClass: TypeAlias = type[DataLoader[Any]]
Epochs: TypeAlias = tuple[int | None, ...]

_PATIENCE_S = 60.0
_OTHERS_WARNINGS = ("/ATen/", "NumPy array is not writ", "use of fork() may lead")  # once per process; Python 3.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception, without parts that may differ: process ids, addresses and frames outside these tests."""

    kind: type[BaseException]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that a user saw.

    `random_states` are digests of all generators before, at the start of and after each epoch.
    """

    epochs: tuple[tuple[Described | Failure, ...], ...]
    warnings: tuple[str, ...]
    random_states: tuple[int, ...]


def watch(make: Callable[[], DataLoader[Any]], epochs: Epochs = (None,)) -> Seen:
    """Make a loader and run it; `epochs` has the number of batches to take from each epoch, None for all."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002 - the generator that torch seeds in workers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make()
        with suppress(TypeError):  # no length; with one, torch warns of more batches
            len(loader)
        states, seen = [_random_state(loader)], []
        for limit in epochs:
            iterator = iter(loader)
            states.append(_random_state(loader))
            seen.append(tuple(itertools.islice(events(iterator), limit)))
            states.append(_random_state(loader))
            del iterator
    texts = (f"{warning.category.__name__}: {warning.message}" for warning in caught)
    texts = (text for text in texts if not any(other in text for other in _OTHERS_WARNINGS))
    return Seen(epochs=tuple(seen), warnings=tuple(texts), random_states=tuple(states))


def events(iterator: Iterator[Any], limit: int = 500) -> Iterator[Described | Failure]:
    """Yield each batch's description, or the exception in its place, until the iterator ends."""
    for _ in range(limit):
        try:
            yield describe(next(iterator))
        except StopIteration as end:
            failure(end)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, torch's must be the same
            yield failure(error)


def failure(error: BaseException) -> Failure:
    """Return the comparable parts of an exception, and release the objects in its frames.

    The frame in which torch raises it refers to it, which is a cycle that would keep the iterator alive.
    """
    traceback.clear_frames(error.__traceback__)
    text = re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"\(pid(\(s\))? [\d, ]+\)", "(pid)", str(error)))
    return Failure(kind=type(error), text=_without_foreign_frames(text))


def _without_foreign_frames(text: str) -> str:
    """Drop traceback entries outside these tests; a loader may reach the user's code through its own functions."""
    kept, keep = [], True
    for line in text.split("\n"):
        if line.startswith('  File "'):
            keep = "/tests/contract/" in line
        elif not line.startswith("    "):
            keep = True
        if keep:
            kept.append(line)
    return "\n".join(kept)


def _random_state(loader: DataLoader[Any]) -> int:
    own = loader.generator.get_state().numpy().tobytes() if loader.generator is not None else b""
    numpys: Any = np.random.get_state()  # noqa: NPY002
    return hash((torch.get_rng_state().numpy().tobytes(), random.getstate(), numpys[1].tobytes(), numpys[2], own))


def assert_as_torch(
    loader_class: LoaderClass,
    arguments: Callable[[], dict[str, Any]],
    epochs: Epochs = (None,),
    *,
    ordered: bool = True,
) -> Seen:
    theirs = watch(lambda: TORCH(**arguments()), epochs)
    ours = watch(lambda: loader_class(**arguments()), epochs)
    assert_same_seen(ours, theirs, ordered=ordered)
    return theirs


def assert_same_seen(ours: Seen, theirs: Seen, *, ordered: bool = True) -> None:
    assert ours.warnings == theirs.warnings
    for mine, torchs in zip(ours.epochs, theirs.epochs, strict=True):
        assert _failures(mine) == _failures(torchs)
        assert_same_batches(_batches(mine), _batches(torchs), ordered=ordered)
    assert ours.random_states == theirs.random_states, "other random numbers were drawn"


def _failures(events: Sequence[Described | Failure]) -> list[tuple[int, Failure]]:
    return [(number, event) for number, event in enumerate(events) if isinstance(event, Failure)]


def _batches(events: Sequence[Described | Failure]) -> list[Described]:
    return [event for event in events if isinstance(event, Described)]


def hits(loader: DataLoader[Any]) -> int | None:
    """Return how many batches came in slots; None for a loader without slots, such as torch's."""
    stats: Any = getattr(loader, "stats", None)
    return None if stats is None else int(stats().hits)


def reused(loader: DataLoader[Any]) -> int | None:
    stats: Any = getattr(loader, "stats", None)
    return None if stats is None else int(stats().hits - stats().slots_made)


def pass_first_batches(loader: DataLoader[Any], iterator: Iterator[Any], num_hits: int = 4) -> list[Any]:
    """Take batches until `num_hits` came in slots, and return all of them; eight batches for torch's loader."""
    return list(first_batches(loader, iterator, num_hits))


def first_batches(loader: DataLoader[Any], iterator: Iterator[Any], num_hits: int = 4) -> Iterator[Any]:
    yield next(iterator)  # spawned workers take seconds to start
    end = time.monotonic() + _PATIENCE_S
    while (through := hits(loader)) is not None and through < num_hits:
        assert time.monotonic() < end, f"only {through} batches came in slots"
        yield next(iterator)
    if through is None:
        yield from itertools.islice(iterator, 7)
