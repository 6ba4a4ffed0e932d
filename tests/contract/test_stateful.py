"""torchdata's StatefulDataLoader on numapin's path: batches, states, resumption and errors equal torchdata's own."""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

import numapin
from tests.contract.datasets import Made, Raise, Reduced, Stream, kill_worker, row
from tests.contract.describe import assert_same_batches, describe
from tests.contract.seam import STATEFUL, LoaderStateError, install

torchdata: Any = pytest.importorskip(
    "torchdata.stateful_dataloader.stateful_dataloader", reason="no torchdata; type: pip install .[dev]"
)
# torchdata 0.11 calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

TORCHDATA = torchdata.StatefulDataLoader
Ours: Any = numapin.StatefulDataLoader


def items(*, bad: int = -1, act: Callable[[], Any] = int) -> Made:
    """Return rows with an index and a random number, of which index `bad` is what `act` makes, if it does."""

    def make(index: int) -> Any:
        return act() if index == bad else {"x": row(index), "index": index, "random": torch.rand(1)}

    return Made(make, 14)


class Counting(IterableDataset[Any]):
    """Rows of a counter, which is the dataset's state; worker w yields `size - w` rows."""

    def __init__(self, size: int = 9) -> None:
        self.size, self.next = size, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        while self.next < self.size - worker:
            self.next += 1
            yield {"x": row(self.next), "worker": worker}
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "large": torch.full((2000,), float(self.next))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = int(state["large"][0])


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (items(), {"shuffle": True, "batch_size": 2}),
    "distributed": (items(), {"sampler": DistributedSampler(range(14), 2, 1, seed=3), "num_workers": 1}),  # type: ignore[arg-type]
    "every third state": (items(), {"batch_size": 1, "snapshot_every_n_steps": 3}),
    "persistent": (items(), {"shuffle": True, "batch_size": 3, "persistent_workers": True}),
    "iterable with a state, persistent": (Counting(), {"batch_size": 2, "persistent_workers": True}),
    "iterable without a state": (Stream(8, 9), {"batch_size": 2, "prefetch_factor": 1}),
    "no workers": (items(), {"shuffle": True, "batch_size": 2, "num_workers": 0}),
}


def history(cls: Any, dataset: Any, options: dict[str, Any]) -> list[Any]:
    """Return the batches and states of a loader: two epochs, one left in its middle, and one resumed from there."""

    def make() -> Any:
        torch.manual_seed(5)
        return cls(dataset, **{"num_workers": 2} | options)

    loader = make()
    found: list[Any] = [loader.state_dict()]
    for epoch in (None, 3):
        iterator = iter(loader)
        for batch in itertools.islice(iterator, epoch):
            found += [describe(batch), loader.state_dict()]
    state = pickle.loads(pickle.dumps(loader.state_dict()))  # noqa: S301 - our own
    del iterator, loader
    resumed = make()
    resumed.load_state_dict(state)
    for batch in resumed:
        found += [describe(batch), resumed.state_dict()]
    return [*found, resumed.state_dict()]  # at the end of the epoch


@pytest.mark.parametrize("case", CASES)
def test_batches_and_states(case: str) -> None:
    """Batches, their random numbers, and the state after each equal torchdata's, and so does the resumed rest."""
    dataset, options = CASES[case]
    ours, theirs = history(Ours, dataset, options), history(TORCHDATA, dataset, options)
    assert len(ours) == len(theirs) > 10
    assert_same_batches(list(map(describe, ours)), list(map(describe, theirs)))


@pytest.mark.xdist_group("fork server")
def test_takes_the_path() -> None:
    """Every batch of a worker that is not forked travels in a slot or makes one; the state needs none, though large."""
    loader = Ours(Counting(), batch_size=2, num_workers=1, multiprocessing_context="forkserver")
    kept = [(batch, loader.state_dict()) for batch in loader]
    assert [describe(batch) for batch, _ in kept] == [describe(batch) for batch in TORCHDATA(Counting(), batch_size=2)]
    stats = loader.stats()
    assert stats.batches == len(kept) == 5
    assert stats.hits + sum(stats.misses.values()) == 5
    assert stats.bytes < 5 * 40_000  # 2 rows of 16 KiB a batch, without the 8 kB of the state
    states = [state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"] for _, state in kept]
    assert not any(state["large"].is_shared() for state in states)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch raises in its SIGCHLD handler
@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (items(bad=5, act=Raise(KeyError, (5,))), {}, "KeyError: 5"),
        (items(bad=5, act=Raise(type("Own", (Exception,), {}), ("of no module",))), {}, "Own: of no module"),
        (
            items(bad=3, act=lambda: Reduced(Raise(ValueError, ("not to be sent",)))),
            {"collate_fn": list},
            "not to be sent",
        ),
        (items(), {"worker_init_fn": Raise(RuntimeError, ("no worker today",))}, "no worker today"),
        (items(bad=6, act=kill_worker), {}, "DataLoader worker (pid"),
    ],
    ids=["item", "class", "unsendable", "start", "killed"],
)
def test_errors(dataset: Any, options: dict[str, Any], expected: str) -> None:
    """An error of the dataset, of sending, of a worker's start, or a worker's death is raised, and ends the workers."""
    loader = Ours(dataset, num_workers=2, batch_size=1, **options)
    with pytest.raises((KeyError, ValueError, RuntimeError)) as caught:
        list(loader)
    assert expected in str(caught.value)


