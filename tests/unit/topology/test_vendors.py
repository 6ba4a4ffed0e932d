"""GPU vendors: what their drivers' files say, what their runtimes show a process, and machines with several vendors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.request import Request
from numapin.system.tree import Tree
from numapin.topology.build import build
from numapin.topology.model import Gpu, GpuVendor, NodeSource
from numapin.topology.readings import CpuReading, NodeReading, NvmlReading, NvmlReadings, PciReading, Readings
from numapin.topology.sources.sysfs import read_sysfs
from numapin.topology.sources.vendors.amd import AMD
from numapin.topology.sources.vendors.intel import INTEL
from numapin.topology.sources.vendors.table import first_visible, seen_by_ranks
from tests.machines.roots import load, write_root

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KFD = "sys/class/kfd/kfd/topology/nodes"


def gpus(vendor: GpuVendor, number: int = 4) -> tuple[Gpu, ...]:
    """Return GPUs of a vendor with UUIDs in ROCr's spelling."""
    return tuple(
        Gpu(
            index=n,
            pci=f"0000:{n + 1:02x}:00.0",
            uuid=f"GPU-{n:016x}",
            vendor=vendor,
            node=0,
            node_source=NodeSource.SYSFS,
        )
        for n in range(number)
    )


def seen(vendor: GpuVendor, environ: Mapping[str, str]) -> tuple[list[int], tuple[str, ...]]:
    """Return the indices of the GPUs that a process sees, in its runtime's order, and the notes."""
    shown, notes = seen_by_ranks(gpus(vendor), environ)
    visible = [gpu for gpu in shown if gpu.visible]
    assert all((gpu.cuda_index is not None) == gpu.visible for gpu in shown)
    return [gpu.index for gpu in sorted(visible, key=lambda gpu: gpu.cuda_index or 0)], notes


def machine(*pci: PciReading, **rest: Any) -> Readings:
    """Return a machine of two nodes with these devices."""
    readings = Readings(
        host=None,
        source="test",
        cpus=tuple(CpuReading(cpu=cpu, siblings=CpuSet({cpu})) for cpu in range(4)),
        nodes=(NodeReading(id=0, cpus=CpuSet({0, 1})), NodeReading(id=1, cpus=CpuSet({2, 3}))),
        pci=pci,
    )
    return readings._replace(**rest)


def device(number: int, vendor: GpuVendor, **rest: object) -> PciReading:
    """Return a GPU on node 1."""
    return PciReading(address=f"0000:{number:02x}:00.0", vendor=vendor, node=1, **rest)  # type: ignore[arg-type]


# --- AMD's variables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "order"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000003,1"}, [3, 1]),
        ({"HIP_VISIBLE_DEVICES": "3, 1"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1,2"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "3,2,1", "CUDA_VISIBLE_DEVICES": "2,0"}, [1, 3]),
    ],
)
def test_amd_variables_work_one_after_the_other(environ: dict[str, str], order: list[int]) -> None:
    """ROCr's list is taken from all GPUs; HIP's, or else CUDA's, from what is left, by its new numbers."""
    assert seen(GpuVendor.AMD, environ) == (order, ())


@pytest.mark.parametrize(
    ("environ", "order", "note"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,9,1"}, [0], "'9' names no further device"),
        ({"HIP_VISIBLE_DEVICES": "1,1,2"}, [1], "'1' names no further device"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, [], "HIP_VISIBLE_DEVICES=1: '1' names no"),
        ({"HIP_VISIBLE_DEVICES": ""}, [], "hides every GPU; to use them: unset HIP_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, [], "hides every GPU"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000"}, [], "names no further device"),
        ({"HIP_VISIBLE_DEVICES": "0,"}, [0], None),
    ],
)
def test_a_bad_entry_ends_a_list_with_a_note(environ: dict[str, str], order: list[int], note: str | None) -> None:
    """What is lost is said once, with the command that lists the devices or the variable to unset."""
    found, notes = seen(GpuVendor.AMD, environ)
    assert found == order
    assert [note in text for text in notes if note] == [True] * bool(note)
    assert len(notes) == bool(note)


