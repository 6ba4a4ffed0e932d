"""The checks of the doctor on one machine, and the report of what they found (schema numapin.doctor/1)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.formats import did_you_mean, gib, parse_size, render_size
from numapin.base.records import to_json
from numapin.doctor import machine, network, nvidia, software  # noqa: F401 - their checks are in CHECKS, in this order
from numapin.doctor.check import CHECKS, DoctorSeverity, Host
from numapin.topology.nics import natural, rdma_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from numapin.data.budget import LockRoom
    from numapin.topology.model import Topology

NAMES: Final = (*(check.name for check in CHECKS), "topology")
"""The names that --only and --skip accept: the checks, and the notes on what could not be read."""
IDLE: Final = "idle"  # the word of --expect that demands idle GPUs; `_IDLE_CHECK` judges that
_IDLE_CHECK: Final = "gpu-processes"
_DRIVER: Final = "driver"
_UNKNOWN: Final = "unknown"


def _active_ports(topology: Topology) -> int | None:
    states = [nic.is_up for nic in rdma_adapters(topology).values()]
    return None if None in states else sum(map(bool, states))


_COUNTED: Final[Mapping[str, Callable[[Topology], int | None]]] = {
    "sockets": lambda topology: len(topology.packages),
    "nodes": lambda topology: len(topology.cpu_nodes),
    "cores": lambda topology: len(topology.cores),
    "cpus": lambda topology: len(topology.cpus),
    "gpus": lambda topology: len(topology.gpus),
    "nics": lambda topology: len(rdma_adapters(topology)),
    "ports": _active_ports,
    "memory": lambda topology: topology.memory_bytes,
}
"""The counts that --expect compares: nodes with CPUs, NICs for RDMA, and as ports those of them with an active one."""
_NAMED: Final[Mapping[str, Callable[[Topology], set[str]]]] = {
    "gpus": lambda topology: {gpu.pci for gpu in topology.gpus if gpu.pci},
    "nics": lambda topology: set(rdma_adapters(topology)),
    "ports": lambda topology: {name for name, nic in rdma_adapters(topology).items() if nic.is_up},
}
"""The names of the things counted, so that a message can name the missing ones."""
_TOLERANCE: Final = 0.03
"""The share by which memory may differ. Firmware and crash kernels reserve varying parts of it, and the kernel's page
structures take 1.6 % of a nominal size. One module of 32 is 3.1 %."""


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


def parse_expected(text: str) -> dict[str, int | str]:
    """Return what a host must have, from gpus=8,nodes=2,memory=1T,driver=580,idle. Raises ValueError.

    The number of `IDLE` has no meaning.
    """
    expected: dict[str, int | str] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if name in expected:
            raise ValueError(f"{name} is there twice")
        if item == IDLE:
            expected[IDLE] = 0
        elif name == _DRIVER and re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}", value):
            expected[_DRIVER] = value
        elif name not in _COUNTED or not equals:
            names = f"{', '.join(_COUNTED)}, or {_DRIVER}=VERSION, or {IDLE}"
            raise ValueError(f"{item!r} is not NAME=NUMBER, where NAME is one of {names}")
        elif name == "memory":
            expected[name] = parse_size(value)
        elif value.isascii() and value.isdecimal():
            expected[name] = int(value)
        else:
            raise ValueError(f"{item!r} has no number, as in {name}=8")
    return expected


def counts_of(topology: Topology) -> dict[str, int | str]:
    """Return what a host must have to be like this one, as far as that is known."""
    found = {name: count(topology) for name, count in _COUNTED.items()}
    return {name: number for name, number in found.items() if number is not None}


def compare(
    host: Host, expected: Mapping[str, int | str], *, like: Topology | None = None
) -> tuple[DoctorFinding, ...]:
    """Compare a machine with the counts and the version of the driver that it must have, see `parse_expected`.

    `like` is the machine whose counts these are, if any: what is missing is named, and models and rates are compared.
    Returns an error for each difference, or one finding that all is as expected. An unknown value is a difference.
    """
    topology = host.topology
    differing: list[str] = []
    found = counts_of(topology)
    for name, wanted in expected.items():
        seen = found.get(name)
        if name == _DRIVER:
            seen = host.live.nvml.driver if host.live else None
            is_same = f"{seen}.".startswith(f"{wanted}.")  # 580 is any 580
        elif name == "memory":
            is_same = seen is not None and abs(int(seen) - int(wanted)) <= _TOLERANCE * int(wanted)
        else:
            is_same = seen == wanted
        if is_same:
            continue
        missing = _NAMED[name](like) - _NAMED[name](topology) if like and name in _NAMED else set()
        which = f" (missing: {', '.join(sorted(missing, key=natural))})" if missing else ""
        shown = [gib(int(each)) if name == "memory" and each is not None else each for each in (seen, wanted)]
        differing.append(f"{name}: {_UNKNOWN if seen is None else shown[0]} instead of {shown[1]}{which}")
    if like is not None:
        models, expected_models = (Counter(gpu.name or _UNKNOWN for gpu in each.gpus) for each in (topology, like))
        num_open = expected_models.pop(_UNKNOWN, 0) + max(0, len(topology.gpus) - len(like.gpus))
        if (models - expected_models).total() > num_open:
            texts = [" and ".join(sorted(each)) for each in (models - expected_models, expected_models - models)]
            differing.append(f"models of GPUs: {' instead of '.join(texts)}")
        nics = rdma_adapters(topology)
        for name, nic in rdma_adapters(like).items():
            are_up = nic.is_up and name in nics and nics[name].is_up
            if are_up and nic.rate_gbit_s is not None:
                rate = nics[name].rate_gbit_s
                if rate is None or rate < nic.rate_gbit_s:
                    shown_rate = _UNKNOWN if rate is None else f"{rate:g}"
                    differing.append(f"{name}: {shown_rate} instead of {nic.rate_gbit_s:g} Gbit/s")
    severity = DoctorSeverity.ERROR if differing else DoctorSeverity.OK
    remedy = "drain the host, and look for the missing part in: numapin topo, sudo dmesg" if differing else None
    return tuple(
        DoctorFinding(
            check="expect",
            severity=severity,
            what=what,
            where="numapin topo --json, and what --expect gives",
            why="A host that lost a GPU, a NIC or memory makes its job fail, or all other hosts of the job wait.",
            remedy=remedy,
        )
        for what in differing or [f"as expected: {', '.join(expected)}"]
    )


def examine(host: Host, *, only: Container[str] = NAMES, skip: Container[str] = ()) -> tuple[DoctorFinding, ...]:
    """Run each of these checks once, and add what could not be read of the machine."""
    findings = []
    for check in CHECKS:
        is_asked = check.name in only or (host.must_be_idle and check.name == _IDLE_CHECK)
        if is_asked and check.name not in skip:
            result = check.run(host)
            findings.append(DoctorFinding(check=check.name, where=check.where, why=check.why, **result._asdict()))
    if "topology" not in only or "topology" in skip:
        return tuple(findings)
    nvml = host.live.nvml if host.live else None
    reported: tuple[str, ...] = ()  # in the finding about the driver
    if nvml is not None:
        reported = nvml.notes if nvml.gpus is None else (*nvml.lost, *nvml.silent)
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
