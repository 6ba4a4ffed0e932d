"""pin_memory=True without torch's pin thread, on the stand-in for the driver. torch's own loader is the oracle."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import numapin
from tests.contract.datasets import Raise
from tests.contract.describe import assert_same, describe
from tests.contract.zoo import Pinnable
from tests.cuda.fake import FakeCuda, pinning
from tests.data.loopback import WAIT_S
from tests.integration.gpu_loading import BATCH, Filled, is_right, wrong_ones
from tests.unit.data.seam import PINNED, cuda, end_at_exit
from tests.waiting import wait_until

NUM_BATCHES: Final = 24
BYTES: Final = 1 << 14
Old = namedtuple("Old", "x y")  # noqa: PYI024 - without types


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class Refuses:
    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def pin_memory(self) -> Refuses:
        message = f"{int(self.data[0, 0])} refuses"
        raise ArithmeticError(message)


COLLATES: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    "tensor": lambda x: x,
    "list": lambda x: [x, x[:, 0].clone()],
    "tuple": lambda x: (x, "text", 7, None, b"bytes"),
    "dict": lambda x: {"x": x, "label": x[:, 0].clone(), "nested": [{"y": x + 1}]},
    "named tuple": lambda x: Pair(x, "name"),
    "old named tuple": lambda x: Old(x, [x + 1]),
    "own type": lambda x: Pinnable(x),  # noqa: PLW0108
    "own type, nested": lambda x: {"mine": Pinnable(x[:, 0].clone()), "x": x},
    "array": lambda x: [x.numpy(), x + 1],
    "sparse": lambda x: x.float().to_sparse().coalesce().values(),
    "no tensor": lambda x: [int(x[0, 0]), "text"],
    "scalars": lambda x: {"zero": torch.tensor(1.5), "none": torch.empty(0), "x": x},
}


@pytest.fixture
def fake(fake_cuda: FakeCuda) -> Iterator[FakeCuda]:
    before = PINNED.total
    with pinning(fake_cuda):
        yield fake_cuda
        gc.collect()  # the traceback of an error that a test expects is in a cycle, and refers to the iterator
        assert wait_until(lambda: fake_cuda.registered_bytes() == 0, limit_s=WAIT_S)
        assert PINNED.total == before
    assert fake_cuda.depth() == fake_cuda.mode() == 0


def load(kind: Any = numapin.DataLoader, make: Callable[[torch.Tensor], Any] = lambda x: x, **options: Any) -> Any:
    options = {"num_workers": 2, "pin_memory": True, **options}
    return kind(
        Filled(NUM_BATCHES * BATCH, BYTES), BATCH, collate_fn=lambda samples: make(torch.stack(samples)), **options
    )


def of_every_kind(stacked: torch.Tensor) -> Any:
    return COLLATES[list(COLLATES)[int(stacked[0, 0]) // BATCH % len(COLLATES)]](stacked)


def pinned_in(batch: Any) -> list[bool]:
    if isinstance(batch, torch.Tensor):
        return [batch.is_pinned()]
    if isinstance(batch, Pinnable):
        return [batch.pinned, *pinned_in(batch.data)]
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return [each for value in values for each in pinned_in(value)]


def test_batches_are_as_torch_pins_them(fake: FakeCuda) -> None:
    """Values, types of containers and what is pinned equal torch's, for two epochs over the same slots.

    The loop's thread opens the batches: there is no other one, and the loader still says that it pins.
    """
    theirs = list(load(DataLoader, of_every_kind))
    with load(make=of_every_kind) as loader:
        for _ in range(2):
            iterator = iter(loader)
            for name, ours, expected in zip([*COLLATES] * 2, iterator, theirs, strict=True):
                if name == "tuple" and isinstance(expected, list):
                    continue  # the pin thread of this torch makes lists of tuples; numapin keeps them: docs/limits.md
                assert_same(describe(ours), describe(expected), name)
                assert pinned_in(ours) == pinned_in(expected)
                threads = {thread.name.lower() for thread in threading.enumerate()}
                assert not any("pin" in thread and "numapin" not in thread for thread in threads)
        assert (loader.pin_memory, hasattr(iterator, "_pin_memory_thread")) == (True, False)
        assert fake.registered_bytes() > 0
        del ours, iterator


@pytest.mark.parametrize(
    "options", [{"persistent_workers": True, "balance": True}, {"in_order": False, "timeout": 60}], ids=str
)
def test_kept_batches_stay_as_they_are(fake: FakeCuda, options: dict[str, Any]) -> None:
    """Slots are not written again while a batch or a copy of the GPU refers to them."""
    fake.hold_events()
    with load(**options) as loader:
        for _ in range(2):
            batches = list(loader)
            if not options.get("in_order", True):
                batches.sort(key=lambda batch: int(batch[0, 0]))
            assert (len(batches), wrong_ones(batches, 0)) == (NUM_BATCHES, [])
            assert all(batch.is_pinned() for batch in batches)
            del batches
    fake.set(hold_events=0)


@pytest.mark.usefixtures("fake")
def test_threads_that_have_not_computed_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's pin thread does this; without it, the loop's threads would contend with the workers for all CPUs."""
    limited: list[tuple[int, threading.Thread]] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda number: limited.append((number, threading.current_thread())))
    with load() as loader:
        next(iter(loader))
    ((number, thread),) = limited
    assert (number, thread is threading.main_thread()) == (1, False)


