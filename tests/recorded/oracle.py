"""Thousands of plans, and of variables that choose GPUs, the same in every run.

`python -m tests.recorded.oracle` prints every answer as a line of JSON, so that those of two versions can be compared.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from numapin import Allowed, Gpu, Request, Topology
from numapin.errors import NumapinError
from tests.machines.grids import grid
from tests.machines.roots import NAMES
from tests.pictures import golden_machine
from tests.recorded.seam import CpuSet, GpuVendor, Mig, first_visible, plan_and_rank_warnings, seen_by_ranks, support_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_PLANS: Final = 46  # of each machine
NUM_ENVIRONMENTS: Final = 750  # of each vendor and of none

_BINDS: Final = ("none", "node", "socket", "exclusive", "core-complex")
_MEMORIES: Final = (None, "none", "local", "preferred", "bind", "interleave")
_NUM_RANKS: Final = (None, None, 1, 3, 17, 64)
_NUM_CPUS: Final = (None, None, 1, 3, 16)
_OTHERS: Final[tuple[dict[str, Any], ...]] = (
    *({}, {}, {}),
    {"memory_nodes": "0"},
    {"nic_env": "ucx"},
    {"rank_gpus": [1, 0]},
    {"gpus": "1,0"},
)
_UUIDS: Final = tuple(f"GPU-{n:08x}-1111-2222-3333-{n:012x}" for n in range(5))
_NAMES: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_WORDS: Final = (
    *(
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "9",
        "-1",
        "",
        "",
        " 1",
        "01",
        "0x1",
        "+2",
        "1 ",
        "a",
        "NoDevFiles",
        "void",
        "none",
    ),
    *("0;1", "00", "default", "0.1", "*", "99999999999", *_UUIDS, _UUIDS[1][:10], _UUIDS[2].lower(), f" {_UUIDS[0]}"),
    *(_UUIDS[3].replace("-", ""), "GPU-", "gpu-0000000000000001", "GPU-0000000000000001", "GPU-000000000000000"),
    *("MIG-00345678-aaaa-bbbb-cccc-dddddddddd00", "MIG-10", f"MIG-{_UUIDS[1]}/0/0", "MIG-GPU-", "GPU-zz"),
)


def plans() -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each machine, with a sample of requests and their plans or errors."""
    for name, topology in _machines():
        chosen = random.Random(name)  # noqa: S311 - a sample that never changes
        requests = [_request(chosen) for _ in range(NUM_PLANS)]
        yield name, [[request, _planned(topology, request)] for request in requests]


def _machines() -> Iterator[tuple[str, Topology]]:
    for name in NAMES:
        yield name, golden_machine(name)
    nps4 = grid(packages=2, nodes=4, l3=2, cores=2, smt=1, gpus=[0, 1, 6, 6, None])
    yield "nps4", nps4
    yield "CPUs in reverse", grid(gpus=[0, 0, 1, 1], cpu_ids=list(range(16))[::-1])
    yield (
        "SMT 4, memory of GPUs",
        grid(
            packages=2,
            nodes=2,
            cores=3,
            smt=4,
            gpus=[3, 2, 1, 0, None],
            memoryless=[1],
            memory_nodes=[8],
            gpu_nodes=[9],
        ),
    )
    doubts = replace(nps4, siblings_known=False, allowed_known=False, gpu_order_known=False)
    yield "nothing is sure", replace(doubts, doubtful_nodes=CpuSet({0, 1}))
    yield "restricted", nps4.restrict(Allowed(cpus=CpuSet.parse("0-3,9"), nodes=CpuSet({0, 5})))
    lost = tuple(replace(node, package=None) if node.id in (1, 2) else node for node in nps4.nodes)
    yield "nodes of unknown packages", replace(nps4, nodes=lost)
    yield "no GPU", grid(packages=2, nodes=2, l3=2, cores=4)
    yield "nothing", replace(nps4, cores=(), nodes=(), gpus=(), packages=())
    yield "one CPU", grid(gpus=[0, 1], gpu_nodes=[4, 5], allowed_cpus=CpuSet({0}))


