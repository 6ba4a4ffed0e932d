"""The control page and a worker's own slots, without a lock."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from numapin.data.slots.control import ALIGNMENT, NOT_READY, TAKEN, Control, Generation, OwnSlots, align

from numapin.data.slots import control as control_page
from numapin.system import memory
from tests.data import child

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S: Final = 20
SLOT_BYTES: Final = 2 * mmap.PAGESIZE
NUM_WORKERS: Final = 2
PER_WORKER: Final = 3


@pytest.fixture
def control() -> Iterator[Control]:
    """Give an empty control page for two workers, three slots each."""
    made = Control.create(num_workers=NUM_WORKERS, slots_per_worker=PER_WORKER)
    yield made
    made.close()


def _mapped(fd: int, num_bytes: int, *, offset: int = 0) -> memoryview:
    return memoryview(memory.map_shared(fd, num_bytes, offset=offset))


def publish(control: Control, *, ready: int = NUM_WORKERS * PER_WORKER) -> Generation:
    """Publish another generation, whose first slots are ready: slot n was released n-th."""
    number = control.num_generations
    first = number * NUM_WORKERS * PER_WORKER
    made = Generation((number + 1) << 21, (number + 1) * SLOT_BYTES, first, NUM_WORKERS * PER_WORKER)
    os.ftruncate(control.fd, made.offset + made.num_bytes)
    control.publish(made)
    for slot in range(first, first + ready):
        control.set_state(slot, slot + 1)
    return made


def taken(own: OwnSlots) -> int:
    """Take a slot, release its memory, and return its number."""
    found = own.take()
    assert found is not None
    return found[0]


@pytest.mark.parametrize(("num_bytes", "to", "aligned"), [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 4, 260)])
def test_align(num_bytes: int, to: int, aligned: int) -> None:
    """Sizes are rounded up; aligned ones stay."""
    assert align(num_bytes, to) == aligned
    assert align(1) == ALIGNMENT


class TestGeneration:
    """Slots of one size."""

    @pytest.mark.parametrize("num_workers", [1, 2, 3, 6])
    def test_every_slot_has_one_worker(self, num_workers: int) -> None:
        """The workers' slots are all slots, without overlap, and each worker has the same number."""
        generation = Generation(1 << 21, 4096, 12, 6)
        owned = [list(generation.slots_of(worker, num_workers)) for worker in range(num_workers)]
        assert sorted(chain.from_iterable(owned)) == list(range(12, 18))
        assert {len(control) for control in owned} == {6 // num_workers}

    def test_slots_lie_one_behind_the_other(self) -> None:
        """Offsets count from the generation's start, where its first slot begins."""
        generation = Generation(1 << 21, 4096, 12, 3)
        assert [generation.start_of(slot) for slot in (12, 13, 14)] == [0, 4096, 8192]
        assert generation.num_bytes == 3 * 4096


class TestControl:
    """One page for all processes."""

    def test_a_new_page_says_nothing_is_there(self, control: Control) -> None:
        """A new page has no generation, and no slot is ready."""
        assert control.num_generations == 0
        assert {control.state(slot) for slot in range(NUM_WORKERS * PER_WORKER)} == {NOT_READY}

    def test_what_is_published_can_be_read(self, control: Control) -> None:
        """Eight generations with all their slots fit in the page, without overlap."""
        made = [publish(control) for _ in range(control_page.MAX_GENERATIONS)]
        assert [control.generation(number) for number in range(control.num_generations)] == made
        num_slots = control_page.MAX_GENERATIONS * NUM_WORKERS * PER_WORKER
        assert [control.state(slot) for slot in range(num_slots)] == list(range(1, num_slots + 1))

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_it_travels_to_a_child(self, control: Control, method: str) -> None:
        """Words and memory are shared with the child, under every start method."""
        generation = publish(control)
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=child.write, args=(control,), daemon=True)
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == 0
        assert control.state(0) == 41
        assert bytes(_mapped(control.fd, 5, offset=generation.offset)) == b"child"

    def test_what_is_mapped_outlives_the_descriptor(self) -> None:
        """A batch may be alive after the ring is closed."""
        control = Control.create(num_workers=1, slots_per_worker=1)
        memory = _mapped(control.fd, 4096)
        control.close()
        memory[:4] = b"here"
        assert bytes(memory[:4]) == b"here"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(control.fd)


