"""Machines and requests, by the rule of the plan that they show.

Machines are grids: two nodes of four cores of two threads unless told; CPUs 0-3 and 8-11 are node 0's. The sentence of
a case says what its recorded plan must show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numapin import Allowed, Bind, Gpu, Link, Memory, Nic, Topology
from tests.machines.grids import gpu, grid
from tests.unit.plan.seam import CpuSet, CpuSpeed, Mig, NicKind


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, the options of `Request`, and the variables that the user has set. None: the request alone."""

    machine: Topology | None
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


def each(what: str, machine: Topology | None, *options: Mapping[str, Any]) -> dict[str, Case]:
    if len(options) < 2:
        return {what: Case(machine=machine, options=dict(*options))}
    return {f"{what}: {_words(one)}": Case(machine=machine, options=one) for one in options}


def _words(options: Mapping[str, Any]) -> str:
    words = (
        f"{name} {value if isinstance(value, str | int | CpuSet) else repr(value)}" for name, value in options.items()
    )
    return ", ".join(words)[:70] or "default"


def eight(**rest: Any) -> Topology:
    """Return two packages of four nodes of four cores: nodes 0-3 and 4-7, CPUs 4n to 4n+3, two L3 groups a node."""
    return grid(packages=2, nodes=4, l3=2, cores=2, smt=1, **rest)


def limited(topology: Topology, cpus: str) -> Topology:
    return replace(topology, allowed=Allowed(cpus=CpuSet.parse(cpus), nodes=topology.allowed.nodes))


def with_gpus(machine: Topology, *gpus: Gpu) -> Topology:
    return replace(machine, gpus=gpus)


def with_fast(topology: Topology, fast: str) -> Topology:
    cpus = CpuSet.parse(fast)
    speeds = (CpuSpeed(cpus=cpus, highest_perf=200), CpuSpeed(cpus=topology.cpus - cpus, highest_perf=100))
    return replace(topology, speeds=speeds)


def rdma(number: int, kind: NicKind = NicKind.INFINIBAND) -> Nic:
    return Nic(name=f"mlx5_{number}", pci=f"0000:{0x80 + number:02x}:00.0", kind=kind)


def linked(gpus: Sequence[int | None], nics: Sequence[Nic], word: str = "PIX") -> Topology:
    """Return a machine of two packages with these nodes of GPUs, and equal links between all GPUs and NICs."""
    links = tuple(Link(a=f"gpu{n}", b=nic.name, kind=word) for n in range(len(gpus)) for nic in nics)
    return replace(grid(packages=2, nodes=1, gpus=gpus), nics=tuple(nics), links=links)


def without(machine: Topology, **unknown: Any) -> Topology:
    """Return a machine whose GPUs lack these facts, each given as None."""
    return replace(machine, gpus=tuple(replace(one, **unknown) for one in machine.gpus))


ONE, TWO, FOUR = grid(gpus=[0]), grid(gpus=[0, 1]), grid(nodes=4, gpus=[0, 1, 2, 3])
EIGHT = eight(gpus=[1, 1, 5])
GRACE = grid(packages=2, nodes=1, smt=1, gpus=[0, 1], gpu_nodes=[2, 3])
UNORDERED = with_gpus(
    grid(), replace(gpu(0, 0), cuda_index=1), gpu(1, 1, visible=False), replace(gpu(2, 1), cuda_index=0)
)
BOTH: Final = ("ucx", "nvshmem")
MODES: Final = tuple({"bind": bind.value} for bind in Bind)

