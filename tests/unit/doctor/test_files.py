"""Checks that read files below a root, each on sound and faulty machines and with broken files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.doctor.given import findings, live, machine, put
from tests.unit.doctor.seam import CHECKS, DoctorSeverity, Tree, read_confinement, read_module_version

if TYPE_CHECKING:
    from pathlib import Path

GPU = "sys/bus/pci/devices/0000:10:00.0"
PORT = f"{GPU}/.."
NODE1 = "sys/devices/system/node/node1"
THP = "sys/kernel/mm/transparent_hugepage"
CPU0 = "sys/devices/system/cpu/cpu0/cpufreq"
STATUS = "Cpus_allowed_list:\t{}\nMems_allowed_list:\t{}\n"
LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {0}  {0}  bytes\n"
SWAP = "MemTotal: 1000000 kB\nSwapTotal: 500000 kB\nSwapFree: {} kB\n"
FULL = "Node 1 MemTotal: 1000000 kB\nNode 1 MemFree: 10000 kB\n"
ERROR, WARNING, NOTE, OK = DoctorSeverity


def cgroup(limit_bytes: int) -> dict[str, str | bytes | None]:
    """Return the files of a process whose cgroup has a memory limit."""
    return {
        "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": str(limit_bytes),
    }


CASES: list[tuple[str, dict[str, str | bytes | None], DoctorSeverity | None, str]] = [
    ("nodes", {}, OK, "2 nodes with CPUs on 2 sockets"),
    ("nodes", {"proc/cmdline": "quiet numa=off ro"}, WARNING, "started with numa=off"),
    ("nodes", {"proc/cmdline": "quiet xnuma=off"}, OK, "2 nodes"),
    ("gpu-nodes", {}, OK, "known for all GPUs (2)"),
    ("gpu-nodes", {f"{GPU}/numa_node": "-1", f"{GPU}/local_cpulist": "", f"{GPU}/local_cpus": "0"}, WARNING, "-1"),
    ("cpuset", {}, OK, "nodes 0-1 may be used"),
    ("cpuset", {"proc/self/status": STATUS.format("0-15:1/2", "0-1")}, ERROR, "no CPU of node 1 (gpu0)"),
    ("cpuset", {"proc/self/status": STATUS.format("0-15", "1")}, ERROR, "no memory of node 0 (gpu1)"),
    (
        "cpuset",
        {"proc/self/status": STATUS.format("0-3", "0-1")},
        NOTE,
        "only 2 of 8 CPUs of node 0, 2 of 8 CPUs of node 1 may be used",
    ),
    ("node-memory", {}, OK, "at least 50% free on every node"),
    ("host-memory", {}, None, "does not show it"),
    ("host-memory", {"proc/meminfo": "MemTotal: 130023424 kB"}, OK, "124.0 GiB (the nodes and /proc/meminfo agree; no"),
    (
        "host-memory",
        {"proc/meminfo": "MemTotal: 1073741824 kB"},
        NOTE,
        "the nodes have 128.0 GiB together, but /proc/meminfo says 1.0 TiB: a hypervisor may give and",
    ),
    (
        "host-memory",
        {"proc/meminfo": "MemTotal: 134217728 kB", **cgroup(64 << 30)},
        NOTE,
        "a cgroup limits this process to 64.0 GiB of 128.0 GiB",
    ),
    ("host-memory", {"proc/meminfo": "MemTotal: 134217728 kB", **cgroup(1 << 62)}, OK, "no lower limit"),
    (
        "host-memory",
        {"proc/meminfo": "MemTotal: 8388608 kB", **cgroup(8 << 30)},
        NOTE,
        "/proc/meminfo says 8.0 GiB: /proc/meminfo shows the limit of this container",
    ),
    ("node-memory", {f"{NODE1}/meminfo": FULL}, WARNING, "almost full: node 1 (free: 50.0% of node 0, 1.0% of node 1)"),
    ("memlock", {"proc/self/limits": LIMITS.format("unlimited")}, OK, "unlimited"),
    ("memlock", {"proc/self/limits": LIMITS.format("65536")}, NOTE, "limited to 64.0 KiB; no InfiniBand was found"),
    ("memlock", {}, None, "does not show it"),
    ("swap", {"proc/meminfo": SWAP.format(500000)}, OK, "0 B of 488.3 MiB in use"),
    ("swap", {"proc/meminfo": SWAP.format(499000)}, NOTE, "1000.0 KiB of 488.3 MiB"),
    ("swap", {"proc/meminfo": SWAP.format(400000)}, WARNING, "97.7 MiB of 488.3 MiB"),
    ("swap", {"proc/meminfo": "MemTotal: 1 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"}, OK, "no swap"),
    ("pcie-link", {}, OK, "PCIe 4 x16"),
    (
        "pcie-link",
        {f"{GPU}/current_link_speed": "2.5 GT/s PCIe"},
        NOTE,
        "gpu0 runs at PCIe 1 x16 instead of PCIe 4 x16; idle",
    ),
    ("pcie-link", {f"{GPU}/current_link_width": "8"}, NOTE, "gpu0 runs at PCIe 4 x8 instead of PCIe 4 x16; idle"),
    (
        "pcie-link",
        {f"{GPU}/current_link_width": "8", f"{PORT}/max_link_width": "8", f"{PORT}/max_link_speed": "32.0 GT/s PCIe"},
        WARNING,
        "gpu0 supports PCIe 4 x16, but its slot only PCIe 5 x8",
    ),
    ("pcie-link", {f"{PORT}/max_link_width": "1"}, OK, "x16"),  # a hypervisor's port, narrower than the link
    ("iommu", {"sys/class/iommu/dmar0/name": "", f"{GPU}/iommu_group/type": "DMA-FQ"}, WARNING, "for gpu0 (DMA-FQ)"),
    (
        "iommu",
        {"sys/class/iommu/dmar0/name": "", f"{GPU}/iommu_group/type": "identity"},
        OK,
        "passes through (identity)",
    ),
    ("iommu", {"sys/class/iommu/dmar0/name": "", "proc/cmdline": "iommu=pt"}, OK, "passes through (iommu=pt)"),
    (
        "iommu",
        {"sys/class/iommu/dmar0/name": "", "proc/cmdline": "ro"},
        NOTE,
        "GPUs is unknown",
    ),
    ("iommu", {}, None, "the capture has no such file"),
    ("numa-balancing", {"proc/sys/kernel/numa_balancing": "0"}, OK, "off"),
    ("numa-balancing", {"proc/sys/kernel/numa_balancing": "1"}, WARNING, "on (1)"),
    ("numa-balancing", {}, None, "the capture has no such file"),
    ("huge-pages", {f"{THP}/enabled": "always [madvise] never"}, OK, "madvise"),
    ("huge-pages", {f"{THP}/enabled": "always madvise [never]"}, NOTE, "off (never)"),
    ("shmem-huge-pages", {f"{THP}/shmem_enabled": "always within_size [advise] never deny force"}, OK, "advise"),
    ("shmem-huge-pages", {f"{THP}/shmem_enabled": "always within_size advise never [deny] force"}, NOTE, "off (deny)"),
    ("governor", {f"{CPU0}/scaling_governor": "performance"}, OK, "performance (CPUs: 1)"),
    ("governor", {f"{CPU0}/scaling_governor": "powersave"}, WARNING, "powersave (CPUs: 1)"),
    (
        "governor",
        {f"{CPU0}/scaling_governor": "powersave", f"{CPU0}/scaling_driver": "intel_pstate"},
        NOTE,
        "driver intel_pstate",
    ),
    ("governor", {f"{CPU0}/scaling_governor": "schedutil"}, NOTE, "schedutil"),
    ("smt", {"sys/devices/system/cpu/smt/control": "on"}, NOTE, "2 CPUs per core (control: on)"),
    ("kernel", {"proc/sys/kernel/osrelease": "5.15.0-1-generic"}, OK, "Linux 5.15.0-1-generic"),
    ("kernel", {"proc/sys/kernel/osrelease": "5.14.0"}, NOTE, "only the first of several nodes is preferred"),
    ("kernel", {"proc/sys/kernel/osrelease": "4.18.0-553.el8"}, WARNING, "pidfds"),
    ("kernel", {"proc/version": "Linux version 6.8.0 (gcc) #1"}, OK, "Linux 6.8.0"),
]


@pytest.mark.parametrize(("check", "files", "severity", "words"), CASES)
def test_checks_of_files(
    check: str, files: dict[str, str | bytes | None], severity: DoctorSeverity | None, words: str, tmp_path: Path
) -> None:
    """Each content of a file leads to its severity and text; a fault has a remedy."""
    root = machine(tmp_path)
    put(root, files)
    finding = findings(root)[check]
    assert (finding.severity, words in finding.what) == (severity, True), finding.what
    assert (finding.remedy is not None) == (severity in (ERROR, WARNING, NOTE))


FILES = {
    "proc/cmdline": "nodes",
    f"{GPU}/iommu_group/type": "iommu",
    f"{PORT}/max_link_speed": "pcie-link",
    "proc/self/limits": "memlock",
    "proc/meminfo": "swap",
    f"{NODE1}/meminfo": "node-memory",
    "proc/sys/kernel/numa_balancing": "numa-balancing",
    f"{THP}/enabled": "huge-pages",
    f"{THP}/shmem_enabled": "shmem-huge-pages",
    f"{CPU0}/scaling_governor": "governor",
    f"{CPU0}/scaling_driver": "governor",
    "proc/sys/kernel/osrelease": "kernel",
    "proc/version": "kernel",
}


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\x00[\n", b"-1", b"9" * 5000], ids=["directory", "empty", "binary", "-1", "digits"]
)
@pytest.mark.parametrize("path", FILES)
def test_a_broken_file_is_not_a_fault(path: str, content: bytes | None, tmp_path: Path) -> None:
    """A file that cannot be read or makes no sense counts as unknown or absent."""
    root = machine(tmp_path)
    before = findings(root)[FILES[path]]
    put(root, {path: content})
    after = findings(root)[FILES[path]]
    assert after.severity in (before.severity, None)


def test_live_checks_are_skipped_on_a_capture(tmp_path: Path) -> None:
    """On a capture, each live check says why it was not made; on the running machine all are made."""
    root = machine(tmp_path)
    captured, asked = findings(root), findings(root, answers=live())
    names = {name for name, finding in captured.items() if finding.what.startswith("not checked: ")}
    assert len(names) == 15
    assert all(captured[name].severity is None for name in names)
    assert len(captured) == len(asked) == len(CHECKS)
    assert all(asked[name].severity is OK for name in names)


def test_absent_files_of_a_live_kernel_are_ok(tmp_path: Path) -> None:
    """On the running machine, absent files mean that it has no IOMMU, balancing or governor."""
    found = findings(machine(tmp_path), answers=live())
    assert {found[name].severity for name in ("iommu", "numa-balancing", "governor")} == {OK}


def test_infiniband_under_a_limit(tmp_path: Path) -> None:
    """With InfiniBand, a limit is a warning, unless a capability lifts it."""
    root = machine(tmp_path, "2pkg-8node-smt2-8gpu-pairs")
    put(root, {"proc/self/limits": LIMITS.format("65536")})
    assert findings(root, answers=live())["memlock"].severity is WARNING
    assert "mlx5_0, mlx5_6" in findings(root)["memlock"].what
    assert findings(root, answers=live(capabilities=1 << 14))["memlock"].severity is OK


def test_one_node_needs_no_balancing_off(tmp_path: Path) -> None:
    """With one node, automatic balancing has nothing to do."""
    root = machine(tmp_path, "1node-16cpu-1gpu-vm")
    put(root, {"proc/sys/kernel/numa_balancing": "1"})
    found = findings(root)
    assert (found["numa-balancing"].severity, found["nodes"].severity) == (OK, OK)


def test_the_limiting_cgroup_is_named(tmp_path: Path) -> None:
    """The remedy has the missing CPUs and nodes; only cgroups that may limit CPUs are named."""
    root = machine(tmp_path, "4node-cpuset-3gpu")
    put(root, {"proc/self/cgroup": "9:cpuset:/jobs/7\n4:memory:/m\nbroken\n0::/unified\n"})
    finding = findings(root)["cpuset"]
    assert finding.severity is ERROR
    assert finding.what == (
        "no CPU of node 2 (gpu1) and no memory of node 2 (gpu1) may be used; "
        "allowed: CPUs 0-3,12-15 and memory of nodes 0,3; cgroup: cpuset:/jobs/7, v2:/unified"
    )
    assert "--cpuset-cpus 0-3,8-15 --cpuset-mems 0,2-3" in (finding.remedy or "")


def test_hidden_and_mixed_up_nodes(tmp_path: Path) -> None:
    """Nodes that all list the same CPUs are a warning."""
    assert findings(machine(tmp_path / "a", "2node-every-node-lists-all"))["nodes"].severity is WARNING


def test_gpus_of_unknown_node(tmp_path: Path) -> None:
    """Eight GPUs of unknown node are one finding, with --gpu-nodes in the remedy."""
    finding = findings(machine(tmp_path, "2node-48cpu-8gpu-nosysfs"))["gpu-nodes"]
    assert (finding.severity, finding.what) == (
        WARNING,
        "no source reports the node of gpu0-7; the kernel reports numa_node -1",
    )
    assert (finding.remedy or "").startswith("numapin run --gpu-nodes 0=NODE,1=NODE,… …; to measure the nodes: ")
    assert (finding.remedy or "").endswith("numapin bench transfer")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC", "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n", "470.82.01"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54  Wed", "550.54"),
        ("garbage 1.2.3\n", None),
        (b"\xff", None),
        (None, None),
    ],
)
def test_module_version(text: str | bytes | None, version: str | None, tmp_path: Path) -> None:
    """The open and the closed kernel module write their version differently; anything else is unknown."""
    put(tmp_path, {"proc/driver/nvidia/version": text})
    assert read_module_version(Tree(str(tmp_path))) == version


@pytest.mark.parametrize(
    ("text", "confinement"),
    [
        ("Name:\tpython\nCapEff:\t0000000000804000\nSeccomp:\t2\nSeccomp_filters:\t1\n", (2, (1 << 23) | (1 << 14))),
        ("CapEff:\tzz\nSeccomp:\t\n", (None, None)),
        (b"\x00\xff", (None, None)),
        (None, (None, None)),
    ],
)
def test_confinement(text: str | bytes | None, confinement: tuple[int | None, int | None], tmp_path: Path) -> None:
    """Seccomp mode and capabilities of the process; None if unknown."""
    put(tmp_path, {"proc/self/status": text})
    assert read_confinement(Tree(str(tmp_path))) == confinement
