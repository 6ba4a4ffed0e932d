"""The memory and the reading speed of data shared with `numapin.share`, compared with a plain list.

    numapin run --nproc-per-node 8 bench/share.py memory --kind shared    also: list, none
    python -m bench.share access                                          CPU time of reading
    python -m bench.share loader                                          time of a sample in a DataLoader

The data is a list of tuples of a path and a label. `memory` starts four DataLoader workers in each rank, each of which
reads every entry. Then each rank adds up the memory of itself and its workers in /proc: Pss, which divides a page by
the number of its users, and what of that is shared data. Rank 0 prints the sums. Run it with each kind: the difference
to `none`, which has an empty list, is the cost of the data.

`access` repeats each loop five times, in turn with the plain list, and prints the median CPU time of an entry.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import numapin

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_WORKERS: Final = 4
REPEATS: Final = 5
BATCH: Final = 64
NUM_BATCHES: Final = 100
ROLLUP: Final = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
SHARED: Final = re.compile(r"memfd:numapin-share.*?^Pss:\s+(\d+) kB", re.MULTILINE | re.DOTALL)
Samples = Sequence[tuple[str, int]]


def make(num: int) -> list[tuple[str, int]]:
    """Return the data: paths as of ImageNet, with labels."""
    return [(f"train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG", i % 1000) for i in range(num)]


# --- memory ----------------------------------------------------------------------------------------------------------


class ReadAll(torch.utils.data.Dataset[int]):
    """A data set with one item a worker; to make an item, the worker reads all samples."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        """Return the number of items."""
        return NUM_WORKERS

    def __getitem__(self, index: int) -> int:
        """Return the number of characters and the sum of the labels."""
        total = 0
        for number in range(len(self.samples)):
            path, label = self.samples[number]
            total += len(path) + label
        return total


def memory(kind: str, num: int) -> None:
    """Print the memory of all ranks and workers."""
    dist.init_process_group("gloo")
    samples: Any = make(num) if kind == "list" else numapin.share(lambda: make(num if kind == "shared" else 0))
    loader = DataLoader(ReadAll(samples), batch_size=None, num_workers=NUM_WORKERS, persistent_workers=True)
    totals = set(map(int, loader))
    assert len(totals) == 1
    dist.barrier()
    pids = ["self", *(str(child.pid) for child in multiprocessing.active_children())]
    assert len(pids) == 1 + NUM_WORKERS
    pss = sum(int(ROLLUP.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())[0]) for pid in pids)
    shared = sum(int(kib) for pid in pids for kib in SHARED.findall(Path(f"/proc/{pid}/smaps").read_text()))
    sums = torch.tensor([pss, shared, len(pids)])
    dist.reduce(sums, 0)
    if dist.get_rank() == 0:
        pss, shared, num_processes = map(int, sums)
        found = {"kind": kind, "samples": num, "processes": num_processes, "pss_kib": pss, "shared_pss_kib": shared}
        print(json.dumps({**found, "total": totals.pop()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# --- access ----------------------------------------------------------------------------------------------------------


def read(samples: Samples | Files, order: list[int]) -> None:
    """Read entries, without a look at them."""
    for number in order:
        samples[number]


def use(samples: Samples, order: list[int]) -> int:
    """Read entries and look at both parts."""
    total = 0
    for number in order:
        path, label = samples[number]
        total += len(path) + label
    return total


def iterate(samples: Samples, _order: list[int]) -> int:
    """Read all entries in their order by iterating."""
    total = 0
    for _path, label in samples:
        total += label
    return total


class Files(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set whose items are the bytes of a file, the same one each time, and a label."""

    def __init__(self, samples: Samples, file: str) -> None:
        self.samples, self.file = samples, file

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        """Return the file and the label."""
        path, label = self.samples[number]
        assert path
        with open(self.file, "rb") as file:  # noqa: PTH123 - as data sets do
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8), label


def cpu_time(loop: Callable[[Samples, list[int]], object], order: list[int], samples: Samples) -> float:
    """Return the CPU time of an entry in a loop, in ns."""
    began_s = time.process_time()
    loop(samples, order)
    return (time.process_time() - began_s) / len(order) * 1e9


def compare(name: str, unit: str, samples: dict[str, Samples], measure: Callable[[Samples], float]) -> None:
    """Measure list and shared in turn; print the medians, their ratio, and all values."""
    values: dict[str, list[float]] = {kind: [] for kind in samples}
    for repeat in range(REPEATS):
        for kind in sorted(samples, reverse=repeat % 2 == 0):
            values[kind].append(measure(samples[kind]))
    plain, shared = (statistics.median(values[kind]) for kind in ("list", "shared"))
    every = {kind: [round(value) for value in each] for kind, each in values.items()}
    print(f"{name}: list {plain:.0f}, shared {shared:.0f} {unit}, ratio {shared / plain:.2f} {every}", flush=True)


def access(samples: dict[str, Samples], file: str) -> None:
    """Print the CPU time of an entry, for each way to read."""
    in_order = list(range(len(samples["list"])))
    shuffled = random.Random(0).sample(in_order, len(in_order))  # noqa: S311 - no secret

    def items(samples: Samples, order: list[int]) -> None:
        read(Files(samples, file), order)

    cases: list[tuple[str, Callable[[Samples, list[int]], object], list[int]]] = [
        ("in order, entry unused", read, in_order),
        ("in order, entry used", use, in_order),
        ("iterated", iterate, in_order),
        ("shuffled, entry unused", read, shuffled),
        ("shuffled, entry used", use, shuffled),
        ("shuffled, item of 100 KB read from a cached file", items, shuffled[:20_000]),
    ]
    for name, loop, order in cases:
        compare(name, "ns of CPU time an entry", samples, partial(cpu_time, loop, order))


def load(samples: dict[str, Samples], file: str) -> None:
    """Print the time of a sample in a DataLoader with workers."""

    def measure(samples: Samples) -> float:
        batches = iter(DataLoader(Files(samples, file), batch_size=BATCH, shuffle=True, num_workers=NUM_WORKERS))
        next(batches)
        began_s = time.perf_counter()
        for _batch in islice(batches, NUM_BATCHES):
            pass
        return (time.perf_counter() - began_s) / NUM_BATCHES / BATCH * 1e9

    name = "DataLoader, 4 workers, shuffled, items of 100 KB read from a cached file"
    compare(name, "ns a sample", samples, measure)


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description="memory and reading speed of shared data")
    parser.add_argument("what", choices=("memory", "access", "loader"))
    parser.add_argument("--kind", choices=("shared", "list", "none"), default="shared")
    parser.add_argument("--num", type=int, default=1_500_000)
    options = parser.parse_args()
    if options.what == "memory":
        memory(options.kind, options.num)
        return
    num_cpus = len(os.sched_getaffinity(0))
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {num_cpus} CPUs, {options.num} entries")
    plain = make(options.num)
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(100_000))
        file.flush()
        (access if options.what == "access" else load)({"list": plain, "shared": numapin.share(plain)}, file.name)


if __name__ == "__main__":
    main()
