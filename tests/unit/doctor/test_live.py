"""Checks of the running machine, from its answers; and the calls that get the answers."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.doctor.given import CALLS, live, put
from tests.machines.grids import gpu, grid
from tests.unit.doctor.seam import (
    CpuSet,
    DoctorSeverity,
    GpuVendor,
    Host,
    NodeSource,
    NvmlReading,
    NvmlReadings,
    Tree,
    examine,
    nccl_files,
    numa,
)
from tests.unit.doctor.seam import live as reading

if TYPE_CHECKING:
    from numapin import Topology
    from tests.unit.doctor.seam import DoctorFinding

ERROR, WARNING, NOTE, OK = DoctorSeverity
MISMATCH = NvmlReadings(gpus=None, broken=True, notes=("NVML did not start: Driver/library version mismatch; reboot",))
NO_DRIVER = NvmlReadings(gpus=None, notes=("NVML could not be loaded: no libnvidia-ml.so.1; install it",))


def _nvml(*, persistence: bool | None = True, **rest: Any) -> NvmlReadings:
    reading = NvmlReading(index=0, uuid=None, pci="0000:10:00.0", persistence=persistence, **rest)
    return NvmlReadings(gpus=(reading,), driver="580.159.04")


def _find(
    check: str, topology: Topology | None = None, *, numa_node: str | None = None, **answers: Any
) -> DoctorFinding:
    with tempfile.TemporaryDirectory() as root:
        if numa_node is not None:
            put(Path(root), {f"sys/bus/pci/devices/{gpu(0, 0).pci}/numa_node": numa_node})
        host = Host(tree=Tree(root), topology=topology or grid(), live=live(**answers))
        (finding,) = (found for found in examine(host) if found.check == check)
    return finding


CASES: list[tuple[str, dict[str, Any], DoctorSeverity | None, str]] = [
    ("driver", {"nvml": _nvml()}, OK, "580.159.04, kernel module 580.159.04"),
    ("driver", {"nvml": _nvml(), "module_version": None}, OK, "kernel module unknown"),
    ("driver", {"nvml": _nvml(), "module_version": "580.95.05"}, ERROR, "the kernel module is 580.95.05"),
    ("driver", {"nvml": MISMATCH}, ERROR, "NVML did not start: Driver/library version mismatch"),
    ("driver", {"nvml": NO_DRIVER}, NOTE, "and no NVIDIA GPU was found"),
    ("persistence", {"nvml": _nvml()}, OK, "on"),
    ("persistence", {"nvml": _nvml(persistence=False)}, NOTE, "off for gpu0"),
    ("persistence", {"nvml": _nvml(persistence=None)}, None, "NVML does not report it"),
    ("persistence", {"nvml": NO_DRIVER}, OK, "no GPU"),
    ("libnuma", {}, OK, "available"),
    ("libnuma", {"libnuma": "libnuma could not be loaded: gone", "refused": None}, ERROR, "could not be loaded: gone"),
    ("memory-policy", {}, OK, "get_mempolicy, set_mempolicy, mbind, move_pages work; seccomp mode 0"),
    (
        "memory-policy",
        {"libnuma": "libnuma could not be loaded: gone", "refused": None},
        None,
        "libnuma cannot be used",
    ),
    (
        "memory-policy",
        {"refused": {**dict.fromkeys(CALLS), "mbind": "EPERM"}, "seccomp": 2},
        WARNING,
        "refused: mbind (EPERM); seccomp mode 2, CAP_SYS_NICE not held",
    ),
    (
        "memory-policy",
        {"refused": {**dict.fromkeys(CALLS), "set_mempolicy": "accepted, but not kept"}, "capabilities": 1 << 23},
        WARNING,
        "set_mempolicy (accepted, but not kept); seccomp mode 0, CAP_SYS_NICE held",
    ),
    (
        "memory-policy",
        {"refused": {**dict.fromkeys(CALLS), "move_pages": "EPERM"}},
        NOTE,
        "reads /proc/self/numa_maps",
    ),
    ("memory-policy", {"refused": dict.fromkeys(CALLS, "ENOSYS")}, NOTE, "no NUMA support"),
    ("shm", {}, OK, "32.0 GiB of 64.0 GiB free"),
    ("shm", {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, WARNING, "64.0 MiB of 64.0 MiB free"),
    ("shm", {"shm_bytes": 64 << 30, "shm_free_bytes": 0}, WARNING, "0 B of 64.0 GiB free"),
    ("shm", {"shm_bytes": None, "shm_free_bytes": None}, ERROR, "there is no /dev/shm"),
    ("streaming-stores", {}, OK, "libstores.so is installed"),
    ("streaming-stores", {"streaming_stores": False}, NOTE, "libstores.so is missing"),
    ("streaming-stores", {"streaming_stores": None}, OK, "not available: for x86-64 and aarch64 only"),
    ("torch", {}, OK, "2.13.0"),
    ("torch", {"torch": None}, NOTE, "not installed"),
    (
        "torch",
        {"torch_off": "torch 2.16.0 has no x._y; use 2.15"},
        WARNING,
        "torch 2.16.0 has no x._y",
    ),
    ("py-libnuma", {}, OK, "nothing but its own package"),
    ("py-libnuma", {"strays": ("/site-packages/tests",)}, NOTE, "/site-packages/tests: it may hide"),
    ("python", {}, OK, "3.12.1"),
    ("python", {"python": (3, 11, 10)}, OK, "3.11.10"),
    ("python", {"python": (3, 11, 9)}, WARNING, "3.11.9: forked children can hang"),
    ("nccl", {"nccl": {}}, None, "no package"),
    ("nccl", {"nccl": {"nvidia-nccl-cu12": "2.27.3"}}, OK, "nvidia-nccl-cu12 2.27.3"),
    ("nccl", {"nccl": {"nvidia-nccl-cu13": "2.29.2"}}, WARNING, "nvidia-nccl-cu13 2.29.2"),
    ("nccl", {"nccl": {"nvidia-nccl-cu12": "2.28.9", "nvidia-nccl-cu13": "2.29.7"}}, WARNING, "2.29.7"),
    ("nccl", {"nccl": {"nvidia-nccl-cu12": "2.30.3.post1"}}, OK, "2.30.3"),
    ("nccl", {"nccl": {"nvidia-nccl-cu12": "unknown"}}, None, "unknown: not a version"),
    (
        "nccl",
        {"nccl": {"/usr/lib64/libnccl.so.2.29.7": "2.29.7"}},
        WARNING,
        "/usr/lib64/libnccl.so.2.29.7 2.29.7: does",
    ),
    ("nccl", {"nccl": {"/usr/lib64/libnccl.so.2": "unknown"}}, None, "not a version"),
    (
        "nccl-affinity",
        {"environ": {"NCCL_IGNORE_CPU_AFFINITY": "1"}},
        WARNING,
        "NCCL_IGNORE_CPU_AFFINITY=1: NCCL's threads leave the rank's CPUs",
    ),
    (
        "nccl-affinity",
        {"environ": {"NCCL_IGNORE_CPU_AFFINITY": "1"}, "nccl": {"nvidia-nccl-cu12": "2.29.3"}},
        WARNING,
        "NCCL_IGNORE_CPU_AFFINITY=1: all threads of a rank leave the rank's CPUs",
    ),
    ("nccl-affinity", {"environ": {"NCCL_IGNORE_CPU_AFFINITY": "0"}}, OK, "set to '0'"),
    ("nic-names", {}, OK, "none of these variables is set"),
    ("nic-names", {"environ": {"NCCL_IB_HCA": "mlx5"}}, WARNING, "NCCL_IB_HCA names mlx5*, which no NIC here has"),
    ("nccl-ib-hca", {}, OK, "no rank of a job is running"),
    ("nccl-ib-hca", {"jobs": {"host:29500": {0: {"NCCL_IB_HCA": "mlx5_0"}}}}, OK, "the same on all ranks of 1 job"),
    (
        "nccl-ib-hca",
        {"jobs": {"host:29500": {rank: {"NCCL_IB_HCA": f"mlx5_{rank // 2}"} for rank in range(4)}}},
        WARNING,
        "the job at host:29500: ranks 0-1: mlx5_0, ranks 2-3: mlx5_1",
    ),
    (
        "nccl-ib-hca",
        {"jobs": {"a:1": {0: {"NCCL_IB_HCA": "mlx5_0"}}, "b:2": {0: {"NCCL_IB_HCA": "mlx5_1"}, 1: {}}}},
        WARNING,
        "the job at b:2: rank 0: mlx5_1, rank 1: not set",
    ),
    ("openmp-affinity", {"environ": {"OMP_NUM_THREADS": "8"}}, OK, "no variable binds"),
    ("openmp-affinity", {"environ": {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}}, WARNING, "OMP_PROC_BIND=close"),
    (
        "openmp-affinity",
        {"environ": {"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"}},
        OK,
        "no variable binds",
    ),
    ("openmp-affinity", {"environ": {"KMP_AFFINITY": "granularity=fine,compact"}}, WARNING, "KMP_AFFINITY="),
    ("openmp-affinity", {"environ": {"KMP_AFFINITY": "disabled"}}, OK, "no variable binds"),
    ("openmp-affinity", {"environ": {"GOMP_CPU_AFFINITY": "0-3"}}, WARNING, "GOMP_CPU_AFFINITY=0-3"),
    ("openmp-affinity", {"environ": {"GOMP_CPU_AFFINITY": ""}}, OK, "no variable binds"),
]


@pytest.mark.parametrize(("check", "answers", "severity", "words"), CASES)
def test_checks_of_the_running_machine(
    check: str, answers: dict[str, Any], severity: DoctorSeverity | None, words: str
) -> None:
    """Each answer leads to its severity and text; a fault has a remedy."""
    finding = _find(check, **answers)
    assert (finding.severity, words in finding.what) == (severity, True), finding.what
    assert (finding.remedy is not None) == (severity in (ERROR, WARNING, NOTE))


@pytest.mark.parametrize(("capabilities", "option"), [(0, "--cap-add SYS_NICE"), (1 << 23, "--security-opt seccomp=")])
def test_the_remedy_is_not_a_capability_that_is_held(capabilities: int, option: str) -> None:
    """The remedy is SYS_NICE if it is missing; if it is held, it is another filter."""
    finding = _find("memory-policy", refused=dict.fromkeys(CALLS, "EPERM"), seccomp=2, capabilities=capabilities)
    assert option in (finding.remedy or "")


def test_gpus_without_a_driver_are_an_error() -> None:
    """A missing driver is an error if sysfs shows GPUs, else a note; the remedy is NVML's."""
    finding = _find("driver", grid(gpus=[0]), nvml=NO_DRIVER)
    assert (finding.severity, finding.remedy) == (ERROR, "install it")