def test_the_loop_waits_for_a_slot_that_is_being_pinned(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is never delivered half pinned."""
    driver = cuda.driver()
    assert driver is not None
    register, is_reached, may_pin = driver.register, threading.Event(), threading.Event()

    def wait_and_register(*arguments: Any) -> None:
        is_reached.set()
        assert may_pin.wait(WAIT_S)
        register(*arguments)

    monkeypatch.setattr(driver, "register", wait_and_register)
    found: list[torch.Tensor] = []
    with load() as loader:
        thread = threading.Thread(target=lambda: found.append(next(iter(loader))))
        thread.start()
        assert is_reached.wait(WAIT_S)
        assert (fake.registered_bytes(), found) == (0, [])
        may_pin.set()
        thread.join(WAIT_S)
        assert [batch.is_pinned() and is_right(batch, 0) for batch in found] == [True]
        found.clear()


@pytest.mark.parametrize(
    ("why", "note"),
    [("driver", "batches are not pinned from now on"), ("budget", "the budget for pinned memory is used up")],
)
def test_slots_that_cannot_be_pinned(fake: FakeCuda, why: str, note: str) -> None:
    """Batches are copied into memory that torch pins, which is reported."""
    if why == "driver":
        fake.refuse_registration()
    with load(pinned_budget=1 if why == "budget" else None) as loader:
        batches = list(loader)
        assert wrong_ones(batches, 0) == []
        assert all(batch.is_pinned() for batch in batches)
        assert note in " ".join(loader.stats().notes)
        assert fake.registered_bytes() == 0
        del batches


@pytest.mark.usefixtures("fake")
def test_without_a_thread_that_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches in new slots get the error, and their slots do not pile up; the next epoch is like any other."""
    with load(persistent_workers=True) as loader:
        iterator = iter(loader)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Raise(RuntimeError, ("can't start new thread",)))
            for _ in range(NUM_BATCHES):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    next(iterator)
        assert loader.stats().slots == 0
        assert wrong_ones(list(loader), 0) == []


@pytest.mark.usefixtures("fake")
def test_without_a_driver_batches_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note does not ask for a newer driver, which would change nothing."""
    monkeypatch.setattr(cuda, "driver", lambda: None)
    with load() as loader:
        assert wrong_ones(list(loader), 0) == []
        (note,) = (note for note in loader.stats().notes if "libstores" not in note)
    assert note == "libcuda.so.1 cannot be used in this process, so batches are copied; see: numapin topo"


@pytest.mark.parametrize("kind", [numapin.DataLoader, DataLoader])
def test_an_error_of_a_users_type(fake: FakeCuda, kind: Any) -> None:
    """It is raised for its batch, as by torch, and the batches after it come."""
    del fake
    loader = load(kind, lambda x: Refuses(x) if int(x[0, 0]) == BATCH else x)
    iterator = iter(loader)
    assert is_right(next(iterator), 0)
    with pytest.raises(ArithmeticError, match=r"(?s)in pin memory thread for device 0.*4 refuses"):
        next(iterator)
    assert is_right(next(iterator), 2)
    iterator._shutdown_workers()  # torch's, in a cycle with the error, would wait for each worker in vain


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata imports all that torch has
@pytest.mark.parametrize("num_steps", [0, 5])
def test_torchdatas_loader(fake: FakeCuda, num_steps: int) -> None:
    """numapin.StatefulDataLoader pins in the loop, too, and resumes in the middle of an epoch."""
    pytest.importorskip("torchdata.stateful_dataloader")
    with load(numapin.StatefulDataLoader, COLLATES["own type, nested"]) as loader:
        iterator = iter(loader)
        for _ in range(num_steps):
            next(iterator)
        state = loader.state_dict()
        del iterator
        loader.load_state_dict(state)
        for number, batch in enumerate(loader, num_steps):
            assert is_right(batch["x"], number)
            assert all(pinned_in(batch))
        assert number == NUM_BATCHES - 1
        assert fake.registered_bytes() > 0
        del batch


def test_a_capture_goes_on(fake: FakeCuda, graphs: Any) -> None:
    """Batches that arrive during the capture of a CUDA graph do not break it, even if new memory has to be pinned."""
    graph = graphs()
    with load(make=lambda x: [x, x[1:, 3:9], x[:, 0].clone()]) as loader:
        iterator = iter(loader)
        next(iterator)
        graph.capture_begin()
        for _ in range(NUM_BATCHES - 1):
            batch, view, _label = batches = next(iterator)
            assert all(pinned_in(batches))
            assert view.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
        del batch, view, batches, _label
        graph.capture_end()
        del iterator
    assert fake.invalidated() == 0


def test_without_slots_torchs_thread_pins(fake: FakeCuda) -> None:
    """Batches that torch sends are copied: beside the loop. An iterator that has ended needs nothing at exit."""
    with load(pinned_budget=0) as loader:
        iterator = iter(loader)
        assert hasattr(iterator, "_pin_memory_thread")
        batches = list(iterator)
        assert wrong_ones(batches, 0) == []
        assert all(batch.is_pinned() for batch in batches)
        assert fake.registered_bytes() == 0
        end_at_exit(weakref.ref(iterator))
        del iterator
