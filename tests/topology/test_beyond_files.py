"""What a table of files cannot say: the live host, bounded time, and files that are swapped."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numapin import Nic, discover
from numapin.errors import MachineFileError
from tests.hostile import winding_capture
from tests.machines.grids import grid
from tests.topology import cases_visible
from tests.topology.reading import Case, read, written
from tests.topology.seam import (
    MAX_GPUS,
    CpuSet,
    GpuVendor,
    NicKind,
    PciReading,
    calls,
    first_visible,
    read_amd,
    read_intel,
    tree,
)


def test_the_live_machine() -> None:
    """CPUs and allowed CPUs are those that the kernel reports to this process."""
    topology = discover()
    assert os.sched_getaffinity(0) <= topology.cpus
    assert topology.allowed.cpus == CpuSet(os.sched_getaffinity(0))


@pytest.mark.parametrize("vendor", [GpuVendor.AMD, GpuVendor.INTEL])
def test_on_the_live_host_gpus_need_their_device_file(vendor: GpuVendor, tmp_path: Path) -> None:
    """A container shows the GPUs in sysfs without /dev/kfd or the render node; ranks do not count on them."""
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0/drm/renderD128").mkdir(parents=True)
    gpu = PciReading(address="0000:03:00.0", vendor=vendor)

    def is_driven(*, is_live: bool) -> list[bool | None]:
        capture = tree.Tree(str(tmp_path))
        if vendor is GpuVendor.AMD:
            return [found.is_driven for found in read_amd(capture, [gpu], is_live=is_live)[0]]
        return [found.is_driven for found in read_intel(capture, [gpu], is_live=is_live)]

    assert is_driven(is_live=False) == [None]
    assert is_driven(is_live=True) == [False]
    (tmp_path / "dev/dri/renderD128").mkdir(parents=True)
    assert is_driven(is_live=True) == [vendor is GpuVendor.INTEL]


def test_network_devices_that_are_not_on_pci(tmp_path: Path) -> None:
    """Interfaces and verbs devices of platform devices are NICs; those of software (soft RoCE, bridges) are not."""
    root = written(Case(files={"cpu:cpu0/uevent": ""}), tmp_path / "machine")
    platform = "devices/platform/HISI00D1:00"
    for folder, at in (
        ("net", f"{platform}/net/eth0"),
        ("net", "devices/virtual/net/br0"),
        ("infiniband", f"{platform}/infiniband/hns_0"),
        ("infiniband", "devices/virtual/infiniband/rxe0"),
    ):
        (root / "sys" / at / "ports/1").mkdir(parents=True)
        (root / "sys" / at / "ports/1/state").write_text("4: ACTIVE\n")
        (root / "sys" / at / "type").write_text("1\n")
        (root / "sys/class" / folder).mkdir(parents=True, exist_ok=True)
        (root / "sys/class" / folder / at.rpartition("/")[2]).symlink_to(f"../../{at}")
    nics = discover(root=root).nics
    assert [(nic.name, nic.kind, nic.pci, nic.is_up) for nic in nics] == [
        ("eth0", NicKind.ETHERNET, None, None),
        ("hns_0", NicKind.INFINIBAND, None, True),
    ]


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSYS, "Function not implemented"), (errno.EPERM, "Operation not permitted")]
)
def test_a_kernel_that_cannot_open_files_inside_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    """The error says what is needed; nothing is read in another way."""

    def refused(*_: object) -> int:
        raise OSError(number, told)

    monkeypatch.setattr(calls, "open_inside", refused)
    with pytest.raises(MachineFileError, match=f"the kernel refuses openat2, .*: {told}") as caught:
        discover(root=tmp_path)
    assert "Linux 5.6" in caught.value.hint


@pytest.mark.parametrize(("case", "seen"), cases_visible.observed().values(), ids=cases_visible.observed())
def test_visible_gpus_are_those_that_cuda_showed(case: Case, seen: str, tmp_path: Path) -> None:
    """The table of values that were tried on hardware has more than 100 rows, some of each outcome."""
    topology = read(case, tmp_path)
    shown = sorted((gpu.cuda_index, gpu.index) for gpu in topology.visible_gpus)
    assert ",".join(str(index) for _, index in shown) == ("" if seen in ("none", "refused") else seen)
    assert any("refuses to start" in note for note in topology.notes) == (seen == "refused")


@pytest.mark.parametrize(
    ("environ", "unknown", "device"),
    [
        ({}, {}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, None),
        ({}, {"name": None}, None),
        ({}, {"pci": None}, None),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"name": None}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"visible": False, "cuda_index": None}, 1),
    ],
)
def test_device_0_of_a_process(environ: dict[str, str], unknown: dict[str, Any], device: int | None) -> None:
    """It is the first that its variables show; None if they show none, or if the order is unknown."""
    facts: dict[str, Any] = {"name": "H", "vendor": GpuVendor.NVIDIA, **unknown}
    gpus = tuple(replace(gpu, **facts) for gpu in grid(gpus=[0, 1]).gpus)
    assert first_visible(gpus, environ) == device


def test_links_that_wind_through_many_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file that was to be read when the time was up; the real time is held by tests/hostile.py."""
    monkeypatch.setattr(tree, "_FREE_S", 0.0)
    monkeypatch.setattr(tree, "_MAX_S_PER_FILE", 1e-6)
    winding_capture(tmp_path / "root", 8)
    with pytest.raises(
        MachineFileError, match=r"root/sys/.*: \d+ of its files took \d\.\d s of CPU time; its links lead"
    ):
        discover(root=tmp_path / "root")


def test_the_nearest_nics_of_the_largest_machine_take_no_time() -> None:
    """256 GPUs and 256 equally near NICs take a second; with more NICs there are no links to go by."""
    nics = [Nic(name=f"mlx5_{n}", pci=f"{n:04x}:00:00.0", node=0, kind=NicKind.INFINIBAND) for n in range(256)]
    machine = replace(grid(packages=2, nodes=1, gpus=[0] * MAX_GPUS), nics=tuple(nics))
    start = time.process_time()
    assert len({found.names[0] for found in machine.nearest_nics.values()}) == 256
    assert time.process_time() - start < 20
    more = (replace(nics[0], name=f"mlx5_{n}", pci=f"{n:04x}:01:00.0") for n in range(257))
    assert replace(machine, nics=tuple(more)).nearest_nics == {}
