"""Wait for the first CUDA context of a process that never names its device.

`torch.ones(1, device="cuda:1")` does not call set_device, and CUDA does not report new contexts. So a thread asks
the driver, which takes microseconds.
"""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Final

from numapin.children import own
from numapin.system import cuda

if TYPE_CHECKING:
    from collections.abc import Callable

_SOON_S: Final = 0.01
_LATER_S: Final = 0.5
_NUM_SOON: Final = 1000


def start(report: Callable[[Exception], None]) -> bool:
    """Start the thread; return False if there is no driver to ask. `report` is called with an error that ends it."""
    driver = cuda.driver()
    if driver is None:
        return False
    from threading import Thread

    Thread(target=_watch, args=(driver, report), name="numapin-context", daemon=True).start()
    return True


def _watch(driver: cuda.Driver, report: Callable[[Exception], None]) -> None:
    try:
        _take_first_context(driver)
    except Exception as error:  # noqa: BLE001 - the program must go on
        report(error)


def _take_first_context(driver: cuda.Driver) -> None:
    """Wait until this process has a context or has named its device; bind it to the context's device."""
    for turn in count():
        if own.is_settled():
            return
        active = driver.active_devices()
        if active:
            own.take_one_of(active, "its first CUDA context")
            return
        time.sleep(_SOON_S if turn < _NUM_SOON else _LATER_S)
