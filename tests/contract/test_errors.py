"""Errors of arguments, of the user's own code and of workers that end: type and text are torch's."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler, default_collate

from tests.contract.datasets import (
    Made,
    ManyArgumentsError,
    Raise,
    Reduced,
    Rows,
    Stream,
    kill_worker,
    raise_from,
    row,
    rows_with,
)
from tests.contract.describe import name_of
from tests.contract.watching import TORCH, Failure, LoaderClass, assert_as_torch, events, failure

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # When a second worker ends, torch's handler reports the first again, also in torch's __del__.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TORCHS: Any = default_collate
ROWS, STREAM, LARGE = Rows(24, shape=(9,)), Stream(4, 4), torch.zeros(1 << 20)
WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": 1},
    {"prefetch_factor": 2},
    {"prefetch_factor": 0, "num_workers": 1},
    {"persistent_workers": True},
    {"dataset": STREAM, "shuffle": True},
    {"sampler": [1], "shuffle": True},
    {"sampler": 5},
    {"sampler": [100]},
    {"sampler": ["first"], "num_workers": 1},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [5], "num_workers": 1},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": "four"},
    {"drop_last": "yes"},
    {"dataset": [], "shuffle": True},
    {"dataset": iter([1, 2])},
    {"dataset": None, "num_workers": 1},
    {"shuffle": True, "generator": 5},
    {"generator": 5, "num_workers": 1},
    {"collate_fn": 5, "num_workers": 1},
    {"worker_init_fn": 5, "num_workers": 1},
    {"multiprocessing_context": "fork"},
    {"multiprocessing_context": "thread", "num_workers": 1},
    {"multiprocessing_context": "spawn", "num_workers": 1, "collate_fn": lambda rows: rows},
    {"multiprocessing_context": "forkserver", "num_workers": 1, "worker_init_fn": lambda _: None},
    {"no_such_option": 1},
    {"sampler": SequentialSampler([]), "num_workers": 1},
]


def outcome(kind: LoaderClass, **arguments: Any) -> object:
    """Return the first exception between the constructor and the end of an epoch, or the result without one."""
    try:
        loader = kind(**arguments)
        iterator = iter(loader)
    except Exception as error:  # noqa: BLE001 - whatever it is, torch's must be the same
        return failure(error)
    return tuple(events(iterator, 20))


class BrokenStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(row, range(3))
        raise ValueError("the shard is truncated")


class FailingSampler:
    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.after)
        raise LookupError("the sampler has no more")


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
    "group": Raise(ExceptionGroup, ("two at once", [ValueError(1), KeyError(2)])),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"num_workers": 2, "batch_size": 2, "persistent_workers": name == "ValueError"}) for name in ACTS),
        *((name, {"batch_size": 2}) for name in ("ValueError", "StopIteration")),
    ],
)
def test_errors_in_the_dataset(loader_class: LoaderClass, name: str, options: dict[str, Any]) -> None:
    """Errors take the place of their batch, with torch's type and text; later batches and epochs are as with torch."""
    arguments = {"dataset": rows_with(ACTS[name], at=7), **options}
    epochs = (None, 9, None) if options.get("persistent_workers") else (None,)
    theirs = assert_as_torch(loader_class, lambda: arguments, epochs)
    assert any(isinstance(event, Failure) for event in theirs.epochs[0]) or name == "StopIteration"


def fail_in_worker_one(worker_id: int) -> None:
    if worker_id == 1:
        raise OSError(5, "no such shard")


OF_USERS: list[dict[str, Any]] = [
    {"collate_fn": Raise(ValueError)},
    {"collate_fn": Raise(ValueError), "num_workers": 0},
    {"worker_init_fn": Raise(ManyArgumentsError, (1, 2))},
    {"worker_init_fn": fail_in_worker_one},
    {"sampler": FailingSampler(7)},
    {"batch_sampler": FailingSampler(3)},
    {"dataset": BrokenStream()},
    {"dataset": [torch.zeros(3), torch.zeros(4)], "batch_size": 2},
    {"dataset": [lambda: 1]},
    {"dataset": [{"x": 1}, {"y": 1}], "batch_size": 2},
    {"dataset": [torch.zeros(5000), torch.zeros(5001)] * 9, "batch_size": 2},
    {"dataset": [LARGE] * 20, "batch_size": 2, "collate_fn": lambda rows: TORCHS(torch.stack(rows))},
    {"dataset": [LARGE] * 20, "batch_size": 2, "collate_fn": lambda rows: TORCHS(deque(rows))},  # no slices
]