GPUS: Final = {
    **each(
        "by default one rank a GPU, in CUDA's order; more ranks go round; fewer leave GPUs out",
        UNORDERED,
        *({"num_ranks": number} for number in (None, 1, 2, 5)),
    ),
    **each(
        "--gpus takes any names in the order of the ranks, whatever CUDA's order is",
        without(grid(gpus=[0, 1, 0, 1]), cuda_index=None),
        {"gpus": ("3", "0000:10:00.0", "GPU-02")},
        {"gpus": "3,0", "num_ranks": 5},
        {"gpus": [1, 0], "num_ranks": 1},
    ),
    **each("if it is unknown which GPU is CUDA device n, no rank is bound by a guess", without(TWO, cuda_index=None)),
    **each(
        "an assumed order of the GPUs alone makes a rank inexact, if its CPUs or memory depend on its GPU",
        replace(TWO, gpu_order_known=False),
        {},
        {"bind": "none", "memory": "bind"},
        {"bind": "none"},
    ),
    **each("a rank whose node is unknown keeps all CPUs and has no policy", grid(gpus=[0, None])),
    **each("with --bind none an unknown node is exact", grid(gpus=[None, 0]), {"bind": "none"}),
    **each(
        "exclusive ranks beside a rank that is not bound are not exact", grid(gpus=[0, None]), {"bind": "exclusive"}
    ),
    **each(
        "without GPUs ranks are far apart, neighbors side by side; more ranks than nodes share them evenly",
        eight(),
        *({"num_ranks": number} for number in (None, 1, 2, 3, 4, 8, 9)),
    ),
    **each(
        "without GPUs nodes whose memory may be used come first",
        eight(memoryless=[4], allowed_nodes=CpuSet({1, 4, 5})),
        *({"num_ranks": number} for number in (1, 2, 3)),
    ),
    **each("without GPUs only nodes with usable CPUs count", limited(eight(), "8-11,20-23"), {"num_ranks": 2}),
    **{
        f"if no node lists a usable CPU, ranks are not bound: {len(gpus)} GPUs": Case(
            machine=limited(
                replace(
                    grid(gpus=gpus),
                    nodes=grid().nodes[:1],
                    packages=(),
                    cores=tuple(replace(core, node=None) for core in grid().cores),
                ),
                "4",
            )
        )
        for gpus in ((), (0,))
    },
    **each(
        "every rank has the GPU of its own entry; there must be as many entries as ranks, of GPUs that exist",
        eight(gpus=[1, 3, 5]),
        {"rank_gpus": (2, 0, 2, None)},
        {"rank_gpus": (0, 1), "num_ranks": 3},
        {"rank_gpus": [99]},
    ),
    **each("a GPU that no driver reports has a rank of its own in a file", with_gpus(grid(), gpu(0, 0))),
    **each("GPUs without a UUID cannot be named by CUDA_VISIBLE_DEVICES", without(TWO, uuid=None), {"gpus": "0"}),
    **each(
        "a GPU that is cut into instances cannot be chosen",
        with_gpus(grid(), replace(gpu(0, 0), mig=(Mig(uuid="MIG-a"), Mig(uuid="MIG-b"))), gpu(1, 1)),
        {"gpus": "0"},
    ),
    **each("a hidden GPU cannot be chosen", with_gpus(grid(), gpu(0, 0), gpu(1, 1, visible=False)), {"gpus": "1"}),
    **each(
        "--gpus names each GPU once, and only GPUs that exist; a single number may have meant a number of ranks",
        TWO,
        {"gpus": ("0", "9")},
        {"gpus": ("2",)},
        {"gpus": ("0", "0000:10:00.0")},
        {"gpus": ()},
    ),
    **each("a live host without GPUs names the command that says why", replace(grid(), source="live"), {"gpus": "0"}),
}

