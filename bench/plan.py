"""Time of make_plan on a large machine, and of `numapin topo`: python bench/plan.py.

The machine has 64 nodes, 4096 CPUs (2 per core) and 64 GPUs. Prints the median and the spread of 30 calls a mode.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from numapin import Allowed, Bind, Core, Gpu, Node, Package, Request, Topology, make_plan
from numapin.topology.model import NodeKind, NodeSource

NODES, CORES_A_NODE, GPUS = 64, 32, 64


def main() -> None:
    """Measure and print."""
    topology = large_machine()
    print(f"make_plan, {NODES} nodes, {len(topology.cpus)} CPUs, {GPUS} GPUs, 30 calls")
    for bind in Bind:
        times_ms = [call_ms(topology, bind) for _ in range(30)]
        print(f"  {bind:14} median {statistics.median(times_ms):6.2f} ms  max {max(times_ms):6.2f} ms")
    walls = [topo_s() for _ in range(11)]
    print(f"numapin topo --format json: median {statistics.median(walls):.3f} s  max {max(walls):.3f} s, 11 processes")


def call_ms(topology: Topology, bind: Bind) -> float:
    """Time one call."""
    start = time.perf_counter()
    make_plan(topology, Request(bind=bind))
    return (time.perf_counter() - start) * 1e3


def topo_s() -> float:
    """Time one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "numapin.cli.main", "topo", "--json"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def large_machine() -> Topology:
    """Return the machine: SMT siblings are CPU n and n + 2048, L3 groups have 8 cores, packages 8 nodes."""
    half = NODES * CORES_A_NODE
    cores = tuple(
        Core(
            id=c,
            cpus=frozenset({c, c + half}),
            node=c // CORES_A_NODE,
            package=c // CORES_A_NODE // 8,
            l3=c // 8 * 8,
        )
        for c in range(half)
    )
    nodes = tuple(
        Node(
            id=n,
            kind=NodeKind.CPU,
            cpus=frozenset(cpu for core in cores[n * CORES_A_NODE : (n + 1) * CORES_A_NODE] for cpu in core.cpus),
            package=n // 8,
            memory_bytes=64 << 30,
            distances={other: 10 if other == n else 12 if other // 8 == n // 8 else 32 for other in range(NODES)},
        )
        for n in range(NODES)
    )
    gpus = tuple(
        Gpu(index=g, cuda_index=g, pci=f"{g:04x}:01:00.0", node=g * 5 % NODES, node_source=NodeSource.SYSFS)
        for g in range(GPUS)
    )
    return Topology(
        host="large",
        source="bench",
        packages=tuple(Package(id=p, nodes=frozenset(range(p * 8, p * 8 + 8))) for p in range(8)),
        nodes=nodes,
        cores=cores,
        allowed=Allowed(cpus=frozenset(range(2 * half)), nodes=frozenset(range(NODES))),
        gpus=gpus,
    )


if __name__ == "__main__":
    main()