class TestTake:
    """The choice of a slot."""

    def test_nothing_before_there_are_slots(self, control: Control) -> None:
        """The worker is starting."""
        own = OwnSlots(control, 0)
        assert own.take() is None
        assert own.is_starting()
        assert own.generation == -1

    def test_the_last_released_comes_first(self, control: Control) -> None:
        """The memory of the last released slot is most likely in a cache; worker 1 owns slots 1, 3 and 5."""
        publish(control)
        control.set_state(3, 100)
        own = OwnSlots(control, 1)
        assert [taken(own) for _ in range(3)] == [3, 5, 1]
        assert own.take() is None
        assert not own.is_starting()
        assert not own.keeps_free_slots()

    def test_a_taken_slot_says_so(self, control: Control) -> None:
        """The rank sees it; other workers' slots stay free."""
        publish(control)
        assert taken(OwnSlots(control, 0)) == 4
        assert [control.state(slot) for slot in range(6)] == [1, 2, 3, 4, TAKEN, 6]

    def test_the_view_is_the_slot(self, control: Control) -> None:
        """Its memory is the slot's range of the memfd, and nothing else."""
        generation = publish(control)
        found = OwnSlots(control, 1).take()
        assert found is not None
        slot, view = found
        view[:] = b"\x07" * len(view)
        memory = _mapped(control.fd, generation.num_bytes, offset=generation.offset)
        assert [set(memory[at : at + SLOT_BYTES]) for at in range(0, len(memory), SLOT_BYTES)] == [
            {7} if number == slot else {0} for number in range(6)
        ]

    def test_what_is_given_back_is_as_free_as_before(self, control: Control) -> None:
        """It keeps its stamp, and is the next to be taken."""
        publish(control)
        own = OwnSlots(control, 0)
        slot = taken(own)
        own.give_back(slot)
        assert control.state(slot) == slot + 1
        assert taken(own) == slot

    def test_slots_that_are_being_prepared_wait(self, control: Control) -> None:
        """The first slots are in use while later ones are made."""
        publish(control, ready=3)  # 0 and 2 of worker 0, 1 of worker 1
        own = OwnSlots(control, 0)
        assert [taken(own), taken(own)] == [2, 0]
        assert own.take() is None
        assert own.is_starting()
        control.set_state(4, 9)
        assert taken(own) == 4
        assert not own.is_starting()

    def test_a_killed_worker_holds_nothing_of_others(self, control: Control) -> None:
        """It dies with all its slots taken; the other worker's are all free."""
        publish(control)
        process = multiprocessing.get_context("fork").Process(target=_take_all_and_die, args=(control,), daemon=True)
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
        other = OwnSlots(control, 1)
        assert [taken(other) for _ in range(PER_WORKER)] == [5, 3, 1]
        assert OwnSlots(control, 0).take() is None


def _take_all_and_die(control: Control) -> None:
    own = OwnSlots(control, 0)
    while own.take():
        pass
    os.kill(os.getpid(), signal.SIGKILL)


class TestKept:
    """Slots to which something in the worker refers."""

    @pytest.mark.parametrize("kind", ["view", "tensor", "tensor's view", "storage", "array"])
    def test_it_is_not_taken_again(self, control: Control, kind: str) -> None:
        """It is free for the rank, but not for this worker, until the reference is gone."""
        publish(control)
        own = OwnSlots(control, 0)
        found = own.take()
        assert found is not None
        slot, view = found
        kept = _kept(kind, view)
        del found, view
        control.set_state(slot, 100)
        assert sorted((taken(own), taken(own))) == sorted({0, 2, 4} - {slot})
        assert own.take() is None
        assert own.keeps_free_slots()
        del kept
        assert not own.keeps_free_slots()
        assert taken(own) == slot

    def test_what_is_lent_to_the_rank_is_not_kept(self, control: Control) -> None:
        """Only slots that the rank has freed count as kept."""
        publish(control)
        own = OwnSlots(control, 0)
        kept = [own.take() for _ in range(PER_WORKER)]
        assert all(kept)
        assert not own.keeps_free_slots()
        assert own.take() is None


def _kept(kind: str, view: memoryview) -> Any:
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    kinds = {"view": view, "tensor": tensor, "tensor's view": tensor[5:9], "storage": tensor.untyped_storage()}
    return kinds.get(kind) if kind in kinds else tensor[::2].numpy()


class TestGrowth:
    """Larger slots, while smaller ones are in use."""

    def test_the_newest_generation_serves(self, control: Control) -> None:
        """Every worker takes the larger slots, even one that starts late."""
        publish(control)
        own = OwnSlots(control, 0)
        assert taken(own) == 4
        publish(control)
        for user in (own, OwnSlots(control, 1)):
            found = user.take()
            assert found is not None
            assert (found[0] >= 6, len(found[1]), user.generation) == (True, 2 * SLOT_BYTES, 1)

    def test_a_generation_serves_once_the_workers_first_slot_is_ready(self, control: Control) -> None:
        """Until then the older one is used: no batch has to wait for memory that is being prepared."""
        publish(control)
        publish(control, ready=1)  # worker 0's first
        assert taken(OwnSlots(control, 0)) == 6
        assert taken(OwnSlots(control, 1)) == 5

    def test_it_never_goes_back(self, control: Control) -> None:
        """If all newer slots are in use, none is free, even if older ones are: the rank may have freed their memory."""
        publish(control)
        publish(control, ready=1)
        own = OwnSlots(control, 0)
        assert taken(own) == 6
        assert own.take() is None
        assert own.is_starting()

    def test_a_slot_of_an_older_generation_is_given_back_there(self, control: Control) -> None:
        """A slot can be given back after the ring has grown."""
        publish(control)
        own = OwnSlots(control, 0)
        slot = taken(own)
        publish(control)
        assert taken(own) == 10
        own.give_back(slot)
        assert control.state(slot) == slot + 1