POOLS: Final = {
    **each("a reason counts the usable CPUs of a place and all its CPUs", limited(ONE, "0-1,8")),
    **each(
        "an empty home goes to the nearest node, the lower number at a tie; its memory stays",
        limited(eight(gpus=[5, 2]), "0-3,4-7,16-19,28-31"),
    ),
    **{
        f"an empty home does not matter while its package has CPUs; an empty package does: {cpus}": Case(
            machine=limited(eight(gpus=[5]), cpus), options={"bind": "socket"}
        )
        for cpus in ("0-15,28-31", "4-7")
    },
    **each(
        "of the package's CPUs a rank gets those next to its GPU first",
        eight(gpus=[0, 3]),
        *({"bind": "socket", "cpus_per_rank": wanted} for wanted in (2, 4, 6, 8)),
    ),
    **each(
        "each rank gets the same number of the package's fast cores",
        with_fast(grid(packages=1, nodes=2, cores=8, smt=1, gpus=[0, 0, 0, 1]), "0-3,8-11"),
        {"bind": "socket", "cpus_per_rank": 4},
    ),
    **each(
        "a GPU on a node of memory alone that names its package takes the package's CPUs",
        replace(
            eight_nodes := grid(packages=2, nodes=2, cores=4, smt=1, memory_nodes=[8], gpus=[8]),
            nodes=tuple(replace(node, package=0) if node.id == 8 else node for node in eight_nodes.nodes),
        ),
        {"bind": "socket"},
        {"bind": "socket", "cpus_per_rank": 4},
    ),
    **each(
        "an unknown package is the node, and the rank is not exact",
        replace(ONE, nodes=tuple(replace(node, package=None) for node in ONE.nodes)),
        {"bind": "socket"},
    ),
    **each(
        "L3 groups are dealt largest first and then shared",
        limited(grid(nodes=1, l3=2, cores=2, smt=1, gpus=[0]), "0,2-3"),
        {"bind": "core-complex", "num_ranks": 3},
    ),
    **{
        f"the L3 group with more fast cores is first, unless a rank would get two more than another: {fast}": Case(
            machine=with_fast(grid(nodes=1, l3=2, cores=4, smt=1, gpus=[0, 0]), fast), options={"bind": "core-complex"}
        )
        for fast in ("0,4-5", "0,4-6")
    },
    **each(
        "fast cores that no rank may use are not mentioned",
        with_fast(grid(nodes=1, cores=4, smt=1, gpus=[0]), "0-1"),
        {"bind": "exclusive", "reserve_cpus": "0-1"},
        {"bind": "exclusive", "reserve_cpus": "0"},
        {"cpus_per_rank": 1},
    ),
    **{
        f"two threads a core are assumed where siblings are unknown, and a rank has at least one: {cores} cores": Case(
            machine=replace(grid(nodes=1, cores=cores, smt=1, gpus=[0]), siblings_known=False)
        )
        for cores in (1, 4)
    },
    **each(
        "GPUs without addresses split in the order of their UUIDs",
        with_gpus(
            grid(nodes=1, cores=2, smt=1),
            replace(gpu(0, 0), pci=None, uuid="GPU-b"),
            replace(gpu(1, 0), pci=None, uuid="GPU-a"),
        ),
        {"bind": "exclusive"},
    ),
    **each(
        "L3 groups of a rank's node that no rank gets stay idle, unless --cpus-per-rank asked for it",
        grid(nodes=1, l3=4, cores=2),
        {"bind": "core-complex", "num_ranks": 1},
        {"bind": "core-complex", "num_ranks": 4},
        {"bind": "core-complex", "num_ranks": 1, "cpus_per_rank": 2},
    ),
}

SPLITS: Final = {
    **each(
        "the order is that of the GPUs' addresses, not CUDA's",
        with_gpus(grid(), *(replace(gpu(i, 0), cuda_index=2 - i) for i in range(3))),
        {"bind": "exclusive"},
    ),
    **each(
        "cores that share an L3 are given out together, whatever their CPU numbers",
        grid(nodes=1, l3=2, cores=2, smt=1, cpu_ids=[0, 2, 1, 3], gpus=[0, 0]),
        {"bind": "exclusive"},
    ),
    **each(
        "ranks get whole cores first, and no more than their even part",
        grid(gpus=[0, 0]),
        *({"cpus_per_rank": wanted} for wanted in (1, 2, 3, 4, 5)),
    ),
    **each(
        "fewer cores than ranks are given out in turn, which is not exact",
        grid(cores=2, gpus=[0]),
        {"cpus_per_rank": 1, "num_ranks": 3},
    ),
    **each(
        "without --smt the lowest usable thread of each core stays, and the number of cores does not change",
        ONE,
        {"smt": False},
        {"smt": False, "reserve_cpus": "0-1"},
    ),
    **{
        f"two exclusive ranks share no CPU that firmware lists on two nodes: {nodes}": Case(
            machine=replace(
                grid(smt=1, gpus=gpus),
                nodes=tuple(
                    replace(node, cpus=CpuSet(range(8))) if node.id in nodes else node for node in grid(smt=1).nodes
                ),
            ),
            options={"bind": "exclusive"},
        )
        for gpus, nodes in (([0, 1], (0, 1)), ([1, 0], (0,)))
    },
    **each(
        "a machine file may allow more CPUs than it has",
        replace(ONE, allowed=Allowed(cpus=CpuSet(range(64)), nodes=CpuSet({0, 1}))),
        {"bind": "none"},
    ),
    **{
        f"a core with a thread that is reserved or not allowed is not exclusive: {allowed}, {reserved}, {smt}": Case(
            machine=limited(grid(nodes=1, gpus=[0]), allowed),
            options={"bind": "exclusive", "reserve_cpus": reserved, "smt": smt},
        )
        for allowed, reserved, smt in (
            *(("0-7", reserved, True) for reserved in ("4", "4-7", "0,4")),
            ("0-3,5-7", "", True),
            ("0-7", "", False),
        )
    },
}

