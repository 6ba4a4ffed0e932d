"""A rank that shares data, and writes the kernel's view of its pages to $PROBE_OUT/<RANK>.json.

    numapin run share_probe.py interleave|per-node

Pages are counted for one large array, in the rank and in a DataLoader worker that has read it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

import torch
import torch.utils.data

import numapin
from tests.vm.probe import MAPPING_BYTES
from tests.vm.seam import numa

NUM_TUPLES: Final = 20_000


class Reader(torch.utils.data.Dataset[dict[str, int]]):
    """One item: the worker reads everything, and counts the pages of the array by node."""

    def __init__(self, shared: dict[str, object]) -> None:
        self.shared = shared

    def __len__(self) -> int:
        """Return the number of items."""
        return 1

    def __getitem__(self, index: int) -> dict[str, int]:
        """Return the number of pages on each node."""
        samples, rows = self.shared["samples"], self.shared["rows"]
        assert isinstance(rows, torch.Tensor)
        assert list(samples) == _samples()  # type: ignore[call-overload]
        assert int(rows.sum()) == MAPPING_BYTES
        return {str(node): pages for node, pages in numa.nodes_of_range(rows.data_ptr(), rows.nbytes).items()}


def _samples() -> list[tuple[str, int]]:
    return [(f"images/{number}.jpg", number) for number in range(NUM_TUPLES)]


def main() -> None:
    """Share, read, and write the counts."""
    shared = numapin.share(
        lambda: {"samples": _samples(), "rows": torch.ones(MAPPING_BYTES, dtype=torch.uint8)}, placement=sys.argv[1]
    )
    reader = Reader(shared)
    own = reader[0]
    worker = next(iter(torch.utils.data.DataLoader(reader, batch_size=None, num_workers=1)))
    smaps = Path("/proc/self/maps").read_text()
    files = {line.split()[4] for line in smaps.splitlines() if "memfd:numapin-share" in line}
    answers = {"rank": own, "worker": worker, "files": sorted(files)}
    folder = Path(os.environ["PROBE_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
