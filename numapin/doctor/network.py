"""Checks of NICs. Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final, NamedTuple

from numapin.base.text import counted, not_none
from numapin.doctor.check import Host, Result, check, joined, note, ok, unknown, warning
from numapin.topology.nics import rdma_adapters

_INFINIBAND: Final = "sys/class/infiniband"
_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9])?) Gb/sec \(([0-9]{1,2})X", re.ASCII)
_MOST_NAMES: Final = 16  # in a message


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
        names = [name for name, nic in rdma_adapters(host.topology).items() if nic.verbs_name is not None]
        if names:
            return unknown(f"the ports of {', '.join(names)} are not shown")
        return ok("no RDMA NIC (InfiniBand, RoCE) was found")
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