MEMORY: Final = {
    **each(
        "the nodes of each policy: the home's, the package's, all with CPUs, or the named ones; never a GPU's",
        eight(memory_nodes=[8], gpu_nodes=[9], gpus=[1, 5]),
        {},
        {"bind": "socket"},
        {"bind": "none"},
        {"bind": "none", "memory": "preferred"},
        *({"memory": memory.value} for memory in Memory),
        {"memory": "bind", "memory_nodes": "2,8"},
        {"memory": "interleave", "memory_nodes": "0"},
    ),
    **each("without GPU memory the kernel needs no other policy", EIGHT, *({"memory": one.value} for one in Memory)),
    "a home without allowed memory is replaced by the nearest node": Case(
        machine=eight(gpus=[5], allowed_nodes=CpuSet({0, 1, 4, 6}))
    ),
    **each(
        "pages can only go where memory is allowed and exists",
        eight(memoryless=[0], gpus=[1], allowed_nodes=CpuSet({0, 1, 2})),
        {"memory": "interleave"},
    ),
    **each("one node beside GPU memory has a policy", grid(nodes=1, gpu_nodes=[1], gpus=[0])),
    **each(
        "a requested policy without a node to name is not exact; the default only adds a reason",
        grid(),
        {"bind": "none", "memory": "bind"},
    ),
    "no node may be used for memory": Case(machine=grid(gpus=[0], allowed_nodes=CpuSet())),
    **each(
        "on a Grace host the kernel binds pages to all nodes with CPUs; far memory cannot be preferred then",
        GRACE,
        *({"memory": memory.value} for memory in Memory),
        {"bind": "none", "memory": "preferred"},
        {"memory": "preferred", "memory_nodes": "1"},
    ),
    **each(
        "CXL memory that the user named is used, but not by default",
        grid(packages=2, nodes=1, smt=1, gpus=[0], gpu_nodes=[3], memory_nodes=[2]),
        {"memory": "preferred", "memory_nodes": "0,2"},
        {"memory": "preferred"},
    ),
    "a rank without a home stays out of GPU memory": Case(machine=replace(GRACE, gpus=grid(gpus=[None]).gpus)),
    "a cpuset without GPU memory needs no limit": Case(
        machine=grid(packages=2, nodes=1, smt=1, gpus=[0], gpu_nodes=[2], allowed_nodes=CpuSet({0, 1}))
    ),
    **each(
        "the nodes of --memory have host memory that may be used",
        grid(memoryless=[0], memory_nodes=[7], gpu_nodes=[9], gpus=[0], allowed_nodes=CpuSet({0, 7, 9})),
        *({"memory": "interleave", "memory_nodes": nodes} for nodes in ("7,9", "0-1,7", "")),
    ),
}

WARNINGS: Final = {
    **each(
        "nodes without a rank are idle, in a rank's package with the mode that uses them, and in other packages",
        eight(gpus=[1, 3]),
        *MODES,
    ),
    **{
        f"a package without a rank is reported with what would use it: {len(gpus)} GPUs, {num_ranks} ranks": Case(
            machine=grid(packages=2, nodes=1, gpus=gpus), options={"bind": bind, "num_ranks": num_ranks}
        )
        for gpus, num_ranks, bind in (
            ((0, 0), None, "node"),
            ((0, 0, 1, 1), 2, "socket"),
            ((), 1, "exclusive"),
            ((), 2, "node"),
        )
    },
    "nodes without usable CPUs are not idle": Case(machine=limited(ONE, "0-3")),
    "a node that took over is not idle": Case(machine=limited(ONE, "4-7")),
    "notes of the machine come first": Case(machine=replace(grid(gpus=[None]), notes=("a note",))),
    **each("ranks that share a GPU are warned of", TWO, *({**mode, "num_ranks": 4} for mode in MODES)),
    **each("ranks share GPUs unevenly, or do not share them", TWO, {"num_ranks": 3}, {"num_ranks": 2}),
    **each("one warning for one shortfall of several ranks", grid(gpus=[0, 0, 1, 1]), {"cpus_per_rank": 16}),
    **each("a shortfall of one rank", ONE, {"cpus_per_rank": 16}),
}

