"""The fake driver's behavior, checked against the real driver: system/cuda.py and data/quarantine.py beside torch."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.seam import CudaRefused, Driver, cuda
from tests.cuda.seam_torch import capture_lock, is_capturing, watch_captures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")]

NUM_BYTES = 64 << 20
CYCLES = 1 << 30  # about half a second on a GPU
BREAK_A_CAPTURE = """
import torch
from numapin.system import cuda
torch.ones(1, device="cuda")
driver, name = cuda.driver(), None
event = driver.record(0)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        try:
            {call}
        except cuda.CudaRefused as error:
            name = error.name
except RuntimeError:
    print("broken by", name)
"""


@pytest.fixture
def driver() -> Driver:
    torch.ones(1, device="cuda:0")
    found = cuda.driver()
    assert found is not None
    return found


@pytest.fixture
def memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    array = np.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=np.uint8)
    array[:] = 1
    return array


def in_thread(call: Callable[[], object]) -> Any:
    """Run a call in a new thread, which has no current context and the default capture mode."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_registered_memory_is_pinned_for_torch(driver: Driver, memory: np.ndarray[Any, Any]) -> None:
    """Torch reports the memory as pinned between register and unregister, which work from any thread."""
    tensor = torch.from_numpy(memory)
    in_thread(lambda: driver.register(0, memory.ctypes.data, memory.nbytes))
    assert tensor.is_pinned()
    assert int(tensor.to("cuda", non_blocking=True).sum()) == NUM_BYTES
    driver.unregister(0, memory.ctypes.data)
    assert not tensor.is_pinned()


def test_a_refusal_leaves_no_error_behind(driver: Driver, memory: np.ndarray[Any, Any]) -> None:
    """After a refused registration, torch's next launch succeeds."""
    driver.register(0, memory.ctypes.data, memory.nbytes)
    with pytest.raises(CudaRefused) as caught:
        driver.register(0, memory.ctypes.data, memory.nbytes)
    driver.unregister(0, memory.ctypes.data)
    assert caught.value.name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert int(torch.ones(8, device="cuda").sum()) == 8


def test_an_event_waits_for_every_stream(driver: Driver) -> None:
    """A record in a new thread covers earlier work on a side stream, and no later work."""
    early = in_thread(lambda: driver.record(0))
    torch.cuda.synchronize()
    untyped: Any = torch.cuda
    with untyped.stream(untyped.Stream()):
        untyped._sleep(CYCLES)
    late = in_thread(lambda: driver.record(0))
    assert driver.has_passed(early)
    assert not in_thread(lambda: driver.has_passed(late))
    torch.cuda.synchronize()
    assert driver.has_passed(late)
    driver.recycle(early)
    driver.recycle(late)


def test_an_event_of_a_stream(driver: Driver, memory: np.ndarray[Any, Any]) -> None:
    """In a thread without a context: an event passes with its stream's work only, and the default stream waits for it.

    The time between two events is that of the work.
    """
    untyped: Any = torch.cuda
    stream = untyped.Stream()
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    driver.register(0, memory.ctypes.data, memory.nbytes)
    target.sum()  # the first time, CUDA loads the kernel, which may take longer than the work below
    torch.cuda.synchronize()

    def copy_late() -> tuple[cuda.Event, ...]:
        with untyped.stream(stream):
            untyped._sleep(CYCLES)
        return submit()

    def submit() -> tuple[cuda.Event, ...]:
        with driver.context(0):
            began = driver.record(0, stream=stream.cuda_stream, is_timed=True)
            driver.copy_to_device(target.data_ptr(), memory.ctypes.data, NUM_BYTES, stream.cuda_stream)
            ended = driver.record(0, stream=stream.cuda_stream, is_timed=True)
            event = driver.record(0, stream=stream.cuda_stream)
            driver.let_wait(0, event)
        return began, ended, event

    began, ended, event = copy_late()
    total = target.sum()  # on the default stream
    assert not driver.has_passed(event)
    assert int(total) == NUM_BYTES
    in_thread(lambda: driver.wait(event))
    assert driver.has_passed(event)
    assert 0.5 < driver.elapsed_ms(began, ended) < 100  # 64 MiB; by 100 GB/s and by less than 1
    again = in_thread(submit)
    in_thread(lambda: driver.wait(again[-1]))
    driver.recycle(began, ended, event, *again)
    driver.unregister(0, memory.ctypes.data)


def test_no_context_stays_current(driver: Driver) -> None:
    """After the block, the thread's current device is the same."""
    last = torch.cuda.device_count() - 1
    with driver.context(last):
        pass
    assert torch.cuda.current_device() == 0
    assert_runs_on(0)
    with torch.cuda.device(last), driver.context(0):
        pass
    assert torch.cuda.current_device() == 0


def assert_runs_on(device: int) -> None:
    assert torch.ones(8, device="cuda").sum().device == torch.device("cuda", device)


def test_a_capture_goes_through_beside_us(driver: Driver, memory: np.ndarray[Any, Any]) -> None:
    """Queries and registrations of relaxed threads do not invalidate a capture, and records have to wait."""
    watch_captures()
    event, graph, ones = driver.record(0), torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    torch.cuda.synchronize()

    def meddle() -> bool:
        driver.register(0, memory.ctypes.data, memory.nbytes)
        driver.unregister(0, memory.ctypes.data)
        with driver.relaxed_capture(), capture_lock:
            return driver.has_passed(event) and is_capturing()

    with torch.cuda.graph(graph):
        ones.mul_(2)
        assert in_thread(meddle)
        assert meddle()
    graph.replay()
    assert int(ones.sum()) == 16
    with capture_lock:
        assert not is_capturing()
        driver.recycle(driver.record(0))


@pytest.mark.parametrize("call", ["driver.record(0)", "driver.has_passed(event)"])
def test_what_breaks_a_capture(call: str) -> None:
    """A record, which `capture_lock` prevents, and a query by a thread that is not relaxed invalidate a capture."""
    code = BREAK_A_CAPTURE.format(call=call)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "broken by CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
