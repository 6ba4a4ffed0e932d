"""A program whose end is tested: python -m tests.contract.rank LOADER SCENE METHOD prints "ready" once batches come."""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.utils.data._utils.worker

from tests.contract.datasets import Rows
from tests.contract.watching import LoaderClass, first_batches

LOOK_S = "NUMAPIN_TESTS_LOOK_S"
"""The variable with the time after which torch's loop in a worker looks whether the rank is alive; torch's own: 5 s."""
if LOOK_S in os.environ:
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = float(os.environ[LOOK_S])  # type: ignore[attr-defined] # imported there


def started(kind: LoaderClass, method: str) -> tuple[Any, Any]:
    loader: Any = kind(Rows(100_000), batch_size=2, num_workers=2, multiprocessing_context=method)
    iterator = iter(loader)
    for _ in first_batches(loader, iterator):  # keeping them would use up the slots, which is reported
        pass
    print("ready", flush=True)  # noqa: T201 - the test waits for it
    return loader, iterator


def run_on(kind: LoaderClass, method: str) -> None:
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


if __name__ == "__main__":
    globals()[sys.argv[2]](pkgutil.resolve_name(sys.argv[1]), sys.argv[3])
