"""Errors: type and text for every wrong argument, and for exceptions of the user's own code."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from tests.contract.datasets import (
    At,
    ManyArgumentsError,
    Raise,
    Reduced,
    Rows,
    Stream,
    collate_deque,
    collate_one_tensor,
    lock_of,
    raise_from,
    row,
    with_history,
)
from tests.contract.describe import name_of
from tests.contract.watching import (
    TORCH,
    Failure,
    LoaderClass,
    assert_as_torch,
    events,
    failure,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ROWS, STREAM = Rows(8), Stream(4, 4)
WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"num_workers": "two"},
    {"timeout": -1},
    {"timeout": 1},
    {"prefetch_factor": 2},
    {"prefetch_factor": 0, "num_workers": 1},
    {"prefetch_factor": -1, "num_workers": 1},
    {"prefetch_factor": "a", "num_workers": 1},
    {"persistent_workers": True},
    {"dataset": STREAM, "shuffle": True},
    {"dataset": STREAM, "sampler": [1]},
    {"dataset": STREAM, "batch_sampler": [[1]]},
    {"sampler": [1], "shuffle": True},
    {"sampler": 5},
    {"sampler": [100]},
    {"sampler": ["first"], "num_workers": 1},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "sampler": [1]},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_sampler": [5], "num_workers": 1},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": -3},
    {"batch_size": True},
    {"batch_size": "four"},
    {"drop_last": "yes"},
    {"dataset": [], "shuffle": True},
    {"dataset": 5},
    {"dataset": object()},
    {"dataset": iter([1, 2])},
    {"dataset": None, "num_workers": 1},
    {"shuffle": True, "generator": 5},
    {"generator": 5, "num_workers": 1},
    {"collate_fn": 5},
    {"collate_fn": 5, "num_workers": 1},
    {"worker_init_fn": 5, "num_workers": 1},
    {"multiprocessing_context": "fork"},
    {"multiprocessing_context": "thread", "num_workers": 1},
    {"multiprocessing_context": 5, "num_workers": 1},
    {"multiprocessing_context": "spawn", "num_workers": 1, "collate_fn": lambda rows: rows},
    {"multiprocessing_context": "forkserver", "num_workers": 1, "worker_init_fn": lambda _: None},
    {"no_such_option": 1},
    {"sampler": SequentialSampler([]), "num_workers": 1},
]


def outcome(kind: LoaderClass, *positional: Any, **arguments: Any) -> object:
    """Return the first exception between the constructor and the end of an epoch, or the result without one."""
    try:
        loader = kind(*positional, **arguments)
        iterator = iter(loader)
    except Exception as error:  # noqa: BLE001 - whatever it is, torch's must be the same
        return failure(error)
    return tuple(events(iterator, 20))


@pytest.mark.parametrize("arguments", WRONG, ids=name_of)
@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's __del__, unfinished iterator
def test_wrong_arguments(loader_class: LoaderClass, arguments: dict[str, Any]) -> None:
    """Each wrong argument fails with torch's type and text; the two that torch accepts are accepted."""
    ours, theirs = (outcome(kind, **{"dataset": ROWS, **arguments}) for kind in (loader_class, TORCH))
    assert ours == theirs
    assert "Failure" in repr(theirs) or "SequentialSampler" in str(arguments)


class BrokenStream(IterableDataset[Any]):
    """A stream that ends with an exception."""

    def __iter__(self) -> Iterator[Any]:
        """Yield three rows and fail."""
        yield from map(row, range(3))
        raise ValueError("the shard is truncated")


