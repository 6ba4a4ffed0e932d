"""device_transform=: the function that makes the loop's batches, on the host; tests/integration has those on a GPU."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import numapin
from numapin.errors import UsageError
from tests.contract.watching import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it

NUM_BATCHES = 8


class Pairs(Dataset[Any]):
    """Sample i: a thousand times i, and i."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 2 * NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return torch.full((1000,), index), index


class Stream(IterableDataset[Any]):
    """The same samples; each worker has every other one."""

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's samples."""
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from (Pairs()[index] for index in range(first, 2 * NUM_BATCHES, step))


def doubled(batch: Any) -> Any:
    """Return twice the samples as floats, and their numbers."""
    samples, numbers = batch
    return {"x": samples.float() * 2, "number": numbers}


def fails_at_3(batch: Any) -> Any:
    """Return the batch; fail for the fourth one."""
    if batch[1][0] == 6:
        raise ArithmeticError("not this one")
    return batch


def fails_at_3_and_5(batch: Any) -> Any:
    """Return the batch; fail for the fourth and the sixth one."""
    if batch[1][0] in (6, 10):
        raise ArithmeticError("not this one")
    return batch


@pytest.fixture(params=["DataLoader", "StatefulDataLoader"])
def each_class(request: pytest.FixtureRequest) -> Any:
    """Give numapin's two loaders."""
    pytest.importorskip("torchdata", reason="no torchdata; type: pip install .[dev]")
    return getattr(numapin, request.param)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 0, "device": "cpu"},
        {"num_workers": 2},
        {"num_workers": 2, "device": "cpu"},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "pinned_budget": 0},
        {"num_workers": 2, "in_order": False},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_values(each_class: Any, options: dict[str, Any]) -> None:
    """The loop gets what the function returns for each batch, in two epochs. Workers never get the function."""
    cannot_be_pickled = lambda batch: {**doubled(batch)}  # noqa: E731
    loader = each_class(Pairs(), 2, device_transform=cannot_be_pickled, **options)
    for _ in range(2):
        seen = [batch["number"].tolist() for batch in loader if bool((batch["x"].mT == 2 * batch["number"]).all())]
        assert sorted(seen) == [[first, first + 1] for first in range(0, 2 * NUM_BATCHES, 2)]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset(each_class: Any, num_workers: int) -> None:
    """Batches of an iterable dataset are transformed, too, and its end is not."""
    loader = each_class(Stream(), 2, num_workers=num_workers, device_transform=doubled)
    numbers = [number for batch in loader for number in batch["number"].tolist()]
    assert sorted(numbers) == list(range(2 * NUM_BATCHES))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_calls(each_class: Any, num_workers: int) -> None:
    """The function is called once for each batch, in their order, in the loop's thread and with its modes."""
    seen: list[Any] = []

    def note(batch: Any) -> Any:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((int(batch[1][0]) // 2, threading.get_ident(), modes))
        return batch

    iterator = iter(each_class(Pairs(), 2, num_workers=num_workers, device_transform=note))
    next(iterator)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        next(iterator)
    rest = len(list(iterator))
    assert [number for number, _, _ in seen] == list(range(NUM_BATCHES)) == list(range(rest + 2))
    assert {thread for _, thread, _ in seen} == {threading.get_ident()}
    assert [modes for _, _, modes in seen[:3]] == [(False, True, False), (True, False, True), (False, True, False)]


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "pinned_budget": 0}])
def test_errors(each_class: Any, options: dict[str, Any]) -> None:
    """An error is raised when its batch is due, with its type and the batch's number; the other batches come."""
    loader = each_class(
        Pairs(), 2, device_transform=fails_at_3_and_5, persistent_workers=options["num_workers"] > 0, **options
    )
    for _ in range(2):
        iterator, numbers = iter(loader), []
        for number in range(NUM_BATCHES):
            if number in (3, 5):
                with pytest.raises(
                    ArithmeticError, match=rf"(?s)device_transform of batch {number}.*not this one"
                ) as caught:
                    next(iterator)
                assert "in fails_at_3_and_5" in str(caught.value)  # the user's line
            else:
                numbers += next(iterator)[1].tolist()
        assert numbers == [0, 1, 2, 3, 4, 5, 8, 9, *range(12, 2 * NUM_BATCHES)]
        assert next(iterator, None) is None
    loader.close()


def test_a_resumed_loop() -> None:
    """A state that was taken after a batch whose function failed leads to the batches that follow."""
    loader = numapin.StatefulDataLoader(Pairs(), 2, num_workers=2, device_transform=fails_at_3)
    iterator = iter(loader)
    for number in range(6):
        if number == 3:
            with pytest.raises(ArithmeticError):
                next(iterator)
        else:
            next(iterator)
    resumed = numapin.StatefulDataLoader(Pairs(), 2, num_workers=2, device_transform=doubled)
    resumed.load_state_dict(loader.state_dict())
    followed = [batch["number"].tolist() for batch in resumed]
    assert followed == [batch[1].tolist() for batch in iterator]


def test_a_worker_error_is_not_transformed(each_class: Any) -> None:
    """The function gets no batch that a worker could not make."""

    def collate(_samples: Any) -> Any:
        raise LookupError("no batch")

    loader = each_class(Pairs(), 2, num_workers=1, collate_fn=collate, device_transform=doubled)
    with pytest.raises(LookupError, match="no batch"):
        next(iter(loader))


@pytest.mark.parametrize("wrong", ["normalize", 3, [doubled]])
def test_what_cannot_be_called(each_class: Any, wrong: object) -> None:
    """A value that is no function is refused at once, with what to pass."""
    with pytest.raises(UsageError, match=r"device_transform=.* cannot be called") as caught:
        each_class(Pairs(), device_transform=wrong)
    assert "function of one batch" in caught.value.hint


@pytest.mark.parametrize("num_workers", [0, 1])
def test_copies_of_the_loader(each_class: Any, num_workers: int) -> None:
    """A pickled loader, and a framework's copy made with the arguments that torch knows, transform as well."""
    loader = each_class(Pairs(), 2, num_workers=num_workers, device_transform=doubled)
    copy = TORCH(Pairs(), 2, num_workers=num_workers, pin_memory_device=loader.pin_memory_device)
    for made in (copy, pickle.loads(pickle.dumps(loader))):  # noqa: S301
        assert [batch["number"].tolist() for batch in made][-1] == [2 * NUM_BATCHES - 2, 2 * NUM_BATCHES - 1]


def test_batches_that_are_kept() -> None:
    """What a function returns of the host's memory stays as it is, also views, arrays, and after an early end."""
    loader = numapin.DataLoader(
        Pairs(), 2, num_workers=2, device_transform=lambda batch: (batch[0][:, 1:].numpy(), batch[1])
    )
    kept = []
    for _ in range(4):
        for batch in loader:
            kept.append(batch)
            if len(kept) % 3 == 0:
                break
    loader.close()
    assert all(np.array_equal(array[:, -1], numbers.numpy()) for array, numbers in kept)
    assert len(kept) == 12
