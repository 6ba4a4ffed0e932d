"""A training script that trains nothing, and lets `numapin verify` look at it while it misbehaves.

    numapin run verify_probe.py          rank 0 has itself verified: as started, a thread moved, its pages migrated
    python verify_probe.py self          has itself verified by its process id

Writes to $PROBE_OUT, for each look, what `numapin verify` printed, and its status with --json.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

REGION_BYTES: Final = 64 << 20
OUT: Final = Path(os.environ["PROBE_OUT"])
VERIFY: Final = (sys.executable, "-m", "numapin", "verify")


def main() -> None:
    """Have memory and a thread, and be looked at."""
    region = mmap.mmap(-1, REGION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, REGION_BYTES, mmap.PAGESIZE):
        region[offset] = 1
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        _play(thread.native_id or 0)
    finally:
        end.set()


def _play(thread: int) -> None:
    rank = os.environ.get("LOCAL_RANK", "0")
    if sys.argv[1:] == ["self"]:
        _look("unbound", "--pid", str(os.getpid()))
    elif rank == "0":
        _wait_for("ready")
        _misbehave(thread)
        (OUT / "done").touch()
    else:
        (OUT / "ready").touch()
        _wait_for("done")


def _misbehave(thread: int) -> None:
    """Be as planned, then move a thread to the other node and back, then all pages."""
    _look("green")
    planned = os.sched_getaffinity(thread)
    os.sched_setaffinity(thread, {4})
    _look("thread")
    os.sched_setaffinity(thread, planned)
    _look("restored")
    _migrate(source=0, target=1)
    _look("pages")
    _wait_for("report.json")  # of --report, which looks when it is its time


def _migrate(*, source: int, target: int) -> None:
    """Move all pages of this process from one node to another, as migratepages(8) does."""
    libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
    masks = [ctypes.c_ulong(1 << node) for node in (source, target)]
    left = libnuma.migrate_pages(os.getpid(), ctypes.c_ulong(64), *map(ctypes.byref, masks))
    assert left >= 0, os.strerror(ctypes.get_errno())


def _look(name: str, *options: str) -> None:
    table = subprocess.run([*VERIFY, *options], capture_output=True, text=True, check=False)
    (OUT / f"{name}.txt").write_text(table.stdout)
    done = subprocess.run([*VERIFY, "--json", *options], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout) if done.stdout else None
    (OUT / f"{name}.json").write_text(json.dumps({"status": done.returncode, "report": report, "stderr": done.stderr}))


def _wait_for(name: str) -> None:
    while not (OUT / name).exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
