"""Boot a machine with several NUMA nodes in QEMU, run commands in it, and bring back what they wrote.

Comes in: a `VmMachine` (a file in machines/) and `Job`s. Goes out: a `VmResult`, with each job's exit status, output
and files. The machine runs a real Linux kernel in emulation and sees this host's file system: at its own paths, with
the writes kept in memory. `make vm` unpacks QEMU and the kernel; `missing()` says whether it was run.
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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin import cpulist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
SHARE: Final = Path("/run/share")
"""Where the machine sees the folder that it may write and the host reads."""
_LIBRARIES: Final = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")
_CONSOLE_TAIL: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class VmNode:
    """One NUMA node of a machine; without CPUs it is memory only."""

    cpus: frozenset[int]
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VmGpu:
    """A PCI device that plays a GPU: on its node, behind a host bridge of bus number `bus`, seen at `address`."""

    node: int
    bus: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VmMachine:
    """What QEMU is to build. `gpus` are in NVML's order."""

    name: str
    sockets: int
    cores: int
    threads: int
    distances: tuple[tuple[int, ...], ...]
    nodes: tuple[VmNode, ...]
    gpus: tuple[VmGpu, ...]

    @classmethod
    def load(cls, name: str) -> VmMachine:
        """Read machines/NAME.toml."""
        values = tomllib.loads((HERE / "machines" / f"{name}.toml").read_text())
        return cls(
            name=name,
            sockets=values["sockets"],
            cores=values["cores"],
            threads=values["threads"],
            distances=tuple(map(tuple, values["distances"])),
            nodes=tuple(VmNode(cpus=cpulist.parse(n["cpus"]), memory_mib=n["memory_mib"]) for n in values["node"]),
            gpus=tuple(VmGpu(**gpu) for gpu in values["gpu"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command to run in the machine; what it writes below $PROBE_OUT is in `JobResult.out` afterwards.

    LD_LIBRARY_PATH in `env` comes before the machine's own. `cpuset` limits the command to (CPUs, nodes) by a cgroup
    v2; `refuse_policy` puts it under the seccomp filter of refuse_policy.py.
    """

    name: str
    argv: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    cpuset: tuple[str, str] | None = None
    refuse_policy: bool = False
    timeout_s: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What one job did. `status` is None where it never ended; 124 is its own time limit."""

    status: int | None
    stdout: str
    stderr: str
    out: Path
    seconds: float | None

    def json(self, file: str) -> object:
        """Decode a JSON file that the job wrote; where there is none, fail with what the job printed."""
        path = self.out / file
        assert path.exists(), f"the job left no {file}; {self.shown()}"
        return json.loads(path.read_text())

    def shown(self) -> str:
        """Render status and output for an assertion's message."""
        return f"status {self.status}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmResult:
    """What came back from one boot."""

    machine: VmMachine
    jobs: Mapping[str, JobResult]
    console: str


class VmFailedError(Exception):
    """The machine did not boot, hung or panicked; the message ends with the console's last lines."""


def cache() -> Path:
    """Return the folder that `make vm` fills."""
    return Path(os.environ.get("NUMAPIN_VM_CACHE") or REPOSITORY / ".cache" / "vm").absolute()


def missing() -> str | None:
    """Return why no machine can be booted, or None."""
    return None if (cache() / "ready.json").exists() else "QEMU and a kernel are not unpacked: run `make vm`"


def boot(machine: VmMachine, jobs: Sequence[Job], *, share: Path, timeout_s: float = 150) -> VmResult:
    """Boot `machine`, run `jobs` one after another, power off, and return what they did.

    `share` is an empty folder, which holds the script before and the results after. Raises VmFailedError with the
    console's tail where the machine does not finish in `timeout_s`.
    """
    for job in jobs:
        (share / job.name).mkdir()
    (share / "batch.sh").write_text("\n".join(["cd /run/tmp", *map(_job_script, jobs), ""]))
    console = _run_qemu(_qemu_command(machine, share), console=share / "console", timeout_s=timeout_s)
    results = {job.name: _job_result(share / job.name) for job in jobs}
    return VmResult(machine=machine, jobs=results, console=console)


def _run_qemu(command: list[str], *, console: Path, timeout_s: float) -> str:
    """Run QEMU to its end and return the console's text; its whole process group dies at the time limit."""
    libraries = ":".join(str(cache() / side / base) for side in ("host", "guest") for base in _LIBRARIES)
    with console.open("wb") as out:
        qemu = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"PATH": os.defpath, "LD_LIBRARY_PATH": libraries},
            start_new_session=True,
        )
        try:
            qemu.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # the console below shows how far it came
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
    # TCG's "max" is an AMD processor without topoext, whose threads the kernel would take for cores.
    cpu = "max,vendor=GenuineIntel"
    return [
        *(str(host / "usr/bin/qemu-system-x86_64"), "-L", str(host / "usr/share/qemu")),
        *("-L", str(host / "usr/share/seabios"), "-machine", "q35,accel=tcg", "-cpu", cpu),
        *("-smp", f"{num_cpus},{shape}", "-m", f"{memory_mib}M"),
        *_node_options(machine),
        *_gpu_options(machine),
        *_shared_folder("root", Path("/"), "readonly=on"),
        *_shared_folder("share", share, "readonly=off"),
        *("-kernel", str(cache() / "vmlinuz"), "-initrd", str(cache() / "initrd.gz")),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off"),
        *("-display", "none", "-vga", "none", "-nic", "none", "-serial", "stdio", "-no-reboot"),
    ]


def _node_options(machine: VmMachine) -> list[str]:
    options = []
    for number, node in enumerate(machine.nodes):
        cpus = "".join(f",cpus={run}" for run in cpulist.render(node.cpus).split(",") if run)
        options += ["-object", f"memory-backend-ram,id=m{number},size={node.memory_mib}M"]
        options += ["-numa", f"node,nodeid={number}{cpus},memdev=m{number}"]
    for source, row in enumerate(machine.distances):
        for target, distance in enumerate(row):
            options += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    return options


def _gpu_options(machine: VmMachine) -> list[str]:
    """Give each GPU a host bridge with a node, a root port on that, and a harmless device behind it."""
    options = []
    for number, gpu in enumerate(machine.gpus):
        options += ["-device", f"pxb-pcie,id=px{number},bus_nr={gpu.bus},numa_node={gpu.node},bus=pcie.0"]
        options += ["-device", f"pcie-root-port,id=rp{number},bus=px{number},chassis={number},slot={number}"]
        options += ["-device", f"virtio-rng-pci,bus=rp{number}"]
    return options


def _shared_folder(tag: str, path: Path, mode: str) -> list[str]:
    # A comma in a path would end the option; QEMU reads two as one.
    where = str(path).replace(",", ",,")
    return [
        *("-fsdev", f"local,id={tag},path={where},security_model=none,multidevs=remap,{mode}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag},bus=pcie.0"),
    ]


def _job_script(job: Job) -> str:
    """Write the shell lines that run one job and leave stdout, stderr, status and seconds in its folder."""
    folder = shlex.quote(str(SHARE / job.name))
    wrapper = [sys.executable, str(HERE / "refuse_policy.py")] if job.refuse_policy else []
    environment = [f"{name}={value}" for name, value in _environment(job).items()]
    words = ["timeout", "-k", "5", str(job.timeout_s), "env", *environment, *wrapper, *map(str, job.argv)]
    enter = _enter_cpuset(*job.cpuset, name=job.name) if job.cpuset else "true"
    run = f"{shlex.join(words)}; echo $? > {folder}/status"
    return "\n".join(
        (
            "began=$(cut -d. -f1 /proc/uptime)",
            f"( {enter} && {{ {run}; }} ) > {folder}/stdout 2> {folder}/stderr",
            f"echo $(($(cut -d. -f1 /proc/uptime) - began)) > {folder}/seconds",
        )
    )


def _enter_cpuset(cpus: str, nodes: str, *, name: str) -> str:
    """Write the shell commands that put the current subshell into a cgroup with these CPUs and nodes."""
    group = shlex.quote(f"/sys/fs/cgroup/{name}")
    return " && ".join(
        (
            "echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control",
            f"mkdir -p {group}",
            f"echo {cpus} > {group}/cpuset.cpus",
            f"echo {nodes} > {group}/cpuset.mems",
            f"sh -c 'echo $PPID' > {group}/cgroup.procs",  # $$ would be the batch's own shell
        )
    )


def _environment(job: Job) -> dict[str, str]:
    guest = cache() / "guest"
    libraries = [job.env["LD_LIBRARY_PATH"]] if "LD_LIBRARY_PATH" in job.env else []
    return {
        "PATH": f"{Path(sys.executable).parent}:{guest / 'usr/bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/run/tmp",
        "TMPDIR": "/run/tmp",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PROBE_OUT": str(SHARE / job.name),
        **job.env,
        "LD_LIBRARY_PATH": ":".join([*libraries, *(str(guest / base) for base in _LIBRARIES)]),
    }


def _job_result(folder: Path) -> JobResult:
    status, seconds = _text(folder / "status"), _text(folder / "seconds")
    return JobResult(
        status=int(status) if status else None,
        stdout=_text(folder / "stdout"),
        stderr=_text(folder / "stderr"),
        out=folder,
        seconds=float(seconds) if seconds else None,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
