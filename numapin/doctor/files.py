"""The doctor's facts from /proc and /sys below any root directory. Edge.

Comes in: a root ("/" is the live machine), its `Topology`, and the facts of the running machine. Goes out:
`DoctorReadings`. A file that is missing, unreadable or garbled is unknown. Source: proc(5);
Documentation/ABI/testing/sysfs-class-iommu, sysfs-kernel-iommu_groups, sysfs-devices-system-cpu;
Documentation/admin-guide/sysctl/kernel.rst, mm/transhuge.rst.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from numapin.doctor.model import DoctorReadings
from numapin.system.cgroup import memory_cgroups
from numapin.system.tree import Tree
from numapin.topology.model import Pcie
from numapin.topology.readings import pcie_generation, pcie_width

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numapin.doctor.model import Live
    from numapin.topology.model import Topology

_CPU: Final = "sys/devices/system/cpu"
_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage"
_PCI: Final = "sys/bus/pci/devices"


def read_files(root: Path, topology: Topology, *, live: Live | None) -> DoctorReadings:
    """Read all files that the checks need, for the GPUs and CPUs of `topology`."""
    tree = Tree(os.fspath(root).rstrip("/"))
    gpus = {gpu.index: f"{_PCI}/{gpu.pci}" for gpu in topology.gpus if gpu.pci}
    return DoctorReadings(
        kernel=_kernel(tree),
        command_line=tree.text("proc/cmdline"),
        memory=_memory(tree),
        cgroups=tuple((tree.text("proc/self/cgroup") or "").splitlines()),
        memlock=_match(tree.text("proc/self/limits"), r"^Max locked memory\s+(unlimited|[0-9]{1,19})\s"),
        memory_limit=_memory_limit(tree),
        numa_balancing=_word(tree, "proc/sys/kernel/numa_balancing"),
        huge_pages=_choice(tree, f"{_HUGE_PAGES}/enabled"),
        shared_huge_pages=_choice(tree, f"{_HUGE_PAGES}/shmem_enabled"),
        governors=_governors(tree, topology),
        frequency_driver=_word(tree, f"{_CPU}/cpu{min(topology.cpus, default=0)}/cpufreq/scaling_driver"),
        smt=_word(tree, f"{_CPU}/smt/control"),
        iommus=tuple(tree.names("sys/class/iommu")),
        iommu_types=_gpu_words(tree, gpus, "iommu_group/type"),
        gpu_nodes=_gpu_words(tree, gpus, "numa_node"),
        slots={index: _slot(tree, path) for index, path in gpus.items()},
        live=live,
    )


def read_module_version(root: Path) -> str | None:
    """Return the version of the loaded NVIDIA kernel module, or None."""
    text = Tree(os.fspath(root).rstrip("/")).text("proc/driver/nvidia/version")
    return _match(text, r"^NVRM version:.*?\s([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\s")


def read_confinement(root: Path) -> tuple[int | None, int | None]:
    """Return the seccomp mode of this process and its effective capabilities as a bit mask; None: unknown."""
    status = Tree(os.fspath(root).rstrip("/")).text("proc/self/status")
    mode, mask = _match(status, r"^Seccomp:\s*([0-9])$"), _match(status, r"^CapEff:\s*([0-9a-f]{1,16})$")
    return _integer(mode, base=10), _integer(mask, base=16)


def _integer(digits: str | None, *, base: int) -> int | None:
    return None if digits is None else int(digits, base)


def _kernel(tree: Tree) -> str | None:
    """Return the kernel's release; captures often have only /proc/version."""
    return _word(tree, "proc/sys/kernel/osrelease") or _match(
        tree.text("proc/version"), r"^Linux version ([\w.+~-]{1,64})\s"
    )


def _memory(tree: Tree) -> Mapping[str, int]:
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB$", tree.text("proc/meminfo") or "", re.MULTILINE)
    return {key: int(kilobytes) * 1024 for key, kilobytes in lines}


def _memory_limit(tree: Tree) -> int | None:
    """Return the lowest memory limit of this process's cgroups; "max" is not a number."""
    limits = (tree.number(f"{directory}/{files.limit}") for directory, files in memory_cgroups(tree))
    return min((limit for limit in limits if limit is not None), default=None)


def _governors(tree: Tree, topology: Topology) -> Mapping[str, int]:
    words = (_word(tree, f"{_CPU}/cpu{cpu}/cpufreq/scaling_governor") for cpu in sorted(topology.cpus))
    return Counter(word for word in words if word and word.isidentifier())


def _gpu_words(tree: Tree, gpus: Mapping[int, str], name: str) -> Mapping[int, str]:
    """Return the word in a file of each GPU, by index; a GPU without one is left out."""
    words = {index: _word(tree, f"{path}/{name}") for index, path in gpus.items()}
    return {index: word for index, word in words.items() if word}


def _slot(tree: Tree, gpu: str) -> Pcie:
    """Return the fastest link of the port above a GPU; a device's entry is a link, so `..` leads to that port."""
    port = f"{gpu}/.."
    return Pcie(
        max_gen=pcie_generation(tree.text(f"{port}/max_link_speed")),
        max_width=pcie_width(tree.number(f"{port}/max_link_width")),
    )


def _word(tree: Tree, path: str) -> str | None:
    """Return the only word of a file; None if it holds anything else."""
    return _match(tree.text(path), r"\A([\w.+~-]{1,64})\Z")


def _choice(tree: Tree, path: str) -> str | None:
    """Return the word in brackets of a file such as "always [madvise] never"."""
    return _match(tree.text(path), r"\[(\w+)\]")


def _match(text: str | None, pattern: str) -> str | None:
    match = re.search(pattern, text or "", re.MULTILINE | re.ASCII)
    return match[1] if match else None
