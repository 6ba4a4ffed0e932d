"""The doctor's readings, checks, findings and report. Pure.

Comes in: the answers that `files` and `live` read. Goes out: frozen findings, and a `DoctorReport` of them (schema
numapin.doctor/1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.base.records import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.doctor.advice import Advice
    from numapin.topology.model import Pcie
    from numapin.topology.readings import NvmlReadings

SCHEMA: Final = "numapin.doctor/1"


class DoctorSeverity(StrEnum):
    """The severity of a finding, worst first."""

    ERROR = "error"
    """A job fails, or a rank cannot be bound to its GPU's node."""
    WARNING = "warning"
    """It costs speed or safety."""
    NOTE = "note"
    """It costs something in some jobs only."""
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """The result of one check.

    Attributes:
        check: The name of the check.
        severity: How bad it is; None if the check got no answer.
        what: What was seen; without a severity, why there is no answer.
        where: The file or call that was read.
        why: What it costs a job.
        remedy: The command or setting that fixes it.
    """

    check: str
    severity: DoctorSeverity | None
    what: str
    where: str
    why: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: its name, the file or call that it reads, and why it matters. The methods make its findings."""

    name: str
    where: str
    why: str

    def found(self, severity: DoctorSeverity | None, what: str, remedy: str | None = None) -> DoctorFinding:
        """Return a finding of any severity."""
        return DoctorFinding(
            check=self.name, severity=severity, what=what, where=self.where, why=self.why, remedy=remedy
        )

    def error(self, what: str, *, remedy: str) -> DoctorFinding:
        """Return an error and the command that fixes it."""
        return self.found(DoctorSeverity.ERROR, what, remedy)

    def warning(self, what: str, *, remedy: str) -> DoctorFinding:
        """Return a warning and the command that fixes it."""
        return self.found(DoctorSeverity.WARNING, what, remedy)

    def note(self, what: str, *, remedy: str | None = None) -> DoctorFinding:
        """Return a note, with a command if there is something to do."""
        return self.found(DoctorSeverity.NOTE, what, remedy)

    def ok(self, what: str) -> DoctorFinding:
        """Return the finding that nothing is wrong."""
        return self.found(DoctorSeverity.OK, what)

    def unknown(self, what: str) -> DoctorFinding:
        """Return the finding that the check got no answer."""
        return self.found(None, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Facts that only the running machine has.

    Attributes:
        environ: The environment that ranks would inherit.
        refused: Each memory-policy call that was tried, with the kernel's error name, or None if it worked. None as a
            whole without libnuma.
        seccomp: The seccomp mode of this process; 2 means filtered.
        capabilities: The effective capabilities of this process, as a bit mask.
        nvml: The answers of NVML.
        module_version: The version of NVIDIA's kernel module. The driver's libraries must have the same.
        libnuma: Why libnuma cannot be used; None if it can.
        streaming_stores: Whether libstores.so is installed; None on machines that it does not support.
        torch: The version of the installed torch, from its own metadata; None without torch.
        strays: Top-level packages that py-libnuma has put into site-packages, other than its own, as paths.
        python: The version of this Python.
        nccl: The installed NCCL packages, or the path of the library without a package, with their versions.
        shm_bytes: The size of /dev/shm.
        shm_free_bytes: The free part of /dev/shm.
        jobs: The variables that choose NICs, of each running rank on this host, by its job's address and local rank.
    """

    environ: Mapping[str, str]
    refused: Mapping[str, str | None] | None
    seccomp: int | None
    capabilities: int | None
    nvml: NvmlReadings
    module_version: str | None
    libnuma: str | None
    streaming_stores: bool | None
    torch: str | None
    strays: tuple[str, ...]
    python: tuple[int, ...]
    nccl: Mapping[str, str]
    shm_bytes: int | None
    shm_free_bytes: int | None
    jobs: Mapping[str, Mapping[int, Mapping[str, str]]] = field(default_factory=dict)

    def has_capability(self, bit: int) -> bool | None:
        """Return whether the process has a capability; None if that is unknown."""
        return None if self.capabilities is None else bool(self.capabilities & bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReadings:
    """The contents of the files below a root. GPUs are named by their index.

    Attributes:
        kernel: The release of the kernel.
        command_line: The kernel's command line.
        memory: /proc/meminfo, in bytes.
        cgroups: The lines of /proc/self/cgroup.
        memlock: The limit on locked memory: a number of bytes, or "unlimited".
        memory_limit: The lowest memory limit of this process's cgroup and of those above it, in bytes.
        numa_balancing: The mode of automatic NUMA balancing.
        huge_pages: The mode of transparent huge pages.
        shared_huge_pages: The mode of transparent huge pages in shared memory.
        governors: Each frequency governor and its number of CPUs.
        frequency_driver: The driver that scales the frequency.
        smt: The state of SMT control.
        iommus: The names of the IOMMUs.
        iommu_types: Each GPU's IOMMU group type, such as "DMA-FQ" or "identity".
        gpu_nodes: Each GPU's `numa_node`, as the kernel writes it ("-1").
        slots: The fastest link of the PCIe port above each GPU.
        live: The facts of the running machine; None for a capture.
    """

    kernel: str | None = None
    command_line: str | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    cgroups: tuple[str, ...] = ()
    memlock: str | None = None
    memory_limit: int | None = None
    numa_balancing: str | None = None
    huge_pages: str | None = None
    shared_huge_pages: str | None = None
    governors: Mapping[str, int] = field(default_factory=dict)
    frequency_driver: str | None = None
    smt: str | None = None
    iommus: tuple[str, ...] = ()
    iommu_types: Mapping[int, str] = field(default_factory=dict)
    gpu_nodes: Mapping[int, str] = field(default_factory=dict)
    slots: Mapping[int, Pcie] = field(default_factory=dict)
    live: Live | None = None

    @property
    def kernel_options(self) -> frozenset[str]:
        """The words of the kernel's command line."""
        return frozenset((self.command_line or "").split())

    def without(self, check: Check, what: str) -> DoctorFinding:
        """Return the finding for an absent file: all is well on a live kernel, unknown in a capture."""
        return check.unknown("the capture has no such file") if self.live is None else check.ok(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The findings about one machine, in the order of the checks, and the advice on pinning."""

    host: str | None
    source: str
    findings: tuple[DoctorFinding, ...]
    advice: Advice

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.severity is DoctorSeverity.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.doctor/1); `json.dumps` takes it as it is."""
        return {"schema": SCHEMA, **to_json(self)}
