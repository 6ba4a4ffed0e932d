"""Slots wait for the copies that may still read them, and events for captures of CUDA graphs. The driver is a fake."""

from __future__ import annotations

import _thread
import inspect
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.data.loopback import in_forked_child
from tests.unit.data.seam import CudaRefused, Driver, Quarantine, capture_lock, cuda, is_capturing, watch_captures

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

WAIT_S = 120


@pytest.fixture
def driver(fake_cuda: FakeCuda, graphs: Any) -> Driver:
    found = cuda.driver()
    assert found is not None, (fake_cuda, graphs)
    return found


@pytest.fixture
def quarantine(driver: Driver) -> Quarantine[int]:
    return Quarantine(lambda: driver)


def test_a_gpu_that_is_used_later_counts_from_then_on(driver: Driver, fake_cuda: FakeCuda) -> None:
    """Without a GPU slots pass at once, and no event is recorded; the user's first CUDA call may come later."""
    found: list[Driver | None] = [None]
    quarantine: Quarantine[int] = Quarantine(lambda: found[0])
    for number in (3, 1):
        quarantine.admit(number)
    assert (len(quarantine), quarantine.passed(), len(quarantine), quarantine.passed()) == (2, [3, 1], 0, [])
    assert fake_cuda.get("recorded") == 0
    found[0] = driver
    fake_cuda.hold_events()
    quarantine.admit(2)
    assert quarantine.passed() == []


def test_a_slot_waits_for_its_event(quarantine: Quarantine[int], fake_cuda: FakeCuda) -> None:
    """A slot passes once, when the GPU's work before its last reference's end is done. One look, one event."""
    fake_cuda.hold_events()
    for number in range(10):
        quarantine.admit(number)
    assert (quarantine.passed(), quarantine.passed(), len(quarantine), fake_cuda.get("recorded")) == ([], [], 10, 1)
    quarantine.admit(11)
    fake_cuda.pass_events()
    assert quarantine.passed() == list(range(10))
    assert (quarantine.passed(), len(quarantine)) == ([], 1)  # the event of the others does not cover it
    fake_cuda.pass_events()
    assert (quarantine.passed(), quarantine.passed(), len(quarantine)) == ([11], [], 0)
    assert fake_cuda.get("recorded") == 2


def test_every_device_that_is_in_use_is_asked(driver: Driver, quarantine: Quarantine[int], fake_cuda: FakeCuda) -> None:
    """A copy may run on any device: the slot is free when all events have passed."""
    driver.register(1, 0x7F0000000000, 4096)  # creates the context
    fake_cuda.hold_events()
    quarantine.admit(4)
    assert (quarantine.passed(), fake_cuda.get("recorded")) == ([], 2)
    fake_cuda.set(passed=1)
    assert quarantine.passed() == []
    fake_cuda.pass_events()
    assert quarantine.passed() == [4]


def test_events_are_used_again(quarantine: Quarantine[int], fake_cuda: FakeCuda) -> None:
    """A thousand steps use one event; pools that are closed while copies run lose none."""
    for slot in range(1000):
        quarantine.admit(slot)
        assert quarantine.passed() == [slot]
    fake_cuda.hold_events()
    for slot in range(10):
        quarantine.admit(slot)
        assert (quarantine.passed(), len(quarantine)) == ([], 1)
        quarantine.drop()
    assert (len(quarantine), fake_cuda.get("created")) == (0, 1)


