"""device_transform=: the function that makes the loop's batches, on the host; tests/integration has those on a GPU."""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

import numapin
from numapin.errors import UsageError
from tests.contract.datasets import Made, Raise
from tests.contract.watching import TORCH

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it

NUM_BATCHES = 8


def pair(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((1000,), index), index


PAIRS = Made(pair, 2 * NUM_BATCHES)


def doubled(batch: Any) -> Any:
    samples, numbers = batch
    return {"x": samples.float() * 2, "number": numbers}


def fails_at_3_and_5(batch: Any) -> Any:
    if batch[1][0] in (6, 10):
        raise ArithmeticError("not this one")
    return batch


@pytest.fixture(params=["DataLoader", "StatefulDataLoader"])
def each_class(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("torchdata", reason="no torchdata; type: pip install .[dev]")
    return getattr(numapin, request.param)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "device": "cpu", "persistent_workers": True},
        {"num_workers": 2, "pinned_budget": 0},
        {"num_workers": 2, "in_order": False},
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "forkserver"}, marks=pytest.mark.xdist_group("fork server")
        ),
    ],
    ids=str,
)
def test_values(each_class: Any, options: dict[str, Any]) -> None:
    """The loop gets what the function returns for each batch, in two epochs. Workers never get the function."""
    cannot_be_pickled = lambda batch: {**doubled(batch)}  # noqa: E731
    loader = each_class(PAIRS, 2, device_transform=cannot_be_pickled, **options)
    for _ in range(2):
        seen = [batch["number"].tolist() for batch in loader if bool((batch["x"].mT == 2 * batch["number"]).all())]
        assert sorted(seen) == [[first, first + 1] for first in range(0, 2 * NUM_BATCHES, 2)]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_calls(each_class: Any, num_workers: int) -> None:
    """The function is called once for each batch, in their order, in the loop's thread and with its modes."""
    seen: list[Any] = []

    def note(batch: Any) -> Any:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((int(batch[1][0]) // 2, threading.get_ident(), modes))
        return batch

    iterator = iter(each_class(PAIRS, 2, num_workers=num_workers, device_transform=note))
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
        PAIRS, 2, device_transform=fails_at_3_and_5, persistent_workers=options["num_workers"] > 0, **options
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_ends_in_the_function(each_class: Any, num_workers: int) -> None:
    """Its StopIteration is an error, and not the end of the epoch."""
    others = iter([1])
    iterator = iter(each_class(PAIRS, 2, num_workers=num_workers, device_transform=lambda _: next(others)))
    assert next(iterator) == 1
    with pytest.raises(RuntimeError, match=r"(?s)device_transform of batch 1.*device_transform raised StopIteration"):
        next(iterator)


def test_a_resumed_loop() -> None:
    """A state that was taken after a batch whose function failed leads to the batches that follow."""
    loader = numapin.StatefulDataLoader(PAIRS, 2, num_workers=2, device_transform=fails_at_3_and_5)
    iterator = iter(loader)
    for _ in range(7):
        with suppress(ArithmeticError):
            next(iterator)
    resumed = numapin.StatefulDataLoader(PAIRS, 2, num_workers=2, device_transform=doubled)
    resumed.load_state_dict(loader.state_dict())
    followed = [batch["number"].tolist() for batch in resumed]
    assert followed == [batch[1].tolist() for batch in iterator]


def test_a_worker_error_is_not_transformed(each_class: Any) -> None:
    """The function gets no batch that a worker could not make."""
    collate = Raise(LookupError, ("no batch",))
    loader = each_class(PAIRS, 2, num_workers=1, collate_fn=collate, device_transform=doubled)
    with pytest.raises(LookupError, match="no batch"):
        next(iter(loader))


def test_what_cannot_be_called(each_class: Any) -> None:
    """A value that is no function is refused at once, with what to pass."""
    with pytest.raises(UsageError, match=r"device_transform=.* cannot be called") as caught:
        each_class(PAIRS, device_transform=[doubled])
    assert "function of one batch" in caught.value.hint


@pytest.mark.parametrize("num_workers", [0, 1])
def test_copies_of_the_loader(each_class: Any, num_workers: int) -> None:
    """A pickled loader, and a framework's copy made with the arguments that torch knows, transform as well."""
    loader = each_class(PAIRS, 2, num_workers=num_workers, device_transform=doubled)
    copy = TORCH(PAIRS, 2, num_workers=num_workers, pin_memory_device=loader.pin_memory_device)
    for made in (copy, pickle.loads(pickle.dumps(loader))):  # noqa: S301
        assert [batch["number"].tolist() for batch in made][-1] == [2 * NUM_BATCHES - 2, 2 * NUM_BATCHES - 1]
