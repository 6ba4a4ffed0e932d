"""device="cuda" and device_transform= on the stand-in for the driver, whose device memory is host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import numapin
from numapin.errors import UsageError
from tests.contract.datasets import Made, Raise
from tests.cuda.fake import FakeCuda, FakeStream, moving
from tests.data.loopback import WAIT_S, in_forked_child, make_head
from tests.integration.gpu_loading import BATCH, Filled, wrong_ones
from tests.unit.data.seam import _Copy, opening, put_on, small_runs, tensors_in
from tests.waiting import wait_until

NUM_BATCHES = 24
LONG = 1 << 16


def item(index: int) -> Any:
    return torch.full((LONG,), index), np.full(LONG, index)


def leave(item: Any) -> Any:
    """Return an item as it is; torch's own collate_fn would make a tensor of the array."""
    return item


class Calls:
    """A function that notes the number of each batch and doubles it; at a batch, it does something else before."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.at: dict[int, Callable[[], object]] = {}
        self.note: Callable[[Any], object] = id

    def __call__(self, batch: Any) -> Any:
        number = int(batch[0][0])
        self.numbers.append(number)
        self.note(batch)
        self.at.get(number, int)()
        return {"x": batch[0] * 2, "array": batch[1]}


@pytest.fixture
def calls() -> Calls:
    return Calls()


@contextmanager
def loading(fake: FakeCuda, dataset: Any, batch_size: int | None, **options: Any) -> Iterator[Any]:
    with moving(), numapin.DataLoader(dataset, batch_size, num_workers=2, device="cuda", **options) as made:
        yield made
        gc.collect()  # an iterator that an error's traceback holds in a cycle; the stand-in is about to go
    assert (fake.depth(), fake.mode()) == (0, 0)


@pytest.fixture
def loader(fake_cuda: FakeCuda, calls: Calls) -> Iterator[Any]:
    with loading(fake_cuda, Made(item, NUM_BATCHES), None, collate_fn=leave, device_transform=calls) as made:
        yield made


def numbers_of(batches: list[Any]) -> list[int]:
    numbers = [int(batch["x"][0]) // 2 for batch in batches]
    for batch, number in zip(batches, numbers, strict=True):
        assert bool((batch["x"] == 2 * number).all())
        assert (batch["array"] == number).all()
    return numbers


def next_of(iterator: Any) -> Any:
    """Return the next batch once all that the workers have to make have arrived, so that the one after it is ahead."""

    def are_there() -> bool:
        iterator._lane.results.look_ahead()
        tasks = iterator._task_info.items()  # with the batch, if torch has it already
        return all(len(task) == 2 or iterator._lane.results.peek(number) is not None for number, task in tasks)

    assert wait_until(are_there, limit_s=WAIT_S)
    return next(iterator)


def test_one_batch_ahead_and_in_order(loader: Any, calls: Calls) -> None:
    """Each batch is transformed once, in order, and before the loop asks for it."""
    iterator, num_called = iter(loader), []
    for number in range(NUM_BATCHES):
        next_of(iterator)
        num_called.append(len(calls.numbers) - number)
    assert calls.numbers == list(range(NUM_BATCHES))
    assert num_called == [1] + [2] * (NUM_BATCHES - 2) + [1]  # the first two are called when they are due


def test_the_loop_waits_for_the_function(loader: Any, fake_cuda: FakeCuda) -> None:
    """The loader's stream waits for each batch's copy, and the loop's for each batch's transform."""
    fake_cuda.hold_events()
    assert len(list(loader)) == NUM_BATCHES
    assert fake_cuda.get("waited") >= 2 * NUM_BATCHES


def test_on_the_loader_s_stream(loader: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function runs while the loader's stream is the current one, and the loop's is current again afterwards."""
    streams = [(0, 0, 1)]
    monkeypatch.setattr(opening, "_set_stream", streams.append)
    monkeypatch.setattr(opening, "_get_stream", lambda _: streams[-1])
    seen: list[Any] = []
    calls.at = {number: lambda: seen.append(streams[-1]) for number in range(NUM_BATCHES)}
    for _ in loader:
        assert streams[-1] == (0, 0, 1)
    assert seen == [(FakeStream.stream_id, FakeStream.device_index, FakeStream.device_type)] * NUM_BATCHES