@pytest.mark.parametrize(("visible", "severity"), [(True, OK), (False, ERROR)])
def test_other_vendors_need_no_nvidia_driver(*, visible: bool, severity: DoctorSeverity) -> None:
    """On a machine with AMD's GPUs a missing NVML is fine; what counts is whether ranks can use the GPUs."""
    machine = grid(gpus=[0])
    gpus = tuple(
        replace(gpu, vendor=GpuVendor.AMD, visible=visible, cuda_index=0 if visible else None) for gpu in machine.gpus
    )
    finding = _find("driver", replace(machine, gpus=gpus), nvml=NO_DRIVER)
    assert (finding.severity, "(amd)" in finding.what) == (severity, True)


@pytest.mark.parametrize(
    ("names", "order", "severity", "what"),
    [
        ((), None, OK, "CUDA_DEVICE_ORDER not set; no GPU"),
        (("A100", "A100"), None, OK, "CUDA_DEVICE_ORDER not set; GPU models: A100"),
        (("A100", "T400"), None, WARNING, "CUDA_DEVICE_ORDER not set; GPU models: A100, T400"),
        (("A100", "T400"), "FASTEST_FIRST", WARNING, "CUDA_DEVICE_ORDER=FASTEST_FIRST; GPU models: A100, T400"),
        (("A100", "T400"), "PCI_BUS_ID", OK, "CUDA_DEVICE_ORDER=PCI_BUS_ID; GPU models: A100, T400"),
    ],
)
def test_device_order(names: tuple[str, ...], order: str | None, severity: DoctorSeverity, what: str) -> None:
    """With GPUs of several models, an order that NVML and CUDA do not share is a warning."""
    topology = replace(grid(), gpus=tuple(gpu(index, 0, name=name) for index, name in enumerate(names)))
    finding = _find("device-order", topology, environ={"CUDA_DEVICE_ORDER": order} if order else {})
    assert (finding.severity, finding.what) == (severity, what)


