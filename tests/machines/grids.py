"""Regular topologies by number: packages x nodes x L3 groups x cores x threads. For tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence

from numapin import Allowed, Core, Gpu, Node, Package, Topology
from tests.machines.seam import CpuSet, NodeKind, NodeSource


def grid(
    *,
    packages: int = 1,
    nodes: int = 2,
    l3: int | None = 1,
    cores: int = 4,
    smt: int = 2,
    gpus: Sequence[int | None] = (),
    node_ids: Sequence[int] | None = None,
    cpu_ids: Sequence[int] | None = None,
    memory_nodes: Sequence[int] = (),
    gpu_nodes: Sequence[int] = (),
    memoryless: Sequence[int] = (),
    allowed_cpus: CpuSet | None = None,
    allowed_nodes: CpuSet | None = None,
) -> Topology:
    """Return a machine of `packages` x `nodes` x `l3` x `cores` x `smt`; siblings are numbered one round apart.

    With `l3` None each node has one group of unknown cache. `gpus` has the GPUs' nodes, None for unknown. `node_ids`
    and `cpu_ids` rename 0, 1, 2, …; `memory_nodes` and `gpu_nodes` are further nodes without CPUs. Distances are 10,
    12 within a package, and 32.
    """
    num_nodes, per_node = packages * nodes, (l3 or 1) * cores
    total = num_nodes * per_node
    node_of = list(node_ids or range(num_nodes))
    cpu_of = list(cpu_ids or range(total * smt))

    def core(number: int) -> Core:
        cpus, place, group = range(number, total * smt, total), number // per_node, number // cores * cores
        renamed = CpuSet(cpu_of[cpu] for cpu in cpus)
        lowest = min(cpu_of[cpu] for first in range(group, group + cores) for cpu in range(first, total * smt, total))
        return Core(
            id=min(renamed), cpus=renamed, node=node_of[place], package=place // nodes, l3=lowest if l3 else None
        )

    all_cores = [core(number) for number in range(total)]
    package_of = {node_of[place]: place // nodes for place in range(num_nodes)}
    others = [*memory_nodes, *gpu_nodes]

    def node(number: int) -> Node:
        mine = CpuSet(cpu for c in all_cores if c.node == number for cpu in c.cpus)
        without = NodeKind.GPU if number in gpu_nodes else NodeKind.MEMORY
        return Node(
            id=number,
            kind=NodeKind.CPU if mine else without,
            cpus=mine,
            package=package_of.get(number),
            memory_bytes=0 if number in memoryless else 64 << 30,
            distances={other: _distance(package_of, number, other) for other in (*node_of, *others)},
        )

    return Topology(
        host=None,
        source="grid",
        packages=tuple(
            Package(id=p, nodes=CpuSet(n for n, package in package_of.items() if package == p)) for p in range(packages)
        ),
        nodes=tuple(node(number) for number in sorted((*node_of, *others))),
        cores=tuple(sorted(all_cores, key=lambda c: c.id)),
        allowed=Allowed(
            cpus=CpuSet(cpu_of) if allowed_cpus is None else allowed_cpus,
            nodes=CpuSet((*node_of, *others)) if allowed_nodes is None else allowed_nodes,
        ),
        gpus=tuple(gpu(index, node) for index, node in enumerate(gpus)),
    )


def gpu(index: int, node: int | None, *, name: str = "T4", visible: bool = True) -> Gpu:
    """Return a GPU whose PCI address and UUID follow from its index."""
    return Gpu(
        index=index,
        cuda_index=index if visible else None,
        visible=visible,
        uuid=f"GPU-{index:02x}000000-0000-4000-8000-000000000000",
        pci=f"0000:{index + 16:02x}:00.0",
        name=name,
        node=node,
        node_source=None if node is None else NodeSource.SYSFS,
    )


def _distance(package_of: dict[int, int], a: int, b: int) -> int:
    if a == b:
        return 10
    return 12 if package_of.get(a, -1) == package_of.get(b, -2) else 32
