"""A stand-in for a training script that runs `numapin verify` on itself while it violates its plan.

    numapin run verify_probe.py          rank 0 verifies: as started, after moving a thread, after narrowing itself,
                                         after migrating its pages
    python verify_probe.py self          verifies its own process id

Writes to $PROBE_OUT, for each check, the status and report of `numapin verify --json`, and the output without --json of
the first check, or of all if $PROBE_TEXTS is set.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from tests.vm.agent import numapin, verify
from tests.vm.probe import touched

REGION_BYTES: Final = 64 << 20
OUT: Final = Path(os.environ["PROBE_OUT"])


def main() -> None:
    is_alone = sys.argv[1:] == ["self"]
    allowed = os.sched_getaffinity(0)
    if is_alone:  # nothing binds it: its memory must be on node 0 wherever it was started
        os.sched_setaffinity(0, {0})
    region = touched(REGION_BYTES)
    os.sched_setaffinity(0, allowed)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        if is_alone:
            _look("unbound", "--pid", str(os.getpid()))
        elif os.environ["LOCAL_RANK"] == "0":
            _wait_for("ready")
            _misbehave(thread.native_id or 0)
            (OUT / "done").touch()
        else:
            (OUT / "ready").touch()
            _wait_for("done")
    finally:
        end.set()
        region.close()


def _misbehave(thread: int) -> None:
    """Verify as planned, with a thread elsewhere, then back, on one CPU, then bound again, and with pages migrated."""
    _look("green")
    planned = os.sched_getaffinity(thread)
    os.sched_setaffinity(thread, {4})
    _look("thread")
    os.sched_setaffinity(thread, planned)
    _look("restored")
    os.sched_setaffinity(0, {0})
    _look("squeezed")
    run = Path(os.environ["NUMAPIN_RUN_DIR"]).name
    assert numapin("attach", "--job", run, "--widen")["status"] == 0
    _look("widened")
    _migrate(source=0, target=1)
    _look("pages")
    _wait_for("report.json")  # written by --report at its own time


def _migrate(*, source: int, target: int) -> None:
    """Move all pages of this process from one node to another, as migratepages(8) does."""
    libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
    masks = [ctypes.c_ulong(1 << node) for node in (source, target)]
    left = libnuma.migrate_pages(os.getpid(), ctypes.c_ulong(64), *map(ctypes.byref, masks))
    assert left >= 0, os.strerror(ctypes.get_errno())


def _look(name: str, *options: str) -> None:
    if name == "green" or "PROBE_TEXTS" in os.environ:
        (OUT / f"{name}.txt").write_text(numapin("verify", *options)["stdout"])
    verify(OUT / f"{name}.json", *options)


def _wait_for(name: str) -> None:
    while not (OUT / name).exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
