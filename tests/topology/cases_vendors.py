"""GPUs of AMD and Intel, and of several vendors: variables of their runtimes, drivers' files, what ranks get to use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.topology.reading import Case
from tests.topology.seam import BY_PCI_ID

AMD8: Final = "1pkg-4node-smt2-8amd"  # eight GPUs, whose UUIDs are GPU-000000000000a000 to …a007
NPS4: Final = "2pkg-8node-nps4-8amd"  # eight GPUs that the KFD numbers in another order than PCI
CPX: Final = "2pkg-2node-2amd-cpx4"  # eight partitions of two GPUs
TILES: Final = "2pkg-2node-2intel-2tile"  # four tiles of two GPUs, and integrated graphics
A, B = "pci0000:16/0000:18:00.0", "pci0000:16/0000:19:00.0"
RENDER: Final = {"drm/renderD128/dev": "226:128"}


def gpu(vendor: str, device_class: str = "0x030200") -> dict[str, str]:
    (number,) = (number for number, known in BY_PCI_ID.items() if known == vendor)
    return {"vendor": f"{number:#x}", "class": device_class, "numa_node": "1"}


def kfd(number: int, address: str, **more: int) -> dict[str, str]:
    bus, device = int(address[5:7], 16), int(address[8:10], 16)
    values = {"simd_count": 304, "domain": 0, "location_id": bus << 8 | device << 3, **more}
    rows = "\n".join(f"{name} {value}" for name, value in values.items())
    return {f"kfd:{number}/gpu_id": "1000", f"kfd:{number}/properties": rows}


def shown(on: str, *variables: Mapping[str, str], gpus: str = "") -> dict[str, Case]:
    return {
        f"{on}: {dict(environ)}{gpus and f' --gpus {gpus}'}": Case(on=on, environ=environ, gpus=gpus)
        for environ in variables
    }


CASES: Final = {
    # --- AMD: ROCr's list is taken from all GPUs; HIP's, or else CUDA's, from what is left, by its new numbers
    **shown(
        AMD8,
        {"ROCR_VISIBLE_DEVICES": "2,0"},
        {"ROCR_VISIBLE_DEVICES": "GPU-000000000000a003,1"},
        {"ROCR_VISIBLE_DEVICES": " 0x3 , 01"},
        {"ROCR_VISIBLE_DEVICES": "gpu-000000000000a003"},
        {"ROCR_VISIBLE_DEVICES": "\udcff"},  # bytes that are not UTF-8
        {"HIP_VISIBLE_DEVICES": "3,1,3,0"},
        {"HIP_VISIBLE_DEVICES": "GPU-000000000000a003,GPU-"},
        {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "2"},
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1,2"},
        {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"},
        {"ROCR_VISIBLE_DEVICES": "3,2,1", "CUDA_VISIBLE_DEVICES": "2,0"},
        # A bad entry ends a list, with a note.
        {"ROCR_VISIBLE_DEVICES": "0,9,1"},
        {"ROCR_VISIBLE_DEVICES": "1,1,2"},
        {"ROCR_VISIBLE_DEVICES": "1,,2"},
        {"ROCR_VISIBLE_DEVICES": "09"},
        {"ROCR_VISIBLE_DEVICES": "GPU-00000000000000"},
        {"ROCR_VISIBLE_DEVICES": "GPU-000000000000a00"},
        {"ROCR_VISIBLE_DEVICES": ""},
        {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
        {"HIP_VISIBLE_DEVICES": "0, 1"},
        {"HIP_VISIBLE_DEVICES": "00,1"},
        {"HIP_VISIBLE_DEVICES": "0x1"},
        {"HIP_VISIBLE_DEVICES": "gpu-000000000000a003"},
        {"HIP_VISIBLE_DEVICES": "0,"},
        {"CUDA_VISIBLE_DEVICES": "-1"},
        {"HIP_VISIBLE_DEVICES": ""},
    ),
    # --- what --gpus exports replaces the list that HIP reads, in the numbers that ROCr leaves
    **shown(
        AMD8,
        {},
        {"HIP_VISIBLE_DEVICES": "0,1,2,3"},
        {"ROCR_VISIBLE_DEVICES": "1,3"},
        {"CUDA_VISIBLE_DEVICES": "1,2,3"},
        {"HIP_VISIBLE_DEVICES": "1,GPU-000000000000a003"},
        {"HIP_VISIBLE_DEVICES": "0"},
        gpus="3,1",
    ),
    # --- Intel: a mask is a set in Level Zero's own order; an empty one hides nothing
    **shown(
        TILES,
        *({"ZE_AFFINITY_MASK": mask} for mask in ("2,0", "3,1,3", "0x2", "0,9,2", "9", "", "0.1", "all")),
        *({"ZE_AFFINITY_MASK": mask} for mask in ("-1", "-9", "-9,2")),  # no device has a negative number
        *({"ONEAPI_DEVICE_SELECTOR": text} for text in ("level_zero:0", "opencl:gpu", "level_zero:gpu", "*:*")),
        {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"},
        {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"},
    ),
    **shown(TILES, {}, {"ZE_AFFINITY_MASK": "3,1,9"}, {"ZE_AFFINITY_MASK": "3,-9,1"}, gpus="1,3"),
    **shown(TILES, {}, gpus="3,1"),
    **shown(TILES, {"ZE_AFFINITY_MASK": "0.1"}, gpus="0"),
    "without a selector that is understood, Intel's ranks are not bound, without advice on CUDA": Case(
        on=TILES, environ={"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, plans=True
    ),
    "tiles that Level Zero joins are not guessed": Case(
        on=TILES, environ={"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, plans=True
    ),
    "asked for by address, integrated graphics may come first: not exact": Case(
        on=TILES, environ={"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, plans=True
    ),
    "the driver i915 shows no tiles: a GPU Max may be one device or two": Case(
        on=TILES,
        files={
            f"up:{path}/tile{tile}": None
            for path in ("pci0000:16/0000:16:01.0/0000:18:00.0", "pci0000:96/0000:96:01.0/0000:98:00.0")
            for tile in (0, 1)
        },
        plans=True,
    ),
    # --- AMD's driver
    "a GPU that the KFD does not list is hidden, with a note": Case(on=NPS4, files={"kfd:9/gpu_id": None}, plans=True),
    "without the KFD HIP's order is unknown, and no rank is exact": Case(
        on=AMD8, files={"sys/class/kfd": None}, plans=True
    ),
    "garbled files of the KFD are left out": Case(
        on=CPX,
        files={
            "kfd:x/y": "",
            "kfd:2/properties": "location_id -1\nsimd_count x",
            "kfd:3/io_links/0/properties": b"\xff\0type 11\n",
        },
    ),
    "a GPU that PCI does not have keeps the numbers of the others": Case(
        on=NPS4, files={"pci:0000:2a:00.0": None}, plans=True
    ),
    "partitions with one number are kept apart": Case(
        on=CPX, files=kfd(2, "0000:83:00.0", unique_id=40960) | kfd(3, "0000:83:00.0", unique_id=40960)
    ),
    "older kernels have the number of the partition in the PCI function: the same machine": Case(
        on=CPX,
        files={
            path: text
            for place, bus in ((2, 0x83), (6, 0x03))
            for part in range(4)
            for path, text in kfd(
                place + part, f"0000:{bus:02x}:00.0", location_id=bus << 8 | part, unique_id=0xA000 + (place == 6)
            ).items()
            if path.endswith("properties")
        },
    ),
    # --- what is a GPU
    **{
        f"{vendor}, class {device_class} at {path[-12:]}": Case(devices={path: gpu(vendor, device_class)})
        for vendor, device_class, path in (
            ("amd", "0x030000", A),
            ("amd", "0x038000", A),
            ("amd", "0x120000", A),
            ("amd", "0x040300", "pci0000:16/0000:18:00.1"),
            ("intel", "0x038000", A),
            ("intel", "0x030000", A),
            ("intel", "0x030000", "pci0000:00/0000:00:02.0"),
            ("intel", "0x038000", "pci0000:00/0000:00:02.0"),
            ("intel", "0x120000", "pci0000:00/0000:00:0b.0"),
        )
    },
    **{
        f"a board's VGA chip of {vendor} with a render node counts": Case(devices={A: gpu(vendor, "0x030000") | RENDER})
        for vendor in ("amd", "intel")
    },
    # --- several vendors: ranks use the GPUs of one
    "NVIDIA's driver answers: AMD's GPU gets a new number and is hidden": Case(
        devices={A: gpu("nvidia"), B: gpu("amd", "0x120000")},
        files=kfd(0, "0000:19:00.0"),
        nvml=[{"pci": "0000:18:00.0"}],
        plans=True,
    ),
    "--gpus of another vendor is refused": Case(
        devices={A: gpu("nvidia"), B: gpu("amd", "0x120000")},
        files=kfd(0, "0000:19:00.0"),
        nvml=[{"pci": "0000:18:00.0"}],
        gpus="1",
    ),
    "a screen of another vendor is left out without a word": Case(
        devices={A: gpu("nvidia"), B: gpu("amd", "0x030000") | RENDER}
    ),
    "alone, a screen with a render node counts": Case(devices={B: gpu("amd", "0x030000") | RENDER}),
    "NVIDIA's GPU without a driver does not keep ranks from AMD's": Case(
        devices={A: gpu("nvidia"), B: gpu("amd", "0x120000")}, files=kfd(0, "0000:19:00.0"), plans=True
    ),
    "a processor's graphics in the KFD does not hide NVIDIA's GPUs": Case(
        devices={A: gpu("nvidia"), B: gpu("amd", "0x030000") | RENDER}, files=kfd(0, "0000:19:00.0")
    ),
    "a GPU that NVIDIA's driver lists is used": Case(
        devices={A: gpu("nvidia"), B: gpu("amd", "0x120000")},
        files=kfd(0, "0000:19:00.0") | {"nvidia:0000:18:00.0/information": "Model: H100"},
    ),
    "NVIDIA's screen does not keep ranks from AMD's GPU": Case(
        devices={A: gpu("nvidia", "0x030000"), B: gpu("amd", "0x120000")}, files=kfd(0, "0000:19:00.0")
    ),
}
