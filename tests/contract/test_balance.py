"""`balance=True`: torch's batches in torch's order, made by whichever worker is ready first."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

import numapin
from numapin.errors import UsageError
from tests.contract.datasets import At, CountingSampler, Raise, Rows, Stream, kill_worker, sleep_long
from tests.contract.describe import Described
from tests.contract.watching import TORCH, Failure, Seen, assert_as_torch, assert_same_seen, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores

BALANCED: Final[Any] = partial(numapin.DataLoader, balance=True)
UNEVEN: Final = Rows(delay_s=0.001)


class WorkerIds(Dataset[Any]):
    """The index, and the worker that made the item; worker 0 takes `slow_s` for each item, the others 2 ms."""

    def __init__(self, size: int, *, slow_s: float) -> None:
        self.size, self.slow_s = size, slow_s

    def __len__(self) -> int:
        """Return the number of items."""
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return an item after the worker's pause."""
        info: Any = get_worker_info()
        time.sleep(self.slow_s if info.id == 0 else 0.002)
        return index, info.id


def _make(loader: DataLoader[Any]) -> tuple[list[int], Counter[int]]:
    """Run an epoch; return the indices in their order, and how many batches each worker made."""
    batches = [(int(index), int(worker)) for index, worker in loader]
    return [index for index, _worker in batches], Counter(worker for _index, worker in batches)


@pytest.fixture
def uneven() -> Callable[..., DataLoader[Any]]:
    """Give a function that makes a loader over 120 items with three workers, of which one takes 125 times as long."""
    # So much longer that it is the slowest on a busy machine, too.
    return partial(numapin.DataLoader, WorkerIds(120, slow_s=0.25), num_workers=3)


def test_a_slow_worker_makes_fewer_batches(uneven: Callable[..., DataLoader[Any]]) -> None:
    """In order, a slow worker gets about as few tasks as it does with in_order=False; in turn it would get a third."""
    indices, made = _make(uneven(balance=True))
    assert indices == list(range(120))
    assert made[0] <= 12
    assert made[0] <= _make(uneven(in_order=False))[1][0] + 6


def test_off_by_default(uneven: Callable[..., DataLoader[Any]]) -> None:
    """Without `balance`, task n goes to worker n mod W, as in torch."""
    loader = uneven(batch_size=10, collate_fn=_first_of)
    loader.dataset.slow_s = 0.004  # type: ignore[attr-defined]
    assert [worker for _index, worker in loader] == [0, 1, 2] * 4
    assert loader.balance is False  # type: ignore[attr-defined]


def _first_of(items: list[Any]) -> Any:
    return items[0]


def test_persistent_workers(uneven: Callable[..., DataLoader[Any]]) -> None:
    """What was learned in one epoch holds in the next, and an epoch that ends early leaves no tasks behind."""
    loader = uneven(balance=True, persistent_workers=True)
    iterator: Iterator[Any] = iter(loader)
    for _ in range(20):
        next(iterator)
    for _ in range(2):
        indices, made = _make(loader)
        assert indices == list(range(120))
        assert made[0] <= 12
    balance: Any = loader._iterator._lane.balance  # type: ignore[union-attr]
    assert [balance.num_unfinished(worker) for worker in range(3)] == [0, 0, 0]