def test_an_error_waits_until_its_batch_is_due(loader: Any, calls: Calls) -> None:
    """The batch before the one that failed is delivered, and so are those behind it."""
    calls.at[5] = lambda: {"there": 0}["missing"]
    iterator, batches = iter(loader), []
    for number in range(NUM_BATCHES):
        if number == 5:
            with pytest.raises(KeyError, match="device_transform of batch 5"):
                next_of(iterator)
        else:
            batches.append(next_of(iterator))
    assert calls.numbers == list(range(NUM_BATCHES))
    assert numbers_of(batches) == [number for number in range(NUM_BATCHES) if number != 5]


def test_ctrl_c_inside_the_function(loader: Any, calls: Calls) -> None:
    """It is raised once, where the batch is due. A loop that goes on gets all batches but that one."""
    calls.at[5] = Raise(KeyboardInterrupt)
    iterator, numbers, num_interrupted = iter(loader), list[int](), 0
    while True:
        try:
            numbers += numbers_of([next_of(iterator)])
        except KeyboardInterrupt:
            num_interrupted += 1
        except StopIteration:
            break
    assert num_interrupted == 1
    assert numbers == [number for number in range(NUM_BATCHES) if number != 5]
    assert calls.numbers == list(range(NUM_BATCHES))


def test_a_capture_goes_on(loader: Any, calls: Calls, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the function allocates does not break another thread's capture of a CUDA graph."""
    monkeypatch.setattr(opening, "is_capturing", lambda: True)
    calls.at = dict.fromkeys(range(2, NUM_BATCHES), fake_cuda.allocate)
    iterator = iter(loader)
    batches = [next(iterator)]
    fake_cuda.begin_capture()
    batches += [next(iterator) for _ in range(4)]
    assert (fake_cuda.get("capturing"), fake_cuda.invalidated()) == (1, 0)
    fake_cuda.end_capture()
    monkeypatch.undo()
    assert numbers_of([*batches, *iterator]) == list(range(NUM_BATCHES))


def test_a_forked_child_frees_nothing(loader: Any) -> None:
    """A child does not free the memory of batches that the loop holds, or that were made ahead."""
    iterator = iter(loader)
    batch: Any = next_of(iterator)
    held = [batch, next_of(iterator), iterator]
    del batch, iterator

    def drop() -> bool:
        held.clear()
        gc.collect()
        return True

    assert in_forked_child(drop)


def test_the_user_s_own_copies_from_an_array(loader: Any, calls: Calls, fake_cuda: FakeCuda) -> None:
    """A worker gets no slot back while the GPU may still read an array that the function got and dropped."""
    places: list[int] = []
    calls.note = lambda batch: places.append(batch[1].ctypes.data)

    def read_on() -> None:
        loader._numapin_path._mover.poll()  # our own copy has ended
        fake_cuda.hold_events()

    calls.at[0] = read_on
    iterator = iter(loader)
    assert numbers_of([next(iterator)]) == [0]
    next(iterator)
    slots = loader._numapin_path.slots()
    (slot,) = (slot for slot in slots if 0 <= places[0] - slot.address < slot.num_bytes)
    assert not slot.is_in_use
    assert slot.lease is not None  # still held back
    fake_cuda.pass_events()
    assert numbers_of(list(iterator)) == list(range(2, NUM_BATCHES))
    assert places[0] in places[1:]


@pytest.mark.parametrize("num_new", [0, 6])  # after which the function returns its buffer
def test_memory_that_comes_again(fake_cuda: FakeCuda, num_new: int) -> None:
    """A function that fills a buffer again is called when its batch is due, and the loop's stream comes before it."""
    buffer, numbers = torch.empty(LONG, dtype=torch.int64), []

    def fill(batch: Any) -> Any:
        numbers.append(int(batch[0][0]))
        return batch[0] * 1 if len(numbers) <= num_new else buffer.copy_(batch[0])

    with loading(fake_cuda, Made(item, NUM_BATCHES), None, collate_fn=leave, device_transform=fill) as loader:
        iterator = iter(loader)
        seen = [int(next_of(iterator)[-1]) for _ in range(NUM_BATCHES)]
        first, *others = loader.stats().notes
    assert "returned memory that it had returned before" in first
    assert numbers == list(range(NUM_BATCHES))
    wrong = [number for number in numbers if seen[number] != number]
    assert wrong == [num_new][: bool(num_new)], seen
    assert len(others) == len(wrong)
    assert all(f"batch {num_new + 1} filled memory of an earlier batch" in other for other in others)


@dataclass
class Plain:
    first: Any
    second: Any = None


@dataclass(slots=True)
class Slotted:
    first: Any


class Listed(list[Any]):
    """A list with attributes."""


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_are_found_wherever_they_are() -> None:
    """In containers, in attributes, in parts of sparse tensors; each object once, also in a circle."""
    tensors = [torch.full((2,), float(number)) for number in range(12)]
    tensors[0].mask = tensors[8]  # type: ignore[attr-defined]
    listed = Listed([tensors[0], (tensors[1], {2: tensors[2]})])
    listed.more = {tensors[3]}  # type: ignore[attr-defined]
    ring = Plain(tensors[4], Slotted([tensors[5], Plain(tensors[6])]))
    ring.second.first.append(ring)
    packed = torch.nn.utils.rnn.pack_sequence([tensors[7]])
    sparse = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()]
    module = ModuleType("with_tensors")
    module.tensor = tensors[9]  # type: ignore[attr-defined]
    others = ["text", b"bytes", np.zeros(3), None, print, Listed, module]
    found = list(tensors_in([listed, ring, packed, others, sparse]))
    expected = (*tensors[:7], tensors[8], packed.data, packed.batch_sizes)
    assert {id(tensor) for tensor in expected} <= {id(one) for one in found}
    places = {one.data_ptr() for one in found}
    coo, csr, csc = sparse
    parts = [coo._values(), coo._indices(), csr.crow_indices(), csr.col_indices(), csr.values()]
    parts += [csc.ccol_indices(), csc.row_indices(), csc.values()]
    assert {part.data_ptr() for part in parts} <= places
    assert len(found) == 8 + 2 + 2 + 3 + 3