@pytest.mark.parametrize(
    ("environ", "exported"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "3,1"}),
        ({"HIP_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "3,1"}),
        ({"ROCR_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
        ({"CUDA_VISIBLE_DEVICES": "1,2,3"}, {"CUDA_VISIBLE_DEVICES": "3,1"}),
        (
            {"HIP_VISIBLE_DEVICES": "1,GPU-0000000000000003"},
            {
                "CUDA_VISIBLE_DEVICES": "GPU-0000000000000003,1",
                "HIP_VISIBLE_DEVICES": "GPU-0000000000000003,1",
            },
        ),
    ],
)
def test_exported_variables_show_the_chosen_gpus(environ: dict[str, str], exported: dict[str, str]) -> None:
    """--gpus 3,1 replaces the list that HIP reads, in the numbers that ROCr leaves; the ranks then see 3 and 1."""
    topology = build(
        machine(*(device(n + 1, GpuVendor.AMD, index=n, uuid=f"GPU-{n:016x}") for n in range(4))), environ=environ
    )
    request, variables = settle_gpus(topology, Request(gpus=("3", "1")), environ)
    assert (request.rank_gpus, variables) == ((3, 1), exported)
    assert seen(GpuVendor.AMD, {**environ, **variables}) == ([3, 1], ())


def test_a_hidden_gpu_is_named_with_the_variable_of_its_runtime() -> None:
    """The remedy is the variable that HIP reads, not CUDA's."""
    environ = {"HIP_VISIBLE_DEVICES": "0"}
    topology = build(machine(*(device(n + 1, GpuVendor.AMD, index=n) for n in range(2))), environ=environ)
    with pytest.raises(UsageError, match="HIP_VISIBLE_DEVICES shows gpu0"):
        settle_gpus(topology, Request(gpus=("1",)), environ)


def test_first_visible_follows_the_vendor() -> None:
    """Device 0 of a process is that of its runtime's lists."""
    assert first_visible(gpus(GpuVendor.AMD), {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}) == 3
    assert first_visible(gpus(GpuVendor.INTEL), {"ZE_AFFINITY_MASK": "1"}) == 1
    assert first_visible((), {}) is None


# --- Intel's variables -----------------------------------------------------------------------------------------------


def test_intel_variables() -> None:
    """A mask of whole devices is followed; what is not understood leaves the order unknown, with a note."""
    assert seen(GpuVendor.INTEL, {"ZE_AFFINITY_MASK": "2,0"}) == ([2, 0], ())
    for environ in ({"ZE_AFFINITY_MASK": "0.1"}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}):
        shown, (note,) = seen_by_ranks(gpus(GpuVendor.INTEL), environ)
        assert all(gpu.visible and gpu.cuda_index is None for gpu in shown)
        assert next(iter(environ)) in note


def test_intel_export_asks_for_the_order_that_it_counts_in() -> None:
    """The mask counts by PCI address, so Level Zero is told to do so."""
    assert INTEL.show(gpus(GpuVendor.INTEL)[1:3], {}) == {
        "ZE_AFFINITY_MASK": "1,2",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
    }


def test_a_composite_hierarchy_of_tiles_is_not_guessed(tmp_path: Path) -> None:
    """Tiles are devices by default; if Level Zero joins them, the GPU of each rank is unknown, and a note says so."""
    readings = read_sysfs(write_root(load("2pkg-2node-2intel-2tile"), tmp_path), source="x")
    topology = build(readings, environ={"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"})
    assert "unset ZE_FLAT_DEVICE_HIERARCHY" in topology.notes[0]
    assert not any(rank.exact for rank in make_plan(topology, Request()).ranks)


def test_the_order_of_intel_gpus_is_known_if_level_zero_is_told(tmp_path: Path) -> None:
    """Without the variable the driver chooses the order: ranks follow the addresses, and are not exact."""
    readings = read_sysfs(write_root(load("2pkg-2node-2intel-2tile"), tmp_path), source="x")
    for environ, known in (({}, False), ({"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, True)):
        topology = build(readings, environ=environ)
        plan = make_plan(topology, Request())
        assert [rank.node for rank in plan.ranks] == [0, 0, 1, 1]
        assert (topology.gpu_order_known, plan.exact) == (known, known)
        assert any("export ZE_ENABLE_PCI_ID_DEVICE_ORDER=1" in note for note in topology.notes) is not known


# --- AMD's driver ----------------------------------------------------------------------------------------------------


def test_the_kfd_decides_order_and_what_hip_sees(tmp_path: Path) -> None:
    """GPUs are numbered as in the KFD, not by address; one that it does not list is hidden, with a note."""
    root = write_root(load("2pkg-8node-nps4-8amd"), tmp_path)
    (root / KFD / "9/gpu_id").unlink()  # the second GPU belongs to another container
    topology = build(read_sysfs(root, source="x"))
    assert [gpu.pci for gpu in topology.visible_gpus][:3] == ["0000:2a:00.0", "0000:05:00.0", "0000:0a:00.0"]
    assert [gpu.cuda_index for gpu in topology.visible_gpus] == list(range(7))
    assert [gpu.pci for gpu in topology.gpus if not gpu.visible] == ["0000:2f:00.0"]
    assert any("no driver serves gpu7 (0000:2f:00.0)" in note for note in topology.notes)


def test_without_the_kfd_the_order_is_noted(tmp_path: Path) -> None:
    """A capture without the KFD has the GPUs in the order of their addresses, and says that HIP's may differ."""
    root = write_root(load("1pkg-4node-smt2-8amd"), tmp_path)
    (root / "sys/class/kfd").rename(root / "elsewhere")
    topology = build(read_sysfs(root, source="x"))
    assert [gpu.node for gpu in topology.gpus] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert any("HIP's order of the GPUs is not in this description" in note for note in topology.notes)
    assert not any(link.b.startswith("gpu") for link in topology.links)
    assert not topology.gpu_order_known
    assert not any(rank.exact for rank in make_plan(topology, Request()).ranks)
    assert all(rank.exact for rank in make_plan(topology, Request(bind="none")).ranks)
    assert not any(rank.exact for rank in make_plan(topology, Request(bind="none", memory="preferred")).ranks)


def test_garbled_files_of_the_kfd_are_left_out(tmp_path: Path) -> None:
    """Names and properties that are not numbers do not stop the reading."""
    root = write_root(load("2pkg-2node-2amd-cpx4"), tmp_path)
    (root / KFD / "x").mkdir()
    (root / KFD / "2/properties").write_text("location_id -1\nsimd_count x\n")
    (root / KFD / "3/io_links/0/properties").write_bytes(b"\xff\0type 11\n")
    topology = build(read_sysfs(root, source="x"))
    assert len(topology.visible_gpus) == 7


def test_on_the_live_host_amd_gpus_need_the_device_of_the_driver(tmp_path: Path) -> None:
    """A container without /dev/kfd shows the GPUs in sysfs; ranks do not count on them."""
    gpu = device(3, GpuVendor.AMD)
    assert [found.is_driven for found in AMD.read(Tree(str(tmp_path)), [gpu]).gpus] == [None]
    live = AMD.read(Tree(""), [gpu]).gpus  # this host has no AMD GPU at this address
    topology = build(machine(*live))
    assert topology.visible_gpus == ()
    assert default_num_ranks(topology) == 1
    assert "no driver serves gpu0" in topology.notes[0]


@pytest.mark.parametrize(
    ("vendor", "device_class", "address", "is_gpu"),
    [
        (AMD, 0x0300, "0000:03:00.0", True),
        (AMD, 0x0380, "0000:03:00.0", True),
        (AMD, 0x1200, "0000:03:00.0", True),
        (AMD, 0x0403, "0000:03:00.1", False),
        (INTEL, 0x0380, "0000:3a:00.0", True),
        (INTEL, 0x0300, "0000:03:00.0", True),
        (INTEL, 0x0300, "0000:00:02.0", False),
        (INTEL, 0x0380, "0000:00:02.0", False),
        (INTEL, 0x1200, "0000:00:0b.0", False),
    ],
)
def test_what_is_a_gpu(vendor: object, device_class: int, address: str, *, is_gpu: bool) -> None:
    """By class and address: sound devices, integrated graphics and NPUs of Intel's processors are not."""
    assert vendor.is_gpu(device_class, address) == is_gpu  # type: ignore[attr-defined]


# --- GPUs of several vendors -----------------------------------------------------------------------------------------


def test_ranks_use_one_vendor() -> None:
    """NVIDIA's driver answers, so ranks use its GPUs; another accelerator is listed under a new number and hidden."""
    nvml = NvmlReadings(gpus=(NvmlReading(index=0, uuid="GPU-1", pci="0000:01:00.0"),))
    topology = build(machine(device(1, GpuVendor.NVIDIA), device(2, GpuVendor.AMD, index=0, is_driven=True), nvml=nvml))
    assert [(gpu.label, gpu.vendor, gpu.visible) for gpu in topology.gpus] == [
        ("gpu0", GpuVendor.NVIDIA, True),
        ("gpu1", GpuVendor.AMD, False),
    ]
    assert "gpu1 (amd): not used" in topology.notes[0]
    assert len(make_plan(topology, Request()).ranks) == 1


def test_a_screen_of_another_vendor_is_no_gpu_for_ranks() -> None:
    """A VGA controller beside another vendor's GPUs is left out without a word; alone, it counts."""
    screen = device(2, GpuVendor.AMD, is_vga=True)
    assert [gpu.vendor for gpu in build(machine(device(1, GpuVendor.NVIDIA), screen)).gpus] == [GpuVendor.NVIDIA]
    assert build(machine(device(1, GpuVendor.NVIDIA), screen)).notes == ()
    assert [gpu.vendor for gpu in build(machine(screen)).gpus] == [GpuVendor.AMD]


def test_a_vendor_whose_driver_answers_comes_first() -> None:
    """NVIDIA's GPU without a driver does not keep ranks from AMD's GPUs."""
    topology = build(machine(device(1, GpuVendor.NVIDIA), device(2, GpuVendor.AMD, index=0, is_driven=True)))
    assert [gpu.vendor for gpu in topology.visible_gpus] == [GpuVendor.AMD]
    assert default_num_ranks(topology) is None
