"""All checks of the doctor on one machine, and the report of what they found (schema numapin.doctor/1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numapin.base.formats import render_size
from numapin.base.records import to_json
from numapin.doctor import machine, network, software  # noqa: F401 - their checks are in CHECKS, in this order
from numapin.doctor.check import CHECKS, DoctorSeverity, Host

if TYPE_CHECKING:
    from numapin.data.budget import LockRoom


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

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.severity is DoctorSeverity.ERROR for finding in self.findings)

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


def examine(host: Host) -> tuple[DoctorFinding, ...]:
    """Run every check once, and add what could not be read of the machine."""
    findings = []
    for check in CHECKS:
        result = check.run(host)
        findings.append(DoctorFinding(check=check.name, where=check.where, why=check.why, **result._asdict()))
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