def test_a_record_refused_on_one_device_covers_nothing(
    driver: Driver, quarantine: Quarantine[int], fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event on the first device alone does not free the slot; the event is reused."""
    driver.register(1, 0x7F0000000000, 4096)
    refusal = CudaRefused("no", name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    def refuse(device: int, record: Any = driver.record) -> object:
        if device == 1:
            raise refusal
        return record(device)

    quarantine.admit(1)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "record", refuse)
        assert (quarantine.passed(), len(quarantine)) == ([], 1)
    assert quarantine.passed() == [1]
    assert fake_cuda.get("created") == 2


def test_a_kernel_that_failed_is_told(quarantine: Quarantine[int], fake_cuda: FakeCuda) -> None:
    """The driver's message reaches the loop; no slot is lost, so no memory is freed under a copy."""
    fake_cuda.set(query_fails=700)
    quarantine.admit(1)
    with pytest.raises(CudaRefused, match="cuEventQuery"):
        quarantine.passed()
    assert len(quarantine) == 1


class TestCaptures:
    def test_nothing_passes_while_a_graph_is_captured(
        self, quarantine: Quarantine[int], graphs: Any, fake_cuda: FakeCuda
    ) -> None:
        """There is no record and no query, which would break the capture; afterwards all slots pass."""
        fake_cuda.hold_events()
        quarantine.admit(1)
        quarantine.passed()
        graph = graphs()
        graph.capture_begin()
        quarantine.admit(2)
        fake_cuda.pass_events()
        assert (quarantine.passed(), len(quarantine)) == ([], 2)
        assert (fake_cuda.get("recorded"), fake_cuda.invalidated(), fake_cuda.get("capturing")) == (1, 0, 1)
        graph.capture_end()
        fake_cuda.set(hold_events=0)
        assert quarantine.passed() == [1, 2]

    def test_one_that_torch_does_not_know_of_frees_nothing(
        self, quarantine: Quarantine[int], fake_cuda: FakeCuda
    ) -> None:
        """If the record is refused, the slot waits for the next look, and no event is lost."""
        fake_cuda.begin_capture()
        quarantine.admit(1)
        assert (quarantine.passed(), len(quarantine)) == ([], 1)
        fake_cuda.end_capture()
        assert (quarantine.passed(), fake_cuda.get("created")) == ([1], 1)

    def test_one_is_seen_from_its_begin_to_its_end(self, graphs: Any) -> None:
        """A graph may capture again; two captures end with the later one, with reset, or with the graph's own end."""
        one, other = graphs(), graphs()
        assert _free()
        for _ in range(2):
            one.capture_begin()
            assert not _free()
            one.capture_end()
            assert _free()
        one.capture_begin()
        other.capture_begin()
        one.capture_end()
        assert not _free()
        other.reset()
        assert _free()
        other.capture_begin()
        assert not _free()
        del other
        assert _free()

    def test_errors_of_torch(self, graphs: Any) -> None:
        """They and the arguments pass through; no capture is left after a begin that fails, or an end that fails."""
        with pytest.raises(ArithmeticError) as caught:
            graphs(fails="begin").capture_begin("pool", capture_error_mode="relaxed")
        assert caught.value.args == ("pool", "relaxed")
        assert _free()
        graph = graphs(fails="end")
        graph.capture_begin()
        with pytest.raises(ArithmeticError):
            graph.capture_end()
        assert _free()

    def test_the_graphs_of_this_torch_can_be_watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its class has the three methods, and keeps their signatures; a torch without it never captures."""
        own = torch.cuda.CUDAGraph
        heir = type("CUDAGraph", (own,), {})  # the class itself stays as it is for the other tests
        monkeypatch.setattr(torch.cuda, "CUDAGraph", heir)
        watch_captures()
        for name in ("capture_begin", "capture_end", "reset"):
            assert vars(heir)[name] is not getattr(own, name)
            assert inspect.signature(getattr(heir, name)) == inspect.signature(getattr(own, name))
        monkeypatch.delattr(torch.cuda, "CUDAGraph")
        watch_captures()
        assert _free()

    def test_a_begin_waits_for_the_block(self, graphs: Any, fake_cuda: FakeCuda) -> None:
        """A capture in another thread begins after the block, not inside it."""
        thread = threading.Thread(target=graphs().capture_begin)
        with capture_lock:
            assert not is_capturing()
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
            assert fake_cuda.get("capturing") == 0
        thread.join(WAIT_S)
        assert fake_cuda.get("capturing") == 1

    def test_inside_the_own_block_it_does_not_wait_for_itself(self, graphs: Any) -> None:
        """A signal handler may capture while its thread is in a block: it does not deadlock."""
        with capture_lock:
            thread_is_stuck = threading.Timer(WAIT_S, _thread.interrupt_main)
            thread_is_stuck.start()
            graphs().capture_begin()
            thread_is_stuck.cancel()

    def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(self) -> None:
        """A thread may be inside the block at the fork; the child, which makes a loader of its own, has none such."""
        is_inside, may_leave = threading.Event(), threading.Event()

        def hold() -> None:
            with capture_lock:
                is_inside.set()
                may_leave.wait(WAIT_S)

        def watch_again() -> bool:
            signal.alarm(WAIT_S)  # kills the child, which would wait forever
            watch_captures()
            return True

        watch_captures()  # as whatever enters the block has done
        thread = threading.Thread(target=hold)
        thread.start()
        assert is_inside.wait(WAIT_S)
        lives = in_forked_child(watch_again)
        may_leave.set()
        thread.join()
        assert lives


def _free() -> bool:
    with capture_lock:
        return not is_capturing()
