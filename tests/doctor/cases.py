"""The doctor's checks on sound and faulty machines; tests/recorded/doctor.txt has what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from numapin import Topology
from tests.doctor.given import CALLS, examined, live, machine, put
from tests.doctor.seam import (
    CpuSet,
    DoctorFinding,
    GpuHealth,
    GpuUser,
    GpuVendor,
    KernelLog,
    NodeSource,
    NvmlReading,
    NvmlReadings,
    Xid,
)
from tests.machines.grids import gpu, grid

GPU = "sys/bus/pci/devices/0000:10:00.0"
PORT = f"{GPU}/.."
NODE1 = "sys/devices/system/node/node1"
THP = "sys/kernel/mm/transparent_hugepage"
CPU0 = "sys/devices/system/cpu/cpu0/cpufreq"
LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {0}  {0}  bytes\n"
LOW = {"proc/self/limits": LIMITS.format("65536")}
_STATUS = "Cpus_allowed_list:\t{}\nMems_allowed_list:\t{}\n"
_SWAP = "MemTotal: 1000000 kB\nSwapTotal: 500000 kB\nSwapFree: {} kB\n"
_IOMMU = {"sys/class/iommu/dmar0/name": ""}
_NARROW_SLOT = {
    f"{GPU}/current_link_width": "8",
    f"{PORT}/max_link_width": "8",
    f"{PORT}/max_link_speed": "32.0 GT/s PCIe",
}
_UNKNOWN_NODE = {f"{GPU}/numa_node": "-1", f"{GPU}/local_cpulist": "", f"{GPU}/local_cpus": "0"}


def _confined(seccomp: int, capabilities: int) -> dict[str, str]:
    return {
        "proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities:016x}\nSeccomp:\t{seccomp}\nSeccomp_filters:\t1\n"
    }


class Case(NamedTuple):
    check: str
    label: str
    files: Mapping[str, str] = {}
    answers: Mapping[str, Any] | None = None  # of the running machine, other than those of a sound one; None: a capture
    machine: str | Topology = "2node-interleaved-smt2-2gpu"  # a root's name; or a topology, with no other files
    must_be_idle: bool = False


def finding_of(case: Case, folder: Path) -> DoctorFinding:
    root, topology = folder, None
    if isinstance(case.machine, str):
        root = machine(folder, case.machine)
    else:
        topology = case.machine
    put(root, case.files)
    answers = None if case.answers is None else live(**case.answers)
    found = examined(root, topology=topology, answers=answers, must_be_idle=case.must_be_idle)
    return found[case.check]


FILES = (
    Case("nodes", "two nodes"),
    Case("nodes", "numa=off", {"proc/cmdline": "quiet numa=off ro"}),
    Case("nodes", "xnuma=off", {"proc/cmdline": "quiet xnuma=off"}),
    Case("nodes", "every node lists all CPUs", machine="2node-every-node-lists-all"),
    Case("nodes", "a virtual machine with one node", machine="1node-16cpu-1gpu-vm"),
    Case("gpu-nodes", "known"),
    Case("gpu-nodes", "unknown", _UNKNOWN_NODE),
    Case("gpu-nodes", "eight unknown ones", machine="2node-48cpu-8gpu-nosysfs"),
    Case("cpuset", "all may be used"),
    Case("cpuset", "no CPU of a node", {"proc/self/status": _STATUS.format("0,2,4,6,8,10,12,14", "0-1")}),
    Case("cpuset", "no memory of a node", {"proc/self/status": _STATUS.format("0-15", "1")}),
    Case("cpuset", "some CPUs", {"proc/self/status": _STATUS.format("0-3", "0-1")}),
    Case("node-memory", "enough"),
    Case("node-memory", "a full node", {f"{NODE1}/meminfo": "Node 1 MemTotal: 1000000 kB\nNode 1 MemFree: 10000 kB\n"}),
    Case("node-memory", "not shown", machine=grid()),
    Case("memlock", "unlimited", {"proc/self/limits": LIMITS.format("unlimited")}),
    Case("memlock", "limited", LOW),
    Case("memlock", "limited, with InfiniBand", LOW, machine="2pkg-8node-smt2-8gpu-pairs"),
    Case("memlock", "limited, with the capability", {**LOW, **_confined(0, 1 << 14)}, {}, "2pkg-8node-smt2-8gpu-pairs"),
    Case("memlock", "not shown"),
    Case("swap", "unused", {"proc/meminfo": _SWAP.format(500000)}),
    Case("swap", "a little", {"proc/meminfo": _SWAP.format(499000)}),
    Case("swap", "much", {"proc/meminfo": _SWAP.format(400000)}),
    Case("swap", "not shown"),
    Case("swap", "none", {"proc/meminfo": "MemTotal: 1 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"}),
    Case("pcie-link", "full"),
    Case("pcie-link", "not shown", machine=grid(gpus=[0])),
    Case("pcie-link", "an old generation", {f"{GPU}/current_link_speed": "2.5 GT/s PCIe"}),
    Case("pcie-link", "half the lanes", {f"{GPU}/current_link_width": "8"}),
    Case("pcie-link", "a narrow slot", _NARROW_SLOT),
    Case("pcie-link", "a hypervisor's port, narrower than the link", {f"{PORT}/max_link_width": "1"}),
    Case("iommu", "translates", {**_IOMMU, f"{GPU}/iommu_group/type": "DMA-FQ"}),
    Case("iommu", "passes through", {**_IOMMU, f"{GPU}/iommu_group/type": "identity"}),
    Case("iommu", "passes through by the command line", {**_IOMMU, "proc/cmdline": "iommu=pt"}),
    Case("iommu", "unknown", {**_IOMMU, "proc/cmdline": "ro"}),
    Case("iommu", "no file in a capture"),
    Case("iommu", "no file on a live kernel", answers={}),
    Case("numa-balancing", "off", {"proc/sys/kernel/numa_balancing": "0"}),
    Case("numa-balancing", "on", {"proc/sys/kernel/numa_balancing": "1"}),
    Case("numa-balancing", "on, one node", {"proc/sys/kernel/numa_balancing": "1"}, machine="1node-16cpu-1gpu-vm"),
    Case("numa-balancing", "no file in a capture"),
    Case("numa-balancing", "no file on a live kernel", answers={}),
    Case("huge-pages", "madvise", {f"{THP}/enabled": "always [madvise] never"}),
    Case("huge-pages", "never", {f"{THP}/enabled": "always madvise [never]"}),
    Case("shmem-huge-pages", "advise", {f"{THP}/shmem_enabled": "always within_size [advise] never deny force"}),
    Case("shmem-huge-pages", "deny", {f"{THP}/shmem_enabled": "always within_size advise never [deny] force"}),
    Case("governor", "performance", {f"{CPU0}/scaling_governor": "performance"}),
    Case(
        "governor",
        "powersave on one CPU",
        {f"{CPU0}/scaling_governor": "performance", f"{CPU0}/../../cpu1/cpufreq/scaling_governor": "powersave"},
    ),
    Case("governor", "pstate", {f"{CPU0}/scaling_governor": "powersave", f"{CPU0}/scaling_driver": "intel_pstate"}),
    Case("governor", "schedutil", {f"{CPU0}/scaling_governor": "schedutil"}),
    Case("governor", "no file on a live kernel", answers={}),
    Case("kernel", "not shown"),
    Case("kernel", "5.15", {"proc/sys/kernel/osrelease": "5.15.0-1-generic"}),
    Case("kernel", "5.14", {"proc/sys/kernel/osrelease": "5.14.0"}),
    Case("kernel", "4.18", {"proc/sys/kernel/osrelease": "4.18.0-553.el8"}),
    Case("kernel", "a capture's /proc/version", {"proc/version": "Linux version 6.8.0 (gcc) #1"}),
)


def _nvml(*, persistence: bool | None = True, memory_nodes: CpuSet | None = None) -> NvmlReadings:
    found = NvmlReading(index=0, uuid=None, pci="0000:10:00.0", persistence=persistence, memory_nodes=memory_nodes)
    return NvmlReadings(gpus=(found,), driver="580.159.04")


_NO_DRIVER = NvmlReadings(gpus=None, notes=("NVML could not be loaded: no libnvidia-ml.so.1; install it",))
_NVML = {
    "a GPU": _nvml(),
    "a GPU without persistence": _nvml(persistence=False),
    "a GPU of unknown persistence": _nvml(persistence=None),
    "a driver that does not match": NvmlReadings(
        gpus=None, broken=True, notes=("NVML did not start: Driver/library version mismatch; reboot",)
    ),
    "no driver": _NO_DRIVER,
    "a GPU without power": _nvml()._replace(silent=("GPU 1 (in NVML's order) is left out: no power; check with: x",)),
    "a GPU that is lost": _nvml()._replace(lost=("GPU 1 (in NVML's order) is left out: GPU is lost; check with: x",)),
}
_NO_LIBNUMA = {"libnuma": "libnuma could not be loaded: gone", "refused": None}
_NO_MBIND = {"refused": {**dict.fromkeys(CALLS), "mbind": "EPERM"}}
_GVISOR = {"refused": {**dict.fromkeys(CALLS), "set_mempolicy": "accepted, but not kept"}}
_NO_MOVE_PAGES = {"refused": {**dict.fromkeys(CALLS), "move_pages": "EPERM"}}


def _answered(check: str, *answers: Mapping[str, Any]) -> list[Case]:
    return [Case(check, str(dict(each)), answers=each, machine=grid()) for each in answers]


def _on(machine: Topology, check: str, label: str, **answers: Any) -> Case:
    return Case(check, label, answers=answers, machine=machine)


LIVE = (
    *(_on(grid(), check, label, nvml=nvml) for check in ("persistence", "driver") for label, nvml in _NVML.items()),
    _on(grid(gpus=[0]), "driver", "a GPU without a driver", nvml=_NO_DRIVER),
    *(
        Case(
            "driver",
            text,
            {"proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX {text}\n"},
            {"nvml": _nvml()},
            grid(),
        )
        for text in (
            "Open Kernel Module for x86_64  580.159.04  Release Build  (x)",
            "x86_64 Kernel Module  550.54  Wed",
            "1.2.3",
        )
    ),
    *_answered("libnuma", {}, _NO_LIBNUMA),
    *_answered("memory-policy", {}, _NO_LIBNUMA, _NO_MBIND, _NO_MOVE_PAGES),
    Case("memory-policy", "no filter", _confined(0, 0), {}, grid()),
    Case("memory-policy", "a filter of mbind", _confined(2, 1 << 14), _NO_MBIND, grid()),
    Case("memory-policy", "a filter in spite of SYS_NICE", _confined(2, 1 << 23), _NO_MBIND, grid()),
    Case("memory-policy", "gVisor", _confined(0, 1 << 23), _GVISOR, grid()),
    Case("memory-policy", "a garbled status", {"proc/self/status": "CapEff:\tzz\nSeccomp:\t\n"}, {}, grid()),
    *_answered("memory-policy", {"refused": dict.fromkeys(CALLS, "ENOSYS")}),
    *_answered("shm", {}, {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, {"shm_free_bytes": 0}),
    *_answered("shm", {"shm_bytes": None, "shm_free_bytes": None}),
    *_answered("torch", {}, {"torch": None}, {"torch_off": "torch 2.16.0 has no x._y; use 2.15"}),
    *_answered("py-libnuma", {}, {"strays": ("/site-packages/tests",)}),
    *_answered("python", {}, {"python": (3, 11, 10)}, {"python": (3, 11, 9)}),
    *_answered("nccl", {}, {"nccl": {}}, {"nccl": {"nvidia-nccl-cu12": "2.28.9", "nvidia-nccl-cu13": "2.29.7"}}),
    *_answered("nccl", {"nccl": {"/usr/lib64/libnccl.so.2.29.7": "2.29.7"}}, {"nccl": {"nvidia-nccl-cu12": "unknown"}}),
)


def _amd(*, visible: bool) -> Topology:
    found = replace(gpu(0, 0), vendor=GpuVendor.AMD, visible=visible, cuda_index=0 if visible else None)
    return replace(grid(), gpus=(found,))


def _of_source(source: NodeSource) -> Topology:
    return replace(grid(), gpus=(replace(gpu(0, 0), node_source=source),))


def _numa_node(number: str) -> dict[str, str]:
    return {f"sys/bus/pci/devices/{gpu(0, 0).pci}/numa_node": number}


def _reported(*nodes: int) -> dict[str, Any]:
    return {"nvml": _nvml(memory_nodes=CpuSet(nodes))}


_ONE_NODE = grid(nodes=1)
_TWO_PACKAGES = replace(_ONE_NODE, packages=(*_ONE_NODE.packages, replace(_ONE_NODE.packages[0], id=1, nodes=CpuSet())))
_NOTED = replace(grid(), notes=(*_NO_DRIVER.notes, "NCCL_TOPO_FILE was not used: gone"))
MADE = (
    _on(_amd(visible=True), "driver", "an AMD GPU", nvml=_NO_DRIVER),
    _on(_amd(visible=False), "driver", "an AMD GPU that is not visible", nvml=_NO_DRIVER),
    Case("gpu-nodes", "NVML agrees", _numa_node("0"), _reported(0), _of_source(NodeSource.SYSFS)),
    Case("gpu-nodes", "NVML disagrees", _numa_node("0"), _reported(1), _of_source(NodeSource.SYSFS)),
    Case("gpu-nodes", "NVML names two", _numa_node("0"), _reported(0, 1), _of_source(NodeSource.SYSFS)),
    Case("gpu-nodes", "NVML disagrees, the user knows", _numa_node("0"), _reported(1), _of_source(NodeSource.USER)),
    Case("gpu-nodes", "only NVML knows", _numa_node("-1"), _reported(0), _of_source(NodeSource.NVML_MEMORY)),
    _on(replace(grid(), gpus=(gpu(0, None),)), "gpu-nodes", "no file of the kernel"),
    _on(_TWO_PACKAGES, "nodes", "two packages, one node"),
    _on(_ONE_NODE, "nodes", "one node"),
    _on(_NOTED, "topology", "a note beside NVML's, which the driver's finding has", nvml=_NO_DRIVER),
)

_SOUND = GpuHealth(
    uncorrected=0,
    uncorrected_ever=0,
    is_remapping_pending=False,
    has_remapping_failed=False,
    slowdowns=(),
    processes=(),
    unread={"is_retirement_pending": "Not Supported"},
)
_OLD = GpuHealth(uncorrected=0, uncorrected_ever=0, is_retirement_pending=False, unread={"rows": "Function Not Found"})
_REPAIRS = ("rows", "is_retirement_pending")
_UNREAD = dict.fromkeys(("uncorrected", "uncorrected_ever", *_REPAIRS), "Not Supported")
_NO_ANSWER = GpuHealth(unread={**_UNREAD, "slowdowns": "Function Not Found", "processes": "Insufficient Permissions"})


def _of_health(check: str, label: str, *healths: GpuHealth, must_be_idle: bool = False, **answers: Any) -> Case:
    """Return a case of two GPUs, the first of them sound unless two are given."""
    both = healths if len(healths) == 2 else (_SOUND, *healths)
    gpus = tuple(NvmlReading(index=n, uuid=None, pci=gpu(n, 0).pci or "", health=each) for n, each in enumerate(both))
    found = {"nvml": NvmlReadings(gpus=gpus, driver="580.159.04"), **answers}
    return Case(check, label, answers=found, machine=grid(gpus=[0, 0]), must_be_idle=must_be_idle)


_LEFT_OVER: dict[str, Any] = {
    "gpu_users": (GpuUser(0, 4711, 40 << 30, "python", "alice"), GpuUser(1, 4712, None, None, None))
}
_UNSEEN: dict[str, Any] = {"gpu_users": (GpuUser(1, 4712, None, None, None),)}
_MPS: dict[str, Any] = {"gpu_users": (GpuUser(0, 4711, 30 << 20, "nvidia-cuda-mps", "root"),)}
_MANY: dict[str, Any] = {"gpu_users": tuple(GpuUser(0, 4711 + n, 1 << 30, "python", "alice") for n in range(10))}
HEALTH = (
    _of_health("ecc", "sound", _SOUND),
    _of_health("ecc", "a GPU that retires pages, on an old driver", _OLD),
    _of_health("ecc", "an error long ago", replace(_SOUND, uncorrected_ever=3)),
    _of_health("ecc", "two errors", replace(_SOUND, uncorrected=2)),
    _of_health("ecc", "a row to replace", replace(_SOUND, uncorrected=1, is_remapping_pending=True)),
    _of_health("ecc", "a page to retire", replace(_OLD, is_retirement_pending=True)),
    _of_health("ecc", "no row is left", replace(_SOUND, has_remapping_failed=True)),
    _of_health("ecc", "no answer", _NO_ANSWER),
    _of_health("ecc", "neither rows nor pages", replace(_SOUND, unread=dict.fromkeys(_REPAIRS, "Not Supported"))),
    _of_health("slowdown", "none", _SOUND),
    _of_health("slowdown", "heat", replace(_SOUND, slowdowns=("hardware slowdown", "heat, by the hardware"))),
    _of_health("slowdown", "no answer", _NO_ANSWER),
    _of_health("gpu-processes", "none", _SOUND),
    _of_health("gpu-processes", "two", _SOUND, **_LEFT_OVER),
    _of_health("gpu-processes", "no answer", _NO_ANSWER),
    _of_health("gpu-processes", "none, and there must be none", _SOUND, must_be_idle=True),
    _of_health("gpu-processes", "two, and there must be none", _SOUND, **_LEFT_OVER, must_be_idle=True),
    _of_health(
        "gpu-processes", "one that cannot be seen, and there must be none", _SOUND, **_UNSEEN, must_be_idle=True
    ),
    _of_health("gpu-processes", "MPS, and there must be none", _SOUND, **_MPS, must_be_idle=True),
    _of_health("gpu-processes", "ten, and there must be none", _SOUND, **_MANY, must_be_idle=True),
    _of_health("gpu-processes", "no answer, and there must be none", _NO_ANSWER, must_be_idle=True),
    *(
        Case(check, f"{label}, {gpus} GPU{', idle' * is_idle}", {}, {"nvml": nvml}, grid(gpus=[0] * gpus), is_idle)
        for check, is_idle in (("ecc", False), ("gpu-processes", True))
        for label, nvml, gpus in (
            ("no driver", _NO_DRIVER, 0),
            ("no driver", _NO_DRIVER, 1),
            ("a driver that does not match", _NVML["a driver that does not match"], 0),
        )
    ),
    _on(_amd(visible=True), "gpu-processes", "an AMD GPU", nvml=_NO_DRIVER),
    Case("gpu-processes", "an AMD GPU, idle", {}, {"nvml": _NO_DRIVER}, _amd(visible=True), must_be_idle=True),
)

_GPU0 = gpu(0, 0).pci or ""
_FALLEN = Xid(79, _GPU0, 1.7e9, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
_FAULT = Xid(31, "0000:99:00.0", 1.7e9 + 60, "pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE")
_NEEDS = Xid(154, _GPU0, 1.7e9 + 1, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
_MENDED = Xid(154, _GPU0, 1.7e9 + 90, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
_LINK = Xid(74, _GPU0, 1.7e9 + 5, "NVLink: fatal error detected on link 2 (0x10000, 0x0)")
XIDS = (
    *(
        _on(grid(gpus=[0]), "xid", label, kernel_log=log)
        for label, log in {
            "none": KernelLog(()),
            "none since older messages were overwritten": KernelLog((), 1.7e9),
            "a log that cannot be read": KernelLog(None, problem="/dev/kmsg cannot be read: Operation not permitted"),
            "off the bus, after a program's own error": KernelLog((_FAULT, _FALLEN, _NEEDS)),
            "a program's own error, twice": KernelLog((_FAULT, _FAULT._replace(at_s=1.7e9 + 120))),
            "NVLink": KernelLog((_LINK, _FAULT)),
            "reset since": KernelLog((_FALLEN, _NEEDS, _LINK, _MENDED)),
            "one GPU was reset, another was not": KernelLog((_FALLEN, _FALLEN._replace(pci="0000:98:00.0"), _MENDED)),
            "hostile text": KernelLog((_FALLEN._replace(message="\x1b[2J" + "x" * 200),)),
            "many": KernelLog(tuple(_FAULT._replace(pci=f"0000:{n:02x}:00.0") for n in range(10))),
        }.items()
    ),
)


def _port(device: str, *, number: str = "1", **files: str) -> dict[str, str]:
    """Return the files of a port that is active at 400 Gbit/s, with changes."""
    usual = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    folder = f"sys/class/infiniband/{device}"
    of_port = {f"{folder}/ports/{number}/{name}": text for name, text in {**usual, **files}.items() if text}
    return {f"{folder}/board_id": "MT_0000000838", **of_port}


_DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
_OFF = {**_DOWN, "phys_state": "3: Disabled"}
_ETHERNET = {"rate": "25 Gb/sec (1X EDR)", "link_layer": "Ethernet"}
PORTS = tuple(
    Case("nic-ports", label, files, machine="1node-16cpu-1gpu-vm")
    for label, files in {
        "no adapter": {},
        "two alike": {**_port("mlx5_0"), **_port("mlx5_1")},
        "one of them down": {**_port("mlx5_0"), **_port("mlx5_1", **_DOWN)},
        "one of them disabled": {**_port("mlx5_0"), **_port("mlx5_1", **_OFF)},
        "a second port without a cable": {**_port("mlx5_0"), **_port("mlx5_0", number="2", **_DOWN)},
        "a second port without a cable, as a device of its own": {
            **_port("mlx5_0"),
            **_port("mlx5_1", **_DOWN),
            **{f"sys/class/infiniband/mlx5_{n}/device": f"../../../devices/pci0/0000:3b:00.{n}" for n in range(2)},
        },
        "two cards, one down": {
            **_port("mlx5_0"),
            **_port("mlx5_1", **_DOWN),
            **{f"sys/class/infiniband/mlx5_{n}/device": f"../../../devices/pci0/0000:{n}b:00.0" for n in range(2)},
        },
        "a virtual function that is down": {
            **_port("mlx5_0"),
            **_port("mlx5_1", **_DOWN),
            "sys/class/infiniband/mlx5_1/device/physfn": "../0000:3b:00.0",
        },
        "one down, one that is missing": {**_port("mlx5_0"), **_port("mlx5_1", **_DOWN), **_port("mlx5_2", state="")},
        "one without a subnet manager": {**_port("mlx5_0"), **_port("mlx5_1", state="2: INIT")},
        "one slower": {**_port("mlx5_0"), **_port("mlx5_1", rate="200 Gb/sec (2X NDR)")},
        "another network, slower": {**_port("mlx5_0"), **_port("mlx5_1", **_ETHERNET)},
        "another board, down": {
            **_port("mlx5_0"),
            **_port("mlx5_1", **_DOWN),
            "sys/class/infiniband/mlx5_1/board_id": "MT_0000000001",
        },
        "one lane": _port("mlx5_0", rate="100 Gb/sec (1X NDR)"),
        "twenty down": {path: text for n in range(20) for path, text in _port(f"mlx5_{n:02}", **_DOWN).items()},
        "all down": {**_port("mlx5_0", **_DOWN), **_port("mlx5_1", **_OFF)},
        "all disabled": _port("mlx5_0", **_OFF),
        "a rate that makes no sense": _port("mlx5_0", rate="fast"),
        "a state that is missing": {**_port("mlx5_0"), **_port("mlx5_1", state="")},
    }.items()
)
PORTS_UNSHOWN = Case("nic-ports", "adapters whose ports are not shown", machine="2pkg-2node-8gpu-4nic")

CASES = (*FILES, *LIVE, *MADE, *HEALTH, *XIDS, *PORTS, PORTS_UNSHOWN)
