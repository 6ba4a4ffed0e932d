"""The interface of a doctor's check, and the list of all checks.

A check is one function with `@check`: it takes a `Host`, reads what it needs through it, and returns a `Result`. To add
one, write that function; `examine` runs all of them in the order of their definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable  # noqa: TC003 - the type of a field that is read
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, wraps
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.system.tree import Tree
    from numapin.topology.model import Topology
    from numapin.topology.readings import NvmlReadings


class DoctorSeverity(StrEnum):
    """The severity of a finding, worst first."""

    ERROR = "error"  # a job fails, or a rank cannot be bound to its GPU's node
    WARNING = "warning"  # it costs speed or safety
    NOTE = "note"  # it costs something in some jobs only
    OK = "ok"


class Result(NamedTuple):
    """The outcome of a check, and the command that fixes it; errors and warnings have one.

    `severity` None: no answer, and `what` has the reason.
    """

    severity: DoctorSeverity | None
    what: str
    remedy: str | None = None


error: Final = partial(Result, DoctorSeverity.ERROR)
warning: Final = partial(Result, DoctorSeverity.WARNING)
note: Final = partial(Result, DoctorSeverity.NOTE)
ok: Final = partial(Result, DoctorSeverity.OK)
unknown: Final = partial(Result, None)  # there is no answer


def joined(texts: Sequence[str], *, most: int) -> str:
    """Return the first texts in one line, and how many are left out."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])


class GpuUser(NamedTuple):
    """A process that computes on a GPU, by NVML's index. `name` and `user` are None if the process cannot be seen."""

    gpu: int
    pid: int
    used_bytes: int | None
    name: str | None
    user: str | None


class Xid(NamedTuple):
    """An error that NVIDIA's driver wrote into the kernel log. `at_s` is in seconds since 1970."""

    code: int
    pci: str
    at_s: float
    message: str


class KernelLog(NamedTuple):
    """The driver's errors in the kernel log, oldest first. None: it cannot be read, and `problem` has the reason."""

    xids: tuple[Xid, ...] | None
    begins_s: float | None = None  # when its first message was written, in seconds since 1970; None: at the boot
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Facts that only the running machine has."""

    refused: Mapping[str, str | None] | None  # each policy call with the kernel's error, if any; None without libnuma
    nvml: NvmlReadings
    libnuma: str | None  # why libnuma cannot be used; None if it can
    torch: str | None  # the version of the installed torch
    torch_off: str  # why numapin's data path is off with this torch; "": it is on
    strays: tuple[str, ...]  # packages that py-libnuma has put into site-packages, other than its own
    python: tuple[int, ...]
    nccl: Mapping[str, str]  # the NCCL packages, or the path of the library without a package, with their versions
    shm_bytes: int | None
    shm_free_bytes: int | None
    gpu_users: tuple[GpuUser, ...] = ()
    kernel_log: KernelLog = KernelLog(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine or the capture that is examined: its files, its topology, and for the running machine, `live`."""

    tree: Tree
    topology: Topology
    live: Live | None
    must_be_idle: bool = False  # whether a process on a GPU is a fault, as before a job

    def match(self, path: str, pattern: str) -> str | None:
        """Return the first group of a pattern in a file; None if the file is missing, unreadable or garbled."""
        found = re.search(pattern, self.tree.text(path) or "", re.MULTILINE | re.ASCII)
        return found[1] if found else None

    def word(self, path: str) -> str | None:
        """Return the only word of a file; None if it holds anything else."""
        return self.match(path, r"\A([\w.+~-]{1,64})\Z")

    def has_capability(self, bit: int) -> bool | None:
        """Return whether this process has a capability; None if that is unknown."""
        mask = self.match("proc/self/status", r"^CapEff:\s*([0-9a-f]{1,16})$")
        return None if mask is None else bool(int(mask, 16) & bit)

    def absent(self, what: str) -> Result:
        """Return the result for an absent file: all is well on a live kernel, unknown in a capture."""
        return unknown("the capture has no such file") if self.live is None else ok(what)


class Check(NamedTuple):
    """A check: its name, the file or call that it reads, what the fault costs a job, and the function.

    The first line of the function's docstring says what it finds. docs/checks.md is made of all this.
    """

    name: str
    where: str
    why: str
    run: Callable[[Host], Result]
    is_live: bool  # whether it needs the running machine


CHECKS: Final[list[Check]] = []


def check(
    name: str, *, where: str, why: str, is_live: bool = False
) -> Callable[[Callable[[Host], Result]], Callable[[Host], Result]]:
    """Add a function to the checks."""

    def add(function: Callable[[Host], Result]) -> Callable[[Host], Result]:
        CHECKS.append(Check(name, where, why, function, is_live))
        return function

    return add


def live_check(
    name: str, *, where: str, why: str
) -> Callable[[Callable[[Live, Host], Result]], Callable[[Host], Result]]:
    """Add a function that needs the running machine to the checks."""

    def add(function: Callable[[Live, Host], Result]) -> Callable[[Host], Result]:
        @check(name, where=where, why=why, is_live=True)
        @wraps(function)
        def run(host: Host) -> Result:
            if host.live is None:
                return unknown("not checked: needs the running machine, and this is a capture")
            return function(host.live, host)

        return run

    return add
