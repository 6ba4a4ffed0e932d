"""Checks of the NICs near GPUs.

Sources: src/ucp/core/ucp_context.c of UCX; of ports, the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted, listed, not_none
from numapin.doctor.check import Host, Result, check, joined, note, ok, unknown, warning
from numapin.topology.nics import nearest_by_link, rdma_adapters

if TYPE_CHECKING:
    from numapin.topology.model import Topology

_INFINIBAND: Final = "sys/class/infiniband"
_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9])?) Gb/sec \(([0-9]{1,2})X", re.ASCII)
_MOST_NAMES: Final = 16  # in a message
_NO_RDMA: Final = "no RDMA NIC (InfiniBand, RoCE) was found"
_NO_VERBS: Final = "no NIC has a verbs device: those of Slingshot have none"


@check(
    "nic-sharing",
    where="the links of: numapin topo --format matrix",
    why="UCX and NVSHMEM choose a NIC in each process alone, by distance. GPUs that are equally near to several NICs "
    "may all take the first of them and share its bandwidth. NCCL balances NICs itself.",
)
def sharing(host: Host) -> Result:
    """Find GPUs that would share a NIC while another one, equally near by its link, is idle."""
    near = nearest_by_link(host.topology)
    if not host.topology.gpus:
        return ok("no GPU")
    if not rdma_adapters(host.topology):
        return ok(_NO_RDMA)
    if not _verbs_names(host.topology):
        return ok(_NO_VERBS)
    if not near:
        return unknown("the links between GPUs and NICs are unknown")
    gpus_of: dict[str, list[int]] = {}  # by the NIC that each takes, the first near one
    for gpu, nics in sorted(near.items()):
        gpus_of.setdefault(nics[0], []).append(gpu)
    shared = []
    for nic, gpus in gpus_of.items():
        idle = dict.fromkeys(name for gpu in gpus for name in near[gpu] if name not in gpus_of)
        if len(gpus) > 1 and idle:
            unused = f"{', '.join(idle)} {'is' if len(idle) == 1 else 'are'} idle"
            shared.append(f"gpu{cpu_set.render(gpus)} share {nic} if each takes the first near one, while {unused}")
    if shared:
        return note("; ".join(shared), remedy="numapin run --nic-env ucx,nvshmem … (deals the NICs out)")
    return ok("no two GPUs share a NIC while another one is as near and idle")


def _verbs_names(topology: Topology) -> list[str]:
    """Return the names of the NICs that verbs libraries can use, and their variables can name."""
    return [name for name, nic in rdma_adapters(topology).items() if nic.verbs_name is not None]


@check(
    "nic-package",
    where="/sys/bus/pci/devices/*/numa_node",
    why="Traffic between such a NIC and a GPU crosses the link between the sockets, which memory traffic needs, too.",
)
def package(host: Host) -> Result:
    """Find NICs on a package that has no GPU."""
    nics, gpus = rdma_adapters(host.topology), host.topology.gpus
    package_of: dict[int | None, int | None] = {node.id: node.package for node in host.topology.nodes}
    homes = CpuSet(not_none(package_of.get(gpu.node) for gpu in gpus))
    if not gpus:
        return ok("no GPU")
    if not nics:
        return ok(_NO_RDMA)
    if not homes:
        return unknown("the sockets of the GPUs are unknown")
    far = [name for name, nic in nics.items() if package_of.get(nic.node) not in (None, *homes)]
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


class _Port(NamedTuple):
    """A port of a verbs device. `model` is what its siblings share: the board and the kind of network."""

    card: str  # the PCI address without the function: the second port of a card is often a device of its own
    name: str
    state: str  # "ACTIVE", "DOWN", "INIT", "ARMED"
    physical: str  # "LinkUp", "Polling", "Disabled"
    rate_gbit_s: float | None
    width: int | None
    model: tuple[str | None, str | None]


@check(
    "nic-ports",
    where="state, phys_state, rate and link_layer of the ports in /sys/class/infiniband",
    why="NCCL leaves out a port that is down, so that two GPUs share another one. A collective is as slow as the "
    "slowest port. The kernel does not show the highest rate of a port: it is compared with ports of the same board. "
    "A port may be down if it is disabled, or if its card has another one that is active.",
)
def ports(host: Host) -> Result:
    """Find RDMA ports that are down, or slower than those of the same kind."""
    found, unread = [], []
    for device in host.tree.names(_INFINIBAND):
        at = f"{_INFINIBAND}/{device}"
        if host.tree.link(f"{at}/device/physfn") is not None:  # a virtual function, which may be unused
            continue
        address = (host.tree.link(f"{at}/device") or device).rpartition("/")[2]
        board = host.word(f"{at}/board_id") or host.word(f"{at}/hca_type")
        for number in host.tree.names(f"{at}/ports"):
            path = f"{at}/ports/{number}"
            state, physical = (host.match(f"{path}/{name}", r"\A[0-9]: ?(\w+)\Z") for name in ("state", "phys_state"))
            if state is None:
                unread.append(f"/{path}/state")
                continue
            speed = _RATE.match(host.tree.text(f"{path}/rate") or "")
            rate, width = (float(speed[1]), int(speed[2])) if speed else (None, None)
            layer = host.word(f"{path}/link_layer")
            name = f"{device}:{number}"
            found.append(
                _Port(
                    address.partition(".")[0], name, state.upper(), physical or "unknown", rate, width, (board, layer)
                )
            )
    if not found and not unread:
        names = _verbs_names(host.topology)
        return unknown(f"the ports of {', '.join(names)} are not shown") if names else ok(_NO_RDMA)
    active = [port for port in found if port.state == "ACTIVE"]
    siblings: defaultdict[tuple[str | None, str | None], list[_Port]] = defaultdict(list)
    for port in active:
        siblings[port.model].append(port)

    faults: list[str] = []
    remarks: list[str] = []
    for port in found:
        alike = siblings[port.model]
        shown = f"{port.name} is {port.state} ({port.physical})"
        if port.state in ("INIT", "ARMED"):
            faults.append(f"{shown}: no subnet manager has configured it")
        elif port.state != "ACTIVE":
            # A card's second port is often left without a cable, and a disabled port is meant to be down.
            is_spare = port.physical == "Disabled" or any(other.card == port.card for other in active)
            (remarks if is_spare else faults).append(shown)
        else:
            fastest = max((other.rate_gbit_s or 0 for other in alike), default=0)
            is_slower = port.rate_gbit_s is not None and port.rate_gbit_s < fastest
            is_narrow = port.model[1] == "InfiniBand" and port.width == 1  # every adapter has four lanes
            if is_slower:
                faults.append(f"{port.name} runs at {port.rate_gbit_s:g} Gbit/s, others of its kind at {fastest:g}")
            elif is_narrow:
                faults.append(f"{port.name} runs on one lane of four ({port.rate_gbit_s:g} Gbit/s)")
    cables = "check cable, transceiver and switch port (ibstat, mlxlink -d DEVICE, sudo dmesg); disable unused ports"
    if faults:
        return warning(joined([*faults, *remarks], most=_MOST_NAMES), remedy=cables)
    if unread:
        return unknown(f"cannot be read: {', '.join(unread[:_MOST_NAMES])}")
    if not active:
        return note(f"no port is active: {joined(remarks, most=_MOST_NAMES)}", remedy=cables)
    rates = [f"{rate:g}" for rate in sorted(set(not_none(port.rate_gbit_s for port in active)))]
    speeds = f" at {' and '.join(rates)} Gbit/s" if rates else ", rate unknown"
    spare = f"; {joined(remarks, most=_MOST_NAMES)}" if remarks else ""
    return ok(f"{counted(len(active), 'active port')}{speeds}{spare}")