CASES: Final[dict[str, dict[str, Any]]] = {
    "three": {"dataset": UNEVEN, "batch_size": 5, "num_workers": 3},
    "no-worker": {"dataset": UNEVEN, "batch_size": 5},
    "shuffle": {"dataset": UNEVEN, "batch_size": 4, "num_workers": 3, "shuffle": True},
    "prefetch-one": {"dataset": UNEVEN, "batch_size": 3, "num_workers": 2, "prefetch_factor": 1},
    "unbatched": {"dataset": UNEVEN, "batch_size": None, "num_workers": 2},
    "distributed": {"dataset": UNEVEN, "batch_size": 4, "num_workers": 2, "sampler": DistributedSampler(UNEVEN, 2, 1)},
    "few-batches": {"dataset": Rows(2), "batch_size": 2, "num_workers": 3},
    "persistent": {"dataset": UNEVEN, "batch_size": 3, "num_workers": 2, "shuffle": True, "persistent_workers": True},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_batches_as_torch(name: str) -> None:
    """Batches, their order, errors and the rank's own random draws equal torch's, over epochs that end early, too."""
    assert_as_torch(BALANCED, lambda: CASES[name], (None, 3, None))


def test_the_same_errors_as_torch() -> None:
    """An error is raised in its batch's place. Its text names the worker, which may be another than torch's."""
    arguments: dict[str, Any] = {"dataset": At(index=9, act=Raise(ValueError)), "batch_size": 2, "num_workers": 3}
    ours, theirs = (watch(partial(made, **arguments), (None, 3, None)) for made in (BALANCED, TORCH))
    assert_same_seen(_of_any_worker(ours), _of_any_worker(theirs))
    assert sum(isinstance(event, Failure) for events in theirs.epochs for event in events) == 2


def _of_any_worker(seen: Seen) -> Seen:
    def without_number(event: Described | Failure) -> Described | Failure:
        if isinstance(event, Described):
            return event
        return replace(event, text=re.sub(r"worker process \d+", "worker process", event.text))

    return replace(seen, epochs=tuple(tuple(without_number(event) for event in events) for events in seen.epochs))


@pytest.mark.parametrize(
    ("act", "text"), [(kill_worker, "killed by|exited unexp"), (sleep_long, "timed out after 1 sec")]
)
def test_broken_workers(act: Callable[[], None], text: str) -> None:
    """A worker that dies or hangs is torch's error, no wait forever."""
    timeout = 1 if act is sleep_long else 0
    with pytest.raises(RuntimeError, match=text):
        list(BALANCED(At(index=7, act=act), batch_size=2, num_workers=3, timeout=timeout))


def test_as_many_batches_ahead_as_torch() -> None:
    """A slow worker does not let others run farther ahead: memory stays bounded as in torch."""
    sampler = CountingSampler(60)
    loader = BALANCED(WorkerIds(60, slow_s=0.05), batch_size=1, sampler=sampler, num_workers=3)
    assert all(sampler.drawn <= 6 + taken for taken, _ in enumerate(loader, start=1))


class TestLeftAsTorchs:
    """Loaders on which `balance` has no effect."""

    def test_an_iterable_dataset(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Batches and order are torch's, because each worker has its own share; it says so once, with what to do."""
        arguments: dict[str, Any] = {"dataset": Stream(21, 4, 11), "batch_size": 4, "num_workers": 3}
        made: list[Any] = []

        def make() -> DataLoader[Any]:
            made.append(BALANCED(**arguments))
            return made[-1]  # type: ignore[no-any-return]

        epochs = (None, 2, None)
        assert_same_seen(watch(make, epochs), watch(lambda: DataLoader(**arguments), epochs))
        (note,) = made[0].stats().notes
        assert "in_order=False" in note
        assert capfd.readouterr().err.count("balance=True changes nothing") == 1

    def test_in_any_order(self) -> None:
        """With in_order=False torch itself passes over busy workers: each sample comes once."""
        loader = BALANCED(WorkerIds(60, slow_s=0.03), num_workers=3, in_order=False)
        indices, made = _make(loader)
        assert sorted(indices) == list(range(60))
        assert made[0] <= 12
        assert not loader.stats().notes


@pytest.mark.parametrize("option", ["balance", "strict"])
def test_a_switch_is_true_or_false(option: str) -> None:
    """Text such as "no" would be true."""
    with pytest.raises(UsageError, match=f"{option}='no' is neither True nor False"):
        numapin.DataLoader([1], **{option: "no"})  # type: ignore[arg-type]


def test_copies_of_the_loader_keep_it() -> None:
    """A loader that a framework makes from torch's arguments balances too."""
    loader = BALANCED(WorkerIds(90, slow_s=0.05), num_workers=3)
    copy = DataLoader(loader.dataset, num_workers=3, pin_memory_device=loader.pin_memory_device)
    indices, made = _make(copy)
    assert indices == list(range(90))
    assert made[0] <= 12