def test_after_an_error_the_rest_comes() -> None:
    """A loop may go on after a failed item: no task is lost, and the state counts on."""

    def seen(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        loader = cls(items(bad=5, act=Raise(KeyError)), num_workers=2, batch_size=1)
        iterator, found = iter(loader), []
        for _ in range(14):
            try:
                found.append(int(next(iterator)["index"]))
            except KeyError:
                found.append(-1)
        return [*found, describe(loader.state_dict())]

    assert seen(Ours) == seen(TORCHDATA)


def test_after_a_batch_that_cannot_be_opened_the_rest_comes() -> None:
    """The error is that batch's only; its place is in the sequence."""
    fails = Raise(ValueError, ("not to be opened",))
    loader = Ours(items(bad=5, act=lambda: Reduced(lambda: (fails, ()))), num_workers=2, batch_size=None)
    iterator = iter(loader)
    assert [next(iterator)["index"] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="not to be opened"):
        next(iterator)
    assert iterator._tasks_outstanding + len(iterator._task_info) >= 4  # its worker got another task
    assert [batch["index"] for batch in iterator] == list(range(6, 14))


def test_an_abandoned_epoch_ends_its_workers() -> None:
    """An iterator that is dropped in the middle leaves no process behind; persistent workers go on with a new epoch.

    With in_order=False all items come, and the end of the epoch is found.
    """
    loader = Ours(items(), num_workers=2, batch_size=1)
    iterator = iter(loader)
    next(iterator)
    workers = iterator._workers
    loader._iterator = None
    del iterator
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)
    persistent = Ours(items(), num_workers=2, batch_size=1, persistent_workers=True)
    next(iter(persistent))
    assert [int(batch["index"]) for batch in persistent] == list(range(14))
    loader = Ours(items(), num_workers=2, batch_size=1, in_order=False)
    assert sorted(int(batch["index"]) for batch in loader) == list(range(14))


def test_torchdata_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is taken over only if the program has imported it."""
    assert install.stateful_class() is TORCHDATA
    monkeypatch.delitem(sys.modules, STATEFUL)
    assert install.stateful_class() is None


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_the_other_loader_names_this_one(method: str) -> None:
    """numapin.DataLoader has no state: its error names the line to change, and frameworks that look for it see none."""
    loader: Any = numapin.DataLoader(items())
    with pytest.raises(
        LoaderStateError, match=r"use numapin.StatefulDataLoader in place of numapin.DataLoader"
    ) as caught:
        getattr(loader, method)
    assert f"DataLoader.{method}()" in caught.value.message
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own
    assert not hasattr(loader, method)
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'other'"):
        loader.other  # noqa: B018


class WithProperty(numapin.DataLoader[Any]):
    @property
    def total(self) -> int:
        return sum(self.dataset.sizes)  # type: ignore[attr-defined]


def test_errors_of_a_subclass_are_kept() -> None:
    """An AttributeError that a property raises names what is missing there, as with torch's loader."""
    with pytest.raises(AttributeError, match="'Made' object has no attribute 'sizes'"):
        WithProperty(items()).total  # noqa: B018


def test_without_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.delitem(sys.modules, numapin.StatefulDataLoader.__module__)
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torchdata: pip install 'torchdata>=0.11'"):
        numapin.StatefulDataLoader  # noqa: B018


def test_own_arguments() -> None:
    """The loader, and a copy that a framework makes from torch's arguments, cast; a wrong argument is refused."""
    loader = Ours(items(), num_workers=1, cast=torch.bfloat16, worker_threads=2)
    copy = TORCHDATA(loader.dataset, num_workers=1, pin_memory_device=loader.pin_memory_device)
    for each in (loader, copy):
        assert {batch["x"].dtype for batch in each} == {torch.bfloat16}
    with pytest.raises(numapin.UsageError, match="worker_threads=-1"):
        Ours(items(), worker_threads=-1)


class WithNames(numapin.StatefulDataLoader[Any]):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["loader"])


def test_close() -> None:
    """It ends the workers, also those that state_dict() has started, and the loader can be used again.

    A subclass's own load_state_dict is not called.
    """
    with WithNames(items(), num_workers=1) as loader:
        loader.state_dict()
        workers = loader._iterator._workers
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader)) == 14
