"""Checks of the NICs near GPUs, and of the variables that choose NICs.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (NCCL_IB_HCA),
https://docs.nvidia.com/nvshmem/api/gen/env.html, and src/ucp/core/ucp_context.c of UCX.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted, listed
from numapin.doctor.check import Host, Live, Result, check, live_check, note, ok, unknown, warning
from numapin.topology.nics import nearest_by_link, rdma_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numapin.topology.model import Topology

_MOST_CHARS: Final = 60  # of a name
_MOST_NAMES: Final = 16  # in a message
NO_RDMA: Final = "no RDMA NIC (InfiniBand, RoCE) was found"
_NO_VERBS: Final = "no NIC has a verbs device: those of Slingshot have none"


@check(
    "nic-sharing",
    where="the links of: numapin topo --format matrix",
    why="UCX and NVSHMEM choose a NIC in each process alone, by distance. GPUs that are equally near to several NICs "
    "may all take the first of them and share its bandwidth. NCCL balances NICs itself.",
)
def sharing(host: Host) -> Result:
    """Find GPUs that would share a NIC while another one, equally near by its link, is idle."""
    lacking, near = _lacking(host.topology), nearest_by_link(host.topology)
    if lacking:
        return ok(lacking)
    if not _verbs_names(host.topology):
        return ok(_NO_VERBS)
    if not near:
        return unknown("the links between GPUs and NICs are unknown")
    shared = list(_shared(near))
    if shared:
        return note("; ".join(shared), remedy="numapin run --nic-env ucx,nvshmem … (deals the NICs out)")
    return ok("no two GPUs share a NIC while another one is as near and idle")


def _lacking(topology: Topology) -> str:
    """Return what the machine lacks for traffic between GPUs and NICs; "": nothing."""
    if not topology.gpus:
        return "no GPU"
    return "" if rdma_adapters(topology) else NO_RDMA


def _verbs_names(topology: Topology) -> list[str]:
    """Return the names of the NICs that verbs libraries can use, and their variables can name."""
    return [name for name, nic in rdma_adapters(topology).items() if nic.verbs_name is not None]


def _shared(near: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield which GPUs share a NIC, with the NICs that are as near and no GPU's first, if there are such NICs."""
    first: dict[str, list[int]] = {}
    for gpu, names in sorted(near.items()):
        first.setdefault(names[0], []).append(gpu)
    for nic, gpus in first.items():
        idle = dict.fromkeys(name for gpu in gpus for name in near[gpu] if name not in first)
        if len(gpus) > 1 and idle:
            unused = f"{', '.join(idle)} {_are(len(idle))} idle"
            yield f"gpu{cpu_set.render(gpus)} share {nic} if each takes the first near one, while {unused}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


@check(
    "nic-package",
    where="/sys/bus/pci/devices/*/numa_node",
    why="Traffic between such a NIC and a GPU crosses the link between the sockets, which memory traffic needs, too.",
)
def package(host: Host) -> Result:
    """Find NICs on a package that has no GPU."""
    topology = host.topology
    nics, lacking = rdma_adapters(topology), _lacking(topology)
    if lacking:
        return ok(lacking)
    homes = _packages_of((gpu.node for gpu in topology.gpus), topology)
    if not homes:
        return unknown("the sockets of the GPUs are unknown")
    far = [name for name, nic in nics.items() if _packages_of([nic.node], topology) - homes]
    if not far:
        return ok("no NIC is known to be on a socket without a GPU")
    there = f"all GPUs are on {listed('socket', homes)}"
    remedy = f"move the card to a slot of {listed('socket', homes)}"
    if len(far) == len(nics):
        return warning(f"{there}, and all NICs on another one: {', '.join(far)}", remedy=remedy)
    verbs = [name for name in far if nics[name].verbs_name is not None]
    if verbs:
        keep_off = f"keep GPU traffic off it on all ranks alike: export NCCL_IB_HCA=^={','.join(verbs)}"
        remedy = f"{keep_off}; or {remedy}"
    return note(f"{there}; on another one: {', '.join(far)}", remedy=remedy)


def _packages_of(nodes: Iterable[int | None], topology: Topology) -> CpuSet:
    """Return the known packages of nodes."""
    wanted = set(nodes)
    found = (node.package for node in topology.nodes if node.id in wanted)
    return CpuSet(package for package in found if package is not None)


