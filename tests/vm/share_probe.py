"""A rank that shares data, and writes the kernel's view of its pages to $PROBE_OUT/<RANK>.json.

    numapin run share_probe.py

Pages are counted for one large array, in the rank and in a forked worker that has read it. torch takes minutes to
import here, and shared data does not need it.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

import numapin
from tests.vm.probe import MAPPING_BYTES, mapped_at
from tests.vm.seam import numa

NUM_TUPLES: Final = 20_000


def count_pages(shared: Mapping[str, Any]) -> dict[str, int]:
    """Read everything; return the number of the array's pages on each node."""
    rows = shared["rows"]
    assert list(shared["samples"]) == _samples()
    assert int(rows.sum(dtype=np.int64)) == MAPPING_BYTES
    return {str(node): pages for node, pages in numa.nodes_of_range(rows.ctypes.data, rows.nbytes).items()}


def in_worker(shared: Mapping[str, Any]) -> dict[str, int]:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    worker = context.Process(target=lambda: answers.put(count_pages(shared)))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    found: dict[str, int] = answers.get()
    return found


def _samples() -> list[tuple[str, int]]:
    return [(f"images/{number}.jpg", number) for number in range(NUM_TUPLES)]


def share(placement: str) -> dict[str, Any]:
    """Share and read; return the counts, and the inodes of the files that are mapped."""
    shared = numapin.share(
        lambda: {"samples": _samples(), "rows": np.ones(MAPPING_BYTES, dtype=np.uint8)},
        placement=placement,
        timeout_s=1200,
    )
    own, worker = count_pages(shared), in_worker(shared)
    *_, inode, name = mapped_at(shared["rows"].ctypes.data)[2][:5]
    assert name.startswith("/memfd:numapin-share")
    return {"rank": own, "worker": worker, "file": inode}


def main() -> None:
    faulthandler.dump_traceback_later(1500)
    answers = {placement: share(placement) for placement in ("interleave", "per-node")}
    assert "torch" not in sys.modules
    Path(os.environ["PROBE_OUT"], f"{os.environ['RANK']}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
