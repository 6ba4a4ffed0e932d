"""GPU vendors: what their drivers' files say, what their runtimes show a process, and machines with several vendors."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.request import Request
from numapin.system.tree import Tree
from numapin.topology import vendors
from numapin.topology.build import build
from numapin.topology.model import Gpu, GpuVendor, NodeSource
from numapin.topology.readings import CpuReading, NodeReading, NvmlReading, NvmlReadings, PciReading, Readings
from numapin.topology.sources.gpu_drivers import read_amd, read_intel
from numapin.topology.sources.sysfs import read_sysfs
from numapin.topology.vendors import first_visible, seen_by_ranks, support_of
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
        ({"ROCR_VISIBLE_DEVICES": " 0x3 , 01"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "gpu-0000000000000003"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "3,1,3,0"}, [3, 1, 0]),
        ({"HIP_VISIBLE_DEVICES": "GPU-0000000000000003,GPU-"}, [3, 0]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "2"}, [2]),
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
        ({"ROCR_VISIBLE_DEVICES": "0,9,1"}, [0], "'9' is not a device or is named twice, so the list ends there"),
        ({"ROCR_VISIBLE_DEVICES": "1,1,2"}, [1], "'1' is not a device or is named twice"),
        ({"ROCR_VISIBLE_DEVICES": "1,,2"}, [1], "'' is not a device"),
        ({"ROCR_VISIBLE_DEVICES": "09"}, [], "'09' is not a device"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000"}, [], "is not a device"),
        ({"ROCR_VISIBLE_DEVICES": ""}, [], "hides every GPU; to use them: unset ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, [], "HIP_VISIBLE_DEVICES=1: '1' is not"),
        ({"HIP_VISIBLE_DEVICES": "0, 1"}, [0], "'1' is not a device"),
        ({"HIP_VISIBLE_DEVICES": "00,1"}, [], "'00' is not a device"),
        ({"HIP_VISIBLE_DEVICES": "0x1"}, [], "'0x1' is not a device"),
        ({"HIP_VISIBLE_DEVICES": "gpu-0000000000000003"}, [], "is not a device"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, [], "hides every GPU"),
        ({"HIP_VISIBLE_DEVICES": ""}, [0, 1, 2, 3], "hides no GPU from HIP; to hide them all: export HIP_VISIBLE"),
    ],
)
def test_a_bad_entry_ends_a_list_with_a_note(environ: dict[str, str], order: list[int], note: str) -> None:
    """Lost devices are reported once, with the command that lists the devices or the variable to unset."""
    found, (text,) = seen(GpuVendor.AMD, environ)
    assert found == order
    assert note in text


def test_a_comma_at_the_end_loses_nothing() -> None:
    """There is no note."""
    assert seen(GpuVendor.AMD, {"HIP_VISIBLE_DEVICES": "0,"}) == ([0], ())


def test_rocr_takes_the_unique_beginning_of_a_uuid() -> None:
    """HIP takes the first GPU that fits instead."""
    four = tuple(
        replace(gpu, uuid=f"GPU-{digit}bcdef0123456789") for gpu, digit in zip(gpus(GpuVendor.AMD), "1223", strict=True)
    )
    for environ, order in (
        ({"ROCR_VISIBLE_DEVICES": "GPU-3B,GPU-1"}, [3, 0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2"}, []),
        ({"HIP_VISIBLE_DEVICES": "GPU-2"}, [1]),
    ):
        shown, _ = seen_by_ranks(four, environ)
        visible = sorted((gpu.cuda_index, gpu.index) for gpu in shown if gpu.cuda_index is not None)
        assert [index for _, index in visible] == order


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


@pytest.mark.parametrize(
    ("mask", "order", "note"),
    [
        ("2,0", [0, 2], None),
        ("3,1,3", [1, 3], None),
        ("0x2", [2], None),
        ("0,9,2", [0, 2], "there is no device 9"),
        ("9", [], "hides every GPU; to use them: unset ZE_AFFINITY_MASK"),
        ("", [0, 1, 2, 3], None),
    ],
)
def test_a_mask_is_a_set(mask: str, order: list[int], note: str | None) -> None:
    """Level Zero keeps its own order, skips numbers that are too large, and an empty mask hides nothing."""
    found, notes = seen(GpuVendor.INTEL, {"ZE_AFFINITY_MASK": mask})
    assert found == order
    assert len(notes) == (note is not None)
    assert (note or "") in "".join(notes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ZE_AFFINITY_MASK", "0.1"),
        ("ZE_AFFINITY_MASK", "all"),
        ("ONEAPI_DEVICE_SELECTOR", "level_zero:0"),
        ("ONEAPI_DEVICE_SELECTOR", "opencl:gpu"),
    ],
)
def test_what_is_not_understood_leaves_the_gpus_of_intel_unknown(name: str, text: str) -> None:
    """A note names the variable."""
    shown, (note,) = seen_by_ranks(gpus(GpuVendor.INTEL), {name: text})
    assert all(gpu.visible and gpu.cuda_index is None for gpu in shown)
    assert f"{name}={text}" in note


@pytest.mark.parametrize("text", ["level_zero:gpu", "level_zero:*", "*:gpu", "*:*"])
def test_a_selector_of_all_gpus_hides_nothing(text: str) -> None:
    """Ranks stay bound."""
    assert seen(GpuVendor.INTEL, {"ONEAPI_DEVICE_SELECTOR": text}) == ([0, 1, 2, 3], ())


def test_the_advice_for_gpus_of_unknown_order_is_of_their_vendor(tmp_path: Path) -> None:
    """CUDA_DEVICE_ORDER does not help on Intel."""
    readings = read_sysfs(write_root(load("2pkg-2node-2intel-2tile"), tmp_path), source="x")
    plan = make_plan(build(readings, environ={"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}), Request())
    assert {rank.exact for rank in plan.ranks} == {False}
    assert "not bound: its GPU is unknown" in plan.ranks[0].reason
    assert "CUDA" not in plan.ranks[0].reason


def test_intel_export_names_the_numbers_without_a_mask() -> None:
    """The order is not asked for by address, which would count integrated graphics first."""
    for environ, exported in (({}, "1,2"), ({"ZE_AFFINITY_MASK": "3,1,9"}, "1,3")):
        shown, _ = seen_by_ranks(gpus(GpuVendor.INTEL), environ)
        named = [gpu for gpu in shown if gpu.visible][-2:] if environ else list(shown[1:3])
        assert support_of(GpuVendor.INTEL).variables_for(named, environ) == {"ZE_AFFINITY_MASK": exported}


def test_gpus_of_intel_are_named_in_ascending_order(tmp_path: Path) -> None:
    """Ranks 0 and 1 would use gpu1 and gpu3 whatever the order of the mask is."""
    readings = read_sysfs(write_root(load("2pkg-2node-2intel-2tile"), tmp_path), source="x")
    topology = build(readings)
    for request in (Request(gpus="3,1"), Request(gpus=(3, 1), num_ranks=4)):
        with pytest.raises(UsageError, match="in ascending order") as caught:
            make_plan(topology, request)
        assert "--gpus 1,3" in caught.value.hint
        with pytest.raises(UsageError, match="in ascending order"):
            settle_gpus(topology, request, {})
    assert settle_gpus(topology, Request(gpus="1,3"), {})[1] == {"ZE_AFFINITY_MASK": "1,3"}


def test_a_composite_hierarchy_of_tiles_is_not_guessed(tmp_path: Path) -> None:
    """Tiles are devices by default; if Level Zero joins them, the GPU of each rank is unknown, and a note says so."""
    readings = read_sysfs(write_root(load("2pkg-2node-2intel-2tile"), tmp_path), source="x")
    topology = build(readings, environ={"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"})
    assert "unset ZE_FLAT_DEVICE_HIERARCHY" in topology.notes[0]
    assert not any(rank.exact for rank in make_plan(topology, Request()).ranks)


def test_the_order_of_intel_gpus_is_that_of_their_addresses(tmp_path: Path) -> None:
    """Integrated graphics comes last, unless it is asked for by address: then ranks are not exact."""
    readings = read_sysfs(write_root(load("2pkg-2node-2intel-2tile"), tmp_path), source="x")
    for environ, known in (({}, True), ({"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, False)):
        topology = build(readings, environ=environ)
        plan = make_plan(topology, Request())
        assert [rank.node for rank in plan.ranks] == [0, 0, 1, 1]
        assert (topology.gpu_order_known, plan.exact) == (known, known)
        assert any("type: unset ZE_ENABLE_PCI_ID_DEVICE_ORDER" in note for note in topology.notes) is not known


def test_unknown_tiles_are_not_exact(tmp_path: Path) -> None:
    """The driver i915 does not show tiles in sysfs: a GPU Max may be one device or two."""
    root = write_root(load("2pkg-2node-2intel-2tile"), tmp_path)
    for tile in root.glob("sys/devices/**/tile?"):
        shutil.rmtree(tile)
    topology = build(read_sysfs(root, source="x"))
    assert len(topology.gpus) == 2
    assert not make_plan(topology, Request()).exact
    assert "the number of tiles of gpu0, gpu1 is unknown" in topology.notes[0]


def test_in_a_container_intels_gpus_need_their_device_file(tmp_path: Path) -> None:
    """Containers show all GPUs in sysfs; on the live host the render node must be in /dev/dri, too."""
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0/drm/renderD128").mkdir(parents=True)
    tree, gpu = Tree(str(tmp_path)), device(3, GpuVendor.INTEL)
    driven = [found.is_driven for found in read_intel(tree, [gpu], is_live=False)]
    absent = [found.is_driven for found in read_intel(tree, [gpu], is_live=True)]
    (tmp_path / "dev/dri/renderD128").mkdir(parents=True)
    present = [found.is_driven for found in read_intel(tree, [gpu], is_live=True)]
    assert (driven, absent, present) == ([None], [False], [True])


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
    assert any("HIP's order of gpus 0-7 is unknown" in note for note in topology.notes)
    assert not any(link.b.startswith("gpu") for link in topology.links)
    assert not topology.gpu_order_known
    assert not any(rank.exact for rank in make_plan(topology, Request()).ranks)
    assert all(rank.exact for rank in make_plan(topology, Request(bind="none")).ranks)
    assert not any(rank.exact for rank in make_plan(topology, Request(bind="none", memory="preferred")).ranks)


def test_garbled_files_of_the_kfd_are_left_out(tmp_path: Path) -> None:
    """Names and properties that are not numbers do not stop the reading; the GPU of unknown address counts."""
    root = write_root(load("2pkg-2node-2amd-cpx4"), tmp_path)
    (root / KFD / "x").mkdir()
    (root / KFD / "2/properties").write_text("location_id -1\nsimd_count x\n")
    (root / KFD / "3/io_links/0/properties").write_bytes(b"\xff\0type 11\n")
    topology = build(read_sysfs(root, source="x"))
    assert [gpu.node for gpu in topology.visible_gpus] == [None, 1, 1, 1, 0, 0, 0, 0]


def test_on_the_live_host_amd_gpus_need_the_device_of_the_driver(tmp_path: Path) -> None:
    """A container without /dev/kfd shows the GPUs in sysfs; ranks do not count on them."""
    tree, gpu = Tree(str(tmp_path)), device(3, GpuVendor.AMD)
    assert [found.is_driven for found in read_amd(tree, [gpu], is_live=False)[0]] == [None]
    live = read_amd(tree, [gpu], is_live=True)[0]
    topology = build(machine(*live))
    assert topology.visible_gpus == ()
    assert default_num_ranks(topology) == 1
    assert "no driver serves gpu0" in topology.notes[0]


def with_properties(root: Path, number: int, **values: int) -> None:
    """Replace properties of a node of the KFD."""
    file = root / KFD / str(number) / "properties"
    rows = dict(line.split() for line in file.read_text().splitlines())
    file.write_text("".join(f"{name} {value}\n" for name, value in {**rows, **values}.items()))


def test_partitions_in_the_function_bits(tmp_path: Path) -> None:
    """Older kernels have the number of the partition in the PCI function; the machine is the same."""
    root = write_root(load("2pkg-2node-2amd-cpx4"), tmp_path)
    newer = build(read_sysfs(root, source="x"))
    for file in (root / KFD).glob("*/properties"):
        place = int(dict(line.split() for line in file.read_text().splitlines()).get("location_id", 0))
        with_properties(root, int(file.parent.name), location_id=place & 0x0FFF_FFFF | place >> 28)
    assert build(read_sysfs(root, source="x")) == newer
    assert len(newer.visible_gpus) == 8


def test_a_gpu_that_pci_does_not_have_keeps_the_numbers_of_the_others(tmp_path: Path) -> None:
    """HIP counts all GPUs of the KFD: the others keep their numbers, and a note names it."""
    root = write_root(load("2pkg-8node-nps4-8amd"), tmp_path)
    before = {gpu.pci: gpu.cuda_index for gpu in build(read_sysfs(root, source="x")).gpus}
    (root / "sys/bus/pci/devices/0000:2a:00.0").unlink()
    topology = build(read_sysfs(root, source="x"))
    assert {gpu.pci: gpu.cuda_index for gpu in topology.gpus} == before
    assert [gpu.label for gpu in topology.gpus if gpu.node is None] == ["gpu0"]
    assert any("the driver lists gpu0 (0000:2a:00.0), but no PCI device" in note for note in topology.notes)
    assert [rank.exact for rank in make_plan(topology, Request()).ranks] == [False, *[True] * 7]


def test_partitions_of_one_number_are_kept_apart(tmp_path: Path) -> None:
    """If the files give two devices one place, both count, so that the numbers of the others are HIP's."""
    root = write_root(load("2pkg-2node-2amd-cpx4"), tmp_path)
    for number in (2, 3):
        with_properties(root, number, location_id=0x8300)
    topology = build(read_sysfs(root, source="x"))
    assert [(gpu.cuda_index, gpu.partition) for gpu in topology.gpus][:4] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_boards_vga_chip_is_not_a_gpu_unless_a_driver_serves_it(tmp_path: Path) -> None:
    """A server's ATI chip counts neither in captures nor on the live host; with a render node it does."""
    chip = device(3, GpuVendor.AMD, is_vga=True)
    intel = device(4, GpuVendor.INTEL, is_vga=True)
    tree = Tree(str(tmp_path))
    for is_live in (False, True):
        assert read_amd(tree, [chip], is_live=is_live)[0] == []
        assert read_intel(tree, [intel], is_live=is_live) == []
    for found in (chip, intel):
        (tmp_path / f"sys/bus/pci/devices/{found.address}/drm/renderD128").mkdir(parents=True)
    assert len(read_amd(tree, [chip], is_live=False)[0]) == 1
    assert len(read_intel(tree, [intel], is_live=False)) == 1


