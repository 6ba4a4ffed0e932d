"""Slots without references wait for the copies that may still read them. The driver is a stand-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.data.seam import CudaRefused, Driver, Quarantine, Slot, cuda

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda


def admit(quarantine: Quarantine[Slot], *numbers: int) -> None:
    """Admit slots with these numbers."""
    memory = torch.empty(0)
    for number in numbers:
        quarantine.admit(Slot(number=number, fd=None, num_bytes=0, address=0, owner=memory, worker=0))


def passed(quarantine: Quarantine[Slot]) -> list[int]:
    """Return the numbers of the slots that no copy reads any more."""
    return [slot.number for slot in quarantine.passed()]


@pytest.fixture
def graphs(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace torch's class by graphs that capture on the stand-in."""

    class CUDAGraph:
        def capture_begin(self) -> None:
            fake_cuda.begin_capture()

        def capture_end(self) -> None:
            fake_cuda.end_capture()

        def reset(self) -> None:
            fake_cuda.end_capture()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    return CUDAGraph


@pytest.fixture
def driver(graphs: Any) -> Driver:
    """Give the driver over the stand-in."""
    found = cuda.driver()
    assert found is not None, graphs
    return found


@pytest.fixture
def quarantine(driver: Driver) -> Quarantine[Slot]:
    """Give an empty quarantine in a process that uses the GPU."""
    return Quarantine(lambda: driver)


def test_without_a_gpu_slots_pass_at_once(fake_cuda: FakeCuda) -> None:
    """Only this process reads the slots, so no event is recorded."""
    quarantine: Quarantine[Slot] = Quarantine(lambda: None)
    admit(quarantine, 3, 1)
    assert (len(quarantine), passed(quarantine), len(quarantine)) == (2, [3, 1], 0)
    assert passed(quarantine) == []
    assert fake_cuda.get("recorded") == 0


def test_a_slot_waits_for_its_event(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """The slot is held back until the GPU's earlier work has ended, and passes once."""
    fake_cuda.hold_events()
    admit(quarantine, 5)
    assert passed(quarantine) == []
    assert (passed(quarantine), len(quarantine), fake_cuda.get("recorded")) == ([], 1, 1)
    fake_cuda.pass_events()
    assert (passed(quarantine), passed(quarantine), len(quarantine)) == ([5], [], 0)


def test_the_event_is_recorded_after_the_last_reference(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """A slot that came later is not covered by an event that was recorded before."""
    fake_cuda.hold_events()
    admit(quarantine, 1)
    passed(quarantine)
    admit(quarantine, 2)
    fake_cuda.pass_events()
    assert passed(quarantine) == [1]
    assert (passed(quarantine), len(quarantine)) == ([], 1)
    fake_cuda.pass_events()
    assert passed(quarantine) == [2]


def test_slots_that_come_together_share_an_event(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """One event is recorded per look, not per slot, and none if no slot waits."""
    admit(quarantine, *range(10))
    assert sorted(passed(quarantine)) == list(range(10))
    passed(quarantine)
    assert fake_cuda.get("recorded") == 1


def test_every_device_that_is_in_use_is_asked(
    driver: Driver, quarantine: Quarantine[Slot], fake_cuda: FakeCuda
) -> None:
    """A copy may run on any device: the slot is free when all events have passed."""
    driver.register(1, 0x7F0000000000, 4096)  # creates the context
    fake_cuda.hold_events()
    admit(quarantine, 4)
    passed(quarantine)
    assert fake_cuda.get("recorded") == 2
    fake_cuda.set(passed=1)
    assert passed(quarantine) == []
    fake_cuda.pass_events()
    assert passed(quarantine) == [4]


def test_events_are_used_again(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """A thousand steps use one event, again and again."""
    for slot in range(1000):
        admit(quarantine, slot)
        assert passed(quarantine) == [slot]
    assert fake_cuda.get("created") == 1


def test_events_of_dropped_slots_are_used_again(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """Pools that are closed while copies run lose no events."""
    fake_cuda.hold_events()
    for slot in range(10):
        admit(quarantine, slot)
        passed(quarantine)
        assert [dropped.number for dropped in quarantine.drop()] == [slot]
    assert (len(quarantine), fake_cuda.get("created")) == (0, 1)


def test_nothing_passes_while_a_graph_is_captured(
    quarantine: Quarantine[Slot], graphs: Any, fake_cuda: FakeCuda
) -> None:
    """There is no record and no query, which would break the capture; afterwards all slots pass."""
    fake_cuda.hold_events()
    admit(quarantine, 1)
    passed(quarantine)
    graph = graphs()
    graph.capture_begin()
    admit(quarantine, 2)
    fake_cuda.pass_events()
    assert (passed(quarantine), len(quarantine)) == ([], 2)
    assert (fake_cuda.get("recorded"), fake_cuda.invalidated(), fake_cuda.get("capturing")) == (1, 0, 1)
    graph.capture_end()
    fake_cuda.set(hold_events=0)
    assert passed(quarantine) == [1, 2]


def test_a_capture_that_torch_does_not_know_of_frees_nothing(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """If the record is refused, the slot waits for the next look, and no event is lost."""
    fake_cuda.begin_capture()
    admit(quarantine, 1)
    assert (passed(quarantine), len(quarantine)) == ([], 1)
    fake_cuda.end_capture()
    assert passed(quarantine) == [1]
    assert fake_cuda.get("created") == 1


def test_a_record_refused_on_one_device_covers_nothing(
    driver: Driver, quarantine: Quarantine[Slot], fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event on the first device alone does not free the slot; the event is reused."""
    driver.register(1, 0x7F0000000000, 4096)
    record = driver.record

    def refuse(device: int) -> object:
        if device == 1:
            raise CudaRefused("no", name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        return record(device)

    admit(quarantine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "record", refuse)
        assert (passed(quarantine), len(quarantine)) == ([], 1)
    assert passed(quarantine) == [1]
    assert fake_cuda.get("created") == 2


def test_a_kernel_that_failed_is_told(quarantine: Quarantine[Slot], fake_cuda: FakeCuda) -> None:
    """The driver's message reaches the loop; no slot is lost, so no memory is freed under a copy."""
    fake_cuda.set(query_fails=700)
    admit(quarantine, 1)
    with pytest.raises(CudaRefused, match="cuEventQuery"):
        passed(quarantine)
    assert len(quarantine) == 1


def test_a_gpu_that_is_used_later_counts_from_then_on(driver: Driver, fake_cuda: FakeCuda) -> None:
    """The user's first CUDA call may come while the loader is running."""
    found: list[Driver | None] = [None]
    quarantine: Quarantine[Slot] = Quarantine(lambda: found[0])
    admit(quarantine, 1)
    assert passed(quarantine) == [1]
    found[0] = driver
    fake_cuda.hold_events()
    admit(quarantine, 2)
    assert passed(quarantine) == []
