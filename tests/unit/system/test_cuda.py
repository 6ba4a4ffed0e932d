"""CUDA driver calls, against the stand-in driver of tests/cuda."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from time import thread_time
from timeit import timeit
from typing import TYPE_CHECKING

import pytest

from tests.unit.system.seam import CudaRefused, Driver, cuda

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

PAGE = 4096
ADDRESS = 0x7F0000000000
IN_CHILD = "if os.fork() == 0: print(cuda.driver() is None); os._exit(0)\nos.wait()"


@pytest.fixture
def driver(fake_cuda: FakeCuda) -> Driver:
    found = cuda.driver()
    assert found is not None, fake_cuda
    return found


@pytest.mark.parametrize(
    ("code", "numbers", "printed"),
    [
        ("print(cuda.driver().active_devices())", {"devices": 4, "active": 0b1010}, "(1, 3)"),
        ("print(cuda.driver())", {"devices": 0}, "None"),  # cuInit fails, as on a machine without a GPU
        # CUDA fails in a child of a process that initialized it, which goes on; else the child has its own driver.
        (f"print(cuda.driver() is None)\n{IN_CHILD}\nprint(cuda.driver() is None)", {}, "False\nTrue\nFalse"),
        (IN_CHILD, {}, "False"),
    ],
    ids=["devices", "no device", "initialized before the fork", "initialized in the fork"],
)
def test_the_driver_in_a_new_process(fake_cuda: FakeCuda, code: str, numbers: dict[str, int], printed: str) -> None:
    """The dynamic linker finds the library by its name; without a device, and in some forks, there is no driver."""
    begin = "import os, sys\nfrom numapin.system import cuda\nsys.stdout.reconfigure(line_buffering=True)\n"
    command = [sys.executable, "-c", begin + code]
    run = subprocess.run(command, env=fake_cuda.environment(**numbers), capture_output=True, text=True, check=True)
    assert run.stdout.strip() == printed


def test_without_a_library_there_is_no_driver(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not load gives None, and so does one that lacks the calls."""
    for name in (str(fake_cuda.library.with_name("libnothing.so.1")), "libc.so.6"):
        monkeypatch.setattr(cuda, "_LIBRARY", name)
        cuda._load.cache_clear()
        assert cuda.driver() is None


def test_ranges_are_registered_unregistered_and_refused(driver: Driver, fake_cuda: FakeCuda) -> None:
    """The driver counts the bytes; the thread's contexts and capture mode do not change.

    A refusal has call, address, size and the driver's text, and a hint with the remedy; no context stays pushed.
    """
    driver.register(0, ADDRESS, 3 * PAGE)
    driver.register(0, ADDRESS + 3 * PAGE, PAGE)
    assert fake_cuda.registered_bytes() == 4 * PAGE
    driver.unregister(0, ADDRESS)
    fake_cuda.refuse_registration(above_bytes=PAGE)
    with pytest.raises(CudaRefused) as caught:
        driver.register(0, ADDRESS, PAGE)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert caught.value.message == (
        "cuMemHostRegister_v2(0x7f0000000000, 4096, 1) failed: CUDA_ERROR_OUT_OF_MEMORY, out of memory"
    )
    assert "pinned_budget" in caught.value.hint
    state = (fake_cuda.registered_bytes(), fake_cuda.depth(), fake_cuda.mode(), fake_cuda.get("retained"))
    assert state == (PAGE, 0, 0, 1)


