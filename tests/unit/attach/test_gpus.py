"""The GPU of a process, from its environment and from the driver."""

from __future__ import annotations

import pytest

from numapin import Allowed, Core, Gpu, Node, Topology
from tests.unit.attach.seam import CpuSet, NodeKind, NodeSource, gpu_of, gpus_of_ranks, local_rank

UUIDS = tuple(f"GPU-{digit * 8}-0000-1111-2222-333333333333" for digit in "abcd")


def machine(num_gpus: int = 4) -> Topology:
    """Make a machine with two nodes, and half of the GPUs on each."""
    nodes = tuple(
        Node(
            id=node,
            kind=NodeKind.CPU,
            cpus=CpuSet({node}),
            package=None,
            memory_bytes=None,
            free_bytes=None,
            distances={0: 10, 1: 10},
        )
        for node in (0, 1)
    )
    gpus = tuple(
        Gpu(
            index=i,
            uuid=UUIDS[i],
            pci=f"0000:{i}1:00.0",
            name="NVIDIA H100",
            node=2 * i // num_gpus,
            node_source=NodeSource.SYSFS,
            cuda_index=i,
        )
        for i in range(num_gpus)
    )
    cores = tuple(Core(id=cpu, cpus=CpuSet({cpu}), node=cpu, package=None, l3=None) for cpu in (0, 1))
    allowed = Allowed(cpus=CpuSet({0, 1}), nodes=CpuSet({0, 1}))
    return Topology(host=None, source="test", packages=(), nodes=nodes, cores=cores, allowed=allowed, gpus=gpus)


@pytest.mark.parametrize(
    ("environ", "computing", "index", "source"),
    [
        ({}, (3,), 3, "the driver sees"),
        ({"LOCAL_RANK": "1"}, (), 1, "LOCAL_RANK=1"),
        ({"LOCAL_RANK": "5"}, (), 1, "LOCAL_RANK=5"),
        ({"LOCAL_RANK": "1"}, (2,), 2, "the driver sees"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, (), 3, "CUDA_VISIBLE_DEVICES=2,3"),
        ({"LOCAL_RANK": "1"}, (0, 1, 2), 1, "the driver sees"),
        ({}, (0, 1), None, "it computes on GPUs 0-1, and no LOCAL_RANK says which is its own"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, (), 2, "the only GPU that it sees (CUDA_VISIBLE_DEVICES=2)"),
        ({"CUDA_VISIBLE_DEVICES": UUIDS[1]}, (), 1, "the only GPU"),
        ({"LOCAL_RANK": "1"}, (0, 3), None, "it computes on GPUs 0,3, and no LOCAL_RANK"),
        ({}, (), None, "computes on none yet, has no LOCAL_RANK, and sees GPUs 0-3"),
        ({"CUDA_VISIBLE_DEVICES": ""}, (), None, "sees no GPU (CUDA_VISIBLE_DEVICES=)"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, (), None, "and sees GPUs 0-1"),
    ],
)
def test_gpu(environ: dict[str, str], computing: tuple[int, ...], index: int | None, source: str) -> None:
    """The driver's word comes first, then LOCAL_RANK among the visible GPUs, then the only visible one."""
    gpu, told = gpu_of(machine(), environ, [UUIDS[i] for i in computing])
    assert (None if gpu is None else gpu.index) == index
    assert source in told


def test_host_without_gpus() -> None:
    """Without a GPU on the host that is the reason."""
    assert gpu_of(machine(0), {"LOCAL_RANK": "0"}, ()) == (None, "this host has no GPU")


@pytest.mark.parametrize("text", ["", "x", "-1", "1 ", "99999", "\x1b[31m"])
def test_rank_that_no_launcher_writes(text: str) -> None:
    """A LOCAL_RANK that is not a rank's number counts as none."""
    assert local_rank({"LOCAL_RANK": text}) is None


@pytest.mark.parametrize(
    ("visible", "given", "num_ranks", "expected"),
    [
        ([0, 1], {}, 2, (0, 1)),
        ([0, 1], {1: 0}, 2, (1, 0)),
        ([0, 1], {0: 1, 1: 1}, 2, (1, 1)),
        ([0, 1], {1: 0}, 4, (1, 0, 0, 1)),
        ([0, 1], {0: 0}, 4, (0, 1, 0, 1)),
        ([2, 3], {1: 0}, 2, (2, 0)),
        ([0], {1: 0}, 2, (None, 0)),
        ([], {1: 0}, 2, (None, 0)),
    ],
)
def test_the_gpus_of_other_ranks(
    visible: list[int], given: dict[int, int], num_ranks: int, expected: tuple[int | None, ...]
) -> None:
    """Ranks that are not bound are taken to use the GPUs of their turns, but not one that another rank was given."""
    assert gpus_of_ranks(visible, given, num_ranks) == expected
