"""A program whose end is tested: python -m tests.contract.rank LOADER SCENE METHOD prints "ready" once batches come."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch.utils.data._utils.worker

from tests.contract.datasets import Rows
from tests.contract.watching import first_batches
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.watching import LoaderClass


LOOK_S = "NUMAPIN_TESTS_LOOK_S"
"""The variable with the time after which torch's loop in a worker looks whether the rank is alive; torch's own: 5 s."""
if LOOK_S in os.environ:
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = float(os.environ[LOOK_S])  # type: ignore[attr-defined] # imported there


def started(kind: LoaderClass, method: str, **arguments: Any) -> tuple[Any, Any]:
    """Return a loader and an iterator past its first batches, and print "ready"."""
    loader: Any = kind(Rows(100_000), batch_size=2, num_workers=2, multiprocessing_context=method, **arguments)
    iterator = iter(loader)
    for _ in first_batches(loader, iterator):  # keeping them would use up the slots, which is reported
        pass
    print("ready", flush=True)  # noqa: T201 - the test waits for it
    return loader, iterator


def run_on(kind: LoaderClass, method: str) -> None:
    """Take batches forever."""
    loader, iterator = started(kind, method)
    for _ in iterator:
        time.sleep(0.001)
    del loader  # not earlier: its finalizer would run as the test interrupts


def stop_stepping(kind: LoaderClass, method: str) -> None:
    """Hold a batch and take no more, so that workers wait for a free slot."""
    held = started(kind, method)
    time.sleep(1000)
    del held


def hold_in_thread(kind: LoaderClass, method: str) -> None:
    """Create and run the loader in a thread that ends, then sleep: workers end with the process, not the thread."""
    held: list[Any] = []
    thread = threading.Thread(target=lambda: held.extend(started(kind, method)))
    thread.start()
    thread.join()
    assert len([next(held[1]) for _ in range(200)]) == 200
    print("alive", flush=True)  # noqa: T201 - the test waits for it
    time.sleep(1000)


def run_in_threads(kind: LoaderClass, method: str) -> None:
    """Iterate in several threads at once, whose workers are the first of this process."""
    sums: list[int] = []

    def run(_number: int) -> None:
        loader: Any = kind(Rows(20), batch_size=2, num_workers=2, multiprocessing_context=method)
        sums.append(sum(int(batch["index"].sum()) for batch in loader))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    print("ready", sums)  # noqa: T201 - the test reads it


def chain_handler(kind: LoaderClass, method: str) -> None:
    """Set a SIGCHLD handler first; it is still called for a child of the user."""
    calls: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, _: calls.append(number))
    held = started(kind, method)
    assert callable(signal.getsignal(signal.SIGCHLD))
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join()
    print(f"called {wait_until(lambda: bool(calls), limit_s=60)}", flush=True)  # noqa: T201 - what the test reads
    del held


SCENES: dict[str, Callable[[LoaderClass, str], None]] = {
    scene.__name__: scene
    for scene in (
        run_on,
        stop_stepping,
        hold_in_thread,
        run_in_threads,
        chain_handler,
    )
}

if __name__ == "__main__":
    SCENES[sys.argv[2]](pkgutil.resolve_name(sys.argv[1]), sys.argv[3])
