"""Time make_plan on a large machine, and `numapin topo`: python -m scripts.bench_plan.

The machine has 64 nodes, 4096 CPUs (2 per core) and 64 GPUs. Prints the median and maximum of 30 calls per mode.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from numapin import Bind, Request, make_plan
from tests.machines.grids import grid  # the test of this bound plans for the same machine

if TYPE_CHECKING:
    from numapin import Topology


def main() -> None:
    """Measure and print the times."""
    topology = grid(packages=8, nodes=8, l3=4, cores=8, smt=2, gpus=[n * 5 % 64 for n in range(64)])
    print(f"make_plan, {len(topology.nodes)} nodes, {len(topology.cpus)} CPUs, {len(topology.gpus)} GPUs, 30 calls")
    for bind in Bind:
        times_ms = [call_ms(topology, bind) for _ in range(30)]
        print(f"  {bind:14} median {statistics.median(times_ms):6.2f} ms  max {max(times_ms):6.2f} ms")
    walls = [topo_s() for _ in range(11)]
    print(f"numapin topo --json: median {statistics.median(walls):.3f} s  max {max(walls):.3f} s, 11 processes")


def call_ms(topology: Topology, bind: Bind) -> float:
    """Return the time of one call of make_plan."""
    start = time.perf_counter()
    make_plan(topology, Request(bind=bind))
    return (time.perf_counter() - start) * 1e3


def topo_s() -> float:
    """Return the time of one `numapin topo --json`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "numapin", "topo", "--json"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