def test_refusals_have_names(driver: Driver) -> None:
    """Ranges that overlap or are not registered, and an ordinal beyond the last device, have the driver's names."""
    driver.register(0, ADDRESS, 2 * PAGE)
    for call, name in (
        (lambda: driver.register(1, ADDRESS + PAGE, 2 * PAGE), "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
        (lambda: driver.unregister(0, ADDRESS + PAGE), "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
        (lambda: driver.register(2, ADDRESS, PAGE), "CUDA_ERROR_INVALID_DEVICE"),
        (lambda: driver.record(2), "CUDA_ERROR_INVALID_CONTEXT"),
    ):
        with pytest.raises(CudaRefused) as caught:
            call()
        copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
        assert (type(copy), copy.name, str(copy)) == (CudaRefused, name, str(caught.value))


def test_only_register_creates_a_context(driver: Driver, fake_cuda: FakeCuda) -> None:
    """Looking at a device, or failing to record on it, does not activate it; registering on it does."""
    assert driver.active_devices() == (0,)
    with pytest.raises(CudaRefused, match="active on device 1"):
        driver.record(1)
    assert fake_cuda.get("retained") == 0
    driver.register(1, ADDRESS, PAGE)
    assert driver.active_devices() == (0, 1)
    assert driver.record(1).device == 1


def test_an_event_passes_when_what_was_before_it_is_done(driver: Driver, fake_cuda: FakeCuda) -> None:
    """Events pass in order. A recycled one is recorded anew, and has not passed yet; else a new one is created."""
    assert driver.can_record_contexts
    fake_cuda.hold_events()
    first = driver.record(0)
    assert not driver.has_passed(first)
    fake_cuda.pass_events()
    second = driver.record(0)
    assert (driver.has_passed(first), driver.has_passed(second)) == (True, False)
    driver.recycle(first)
    again = driver.record(0)
    assert (again, driver.has_passed(again), fake_cuda.get("created")) == (first, False, 2)
    assert driver.record(0) != first


def test_an_event_of_a_stream(driver: Driver, fake_cuda: FakeCuda) -> None:
    """It passes with the stream's work; another stream, or the host, can wait for it; no context stays pushed."""
    fake_cuda.hold_events()
    with driver.context(0):
        event = driver.record(0, stream=7)
        driver.let_wait(0, event)
    assert (driver.has_passed(event), fake_cuda.get("waited"), fake_cuda.depth()) == (False, 1, 0)
    driver.wait(event)
    assert driver.has_passed(event)


def test_timed_events_are_kept_apart(driver: Driver, fake_cuda: FakeCuda) -> None:
    """Events of a context, of a stream and timed ones are each used again for their own purpose."""
    with driver.context(0):
        for _ in range(3):
            began, ended = (driver.record(0, stream=7, is_timed=True) for _ in range(2))
            assert driver.elapsed_ms(began, ended) > 0
            untimed = driver.record(0, stream=7)
            with pytest.raises(CudaRefused, match="cuEventElapsedTime"):
                driver.elapsed_ms(began, untimed)
            driver.recycle(began, ended, untimed, driver.record(0))
    assert fake_cuda.get("created") == 4


def test_a_record_during_a_capture_breaks_it(driver: Driver, fake_cuda: FakeCuda) -> None:
    """Recording breaks a capture, in relaxed mode too, as in the real driver; the event is not lost."""
    fake_cuda.begin_capture()
    with pytest.raises(CudaRefused) as caught, driver.relaxed_capture():
        driver.record(0)
    assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert fake_cuda.invalidated() == 1
    driver.record(0)
    assert fake_cuda.get("created") == 1


def test_a_query_breaks_a_capture_unless_relaxed(driver: Driver, fake_cuda: FakeCuda) -> None:
    """The mode of the querying thread counts, and is restored after the block, with or without an error.

    A CUresult without a name, as after the failure of a kernel, is shown as its number.
    """
    event = driver.record(0)
    fake_cuda.begin_capture()
    with driver.relaxed_capture():
        assert driver.has_passed(event)
    fake_cuda.set(query_fails=2)
    with pytest.raises(CudaRefused, match="cuEventQuery"), driver.relaxed_capture():
        driver.has_passed(event)
    assert (fake_cuda.mode(), fake_cuda.invalidated()) == (0, 0)
    fake_cuda.set(query_fails=0)
    with pytest.raises(CudaRefused):
        driver.has_passed(event)
    assert fake_cuda.invalidated() == 1
    fake_cuda.set(query_fails=7777)
    with pytest.raises(CudaRefused, match="CUresult 7777") as caught, driver.relaxed_capture():
        driver.has_passed(event)
    assert "dmesg" in caught.value.hint


def test_a_thread_relaxes_for_itself_and_for_good(driver: Driver, fake_cuda: FakeCuda) -> None:
    """The mode stays in that thread, also after a nested block, and does not affect other threads."""
    modes: list[int] = []

    def relaxed() -> None:
        driver.relax_capture()
        with driver.relaxed_capture():
            pass
        modes.append(fake_cuda.mode())

    thread = threading.Thread(target=relaxed)
    thread.start()
    thread.join()
    assert (modes, fake_cuda.mode()) == ([2], 0)


def test_registration_goes_through_beside_a_capture(driver: Driver, fake_cuda: FakeCuda) -> None:
    """Registering and unregistering during a user's capture does not disturb it, even with a new context."""
    fake_cuda.begin_capture()
    driver.register(1, ADDRESS, PAGE)
    driver.unregister(1, ADDRESS)
    assert (fake_cuda.invalidated(), fake_cuda.get("retained")) == (0, 1)


def test_an_old_driver_records_no_contexts(old_fake_cuda: FakeCuda) -> None:
    """Before R555 cuCtxRecordEvent is missing: everything else works, and `record` raises an error that says so."""
    driver = cuda.driver()
    assert driver is not None
    assert not driver.can_record_contexts
    driver.register(0, ADDRESS, PAGE)
    assert old_fake_cuda.registered_bytes() == PAGE
    with pytest.raises(CudaRefused, match="cuCtxRecordEvent") as caught:
        driver.record(0)
    assert "R555" in caught.value.hint


def test_threads_never_share_an_event(driver: Driver) -> None:
    """Threads that record and recycle at the same time never share an event."""
    held: set[int] = set()
    shared: list[int] = []

    def work() -> None:
        for _ in range(300):
            event = driver.record(0)
            shared.extend({event.handle} & held)
            held.add(event.handle)
            driver.has_passed(event)
            held.remove(event.handle)
            driver.recycle(event)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared == []


@pytest.mark.alone
def test_the_hot_calls_are_cheap(driver: Driver, fake_cuda: FakeCuda) -> None:
    """The loader's calls for each batch cost less than ten bare ctypes calls, which take about 0.3 us each.

    Measured side by side, because the machine may be busy; the best of several tries; with two devices.
    """
    bare = ctypes.CDLL(str(fake_cuda.library)).cuCtxPopCurrent_v2  # has nothing to pop
    event, place = driver.record(0), ctypes.byref(ctypes.c_void_p())
    calls: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(place),
        "record": lambda: driver.recycle(driver.record(0)),
        "has_passed": lambda: driver.has_passed(event),
        "active_devices": driver.active_devices,
        "driver": cuda.driver,
    }
    took = dict.fromkeys(calls, float("inf"))
    for _ in range(100):
        took = {name: min(took[name], timeit(call, timer=thread_time, number=100)) for name, call in calls.items()}
    assert {name: ratio for name in took if (ratio := took[name] / took["bare"]) > 10} == {}


def test_a_copy_moves_the_bytes(driver: Driver) -> None:
    """A copy takes addresses and a number of bytes, and changes nothing else; a null address is refused."""
    source, target = ctypes.create_string_buffer(b"abcdef", 6), ctypes.create_string_buffer(b"......", 6)
    with driver.context(0):
        driver.copy_to_device(ctypes.addressof(target), ctypes.addressof(source), 4, 0)
    assert target.raw == b"abcd.."
    with driver.context(0), pytest.raises(CudaRefused, match="INVALID_VALUE"):
        driver.copy_to_device(0, ctypes.addressof(source), 4, 0)
