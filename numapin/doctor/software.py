"""Checks of the driver, NCCL and libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.text import counted, printable
from numapin.doctor.check import Live, Result, error, live_check, note, ok, unknown, warning
from numapin.system.libraries import (
    FORKS_ISSUE,
    FORKS_MENDED,
    NCCL_MENDED,
    forks_may_hang,
    narrows,
)

if TYPE_CHECKING:
    from numapin.doctor.check import Host


@live_check(
    "driver",
    where="nvmlInit, nvmlSystemGetDriverVersion, /proc/driver/nvidia/version",
    why="CUDA does not start if the driver's libraries or its kernel module are missing, if their versions differ, or, "
    "often, if a GPU has failed.",
)
def driver(live: Live, host: Host) -> Result:
    """Find a driver that is missing, has lost a GPU or leaves one out, or whose libraries and kernel module differ."""
    left_out = (*live.nvml.lost, *live.nvml.silent)
    if left_out:
        whats, _, remedies = zip(*(note.rpartition("; ") for note in left_out), strict=True)
        has_failed = bool(live.nvml.lost)
        return (error if has_failed else warning)("; ".join(whats), remedy=f"drain the host; {remedies[0]}")
    if live.nvml.gpus is not None:
        # The open and the closed kernel module write their version differently.
        version = r"^NVRM version:.*?\s([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\s"
        libraries, module = live.nvml.driver, host.match("proc/driver/nvidia/version", version)
        if len({libraries, module} - {None, ""}) > 1:
            return error(
                f"the driver's libraries are {libraries}, but the kernel module is {module}",
                remedy="reboot, or unload and reload the nvidia modules (in a container: restart it)",
            )
        return ok(f"{libraries or 'version unknown'}, kernel module {module or 'unknown'}")
    what, _, remedy = next(iter(live.nvml.notes), "NVML does not answer; nvidia-smi").rpartition("; ")
    others = [gpu for gpu in host.topology.gpus if not gpu.is_nvidia]
    if live.nvml.broken or len(others) < len(host.topology.gpus):
        return error(what, remedy=remedy)
    if not others:
        return note(f"{what}, and no NVIDIA GPU was found", remedy=remedy)
    # All GPUs are of other vendors: what counts is whether ranks can use them.
    vendors = ", ".join(sorted({str(gpu.vendor) for gpu in others}))
    shown = f"{counted(len(host.topology.visible_gpus), 'GPU')} of {len(others)} visible ({vendors})"
    return ok(shown) if host.topology.visible_gpus else error(shown, remedy="see the notes of: numapin topo")


@live_check(
    "persistence",
    where="nvmlDeviceGetPersistenceMode",
    why="Without persistence mode, the driver initializes an idle GPU again for each job, which takes seconds.",
)
def persistence(live: Live, _host: Host) -> Result:
    """Find GPUs that are shut down while idle."""
    modes = {f"gpu{gpu.index}": gpu.persistence for gpu in live.nvml.gpus or ()}
    off = [name for name, mode in modes.items() if mode is False]
    if off:
        remedy = "sudo systemctl enable --now nvidia-persistenced (or: sudo nvidia-smi -pm 1)"
        return note(f"off for {', '.join(off)}", remedy=remedy)
    if None in modes.values():
        return unknown("NVML does not report it")
    return ok("on" if modes else "no GPU")


@live_check(
    "libnuma",
    where="import numa, dlopen libnuma.so.1",
    why="Without libnuma, numapin cannot read the machine that it runs on: run, exec, plan and topo end with status 3.",
)
def libnuma(live: Live, _host: Host) -> Result:
    """Find a missing libnuma."""
    if live.libnuma is None:
        return ok("available")
    remedy = "sudo apt-get install libnuma1 (Fedora, RHEL: sudo dnf install numactl-libs)"
    return error(live.libnuma, remedy=remedy)


@live_check(
    "python",
    where="sys.version_info",
    why=f"Before Python {FORKS_MENDED}, a forked DataLoader worker can hang at its start if a C++ thread, e.g. one of "
    "gloo, was waiting for the GIL. torch's loader then waits forever; numapin's starts the worker again.",
)
def python(live: Live, _host: Host) -> Result:
    """Find a Python whose forked children can hang."""
    version = ".".join(map(str, live.python))
    if not forks_may_hang(live.python):
        return ok(version)
    what = f"{version}: forked children can hang ({FORKS_ISSUE})"
    return warning(what, remedy=f"use Python {FORKS_MENDED} or newer")


@live_check(
    "torch",
    where="the metadata of the package torch, and private names in its files",
    why="topo, plan, job, exec, doctor, verify, top, attach and run work without torch. trace, compare, bench, the "
    "DataLoader, and `run` with a rendezvous of torch (--rdzv-backend, or several hosts that may restart or change in "
    "number) need it. The DataLoader is built on private names of torch; if a release lacks one, batches come from "
    "torch's own loader.",
)
def torch(live: Live, _host: Host) -> Result:
    """Find an environment without torch, or a torch that numapin's DataLoader does not know."""
    if live.torch is None:
        return note("not installed", remedy="pip install 'numapin[torch]', if you need one of these")
    if live.torch_off:
        what, _, remedy = live.torch_off.rpartition("; ")
        return warning(what, remedy=remedy)
    return ok(live.torch)


@live_check(
    "py-libnuma",
    where="the list of files of the package py-libnuma",
    why="py-libnuma 1.2 also installs a package `tests`. `import tests` in a project then finds that one, unless the "
    "project's own folder comes first on sys.path.",
)
def strays(live: Live, _host: Host) -> Result:
    """Find packages that py-libnuma has put beside its own."""
    if not live.strays:
        return ok("installs nothing but its own package")
    what = f"it also installed {', '.join(map(printable, live.strays))}: it may hide the tests of a project"
    return note(what, remedy="run a project's tests in its folder with: python -m pytest")


@live_check(
    "nccl",
    where="the metadata of the packages nvidia-nccl-cu*, else the file name of libnccl.so.2",
    why="NCCL 2.29.2 to 2.29.7 bind the thread that creates a communicator to the CPUs of the GPU's node and leave it "
    "there, with all threads that it starts later. Other versions leave a rank that nothing else binds on "
    "all CPUs.",
)
def nccl(live: Live, _host: Host) -> Result:
    """Find an NCCL that does not restore the caller's CPU affinity."""
    if not live.nccl:
        return unknown("no package nvidia-nccl-cu* and no libnccl.so.2 is installed")
    what = ", ".join(map(" ".join, live.nccl.items()))
    affected = [name for name, version in live.nccl.items() if narrows(version)]
    if affected:
        upgrade = f"pip install --upgrade '{affected[0]}>={NCCL_MENDED}' (pip warns if torch requires another version)"
        remedy = f"install libnccl2 {NCCL_MENDED} or newer" if affected[0].startswith("/") else upgrade
        return warning(f"{what}: does not restore the caller's CPU affinity", remedy=remedy)
    if None in map(narrows, live.nccl.values()):
        return unknown(f"{what}: not a version of NCCL")
    return ok(f"{what}: restores the caller's CPU affinity, so it binds no rank")
