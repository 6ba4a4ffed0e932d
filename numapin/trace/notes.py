"""The notes of a traced rank about its script: its loaders and epochs, its optimizer, and where it runs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError
from numapin.system import proc

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_MOST_EPOCHS: Final = 1000
_MOST_LOADERS: Final = 20


@dataclass(slots=True)
class Notes:
    """The notes of this process so far."""

    loaders: list[tuple[int, dict[str, object]]] = field(default_factory=list)  # with the loader's id
    epochs: list[tuple[int, int, int]] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    optimizer: str = ""
    updates_on_cpu: bool | None = None

    def iterated(self, loader: DataLoader[Any], iterator: object, start_ns: int, end_ns: int) -> None:
        """Note a call of `iter()` on a loader. Only starting workers takes time."""
        known = next((i for i, (one, _) in enumerate(self.loaders) if one == id(loader)), None)
        if known is None:
            known = len(self.loaders)
            if known == _MOST_LOADERS:
                return
            self.loaders.append((id(loader), _described(loader, iterator)))
        if loader.num_workers and len(self.epochs) < _MOST_EPOCHS:
            self.epochs.append((known, start_ns, end_ns))

    def ended(self, start_ns: int, end_ns: int) -> None:
        """Note a call of `next()` that ended an epoch; most of its time is the end of the workers."""
        if len(self.ends) < _MOST_EPOCHS:
            self.ends.append((0, start_ns, end_ns))

    def stepped(self, optimizer: object) -> None:
        """Note the optimizer whose steps count."""
        if not self.optimizer:
            self.optimizer = type(optimizer).__name__
            devices = {
                getattr(getattr(parameter, "device", None), "type", "")
                for group in getattr(optimizer, "param_groups", ())
                for parameter in group.get("params", ())
            }
            self.updates_on_cpu = devices == {"cpu"}

    def to_json(self, *, num_threads: int, cpu_use: CpuUse | None) -> dict[str, object]:
        """Return the notes and the rank's surroundings.

        torch computes with `num_threads` threads on the CPU; `cpu_use` is from the start of the recording.
        """
        cpus = CpuSet(os.sched_getaffinity(0))
        return {
            "host": os.uname().nodename,
            "cpus": str(cpus),
            "nodes": _nodes_of(cpus),
            "num_cpus": len(cpus),
            "num_threads": num_threads,
            **(cpu_use.until_now() if cpu_use else {}),
            "optimizer": self.optimizer,
            "updates_on_cpu": self.updates_on_cpu,
            "loaders": [described for _, described in self.loaders],
            "epochs": self.epochs,
            "ends": self.ends,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """The CPU time, in clock ticks, that all programs have used on some CPUs, and that this job has."""

    cpus: CpuSet
    at_s: float
    all_ticks: int
    job_ticks: int

    @classmethod
    def read(cls, cpus: CpuSet) -> CpuUse | None:
        """Read it for these CPUs; None if /proc cannot be read.

        The job is the launcher, this process's parent, with all processes below it that may use one of the CPUs. The
        time of a process includes that of its children which have ended.
        """
        job_ticks, launcher = 0, os.getppid()
        try:
            processes = dict(proc.processes())
            for pid in processes.keys() & {launcher, *proc.descendants(launcher, proc.children_of(processes))}:
                with suppress(ProcessLookupError):
                    job_ticks += processes[pid].cpu_ticks if cpus & os.sched_getaffinity(pid) else 0
            names = {f"cpu{cpu}" for cpu in cpus}
            rows = [line.split() for line in proc.read("/proc/stat").splitlines()]
            # user, nice and system (proc_stat(5)); interrupts may be the job's own
            all_ticks = sum(sum(map(int, row[1:4])) for row in rows if row and row[0] in names)
        except (OSError, ValueError, MachineError, proc.Gone):
            return None
        return cls(cpus=cpus, at_s=time.monotonic(), all_ticks=all_ticks, job_ticks=job_ticks)

    def until_now(self) -> dict[str, object]:
        """Return the time since then, and the CPU time of other programs on these CPUs; nothing if it is unknown."""
        now = self.read(self.cpus)
        if now is None:
            return {}
        other_ticks = max(now.all_ticks - self.all_ticks - (now.job_ticks - self.job_ticks), 0)
        per_second = os.sysconf("SC_CLK_TCK")
        return {"traced_ms": round((now.at_s - self.at_s) * 1000), "other_cpu_ms": other_ticks * 1000 // per_second}


def _described(loader: DataLoader[Any], iterator: object) -> dict[str, object]:
    num_batches = None
    with suppress(Exception):  # a loader of an iterable dataset may have no length
        num_batches = len(loader)
    device = getattr(getattr(loader, "_numapin_options", None), "device", None)
    return {
        "is_numapin": type(iterator).__module__.startswith("numapin."),
        "num_workers": loader.num_workers,
        "is_persistent": bool(getattr(loader, "persistent_workers", False)),
        "delivers_on_gpu": "cuda" in str(device),
        "num_batches": num_batches,
    }


def _nodes_of(cpus: CpuSet) -> str:
    """Return the NUMA nodes that these CPUs belong to, "" if the kernel does not say."""
    nodes = set()
    for path in Path("/sys/devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            if cpus & CpuSet.parse((path / "cpulist").read_text().strip()):
                nodes.add(int(path.name.removeprefix("node")))
    return str(CpuSet(nodes))
