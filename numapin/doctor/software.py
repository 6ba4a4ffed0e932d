"""Checks of the driver, NCCL, libraries and environment variables. Pure; all of them ask the running machine.

Comes in: `Live` and the `Topology`. Goes out: one `DoctorFinding` a check.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from numapin.data import forks
from numapin.doctor.model import Check
from numapin.system.openmp import binding_variables

if TYPE_CHECKING:
    from numapin.doctor.model import DoctorFinding, Live
    from numapin.topology.model import Topology

DRIVER: Final = Check(
    name="driver",
    where="nvmlInit, nvmlSystemGetDriverVersion, /proc/driver/nvidia/version",
    why="Where libraries and kernel module differ, or one is missing, CUDA does not start.",
)
PERSISTENCE: Final = Check(
    name="persistence",
    where="nvmlDeviceGetPersistenceMode",
    why="Without persistence mode the driver starts each GPU anew, which takes seconds, whenever nobody used it.",
)
LIBNUMA: Final = Check(
    name="libnuma",
    where="import numa, dlopen libnuma.so.1",
    why="Without it ranks keep their CPUs but get no memory policy, and pages cannot be asked where they are.",
)
STORES: Final = Check(
    name="streaming-stores",
    where="dlopen libstores.so beside numapin",
    why="Large batches for a GPU are written past the caches with it, a third less traffic on the memory bus.",
)
PYTHON: Final = Check(
    name="python",
    where="sys.version_info",
    why="Before 3.11.10 a forked DataLoader worker can hang before its first line, where a thread of C++, as gloo's, "
    "was asking for the GIL: torch's loader then waits for ever, numapin's starts the worker again.",
)
NCCL: Final = Check(
    name="nccl",
    where="the metadata of the packages nvidia-nccl-cu*",
    why="NCCL 2.29.2 to 2.29.7 leave the thread that makes a communicator on the GPU's CPUs, and with it all that "
    "this thread starts later.",
)
NCCL_AFFINITY: Final = Check(
    name="nccl-affinity",
    where="NCCL_IGNORE_CPU_AFFINITY in the environment",
    why="NCCL's threads then use all CPUs of the GPU's node, also those that were given to other ranks.",
)
OPENMP: Final = Check(
    name="openmp-affinity",
    where="OMP_PROC_BIND, OMP_PLACES, KMP_AFFINITY, GOMP_CPU_AFFINITY in the environment",
    why="OpenMP then binds the main thread to one place when torch is imported: DataLoader workers inherit that, and "
    "ranks that share a node get the same CPUs.",
)
DEVICE_ORDER: Final = Check(
    name="device-order",
    where="CUDA_DEVICE_ORDER in the environment, nvmlDeviceGetName",
    why="With GPUs of several models CUDA numbers the fastest first, so that cuda:0 is not NVML's or PCI's GPU 0.",
)


def driver(live: Live, topology: Topology) -> DoctorFinding:
    """Find a driver that is missing, or whose libraries and kernel module differ."""
    nvml = live.nvml
    if nvml.gpus is None:
        what, _, remedy = (nvml.notes[0] if nvml.notes else "NVML does not answer; nvidia-smi").rpartition("; ")
        if nvml.broken or topology.gpus:
            return DRIVER.error(what, remedy=remedy)
        return DRIVER.note(f"{what}, and no NVIDIA GPU was seen", remedy=remedy)
    module = live.module_version
    if nvml.driver and module and nvml.driver != module:
        return DRIVER.error(
            f"the libraries are {nvml.driver}, the kernel module is {module}",
            remedy="reboot, or unload and load the nvidia modules (in a container: start it anew)",
        )
    return DRIVER.ok(f"{nvml.driver or 'its version is not told'}, kernel module {module or 'not told'}")


def persistence(live: Live, _topology: Topology) -> DoctorFinding:
    """Find GPUs that are shut down while nobody uses them."""
    gpus = live.nvml.gpus or ()
    off = [f"gpu{gpu.index}" for gpu in gpus if gpu.persistence is False]
    if off:
        return PERSISTENCE.note(
            f"off for {', '.join(off)}",
            remedy="sudo systemctl enable --now nvidia-persistenced (or sudo nvidia-smi -pm 1)",
        )
    if not gpus:
        return PERSISTENCE.ok("there is no GPU")
    if any(gpu.persistence is None for gpu in gpus):
        return PERSISTENCE.unknown("NVML does not tell")
    return PERSISTENCE.ok("on")


def libnuma(live: Live, _topology: Topology) -> DoctorFinding:
    """Find that libnuma is missing."""
    if live.libnuma is None:
        return LIBNUMA.ok("can be used")
    remedy = "sudo apt-get install libnuma1 (Fedora, RHEL: sudo dnf install numactl-libs)"
    return LIBNUMA.error(live.libnuma, remedy=remedy)


def streaming_stores(live: Live, _topology: Topology) -> DoctorFinding:
    """Find that numapin was installed where there was no C compiler."""
    if live.streaming_stores is None:
        return STORES.ok("for x86-64 only, which this machine is not")
    if live.streaming_stores:
        return STORES.ok("libstores.so is there")
    remedy = "sudo apt-get install gcc libc6-dev, then: pip install --force-reinstall --no-deps numapin"
    return STORES.note("libstores.so is missing: torch.stack writes the batches", remedy=remedy)


def python(live: Live, _topology: Topology) -> DoctorFinding:
    """Find a Python whose forked children can hang."""
    version = ".".join(map(str, live.python))
    if forks.may_hang(live.python):
        return PYTHON.warning(
            f"{version}: forked children can hang ({forks.ISSUE})", remedy=f"use Python {forks.MENDED} or later"
        )
    return PYTHON.ok(version)


def nccl(live: Live, _topology: Topology) -> DoctorFinding:
    """Find an NCCL that does not give the caller its CPUs back."""
    if not live.nccl:
        return NCCL.unknown("no package nvidia-nccl-cu* is installed beside numapin")
    what = ", ".join(f"{package} {version}" for package, version in live.nccl.items())
    versions = {package: _version(text) for package, text in live.nccl.items()}
    affected = [package for package, version in versions.items() if version and (2, 29, 2) <= version < (2, 30, 3)]
    if affected:
        return NCCL.warning(
            what, remedy=f"pip install --upgrade '{affected[0]}>=2.30.3' (torch asks for a version of its own)"
        )
    if None in versions.values():
        return NCCL.unknown(f"{what}: not a version of NCCL")
    return NCCL.ok(f"{what}: gives the caller the CPUs back that it had")


def _version(text: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", text, re.ASCII)
    return None if match is None else tuple(map(int, match.groups()))


def nccl_affinity(live: Live, _topology: Topology) -> DoctorFinding:
    """Find NCCL told to leave the CPUs that its rank was bound to."""
    value = live.environ.get("NCCL_IGNORE_CPU_AFFINITY")
    if value in (None, "", "0"):
        return NCCL_AFFINITY.ok("not set" if value is None else f"set to {value!r}")
    return NCCL_AFFINITY.warning(f"NCCL_IGNORE_CPU_AFFINITY={value}", remedy="unset NCCL_IGNORE_CPU_AFFINITY")


def openmp(live: Live, _topology: Topology) -> DoctorFinding:
    """Find variables that make OpenMP bind threads."""
    binding = binding_variables(live.environ)
    if not binding:
        return OPENMP.ok("none of them binds threads")
    return OPENMP.warning(
        ", ".join(f"{name}={value}" for name, value in binding.items()), remedy=f"unset {' '.join(binding)}"
    )


def device_order(live: Live, topology: Topology) -> DoctorFinding:
    """Find GPUs of several models in CUDA's own order."""
    models = sorted({gpu.name for gpu in topology.gpus if gpu.name})
    order = live.environ.get("CUDA_DEVICE_ORDER")
    if order == "PCI_BUS_ID" or len(models) < 2:
        return DEVICE_ORDER.ok(f"{order or 'not set'}; GPUs of {len(models)} model{'' if len(models) == 1 else 's'}")
    return DEVICE_ORDER.warning(
        f"{order or 'not set'}, and GPUs are of several models: {', '.join(models)}",
        remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )
