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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.machines.compact import compact
from tests.nvml import fake
from tests.vm.seam import CpuSet, cpu_set

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
SHARE: Final = Path("/run/share")
"""The machine's path of the folder through which it passes files to the host."""
GPUS: Final = {"FAKE_NVML_DATA": str(SHARE / "gpus.nvml")}
"""Variables with which NVML reports the machine's GPUs, in the order of its file."""
_LIBRARIES: Final = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")
_CONSOLE_TAIL: Final = 4000
_SLOW_IN_EMULATION: Final = ("erms", "fsrm", "xsave", "avx", "avx2", "la57", "smap", "smep", "pku", "umip")
"""Features of a processor that are slow to emulate. Without them torch is imported in half of the CPU time, and
memory is touched in a quarter: "rep movsb" is emulated byte by byte, and each symbol that is bound saves all registers.
"""
BOOT_LIMIT_S: Final = 3600
"""The time after which a machine counts as hung: more than ten times that of the longest on two idle cores."""
TEST_LIMIT_S: Final = BOOT_LIMIT_S + 60


class VmNode(NamedTuple):
    """One NUMA node of a machine; without CPUs it has only memory."""

    cpus: frozenset[int]
    memory_mib: int


class VmGpu(NamedTuple):
    """A PCI device that stands in for a GPU: on a node, behind a host bridge with bus number `bus`, at `address`."""

    node: int
    bus: int
    address: str


class VmMachine(NamedTuple):
    """The machine that QEMU builds. `gpus` are in NVML's order."""

    name: str
    nodes: tuple[VmNode, ...]
    gpus: tuple[VmGpu, ...]
    distances: list[list[int]]
    sockets: int
    cores: int
    threads: int

    @classmethod
    def load(cls, name: str) -> VmMachine:
        """Read machines/NAME.toml; NAME-again is a second machine of that kind."""
        values = tomllib.loads((HERE / "machines" / f"{name.removesuffix('-again')}.toml").read_text())
        nodes = tuple(VmNode(CpuSet.parse(node["cpus"]), node["memory_mib"]) for node in values.pop("node"))
        return cls(name, nodes, tuple(VmGpu(**gpu) for gpu in values.pop("gpu")), **values)


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
class JobResult:
    """The result of one job. `status` is None if the job did not finish, 124 if it exceeded its time limit."""

    status: int | None
    stdout: str
    stderr: str
    out: Path

    def shown(self) -> str:
        return f"status {self.status}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmResult:
    machine: VmMachine
    jobs: Mapping[str, JobResult]

    def found(self, job: str, file: str) -> Any:
        """Return what a job wrote into a JSON file; the job must have succeeded."""
        done = self.jobs[job]
        assert done.status == 0, done.shown()
        path = done.out / file
        assert path.exists(), f"the job left no {file}; {done.shown()}"
        return json.loads(path.read_text())

    def report(self, job: str, file: str) -> dict[str, Any]:
        """Return the result of a command whose JSON report a probe kept as `report`; there must be one."""
        found: dict[str, Any] = self.found(job, file)
        assert found["report"] is not None, found["stderr"]
        return found


def cache() -> Path:
    return Path(os.environ.get("NUMAPIN_VM_CACHE") or REPOSITORY / ".cache" / "vm").absolute()


def missing() -> str | None:
    """Return why no machine can be booted, None if one can."""
    return None if (cache() / "ready.json").exists() else "QEMU and a kernel are not unpacked: run `make vm`"


def boot(
    machine: VmMachine, jobs: Sequence[Job], *, environ: Mapping[str, str], preload: Sequence[str], share: Path
) -> VmResult:
    """Boot `machine`, run the jobs one after another, power off, and return the results.

    All jobs have the variables of `environ`; its LD_LIBRARY_PATH comes first. Modules in `preload` are imported once,
    before any job `python -m MODULE` starts. `share` is an empty folder for the jobs and their results. Raises
    RuntimeError, with the end of the console, if the machine does not boot, hangs, panics, or takes too long.
    """
    _write_batch(machine, jobs, environ, preload, share)
    _run_qemu(_qemu_command(machine, share), console=share / "console")
    results = {}
    for job in jobs:
        out = share / job.name
        status, stdout, stderr = (_text(out / name) for name in ("result.json", "stdout", "stderr"))
        results[job.name] = JobResult(
            status=json.loads(status)["status"] if status else None, stdout=stdout, stderr=stderr, out=out
        )
    return VmResult(machine=machine, jobs=results)


def _run_qemu(command: list[str], *, console: Path) -> None:
    """Run QEMU, with its output in a file; kill its process group at the time limit."""
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
            qemu.wait(BOOT_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # the console shows its progress
        finally:
            if qemu.poll() is None:
                os.killpg(qemu.pid, signal.SIGKILL)
                qemu.wait()
    text = console.read_text(errors="replace")
    if "VM: done" not in text:
        raise RuntimeError(
            f"the machine did not finish in {BOOT_LIMIT_S} s (QEMU's status {qemu.returncode}); "
            f"its console ends with:\n{text[-_CONSOLE_TAIL:]}"
        )


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
        *_node_and_gpu_options(machine),
        *_shared_folder("root", Path("/"), "readonly=on"),
        *_shared_folder("share", share, "readonly=off"),
        *("-kernel", str(cache() / "vmlinuz"), "-initrd", str(cache() / "initrd.gz")),
        # no_timer_check: on a busy host the emulated timer may be late, for which the kernel would panic
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"),
        *("-display", "none", "-vga", "none", "-nic", "none", "-serial", "stdio", "-no-reboot"),
    ]


def _node_and_gpu_options(machine: VmMachine) -> list[str]:
    """Give each node its memory, and each GPU a host bridge on its node, a root port, and a harmless device."""
    options = []
    for number, node in enumerate(machine.nodes):
        cpus = "".join(f",cpus={run}" for run in cpu_set.render(node.cpus).split(",") if run)
        options += ["-object", f"memory-backend-ram,id=m{number},size={node.memory_mib}M"]
        options += ["-numa", f"node,nodeid={number}{cpus},memdev=m{number}"]
    for source, row in enumerate(machine.distances):
        for target, distance in enumerate(row):
            options += ["-numa", f"dist,src={source},dst={target},val={distance}"]
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


def _write_batch(
    machine: VmMachine, jobs: Sequence[Job], environ: Mapping[str, str], preload: Sequence[str], share: Path
) -> None:
    gpus = [
        fake.FakeGpu(uuid=f"GPU-00000000-0000-0000-0000-{index:012d}", pci=f"0000{gpu.address}")
        for index, gpu in enumerate(machine.gpus)
    ]
    (share / "gpus.nvml").write_text(fake.render(gpus))
    described = []
    for job in jobs:
        (share / job.name).mkdir()
        own = {"PROBE_OUT": str(SHARE / job.name), **job.env}
        described.append({**asdict(job), "argv": [*map(str, job.argv)], "env": own})
    told = {"gpus": [gpu.address for gpu in machine.gpus], "preload": [*preload], "jobs": described}
    (share / "jobs.json").write_text(json.dumps(told))
    guest = cache() / "guest"
    searched = [environ["LD_LIBRARY_PATH"], *(str(guest / base) for base in _LIBRARIES)]
    common = {
        **environ,
        "PATH": f"{Path(sys.executable).parent}:{guest / 'usr/bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LD_LIBRARY_PATH": ":".join(searched),
        "HOME": "/run/tmp",
        "TMPDIR": "/run/tmp",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "passive",  # spinning is expensive when two CPUs emulate eight
    }
    assignments = [f"{name}={value}" for name, value in common.items()]
    start = shlex.join(["env", "-i", *assignments, sys.executable, str(HERE / "agent.py")])
    (share / "batch.sh").write_text(f"cd /run/tmp\n{start}\n")


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


def publish(name: str, content: str | Mapping[str, object]) -> None:
    """Write a file for docs/results if NUMAPIN_RESULTS names a folder; JSON gets the versions that were used."""
    folder = os.environ.get("NUMAPIN_RESULTS")
    if folder is None:
        return
    if not isinstance(content, str):
        made = json.loads((cache() / "ready.json").read_text())
        versions = {"torch": version("torch"), "kernel": made["kernel"], "qemu": made["qemu"]}
        content = json.dumps({"versions": versions, **content}, indent=1) + "\n"
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, name).write_text(content)