class Movable:
    """A user's batch, whose `to` takes the device only."""

    def to(self, device: torch.device) -> str:
        return f"on {device}"


def test_without_workers_objects_are_moved_by_their_own_method() -> None:
    """It gets the device, and no argument that only tensors' takes."""
    assert put_on(torch.device("meta"), [Movable(), {"x": Movable()}, "text"]) == ["on meta", {"x": "on meta"}, "text"]


NUM_FILLED = 40


@pytest.fixture
def filled(fake_cuda: FakeCuda) -> Iterator[Any]:
    with loading(fake_cuda, Filled(NUM_FILLED * BATCH, 1 << 14), BATCH) as made:
        yield made


def test_events_are_used_again(filled: Any, fake_cuda: FakeCuda) -> None:
    """Three epochs have the right batches with few events, which the next loader uses."""
    for _ in range(3):
        assert wrong_ones(list(filled), 0) == []
    num_created = fake_cuda.get("created")
    assert num_created <= 2 * opening._IN_FLIGHT + 2  # of copies, and two timed ones
    assert filled.stats().transfer_gbps > 0
    other: Any = numapin.DataLoader(Filled(NUM_FILLED, 1 << 14), 1, num_workers=1, device="cuda")
    assert len(list(other)) == NUM_FILLED
    assert fake_cuda.get("created") <= max(num_created, 2 * opening._IN_FLIGHT + 2)


def test_a_consumer_waits_for_each_late_copy(filled: Any, fake_cuda: FakeCuda) -> None:
    """The current stream waits for the event of a copy that is not known to have ended."""
    fake_cuda.hold_events()
    assert wrong_ones(list(filled), 0) == []
    assert fake_cuda.get("waited") >= NUM_FILLED - opening._AHEAD


def test_loops_over_the_same_loader(fake_cuda: FakeCuda) -> None:
    """Each has batches copied ahead while the other one is kept, and no more than before: they take device memory."""

    def most_ahead(iterator: Any, num_batches: int) -> int:
        results, counts = iterator._lane.results, list[int]()

        def are_many() -> bool:
            results.look_ahead()
            return len(results._results) >= 4

        for _ in range(num_batches):
            assert wait_until(are_many, limit_s=WAIT_S)
            next(iterator)
            waiting = [data for _number, data in results._results]
            waiting += [task[1] for task in iterator._task_info.values() if len(task) == 2]
            counts.append(sum(parcel.begun is not None for parcel in waiting))
        return max(counts)

    with loading(fake_cuda, Filled(NUM_FILLED * BATCH, 1 << 14), BATCH, prefetch_factor=4) as loader:
        assert len(list(zip(loader, loader, strict=True))) == NUM_FILLED  # no copy begins while a new slot is pinned
        outer = iter(loader)
        for _ in range(3):
            assert most_ahead(outer, 10) == opening._AHEAD
            inner = iter(loader)
            assert most_ahead(inner, 30) == opening._AHEAD
            assert wrong_ones(list(inner), 30) == []