class FailingSampler:
    """A sampler that fails after some indices."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Iterator[Any]:
        """Yield indices, then fail."""
        yield from range(self.after)
        raise LookupError("the sampler has no more")


def nested(*_: object) -> None:
    """Raise a group of exceptions."""
    raise ExceptionGroup("two at once", [ValueError(1), KeyError(2)])


ACTS: dict[str, Callable[..., object]] = {
    "ValueError": Raise(ValueError),
    "KeyError": Raise(KeyError, ("field",)),
    "IndexError": Raise(IndexError),
    "StopIteration": Raise(StopIteration),
    "own": Raise(ManyArgumentsError, (1, 2)),
    "OSError": Raise(FileNotFoundError, (2, "No such file", "/data/7.jpg")),
    "MemoryError": Raise(MemoryError, ()),
    "UnicodeDecodeError": Raise(UnicodeDecodeError, ("utf-8", b"\xff", 0, 1, "invalid")),
    "chained": raise_from,
    "group": nested,
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 2) for name in ACTS), ("ValueError", 0), ("StopIteration", 0)])
def test_errors_in_the_dataset(loader_class: LoaderClass, name: str, workers: int) -> None:
    """Errors take the place of their batch, with torch's type and text; later batches arrive as with torch.

    A StopIteration ends the epoch, as with torch.
    """
    arguments = {"dataset": At(index=7, act=ACTS[name]), "batch_size": 2, "num_workers": workers}
    theirs = assert_as_torch(loader_class, lambda: arguments)
    assert any(isinstance(event, Failure) for event in theirs.epochs[0]) or name == "StopIteration"


@pytest.mark.parametrize(
    "arguments",
    [
        {"collate_fn": Raise(ValueError)},
        {"collate_fn": Raise(ValueError), "num_workers": 0},
        {"sampler": FailingSampler(7)},
        {"batch_sampler": FailingSampler(3)},
        {"dataset": BrokenStream()},
        {"dataset": [torch.zeros(3), torch.zeros(4)], "batch_size": 2},
        {"dataset": [lambda: 1]},
        {"dataset": [{"x": 1}, {"y": 1}], "batch_size": 2},
        {"dataset": [torch.zeros(5000), torch.zeros(5001)] * 9, "batch_size": 2},
        {"dataset": [torch.zeros(1 << 20)] * 20, "batch_size": 2, "collate_fn": collate_one_tensor},
        {"dataset": [torch.zeros(1 << 20)] * 20, "batch_size": 2, "collate_fn": collate_deque},
    ],
)
def test_errors_in_collating_and_sampling(loader_class: LoaderClass, arguments: dict[str, Any]) -> None:
    """Collate functions, samplers and the default collation fail as with torch's loader."""
    options = {"dataset": Rows(24, shape=(9,)), "num_workers": 2} | arguments
    ours, theirs = (outcome(kind, **options) for kind in (loader_class, TORCH))
    assert ours == theirs
    assert "Failure" in repr(theirs)


def test_an_error_under_a_persistent_worker(loader_class: LoaderClass) -> None:
    """After an epoch with an error, a persistent worker raises it again, and no old batch arrives."""
    arguments = {"dataset": At(index=7, act=Raise(ValueError)), "num_workers": 2, "persistent_workers": True}
    assert_as_torch(loader_class, lambda: arguments, (None, 9, None))


@pytest.mark.parametrize("collate", [lock_of, with_history])
def test_a_batch_that_cannot_be_sent(own_class: LoaderClass, collate: Callable[[Any], object]) -> None:
    """A batch that cannot be sent is an error in the rank, where torch waits forever; the loader continues."""
    dataset = At(index=-1, act=threading.Lock, size=6)
    loader = own_class(dataset, batch_size=2, num_workers=1, collate_fn=collate)
    told = list(events(iter(loader)))
    assert len(told) == 3
    texts = [event.text for event in told if isinstance(event, Failure)]
    assert len(texts) == 3
    assert all("pickle" in text or "serialize non-leaf" in text for text in texts)


def decode() -> None:
    """Raise an error whose class cannot be imported, as a function's own class, or one of a plugin."""

    class TruncatedError(Exception):
        """A file is too short."""

    raise TruncatedError("image 17.jpg is truncated")


@pytest.mark.parametrize(
    "options", [{"dataset": At(index=3, act=decode, size=6)}, {"collate_fn": lambda _: Reduced(decode)}]
)
def test_an_error_that_cannot_be_pickled(own_class: LoaderClass, options: dict[str, Any]) -> None:
    """It has its own name, message and traceback, where torch waits forever; the loader continues."""
    arguments: dict[str, Any] = {"dataset": Rows(6), "batch_size": 2, "num_workers": 1} | options
    told = list(events(iter(own_class(**arguments))))
    failures = [event for event in told if isinstance(event, Failure)]
    assert (len(told), len(failures)) == (3, 1 if "dataset" in options else 3)
    for each in failures:
        assert (each.kind.__name__, each.kind.__module__) == ("TruncatedError", __name__)
        assert issubclass(each.kind, RuntimeError)
        assert each.text.startswith("Caught TruncatedError in DataLoader worker process 0.\nOriginal Traceback")
        assert each.text.endswith(".TruncatedError: image 17.jpg is truncated\n")
        assert "in decode\n" in each.text