REFUSALS: Final = {
    **each(
        "there must be CPUs",
        TWO,
        {"reserve_cpus": CpuSet({3, 99})},
        {"reserve_cpus": "0-15"},
        {"cpus_per_rank": 9, "smt": False},
        {"bind": "exclusive", "num_ranks": 10},
    ),
    "no CPU is allowed": Case(machine=limited(TWO, "")),
    "no CPU is allowed on this host": Case(machine=limited(replace(TWO, source="live"), "")),
    "what has no CPUs is the file, not this process's allowed CPUs": Case(
        machine=replace(
            grid(), source="cloud.xml", cores=(), packages=(), nodes=(), allowed=Allowed(cpus=CpuSet(), nodes=CpuSet())
        )
    ),
}

NICS: Final = {
    **{
        f"GPUs take turns at equally near NICs, and each library has its spelling: {', '.join(libraries)}": Case(
            machine=linked([0, 0], [rdma(0), rdma(1)]), options={"nic_env": libraries}
        )
        for libraries in ((), BOTH, ("ucx",), ("nvshmem",))
    },
    **each(
        "a job on some GPUs gets the NICs that these GPUs have in a job on all of them",
        linked([0] * 4, [rdma(number) for number in range(4)]),
        {},
        {"gpus": ["3", "1"]},
    ),
    **each(
        "if variables are asked for and no NIC is known, no rank is exact, and one warning says so",
        TWO,
        *({**mode, "nic_env": BOTH} for mode in MODES),
    ),
    **each(
        "UCX and NVSHMEM cannot be given the name of a Slingshot NIC, which has no verbs",
        linked([0], [replace(rdma(0, NicKind.SLINGSHOT), name="cxi0")]),
        {},
        {"nic_env": BOTH},
    ),
    **each(
        "a NIC is that of an assumed GPU, even if nothing is bound",
        replace(linked([0, 1], [rdma(0), rdma(1)]), gpu_order_known=False),
        {"bind": "none", "nic_env": ["ucx"]},
    ),
    **each("without GPUs there is no nearest NIC", grid(), {"num_ranks": 1, "nic_env": ["ucx"]}),
    **{
        f"a library whose NICs the user has chosen is left alone: {environ}": Case(
            machine=linked([0, 0], [rdma(0), rdma(1)]), options={"nic_env": BOTH}, environ=environ
        )
        for environ in (
            {"UCX_NET_DEVICES": "mlx5_7:1"},
            {"UCX_NET_DEVICES": ""},
            {"NVSHMEM_HCA_PE_MAPPING": "mlx5_7:1:8"},
            {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "0"},
            {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"},  # the same as numapin's
            {"UCX_NET_DEVICES": "mlx5_7:1", "NVSHMEM_HCA_LIST": "mlx5_7:1"},
            {"UCX_NET_DEVICES": "mlx5_7:1", "NUMAPIN_NIC_ENV": "UCX_NET_DEVICES"},  # a rank's own child
        )
    },
    "without --nic-env the variables are the user's business": Case(
        machine=linked([0, 0], [rdma(0), rdma(1)]), environ={"UCX_NET_DEVICES": "mlx5_7:1"}
    ),
}

REQUESTS: Final = each(
    "a request has words, sets and lists as text or as values, or says which option is wrong",
    None,
    {"bind": "exclusive", "memory": "bind", "memory_nodes": {1}, "reserve_cpus": {0, 2}, "gpus": ["0"]},
    {"gpus": "10"},
    {"gpus": "1, GPU-12 ,0000:01:00.0"},
    {"gpus": [1, 0]},
    {"memory": "bind", "memory_nodes": "0-1"},
    {"nic_env": "nvshmem,ucx,ucx"},
    {"bind": "bogus"},
    {"bind": 3},
    {"memory": "near"},
    {"nic_env": ("nccl",)},
    {"num_ranks": 0},
    {"num_ranks": "4"},
    {"num_ranks": 2.5},
    {"num_ranks": 4097},
    {"num_ranks": 10**300},
    {"cpus_per_rank": -1},
    {"cpus_per_rank": "x"},
    {"gpus": "0,"},
    {"gpus": ""},
    {"gpus": [1.5]},
    {"gpus": 3},
    {"reserve_cpus": "x"},
    {"reserve_cpus": [1.5]},
    {"reserve_cpus": None},
    {"memory": "bind", "memory_nodes": "y"},
    {"rank_gpus": "01"},
    {"bind": "none", "cpus_per_rank": 2},
    {"memory": "local", "memory_nodes": "0"},
    {"bind": "none", "memory_nodes": "0"},
)

CASES: Final = GPUS | POOLS | SPLITS | MEMORY | WARNINGS | REFUSALS | NICS | REQUESTS
