"""What the doctor reads and what it finds. Pure.

Comes in: what `files` and `live` read. Goes out: frozen findings, and a `DoctorReport` of them (schema
numapin.doctor/1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.doctor.advice import Advice
    from numapin.topology.model import Pcie
    from numapin.topology.readings import NvmlReadings

SCHEMA: Final = "numapin.doctor/1"


class DoctorSeverity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"
    """A job fails, or a rank cannot be where its GPU is."""
    WARNING = "warning"
    """It costs speed or safety."""
    NOTE = "note"
    """Worth knowing; it costs something in some jobs only."""
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """What a check found. `severity` None: it could not be told; `what` says why.

    `where` is the file or call that it came from, `why` what it means for a job, `remedy` the command that mends it.
    """

    check: str
    severity: DoctorSeverity | None
    what: str
    where: str
    why: str
    remedy: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "check": self.check,
            "severity": self.severity.value if self.severity else None,
            **{name: getattr(self, name) for name in ("what", "where", "why", "remedy")},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A question to the machine: its name, where the answer stands, and why it matters. Its methods make findings."""

    name: str
    where: str
    why: str

    def found(self, severity: DoctorSeverity | None, what: str, remedy: str | None = None) -> DoctorFinding:
        """Return what was found, of a severity that is decided elsewhere."""
        return DoctorFinding(
            check=self.name, severity=severity, what=what, where=self.where, why=self.why, remedy=remedy
        )

    def error(self, what: str, *, remedy: str) -> DoctorFinding:
        """Return an error and the command that mends it."""
        return self.found(DoctorSeverity.ERROR, what, remedy)

    def warning(self, what: str, *, remedy: str) -> DoctorFinding:
        """Return a warning and the command that mends it."""
        return self.found(DoctorSeverity.WARNING, what, remedy)

    def note(self, what: str, *, remedy: str | None = None) -> DoctorFinding:
        """Return a note, with a command where there is something to do."""
        return self.found(DoctorSeverity.NOTE, what, remedy)

    def ok(self, what: str) -> DoctorFinding:
        """Return that nothing is wrong, and what was seen."""
        return self.found(DoctorSeverity.OK, what)

    def unknown(self, what: str) -> DoctorFinding:
        """Return that this machine does not tell, and how that shows."""
        return self.found(None, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What only the running machine tells.

    `environ` is what ranks would inherit. `refused` has the memory-policy calls that were tried, each with the kernel's
    word for its refusal, None where it worked; None as a whole without libnuma. `seccomp` is this process's mode (2:
    filtered), `capabilities` its effective ones as a bit mask. `module_version` is the kernel module's, which the
    driver's libraries must match. `libnuma` is what is wrong with that library. `python` is the version of this
    Python. `nccl` are installed NCCL packages with their versions.
    """

    environ: Mapping[str, str]
    refused: Mapping[str, str | None] | None
    seccomp: int | None
    capabilities: int | None
    nvml: NvmlReadings
    module_version: str | None
    libnuma: str | None
    streaming_stores: bool | None
    """Whether libstores.so is there; None on machines that it is not for."""
    python: tuple[int, ...]
    nccl: Mapping[str, str]
    shm_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReadings:
    """What the files below a root tell, as they write it; `live` is None for a captured machine.

    GPUs are named by PCI address: `gpu_nodes` is the kernel's word for the node ("-1"), `iommu_types` its word for how
    the IOMMU treats the GPU, `slots` what the port above the GPU can do at most. `memlock` is in bytes, or "unlimited".
    """

    kernel: str | None = None
    command_line: str | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """/proc/meminfo in bytes."""
    cgroups: tuple[str, ...] = ()
    memlock: str | None = None
    numa_balancing: str | None = None
    huge_pages: str | None = None
    shared_huge_pages: str | None = None
    governors: Mapping[str, int] = field(default_factory=dict)
    """How many CPUs are under each frequency governor."""
    frequency_driver: str | None = None
    smt: str | None = None
    iommus: tuple[str, ...] = ()
    iommu_types: Mapping[str, str] = field(default_factory=dict)
    gpu_nodes: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[str, Pcie] = field(default_factory=dict)
    live: Live | None = None

    def without(self, check: Check, what: str) -> DoctorFinding:
        """Return what it means that a file is not there: that all is well on a live kernel, nothing in a capture."""
        return check.unknown("the capture has no such file") if self.live is None else check.ok(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All that was found on one machine, in the order of the checks, and the advice on pinning."""

    host: str | None
    source: str
    findings: tuple[DoctorFinding, ...]
    advice: Advice

    @property
    def has_errors(self) -> bool:
        """Say whether any finding is an error."""
        return any(finding.severity is DoctorSeverity.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.doctor/1); `json.dumps` takes it as it is."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "source": self.source,
            "findings": [finding.to_json() for finding in self.findings],
            "advice": self.advice.to_json(),
        }