@pytest.mark.parametrize(
    ("kernel", "nodes", "source", "severity", "words"),
    [
        ("0", {0}, NodeSource.SYSFS, OK, "known for all GPUs (1)"),
        ("0", {1}, NodeSource.SYSFS, WARNING, "gpu0 is on node 0 according to the kernel, on node 1 according to NVML"),
        ("0", {0, 1}, NodeSource.SYSFS, OK, "known for all GPUs (1)"),  # NVML names two
        ("0", {1}, NodeSource.USER, OK, "known for all GPUs (1)"),
        (
            "-1",
            {0},
            NodeSource.NVML_MEMORY,
            NOTE,
            "the kernel reports numa_node -1 for gpu0; source of the node: nvml",
        ),
    ],
)
def test_nvml_against_the_kernel(
    kernel: str, nodes: set[int], source: NodeSource, severity: DoctorSeverity, words: str
) -> None:
    """Different nodes from NVML and the kernel are a warning; if only one knows, the finding names it."""
    topology = replace(grid(), gpus=(replace(gpu(0, 0), node_source=source),))
    finding = _find("gpu-nodes", topology, numa_node=kernel, nvml=_nvml(memory_nodes=CpuSet(nodes)))
    assert (finding.severity, words in finding.what) == (severity, True), finding.what