@pytest.mark.parametrize(
    "arguments",
    [*WRONG, *(pytest.param({"num_workers": 2, **each}, id=str(n)) for n, each in enumerate(OF_USERS))],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_errors_of_arguments(loader_class: LoaderClass, arguments: dict[str, Any]) -> None:
    """Wrong arguments, functions and samplers fail with torch's type and text, or are accepted as by torch."""
    ours, theirs = (outcome(kind, **{"dataset": ROWS, **arguments}) for kind in (loader_class, TORCH))
    assert ours == theirs
    assert "Failure" in repr(theirs) or "SequentialSampler" in str(arguments)


@pytest.mark.parametrize("collate", [lambda _: threading.Lock(), lambda rows: torch.stack(rows).requires_grad_() * 2])
def test_a_batch_that_cannot_be_sent(own_class: LoaderClass, collate: Callable[[Any], object]) -> None:
    """A batch that cannot be sent is an error in the rank, where torch waits forever; the loader continues."""
    loader = own_class(Made(row, 6), batch_size=2, num_workers=1, collate_fn=collate)
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
    "options", [{"dataset": rows_with(decode, at=3, size=6)}, {"collate_fn": lambda _: Reduced(decode)}]
)
def test_an_error_that_cannot_be_pickled(own_class: LoaderClass, options: dict[str, Any]) -> None:
    """It is a RuntimeError with its message and traceback, where torch waits forever; the loader continues."""
    arguments: dict[str, Any] = {"dataset": Rows(6), "batch_size": 2, "num_workers": 1} | options
    told = list(events(iter(own_class(**arguments))))
    failures = [event for event in told if isinstance(event, Failure)]
    assert (len(told), len(failures)) == (3, 1 if "dataset" in options else 3)
    for each in failures:
        assert each.kind is RuntimeError
        assert each.text.startswith("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback")
        assert each.text.endswith(".TruncatedError: image 17.jpg is truncated\n")
        assert "in decode\n" in each.text


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (kill_worker, "is killed by signal: Killed. "),
        (partial(signal.raise_signal, signal.SIGSEGV), "is killed by signal: Segmentation fault. "),
        (Raise(SystemExit, (3,)), "exited unexpectedly with exit code 3. Details are lost due to"),
    ],
)
def test_a_worker_that_dies(loader_class: LoaderClass, act: Callable[[], object], cause: str) -> None:
    """Torch's RuntimeError is raised, with torch's own report as its cause, and no other worker is left."""
    may_end = multiprocessing.Event()
    dataset = rows_with(lambda: (may_end.wait(60), act()), at=90, size=200)
    iterator = iter(loader_class(dataset, batch_size=2, num_workers=2))
    for _ in range(45):
        next(iterator)
    may_end.set()  # not earlier: a batch that is being sent would be truncated
    with pytest.raises(RuntimeError) as caught:
        list(iterator)
    texts = [failure(error).text for error in (caught.value, caught.value.__cause__) if error]
    assert texts[-1].startswith(f"DataLoader worker (pid) {cause}")
    assert len(texts) == 1 or texts[0] == "DataLoader worker (pid) exited unexpectedly"
    del iterator, caught
    assert not multiprocessing.active_children()


def test_timeout(loader_class: LoaderClass) -> None:
    """A batch that takes too long is torch's error, and not before the time is over."""
    goes_on = multiprocessing.Event()
    dataset = rows_with(lambda: goes_on.wait(60), at=9)
    loader = loader_class(dataset, batch_size=2, num_workers=1, timeout=60)
    iterator: Any = iter(loader)
    for _ in range(4):
        next(iterator)
    iterator._timeout = 0.4  # not earlier: the worker has to start
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0.4 seconds$"):
        next(iterator)
    assert time.monotonic() - start > 0.3
    goes_on.set()