def _request(chosen: random.Random) -> dict[str, Any]:
    request = {
        "bind": chosen.choice(_BINDS),
        "memory": chosen.choice(_MEMORIES),
        "num_ranks": chosen.choice(_NUM_RANKS),
        "cpus_per_rank": chosen.choice(_NUM_CPUS),
        "smt": chosen.random() < 0.7,
        "reserve_cpus": chosen.choice(("", "", "0-2,9")),
    }
    return request | chosen.choice(_OTHERS)


def _planned(topology: Topology, request: dict[str, Any]) -> object:
    try:
        plan, warnings = plan_and_rank_warnings(topology, Request(**request))
    except NumapinError as error:
        return [type(error).__name__, error.message, error.hint, error.hint_for_fixed_ranks]
    return [_known(plan.to_json()), list(warnings)]


def _known(content: object) -> object:
    """Leave out unknown fields: an optional one may come or go."""
    if isinstance(content, dict):
        return {name: _known(value) for name, value in content.items() if value is not None}
    return [_known(value) for value in content] if isinstance(content, list) else content


def environments() -> Iterator[tuple[str, list[Any]]]:
    """Yield each vendor, with environments and what they do to made GPUs."""
    for vendor in GpuVendor:
        chosen = random.Random(vendor.value)  # noqa: S311
        yield vendor.value, [_visible(vendor, chosen) for _ in range(NUM_ENVIRONMENTS)]


def _visible(vendor: GpuVendor, chosen: random.Random) -> list[Any]:
    gpus = tuple(_gpu(vendor, index, chosen) for index in range(chosen.randint(0, 5)))
    environ = {
        name: ",".join(chosen.choices(_WORDS, k=chosen.randint(1, 4))) for name in _NAMES if chosen.random() < 0.5
    }
    for name, values in (
        ("CUDA_DEVICE_ORDER", ("PCI_BUS_ID", "FASTEST_FIRST", "")),
        ("ONEAPI_DEVICE_SELECTOR", ("level_zero:gpu", "*:*", "opencl:0", "", "", "")),
        ("ZE_FLAT_DEVICE_HIERARCHY", ("flat", "COMPOSITE", "", "", "", "")),
    ):
        if value := chosen.choice(values):
            environ[name] = value
    unusable = tuple(chosen.sample(range(5), chosen.choice((0, 0, 1))))
    seen, notes = seen_by_ranks(gpus, environ, unusable=unusable)
    visible = sorted(
        (gpu for gpu in seen if gpu.visible), key=lambda gpu: (gpu.cuda_index is None, gpu.cuda_index or 0)
    )
    try:
        exported: object = support_of(vendor).variables_for(visible[:2], environ) if visible else None
    except NumapinError as error:
        exported = [error.message, error.hint]
    indices = [[gpu.index, gpu.visible, gpu.cuda_index] for gpu in seen]
    return [environ, indices, notes, first_visible(gpus, environ), exported]


def _gpu(vendor: GpuVendor, index: int, chosen: random.Random) -> Gpu:
    uuids = {GpuVendor.AMD: f"GPU-{index:016x}"}
    mig = [Mig(uuid=f"MIG-{index}{k}345678-aaaa-bbbb-cccc-dddddddddd{k}{index}") for k in range(2)]
    has_mig = vendor is GpuVendor.NVIDIA and chosen.random() < 0.2
    return Gpu(
        index=index,
        pci=f"0000:{9 - index:02x}:00.0" if chosen.random() < 0.9 else None,
        uuid=uuids.get(vendor, _UUIDS[index]) if chosen.random() < 0.7 else None,
        name=chosen.choice(("H", "H", "H", "A", None)),
        mig=tuple(mig) if has_mig else (),
        vendor=vendor,
        partition=chosen.choice((None, None, 0, 1)) if vendor is GpuVendor.INTEL else None,
    )


def main() -> None:
    """Print every answer."""
    for group, answers in itertools.chain(plans(), environments()):
        for answer in answers:
            print(json.dumps([group, *answer]))  # noqa: T201


if __name__ == "__main__":
    main()