def test_remedies_for_contradicting_nodes_measure() -> None:
    """The remedy names the benchmark that shows which node is nearest."""
    topology = replace(grid(), gpus=(gpu(0, 0),))
    finding = _find("gpu-nodes", topology, numa_node="0", nvml=_nvml(memory_nodes=CpuSet({1})))
    assert (finding.remedy or "").endswith("to measure them: numapin bench transfer")


def test_a_kernel_without_the_file_of_a_node() -> None:
    """A missing numa_node is not reported as if the kernel had written a word."""
    finding = _find("gpu-nodes", replace(grid(), gpus=(gpu(0, None),)))
    assert finding.what == "no source reports the node of gpu0; the kernel reports no numa_node"


def test_packages_without_nodes_of_their_own() -> None:
    """With two packages and one node, something hides the other node."""
    one = grid(nodes=1)
    two = replace(one, packages=(*one.packages, replace(one.packages[0], id=1, nodes=CpuSet())))
    assert _find("nodes", two).severity is WARNING
    assert _find("nodes", one).severity is OK


def test_notes_of_the_topology_are_reported_once() -> None:
    """Notes of the topology are findings, except NVML's, which the driver's finding has."""
    topology = replace(grid(), notes=("NCCL_TOPO_FILE was not used: gone", *NO_DRIVER.notes))
    finding = _find("topology", topology, nvml=NO_DRIVER)
    assert (finding.severity, finding.what) == (NOTE, "NCCL_TOPO_FILE was not used: gone")


class TestAsking:
    """The calls that get the answers."""

    def test_a_call_that_kills_the_child_refuses_all_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If a filter kills the child, this process survives, and all calls count as refused."""
        monkeypatch.setitem(reading.CALLS, "mbind", lambda _node: os.kill(os.getpid(), signal.SIGKILL))
        refused = reading.try_policies(0)
        assert set(refused) == set(CALLS)
        assert all("wait status 9" in (word or "") for word in refused.values())

    def test_an_impossible_node_is_refused_with_the_errno(self) -> None:
        """The refusal has the kernel's error name; calls that take no node still work."""
        refused = reading.try_policies(63)
        assert (refused["set_mempolicy"], refused["mbind"], refused["get_mempolicy"]) == ("EINVAL", "EINVAL", None)

    def test_a_policy_that_is_not_kept_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel that accepts a policy and forgets it counts as refusing it."""
        monkeypatch.setattr(numa, "set_memory_policy", lambda _mode, _nodes: None)
        assert reading.try_policies(0)["set_mempolicy"] == "accepted, but not kept"

    def test_nccl_is_found_by_its_metadata(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The version of each package is found; metadata without one is "unknown"."""
        for name, text in (("cu12", "Name: nvidia-nccl-cu12\nVersion: 2.29.7\n"), ("cu13", "Name: nvidia-nccl-cu13\n")):
            folder = tmp_path / f"nvidia_nccl_{name}-2.29.7.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
        monkeypatch.syspath_prepend(tmp_path)
        found = reading.nccl_versions({})
        assert (found["nvidia-nccl-cu12"], found["nvidia-nccl-cu13"]) == ("2.29.7", "unknown")

    def test_nccl_is_found_without_a_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library of a distribution or container is found by LD_LIBRARY_PATH, then in the usual folders."""
        own, usual = tmp_path / "own", tmp_path / "usual"
        for folder, version in ((own, "2.30.4"), (usual, "2.29.7")):
            folder.mkdir()
            (folder / f"libnccl.so.{version}").touch()
            (folder / "libnccl.so.2").symlink_to(f"libnccl.so.{version}")
        monkeypatch.setattr(reading, "_NCCL_PACKAGES", ())
        monkeypatch.setattr(nccl_files, "FOLDERS", [str(usual)])
        assert reading.nccl_versions({}) == {f"{usual}/libnccl.so.2.29.7": "2.29.7"}
        found = reading.nccl_versions({"LD_LIBRARY_PATH": f"/none:{own}"})
        assert found == {f"{own}/libnccl.so.2.30.4": "2.30.4"}
        monkeypatch.setattr(nccl_files, "FOLDERS", [])
        assert reading.nccl_versions({}) == {}
