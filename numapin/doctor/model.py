"""The checks of the doctor on one machine, and the report of what they found (schema numapin.doctor/1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.formats import did_you_mean, gib, parse_size, render_size
from numapin.base.records import to_json
from numapin.doctor import gpus, machine, network, software  # noqa: F401 - their checks are in CHECKS, in this order
from numapin.doctor.check import CHECKS, DoctorSeverity, Host
from numapin.topology.nics import rdma_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from numapin.data.budget import LockRoom
    from numapin.topology.model import Topology

NAMES: Final = (*(check.name for check in CHECKS), "topology")
"""The names that --only and --skip accept: the checks, and the notes on what could not be read."""
_COUNTED: Final[Mapping[str, Callable[[Topology], int | None]]] = {
    "sockets": lambda topology: len(topology.packages),
    "nodes": lambda topology: len(topology.cpu_nodes),
    "cores": lambda topology: len(topology.cores),
    "cpus": lambda topology: len(topology.cpus),
    "gpus": lambda topology: len(topology.gpus),
    "nics": lambda topology: len(rdma_adapters(topology)),
    "memory": lambda topology: topology.memory_bytes,
}
"""The counts that --expect compares: NUMA nodes with CPUs, and NICs for RDMA, among them."""
_MEMORY_TOLERANCE: Final = 0.05  # firmware and crash kernels keep different parts of it


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """The result of one check."""

    check: str
    severity: DoctorSeverity | None  # None: the check got no answer
    what: str  # what was seen; without a severity, why there is no answer
    where: str  # the file or call that was read
    why: str  # what it costs a job
    remedy: str | None = None  # the command or setting that fixes it


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The findings about one machine, in the order of the checks, and the memory that a rank can pin."""

    host: str | None
    source: str
    findings: tuple[DoctorFinding, ...]
    room: LockRoom

    def has(self, least: DoctorSeverity) -> bool:
        """Return whether a finding is at least as severe."""
        severe = list(DoctorSeverity)[: list(DoctorSeverity).index(least) + 1]  # worst first
        return any(finding.severity in severe for finding in self.findings)

    @property
    def pinnable(self) -> str:
        """The memory that a rank can pin, and what limits it."""
        if self.room.num_bytes is None:
            return f"the amount that can be pinned is unknown ({self.room.reason})"
        return f"up to {render_size(self.room.num_bytes)} per rank can be pinned ({self.room.reason})"

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.doctor/1); `json.dumps` takes it as it is."""
        always_null = dict.fromkeys(("verdict", "footprint_bytes", "remedy"))  # fields of the schema's first version
        return {
            "schema": "numapin.doctor/1",
            "host": self.host,
            "source": self.source,
            "findings": [to_json(finding) for finding in self.findings],
            "advice": {**always_null, "room_bytes": self.room.num_bytes, "reason": self.pinnable},
        }


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of checks, separated by commas. Raises ValueError for another one."""
    for name in text.split(","):
        if name not in NAMES:
            meant = did_you_mean(name, NAMES) or f"; choose among {', '.join(NAMES)}"
            raise ValueError(f"there is no check {name!r}{meant}")
    return tuple(text.split(","))


def parse_counts(text: str) -> dict[str, int]:
    """Return what a host must have, from gpus=8,nodes=2,memory=1T. Raises ValueError."""
    counts = {}
    for item in text.split(","):
        name, _, number = item.partition("=")
        if name not in _COUNTED:
            raise ValueError(f"{item!r} is not NAME=NUMBER, where NAME is one of {', '.join(_COUNTED)}")
        if name != "memory" and not (number.isascii() and number.isdecimal()):
            raise ValueError(f"{item!r} has no number, as in {name}=8")
        if name in counts:
            raise ValueError(f"{name} is there twice")
        counts[name] = parse_size(number) if name == "memory" else int(number)
    return counts


def counts_of(topology: Topology) -> dict[str, int]:
    """Return what a host must have to be like this one, as far as that is known."""
    found = {name: count(topology) for name, count in _COUNTED.items()}
    return {name: number for name, number in found.items() if number is not None}


def compare(topology: Topology, expected: Mapping[str, int]) -> DoctorFinding:
    """Compare a machine with what it must have."""
    found, differing = counts_of(topology), []
    for name, wanted in expected.items():
        seen = found.get(name)
        tolerance = _MEMORY_TOLERANCE * wanted if name == "memory" else 0
        if seen is None or abs(seen - wanted) > tolerance:
            shown = [gib(each) if name == "memory" and each is not None else each for each in (seen, wanted)]
            differing.append(f"{name}: {'unknown' if seen is None else shown[0]} instead of {shown[1]}")
    return DoctorFinding(
        check="expect",
        severity=DoctorSeverity.ERROR if differing else DoctorSeverity.OK,
        what="; ".join(differing) or f"as expected: {', '.join(expected)}",
        where="numapin topo --json, and what --expect gives",
        why="A host that lost a GPU, a NIC or memory makes its job fail, or all other hosts of the job wait for it.",
        remedy="drain the host, and look for the missing part in: numapin topo, sudo dmesg" if differing else None,
    )


def examine(host: Host, *, only: Container[str] = NAMES, skip: Container[str] = ()) -> tuple[DoctorFinding, ...]:
    """Run each of these checks once, and add what could not be read of the machine."""
    findings = []
    for check in CHECKS:
        if check.name in only and check.name not in skip:
            result = check.run(host)
            findings.append(DoctorFinding(check=check.name, where=check.where, why=check.why, **result._asdict()))
    if "topology" not in only or "topology" in skip:
        return tuple(findings)
    nvml = host.live.nvml if host.live else None
    reported = nvml.notes if nvml and nvml.gpus is None else ()  # in the finding about the driver
    findings += [
        DoctorFinding(
            check="topology",
            severity=DoctorSeverity.NOTE,
            what=note,
            where="the notes of: numapin topo --json",
            why="Facts that could not be read are not used for binding.",
        )
        for note in host.topology.notes
        if note not in reported
    ]
    return tuple(findings)
