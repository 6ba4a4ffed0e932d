"""Boot a machine with several NUMA nodes in QEMU, run commands in it, and return their output.

The machine runs a real Linux kernel in emulation. It sees this host's file system at the same paths, and
keeps writes in memory. `make vm` unpacks QEMU and the kernel; `missing()` reports if that was not done.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.machines.compact import compact
from tests.vm.seam import CpuSet, cpu_set

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
SHARE: Final = Path("/run/share")
"""The machine's path of the folder through which it passes files to the host."""
_LIBRARIES: Final = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")
_CONSOLE_TAIL: Final = 4000
_SLOW_IN_EMULATION: Final = ("erms", "fsrm", "xsave", "avx", "avx2", "la57", "smap", "smep", "pku", "umip")
"""Features of a processor that are slow to emulate. Without them torch is imported in half of the CPU time, and
memory is touched in a quarter: "rep movsb" is emulated byte by byte, and each symbol that is bound saves all registers.
"""
BOOT_LIMIT_S: Final = 3600
"""The time after which a machine counts as hung: more than ten times that of the longest on two idle cores."""
TEST_LIMIT_S: Final = BOOT_LIMIT_S + 60


@dataclass(frozen=True, slots=True, kw_only=True)
class VmNode:
    """One NUMA node of a machine; without CPUs it has only memory."""

    cpus: frozenset[int]
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VmGpu:
    """A PCI device that stands in for a GPU: on a node, behind a host bridge with bus number `bus`, at `address`."""

    node: int
    bus: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VmMachine:
    """The machine that QEMU builds. `gpus` are in NVML's order."""

    name: str
    sockets: int
    cores: int
    threads: int
    distances: tuple[tuple[int, ...], ...]
    nodes: tuple[VmNode, ...]
    gpus: tuple[VmGpu, ...]

    @classmethod
    def load(cls, name: str) -> VmMachine:
        """Read machines/NAME.toml; NAME-again is a second machine of that kind."""
        values = tomllib.loads((HERE / "machines" / f"{name.removesuffix('-again')}.toml").read_text())
        return cls(
            name=name,
            sockets=values["sockets"],
            cores=values["cores"],
            threads=values["threads"],
            distances=tuple(map(tuple, values["distances"])),
            nodes=tuple(VmNode(cpus=CpuSet.parse(n["cpus"]), memory_mib=n["memory_mib"]) for n in values["node"]),
            gpus=tuple(VmGpu(**gpu) for gpu in values["gpu"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command to run in the machine; files that it writes to $PROBE_OUT are in `JobResult.out` afterwards.

    `cpuset` restricts the command to (CPUs, nodes) by a cgroup v2; `refuse_policy` runs it under the seccomp filter of
    refuse_policy.py. A job that `spoils` the machine for others runs last.
    """

    name: str
    argv: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    cpuset: tuple[str, str] | None = None
    refuse_policy: bool = False
    spoils: bool = False
    timeout_s: int = 1800  # only a job that hangs takes this long, even on a busy host


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The jobs of one boot. The folder `libraries` comes first on LD_LIBRARY_PATH.

    Modules in `preload` are imported once, before any job `python -m MODULE` starts.
    """

    jobs: Sequence[Job]
    libraries: Path | None = None
    preload: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of one job. `status` is None if the job did not finish, 124 if it exceeded its time limit."""

    status: int | None
    stdout: str
    stderr: str
    out: Path
    seconds: float | None

    def json(self, file: str) -> object:
        """Decode a JSON file that the job wrote; if it is missing, fail with the job's output."""
        path = self.out / file
        assert path.exists(), f"the job left no {file}; {self.shown()}"
        return json.loads(path.read_text())

    def shown(self) -> str:
        """Return status and output for an assertion's message."""
        return f"status {self.status}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmResult:
    """The results of one boot."""

    machine: VmMachine
    jobs: Mapping[str, JobResult]
    console: str


class VmFailedError(Exception):
    """The machine did not boot, hung or panicked; the message ends with the last lines of its console."""


def cache() -> Path:
    """Return the folder that `make vm` fills."""
    return Path(os.environ.get("NUMAPIN_VM_CACHE") or REPOSITORY / ".cache" / "vm").absolute()


def missing() -> str | None:
    """Return why no machine can be booted, None if one can."""
    return None if (cache() / "ready.json").exists() else "QEMU and a kernel are not unpacked: run `make vm`"


def boot(machine: VmMachine, batch: Batch, *, share: Path, timeout_s: float = BOOT_LIMIT_S) -> VmResult:
    """Boot `machine`, run the jobs of `batch` one after another, power off, and return the results.

    `share` is an empty folder for the jobs and their results. Raises VmFailedError, with the end of the console, if the
    machine does not finish in `timeout_s`.
    """
    _write_batch(machine, batch, share)
    console = _run_qemu(_qemu_command(machine, share), console=share / "console", timeout_s=timeout_s)
    results = {job.name: _job_result(share / job.name) for job in batch.jobs}
    return VmResult(machine=machine, jobs=results, console=console)


def _run_qemu(command: list[str], *, console: Path, timeout_s: float) -> str:
    """Run QEMU and return the console's text; kill its process group at the time limit."""
    libraries = ":".join(str(cache() / side / base) for side in ("host", "guest") for base in _LIBRARIES)
    with console.open("wb") as out:
        qemu = subprocess.Popen(
            # Killing the test run kills the machine; emulation has a low priority.
            ["setpriv", "--pdeathsig", "KILL", "nice", "-n", "10", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"PATH": os.defpath, "LD_LIBRARY_PATH": libraries},
            start_new_session=True,
        )
        try:
            qemu.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # the console shows its progress
        finally:
            if qemu.poll() is None:
                os.killpg(qemu.pid, signal.SIGKILL)
                qemu.wait()
    text = console.read_text(errors="replace")
    if "VM: done" not in text:
        raise VmFailedError(
            f"the machine did not finish in {timeout_s:.0f} s (QEMU's status {qemu.returncode}); "
            f"its console ends with:\n{text[-_CONSOLE_TAIL:]}"
        )
    return text


def _qemu_command(machine: VmMachine, share: Path) -> list[str]:
    host = cache() / "host"
    memory_mib = sum(node.memory_mib for node in machine.nodes)
    shape = f"sockets={machine.sockets},cores={machine.cores},threads={machine.threads}"
    num_cpus = machine.sockets * machine.cores * machine.threads
    # TCG's "max" is an AMD processor without topoext, whose threads the kernel would treat as cores.
    cpu = f"max,vendor=GenuineIntel,{','.join(f'-{feature}' for feature in _SLOW_IN_EMULATION)}"
    return [
        *(str(host / "usr/bin/qemu-system-x86_64"), "-L", str(host / "usr/share/qemu")),
        *("-L", str(host / "usr/share/seabios"), "-machine", "q35,accel=tcg", "-cpu", cpu),
        *("-smp", f"{num_cpus},{shape}", "-m", f"{memory_mib}M"),
        *_node_options(machine),
        *_gpu_options(machine),
        *_shared_folder("root", Path("/"), "readonly=on"),
        *_shared_folder("share", share, "readonly=off"),
        *("-kernel", str(cache() / "vmlinuz"), "-initrd", str(cache() / "initrd.gz")),
        # no_timer_check: on a busy host the emulated timer may be late, for which the kernel would panic
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"),
        *("-display", "none", "-vga", "none", "-nic", "none", "-serial", "stdio", "-no-reboot"),
    ]


def _node_options(machine: VmMachine) -> list[str]:
    options = []
    for number, node in enumerate(machine.nodes):
        cpus = "".join(f",cpus={run}" for run in cpu_set.render(node.cpus).split(",") if run)
        options += ["-object", f"memory-backend-ram,id=m{number},size={node.memory_mib}M"]
        options += ["-numa", f"node,nodeid={number}{cpus},memdev=m{number}"]
    for source, row in enumerate(machine.distances):
        for target, distance in enumerate(row):
            options += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    return options


def _gpu_options(machine: VmMachine) -> list[str]:
    """Give each GPU a host bridge on its node, a root port, and a harmless device."""
    options = []
    for number, gpu in enumerate(machine.gpus):
        options += ["-device", f"pxb-pcie,id=px{number},bus_nr={gpu.bus},numa_node={gpu.node},bus=pcie.0"]
        options += ["-device", f"pcie-root-port,id=rp{number},bus=px{number},chassis={number},slot={number}"]
        options += ["-device", f"virtio-rng-pci,bus=rp{number}"]
    return options


def _shared_folder(tag: str, path: Path, mode: str) -> list[str]:
    # A comma would end the option; QEMU reads two commas as one.
    where = str(path).replace(",", ",,")
    return [
        *("-fsdev", f"local,id={tag},path={where},security_model=none,multidevs=remap,{mode}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag},bus=pcie.0"),
    ]


def _write_batch(machine: VmMachine, batch: Batch, share: Path) -> None:
    """Write the file that agent.py reads, and the shell script that starts it."""
    for job in batch.jobs:
        (share / job.name).mkdir()
    told = {
        "gpus": [gpu.address for gpu in machine.gpus],
        "preload": [*batch.preload],
        "jobs": [_told(job) for job in batch.jobs],
    }
    (share / "jobs.json").write_text(json.dumps(told))
    assignments = [f"{name}={value}" for name, value in _environment(batch.libraries).items()]
    start = shlex.join(["env", "-i", *assignments, sys.executable, str(HERE / "agent.py")])
    (share / "batch.sh").write_text(f"cd /run/tmp\n{start}\n")


def _told(job: Job) -> dict[str, object]:
    return {
        "name": job.name,
        "argv": [*map(str, job.argv)],
        "env": {"PROBE_OUT": str(SHARE / job.name), **job.env},
        "cpuset": job.cpuset,
        "refuse_policy": job.refuse_policy,
        "timeout_s": job.timeout_s,
    }


def _environment(libraries: Path | None) -> dict[str, str]:
    guest = cache() / "guest"
    searched = [*([libraries] if libraries else []), *(guest / base for base in _LIBRARIES)]
    return {
        "PATH": f"{Path(sys.executable).parent}:{guest / 'usr/bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LD_LIBRARY_PATH": ":".join(map(str, searched)),
        "HOME": "/run/tmp",
        "TMPDIR": "/run/tmp",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "passive",  # spinning is expensive when two CPUs emulate eight
    }


def _job_result(folder: Path) -> JobResult:
    result = json.loads(_text(folder / "result.json") or "{}")
    return JobResult(
        status=result.get("status"),
        seconds=result.get("seconds"),
        stdout=_text(folder / "stdout"),
        stderr=_text(folder / "stderr"),
        out=folder,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def compare(file: str, name: str, found: object) -> None:
    """Compare what was observed with its record in recorded/FILE.json; NUMAPIN_UPDATE_GOLDEN=1 records it anew."""
    path, found = HERE / "recorded" / f"{file}.json", json.loads(json.dumps(found))
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        recorded[name] = found
        path.write_text(compact(dict(sorted(recorded.items()))))
    assert found == recorded.get(name), f"{name} is not as in {path}"


def results() -> str | None:
    """Return the folder for docs/results, if NUMAPIN_RESULTS names one."""
    return os.environ.get("NUMAPIN_RESULTS")


def publish(name: str, content: str | Mapping[str, object]) -> None:
    """Write a file if there is a folder for results; JSON gets the versions that were used."""
    folder = results()
    if folder is None:
        return
    if not isinstance(content, str):
        made = json.loads((cache() / "ready.json").read_text())
        versions = {"torch": version("torch"), "kernel": made["kernel"], "qemu": made["qemu"]}
        content = json.dumps({"versions": versions, **content}, indent=1) + "\n"
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, name).write_text(content)
