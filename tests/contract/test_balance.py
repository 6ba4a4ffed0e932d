"""`balance=True`: torch's batches in torch's order, made by whichever worker is ready first."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pytest
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

import numapin
from numapin.errors import UsageError
from tests.contract.datasets import CountingSampler, Made, Rows, Stream
from tests.contract.seam import Balance
from tests.contract.watching import TORCH, assert_as_torch, assert_same_seen, watch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores

BALANCED: Final[Any] = partial(numapin.DataLoader, balance=True)
UNEVEN: Final = Rows(delay_s=0.001)
SIZE: Final = 60


def worker_of(index: int) -> tuple[int, int]:
    info: Any = get_worker_info()
    return index, info.id


WORKERS: Final = Made(worker_of, SIZE)


def workers_of(loader: DataLoader[Any]) -> list[int]:
    items = [(int(index), int(worker)) for index, worker in loader]
    assert [index for index, _worker in items] == list(range(SIZE))
    return [worker for _index, worker in items]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a script choose the workers, and give a list of its choices; tests/unit/data proves that of `Balance`."""
    choices: list[int] = []
    script = itertools.cycle([2, 0, 2, 1, 2, 2])

    def choose(_balance: Balance, is_active: Sequence[bool]) -> int:
        choices.append(next(worker for worker in script if is_active[worker]))
        return choices[-1]

    monkeypatch.setattr(Balance, "choose", choose)
    return choices


def test_the_chosen_worker_gets_the_task(chosen: list[int]) -> None:
    """Batches are in order whoever makes them, also after an epoch that ends early, which leaves no task behind."""
    loader = BALANCED(WORKERS, num_workers=3, persistent_workers=True)
    iterator: Any = iter(loader)
    for _ in range(20):
        next(iterator)
    for _ in range(2):
        chosen.clear()
        assert workers_of(loader) == chosen[:SIZE]
    balance = iterator._lane.balance
    assert [len(sent_s) for sent_s in balance._sent_s] == [0, 0, 0]
    assert None not in balance._mean_s  # the times of all workers were noted
    loader.close()


def test_copies_of_the_loader_keep_it(chosen: list[int]) -> None:
    """A loader that a framework makes from torch's arguments balances too."""
    loader = BALANCED(WORKERS, num_workers=3)
    copy = DataLoader(loader.dataset, num_workers=3, pin_memory_device=loader.pin_memory_device)
    assert workers_of(copy) == chosen[:SIZE]


def test_off_by_default(chosen: list[int]) -> None:
    """Without `balance`, task n goes to worker n mod W, as in torch."""
    loader: Any = numapin.DataLoader(WORKERS, num_workers=3)
    assert workers_of(loader) == [0, 1, 2] * (SIZE // 3)
    assert (loader.balance, chosen) == (False, [])


CASES: Final[dict[str, dict[str, Any]]] = {
    "no-worker": {"dataset": UNEVEN, "batch_size": 5},
    "distributed": {"dataset": UNEVEN, "batch_size": 4, "num_workers": 2, "sampler": DistributedSampler(UNEVEN, 2, 1)},
    "few-batches": {"dataset": Rows(2), "batch_size": 2, "num_workers": 3},
    "persistent": {"dataset": UNEVEN, "batch_size": 3, "num_workers": 3, "shuffle": True, "persistent_workers": True},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_batches_as_torch(name: str) -> None:
    """Batches, their order, errors and the rank's own random draws equal torch's, over epochs that end early, too."""
    assert_as_torch(BALANCED, lambda: CASES[name], (None, 3, None))


def test_as_many_batches_ahead_as_torch() -> None:
    """A slow worker does not let others run farther ahead: memory stays bounded as in torch."""

    def late(index: int) -> tuple[int, int]:
        made = worker_of(index)
        time.sleep(0.02 if made[1] == 0 else 0)
        return made

    sampler = CountingSampler(SIZE)
    loader = BALANCED(Made(late, SIZE), sampler=sampler, num_workers=3)
    assert all(sampler.drawn <= 6 + taken for taken, _ in enumerate(loader, start=1))


def test_an_iterable_dataset_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Batches and order are torch's, because each worker has its own share; it says so once, with what to do."""
    arguments: dict[str, Any] = {"dataset": Stream(21, 4, 11), "batch_size": 4, "num_workers": 3}
    loader, torchs, epochs = BALANCED(**arguments), TORCH(**arguments), (None, 2, None)
    assert_same_seen(watch(lambda: loader, epochs), watch(lambda: torchs, epochs))
    (note,) = loader.stats().notes
    assert "in_order=False" in note
    assert capfd.readouterr().err.count("balance=True changes nothing") == 1


def test_in_any_order_is_left_alone(chosen: list[int]) -> None:
    """With in_order=False torch itself passes over busy workers: each sample comes once."""
    loader = BALANCED(WORKERS, num_workers=3, in_order=False)
    assert sorted(int(index) for index, _ in loader) == list(range(SIZE))
    assert (chosen, loader.stats().notes) == ([], ())


@pytest.mark.parametrize("option", ["balance", "strict"])
def test_a_switch_is_true_or_false(option: str) -> None:
    """Text such as "no" would be true."""
    with pytest.raises(UsageError, match=f"{option}='no' is neither True nor False"):
        numapin.DataLoader([1], **{option: "no"})  # type: ignore[arg-type]
