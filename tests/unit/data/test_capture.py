"""Captures of CUDA graphs and context-wide events do not overlap. The driver is a stand-in."""

from __future__ import annotations

import inspect
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.data.child import in_forked_child
from tests.unit.data.seam import CudaRefused, Quarantine, capture_lock, cuda, is_capturing, watch_captures

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

WAIT_S = 120
NUM_STOPS = 300
STUCK_S = 20


class RefusedError(RuntimeError):
    """An error that a graph raises on demand."""


@pytest.fixture
def graphs(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace torch's class by graphs that capture on the stand-in, and watch it."""

    class CUDAGraph:
        def __init__(self, *, fails: str = "") -> None:
            self.fails = fails

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            if self.fails == "begin":
                raise RefusedError(pool, capture_error_mode)
            fake_cuda.begin_capture()

        def capture_end(self) -> None:
            fake_cuda.end_capture()
            if self.fails == "end":
                raise RefusedError

        def reset(self) -> None:
            fake_cuda.end_capture()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    watch_captures()
    return CUDAGraph


def _free() -> bool:
    with capture_lock:
        return not is_capturing()


def test_a_capture_is_seen_from_its_begin_to_its_end(graphs: Any) -> None:
    """A block is quiet before and after a capture, but not during it; a graph may capture again."""
    graph = graphs()
    assert _free()
    for _ in range(2):
        graph.capture_begin()
        assert not _free()
        graph.capture_end()
        assert _free()


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(graphs: Any) -> None:
    """A thread may be inside the block at the fork; the child, which makes a loader of its own, has no such thread."""
    is_inside, may_leave = threading.Event(), threading.Event()

    def hold() -> None:
        with capture_lock:
            is_inside.set()
            may_leave.wait(WAIT_S)

    def watch_again() -> bool:
        signal.alarm(WAIT_S)  # kills the child, which would wait forever
        watch_captures()
        return True

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_inside.wait(WAIT_S), graphs
    lives = in_forked_child(watch_again)
    may_leave.set()
    thread.join()
    assert lives


def test_two_captures_end_with_the_later_one(graphs: Any) -> None:
    """Two captures are distinguished by their graphs."""
    one, other = graphs(), graphs()
    one.capture_begin()
    other.capture_begin()
    one.capture_end()
    assert not _free()
    other.capture_end()
    assert _free()


def test_a_begin_that_fails_is_no_capture(graphs: Any) -> None:
    """The error and the arguments pass through, and the block is quiet again."""
    with pytest.raises(RefusedError) as caught:
        graphs(fails="begin").capture_begin("pool", capture_error_mode="relaxed")
    assert caught.value.args == ("pool", "relaxed")
    assert _free()


def test_an_end_that_fails_is_an_end(graphs: Any) -> None:
    """An invalidated capture is over although capture_end raises."""
    graph = graphs(fails="end")
    graph.capture_begin()
    with pytest.raises(RefusedError):
        graph.capture_end()
    assert _free()


def test_a_graph_that_is_gone_captures_no_more(graphs: Any) -> None:
    """A capture that was never ended blocks records only as long as its graph lives."""
    graph = graphs()
    graph.capture_begin()
    assert not _free()
    del graph
    assert _free()


def test_reset_ends_a_capture(graphs: Any) -> None:
    """A graph that was reset is not capturing, although capture_end never came."""
    graph = graphs()
    graph.capture_begin()
    graph.reset()
    assert _free()


def test_watching_twice_wraps_once(graphs: Any) -> None:
    """Each loader calls it; only the first call has an effect."""
    before = dict(vars(graphs))
    watch_captures()
    assert dict(vars(graphs)) == before


def test_without_graphs_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDAGraph never captures."""
    monkeypatch.delattr(torch.cuda, "CUDAGraph", raising=False)
    watch_captures()
    assert _free()


def test_the_graphs_of_this_torch_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed torch's class has the three methods, and keeps their signatures."""
    own = torch.cuda.CUDAGraph
    heir = type("CUDAGraph", (own,), {})  # the class itself stays as it is for the other tests
    monkeypatch.setattr(torch.cuda, "CUDAGraph", heir)
    watch_captures()
    for name in ("capture_begin", "capture_end", "reset"):
        assert vars(heir)[name] is not getattr(own, name)
        assert inspect.signature(getattr(heir, name)) == inspect.signature(getattr(own, name))


def test_a_begin_waits_for_the_block(graphs: Any, fake_cuda: FakeCuda) -> None:
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


def test_a_capture_inside_the_own_block_does_not_wait_for_itself(graphs: Any) -> None:
    """A signal handler may capture while its thread is in a block: it does not deadlock."""
    with capture_lock:
        thread_is_stuck = threading.Timer(WAIT_S, _interrupt)
        thread_is_stuck.start()
        graphs().capture_begin()
        thread_is_stuck.cancel()


def _interrupt() -> None:
    import _thread

    _thread.interrupt_main()


def test_a_record_in_mid_capture_is_what_the_block_prevents(graphs: Any, fake_cuda: FakeCuda) -> None:
    """Without the block the record breaks the capture; a caller that respects the block does not."""
    driver = cuda.driver()
    assert driver is not None
    graph = graphs()
    graph.capture_begin()
    with capture_lock:
        if not is_capturing():
            driver.record(0)
    assert fake_cuda.invalidated() == 0
    with pytest.raises(CudaRefused):
        driver.record(0)
    assert fake_cuda.invalidated() == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a weak reference's callback
def test_ctrl_c_leaves_the_lock_free(graphs: Any, fake_cuda: FakeCuda) -> None:
    """Whenever it comes, captures may begin afterwards: the lock has no Python code of its own around it."""
    fake_cuda.hold_events()
    quarantine = Quarantine[int](cuda.driver)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(NUM_STOPS):
            quarantine.admit(0)
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + number * 1e-6)
                for _ in range(200):
                    quarantine.passed()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    thread = threading.Thread(target=graphs().capture_begin, daemon=True)
    thread.start()
    thread.join(STUCK_S)
    assert not thread.is_alive()


def test_threads_that_capture_and_threads_that_record_agree(graphs: Any, fake_cuda: FakeCuda) -> None:
    """Two threads record while captures come and go: no capture is broken, and records get through."""
    driver = cuda.driver()
    assert driver is not None
    recorded: list[bool] = []
    done = threading.Event()

    def record() -> None:
        while not done.is_set():
            with capture_lock:
                recorded.append(not is_capturing())
                if recorded[-1]:
                    driver.recycle(driver.record(0))

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        graph = graphs()
        graph.capture_begin()
        graph.capture_end()
    done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert fake_cuda.invalidated() == 0
    assert any(recorded)