@live_check(
    "nic-names",
    where="NCCL_IB_HCA, UCX_NET_DEVICES, NVSHMEM_HCA_LIST and NVSHMEM_HCA_PE_MAPPING, here and in running ranks",
    why="A name that no NIC has is ignored, so that traffic goes through fewer NICs, or over TCP.",
)
def names(live: Live, topology: Topology) -> Result:
    """Find variables that name NICs that this machine does not have."""
    nics = _verbs_names(topology)
    unknown = list(dict.fromkeys(_unknown_names(live, nics)))
    if unknown:
        existing = ", ".join(nics) or (_NO_VERBS if rdma_adapters(topology) else NO_RDMA)
        remedy = f"name NICs that exist ({existing}), or unset the variable; see: numapin topo"
        return warning("; ".join(unknown), remedy=remedy)
    is_set = any(name in environ for environ in _environments(live) for name in _READERS)
    return ok("every name is that of a NIC" if is_set else "none of these variables is set")


def _environments(live: Live) -> Iterator[Mapping[str, str]]:
    yield live.environ
    for ranks in live.jobs.values():
        yield from ranks.values()


def _unknown_names(live: Live, nics: Collection[str]) -> Iterator[str]:
    """Yield each variable with the names in it that no NIC has."""
    for environ in _environments(live):
        for variable, read in _READERS.items():
            wrong = [word[:_MOST_CHARS] for word in read(environ.get(variable, "")) if not _matches(word, nics)]
            if wrong:
                yield f"{variable} names {', '.join(wrong[:_MOST_NAMES])}, which no NIC here has"


def _matches(word: str, nics: Iterable[str]) -> bool:
    return any(fnmatchcase(nic, word) for nic in nics)


def _devices(text: str) -> list[str]:
    """Return the names in a list of DEVICE:PORT; none if it is a list of those not to use."""
    return [] if text.startswith("^") else [entry.partition(":")[0] for entry in text.split(",") if entry]


def _read_nccl(text: str) -> list[str]:
    """Return patterns for the devices of NCCL_IB_HCA: names after "=", else beginnings of names."""
    exact = text.startswith("=")
    return [name if exact else f"{name}*" for name in _devices(text.removeprefix("="))]


def _read_ucx(text: str) -> list[str]:
    """Return the verbs devices of UCX_NET_DEVICES, which have a port; network interfaces have none."""
    return _devices(",".join(entry for entry in text.split(",") if ":" in entry or entry.startswith("^")))


_READERS: Final[dict[str, Callable[[str], list[str]]]] = {
    "NCCL_IB_HCA": _read_nccl,
    "UCX_NET_DEVICES": _read_ucx,
    "NVSHMEM_HCA_LIST": _devices,
    "NVSHMEM_HCA_PE_MAPPING": _devices,
}
NIC_VARIABLES: Final = tuple(_READERS)


@live_check(
    "nccl-ib-hca",
    where="NCCL_IB_HCA in /proc/PID/environ of running ranks (LOCAL_RANK, MASTER_PORT)",
    why="NCCL requires the same value on all ranks of a job; with different ones the job can hang.",
)
def same_hca(live: Live, _topology: Topology) -> Result:
    """Find running jobs whose ranks on this host were started with different values of NCCL_IB_HCA."""
    differing = list(filter(None, (_difference(job, ranks) for job, ranks in live.jobs.items())))
    if differing:
        remedy = "export one NCCL_IB_HCA before the launcher starts, and set it in no rank; or unset NCCL_IB_HCA"
        return warning("; ".join(differing), remedy=remedy)
    if not live.jobs:
        return ok("no rank of a job is running that this user may read")
    return ok(f"the same on all ranks of {counted(len(live.jobs), 'job')}")


def _difference(job: str, ranks: Mapping[int, Mapping[str, str]]) -> str:
    """Return which ranks of a job have which value, or "" if all have the same."""
    by_value: dict[str | None, list[int]] = {}
    for rank, environ in sorted(ranks.items()):
        by_value.setdefault(environ.get("NCCL_IB_HCA"), []).append(rank)
    if len(by_value) < 2:
        return ""
    shown = {value: "not set" if value is None else value[:_MOST_CHARS] for value in by_value}
    parts = [f"{listed('rank', numbers)}: {shown[value]}" for value, numbers in by_value.items()][:_MOST_NAMES]
    return f"the job at {job}: {', '.join(parts)}"