def test_any_thread_may_load(filled: Any) -> None:
    """A new thread has no current context."""
    with ThreadPoolExecutor(1) as pool:
        assert wrong_ones(pool.submit(lambda: list(filled)).result(), 0) == []


def test_a_forked_child_is_refused(filled: Any) -> None:
    """A child of a process that uses CUDA cannot use it; the error names the reason and the remedy."""
    next(iter(filled))

    def is_refused() -> bool:
        with pytest.raises(UsageError, match="forked from one that uses CUDA") as caught:
            next(iter(filled))
        return "spawn" in caught.value.hint

    assert in_forked_child(is_refused)


def test_without_memory_the_batch_is_lost_and_no_other(
    filled: Any, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop gets torch's error for a batch that the device has no room for; its slot and the context come back."""
    iterator = iter(filled)
    first, *_ = [next_of(iterator) for _ in range(8)]  # by then, slots are pinned, and copied as they arrive
    with monkeypatch.context() as patch:
        patch.setattr(opening.Mover, "_empty", Raise(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            list(map(next_of, repeat(iterator)))  # at first, batches whose copies were begun before
    assert fake_cuda.depth() == 0
    rest = list(iterator)
    assert wrong_ones([first], 0) == []
    assert wrong_ones(rest[-1:], NUM_FILLED - 1) == []


@pytest.mark.parametrize("num_pairs", [4, 6])  # few are copied one by one
def test_small_tensors_beside_large_ones(fake_cuda: FakeCuda, num_pairs: int) -> None:
    """Each has its own values on the device, and a loop that keeps small ones does not keep the large ones."""

    def make(index: int) -> list[torch.Tensor]:
        return [torch.full((size,), index + pair) for pair in range(num_pairs) for size in (LONG, 3)]

    with loading(fake_cuda, Made(make, 4), None, collate_fn=leave) as loader:
        for index, batch in enumerate(loader):
            assert all(map(torch.equal, batch, make(index)))
            assert batch[1].untyped_storage().nbytes() < LONG


BATCH_BYTES: Final = 4 << 20
LARGE_BYTES: Final = 256 << 10  # what is larger is not small
BYTES: Final = torch.randint(0, 256, (BATCH_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def runs_of(storages: Sequence[tuple[int, int]], num_bytes: int = BATCH_BYTES) -> tuple[tuple[int, int], ...]:
    """Return the runs of small tensors of a batch whose storages are (start, length) in its slot."""
    return small_runs(make_head(slot=1, slot_bytes=num_bytes, storages=tuple(storages)))


def check(storages: Sequence[tuple[int, int]]) -> None:
    runs = runs_of(storages)
    small = torch.cat([BYTES[first:last] for first, last in runs]) if runs else None
    event: Any = None
    copy = _Copy(BYTES, BYTES.untyped_storage(), event, small, runs)
    for start, size in storages:
        storage, begin = copy.place(start, size)
        assert (begin - start) % 256 == 0, (start, size)  # a tensor begins where an item of its dtype may
        assert begin + size <= storage.nbytes(), (start, size)
        found = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (size,), (1,))
        assert torch.equal(found, BYTES[start : start + size]), (start, size)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=12))
def test_every_storage_has_its_bytes(sizes: list[tuple[bool, int]]) -> None:
    """Every storage has its bytes, for any sequence of large and small ones."""
    storages, end = [], 0
    for is_large, size in sizes:
        length = LARGE_BYTES + size if is_large else size
        if end + length <= BATCH_BYTES:
            storages.append((end, length))
            end = -(-(end + length) // 256) * 256
    check(storages)


@pytest.mark.parametrize(
    "storages",
    [
        [(0, 240), (200, 200)],
        [(0, 40), (0, 4 << 20)],
        [(1000, 40), (1000, 3 << 20)],
        [(3, 2000), (16, 4000), (8192, 400)],
    ],
    ids=["overlapping views", "a view and its base", "a view and a longer one", "an array that begins anywhere"],
)
def test_views_of_what_was_collated_may_overlap(storages: list[tuple[int, int]]) -> None:
    """Overlapping storages keep their positions: each has its own bytes."""
    check(storages)