@pytest.mark.parametrize(
    ("vendor", "device_class", "address", "is_gpu"),
    [
        (GpuVendor.AMD, 0x0300, "0000:03:00.0", True),
        (GpuVendor.AMD, 0x0380, "0000:03:00.0", True),
        (GpuVendor.AMD, 0x1200, "0000:03:00.0", True),
        (GpuVendor.AMD, 0x0403, "0000:03:00.1", False),
        (GpuVendor.INTEL, 0x0380, "0000:3a:00.0", True),
        (GpuVendor.INTEL, 0x0300, "0000:03:00.0", True),
        (GpuVendor.INTEL, 0x0300, "0000:00:02.0", False),
        (GpuVendor.INTEL, 0x0380, "0000:00:02.0", False),
        (GpuVendor.INTEL, 0x1200, "0000:00:0b.0", False),
    ],
)
def test_what_is_a_gpu(vendor: GpuVendor, device_class: int, address: str, *, is_gpu: bool) -> None:
    """By class and address: sound devices, integrated graphics and NPUs of Intel's processors are not."""
    assert vendors.is_gpu(vendor, device_class, address) == is_gpu


# --- GPUs of several vendors -----------------------------------------------------------------------------------------


def test_ranks_use_one_vendor() -> None:
    """NVIDIA's driver answers, so ranks use its GPUs; another accelerator is listed under a new number and hidden."""
    nvml = NvmlReadings(gpus=(NvmlReading(index=0, uuid="GPU-1", pci="0000:01:00.0"),))
    topology = build(machine(device(1, GpuVendor.NVIDIA), device(2, GpuVendor.AMD, index=0, is_driven=True), nvml=nvml))
    assert [(gpu.label, gpu.vendor, gpu.visible) for gpu in topology.gpus] == [
        ("gpu0", GpuVendor.NVIDIA, True),
        ("gpu1", GpuVendor.AMD, False),
    ]
    assert topology.notes[0] == "gpu1 (amd) is not used: ranks use the GPUs of one vendor, here nvidia"
    assert len(make_plan(topology, Request()).ranks) == 1
    with pytest.raises(UsageError, match="one vendor, here nvidia") as caught:
        settle_gpus(topology, Request(gpus="1"), {})
    assert "unset" not in caught.value.hint


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


