"""Machines with facts that no machine of tests/machines has."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from numapin import Link, Nic, Topology
from tests.machines.grids import grid
from tests.pictures import golden_machine, many_nics, snc4

_SNC4 = snc4()
_GPU_MEMORY = golden_machine("2pkg-34node-gpumem-4gpu")
_NCCL = golden_machine("2pkg-2node-8gpu-4nic.nccl")


def _linked(*kinds: str) -> Topology:
    """Return a machine whose GPU 0 has these links to GPU 1, 2 and so on, and no other link is known."""
    links = tuple(Link(a="gpu0", b=f"gpu{n}", kind=kind) for n, kind in enumerate(kinds, 1))
    return replace(grid(gpus=[0] * (len(kinds) + 1)), links=links)


MADE: Final = {
    "l3-over-nodes": _SNC4,
    "l3-over-packages": replace(_SNC4, cores=tuple(replace(core, l3=0) for core in _SNC4.cores)),
    "two-l3": grid(l3=2),
    "one-empty-node": grid(nodes=2, memory_nodes=[2], memoryless=[2]),
    "gpu-memory-of-unknown-gpus": replace(
        _GPU_MEMORY,
        gpus=tuple(replace(gpu, memory_node=2 if gpu.index < 2 else None) for gpu in _GPU_MEMORY.gpus),
    ),
    "many-nics": many_nics(),
    "gpus-without-address": replace(
        grid(gpus=[0] * 13), gpus=tuple(replace(gpu, pci=None) for gpu in grid(gpus=[0] * 13).gpus)
    ),
    "facts-that-differ": replace(
        _NCCL,
        gpus=(
            replace(_NCCL.gpus[0], name="NVIDIA B200", cuda_index=None, visible=False, node=None, node_source=None),
            *_NCCL.gpus[1:],
        ),
        nics=(Nic(name="a", node=0, rate_gbit_s=400.0), Nic(name="b", node=0, is_up=False)),
    ),
    "l3-over-some-nodes": replace(_SNC4, cores=(replace(_SNC4.cores[0], l3=None), *_SNC4.cores[1:])),
    "a-long-name": replace(grid(gpus=[0]), nics=(Nic(name="a_very_long_name_of_a_network_device_" * 3, node=0),)),
    "links": _linked("NV12", "NV", "XGMI4", "XGMI", "XELINK", "PIX", "PXB", "PHB", "NODE", "SYS"),
}