@pytest.mark.parametrize(
    ("nvidia", "amd", "used"),
    [
        ({"is_driven": True}, {"is_driven": True, "is_vga": True, "index": 0}, GpuVendor.NVIDIA),
        ({}, {"is_driven": True, "is_vga": True, "index": 0}, GpuVendor.NVIDIA),
        ({"is_driven": True, "is_vga": True}, {"is_driven": True, "index": 0}, GpuVendor.NVIDIA),
        ({}, {"is_driven": False}, GpuVendor.NVIDIA),
        ({"is_vga": True}, {"is_driven": True, "index": 0}, GpuVendor.AMD),
        ({"is_driven": False}, {}, GpuVendor.AMD),
    ],
)
def test_integrated_graphics_does_not_hide_gpus(nvidia: dict[str, Any], amd: dict[str, Any], used: GpuVendor) -> None:
    """A processor's graphics is in the KFD, too; a GPU that NVIDIA's driver lists, or one without a screen, is used."""
    topology = build(machine(device(1, GpuVendor.NVIDIA, **nvidia), device(2, GpuVendor.AMD, **amd)))
    assert {gpu.vendor for gpu in topology.visible_gpus} == {used}


def test_nvidias_driver_names_its_gpus_in_captures(tmp_path: Path) -> None:
    """GPUs in /proc/driver/nvidia are driven."""
    readings = read_sysfs(write_root(load("2node-interleaved-smt2-2gpu"), tmp_path), source="x")
    assert {reading.is_driven for reading in readings.pci if reading.is_gpu} == {True}
