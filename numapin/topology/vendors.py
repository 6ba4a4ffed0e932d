"""The GPU vendors: one table of what differs between them, except the files of their drivers.

Ranks use the GPUs of one vendor, because a build of PyTorch does; those of others count as hidden. This module
imports no descriptions of machines and compiles few patterns, because `numapin exec`, which must be quick, asks it for
the names of variables.

How the runtimes read a list of devices in a variable (CUDA's lists have more forms: topology/visible.py reads them):

======================  ========================  =======================  ===========================
entry                   ROCr                      HIP                      Level Zero
======================  ========================  =======================  ===========================
index                   as C writes it: 1, 0x1    digits only, no blanks   as C writes it
UUID                    unique beginning          beginning, first match   no
same GPU again          ends the list             skipped                  skipped
anything else           ends the list             ends the list            out of range: skipped
order                   of the list               of the list              of the devices
empty list              hides every GPU           is not set               is not set
======================  ========================  =======================  ===========================

AMD: the variables work one after the other. ROCR_VISIBLE_DEVICES chooses from all GPUs; HIP_VISIBLE_DEVICES, or if it
is not set or empty CUDA_VISIBLE_DEVICES, chooses from the remaining ones, by their new numbers. This is what HIP does;
`torch.cuda.device_count()` reads the variables itself, and counts no GPU if HIP's list is empty.

Intel: a GPU of several tiles (Data Center GPU Max) is as many devices, unless ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE.
Integrated graphics, which is always on bus 0, is not read: ranks do not compute on it. Level Zero numbers other GPUs
before it, in the order of PCI addresses; with ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, integrated graphics comes first, so that
numbers are unknown then.

No AMD or Intel machine was at hand: files, documentation and source code only.
Source: ROCR-Runtime, core/runtime/amd_filter_device.cpp; clr, device/rocm/rocdevice.cpp, Device::init; ROCm, "GPU
isolation techniques"; Level Zero's specification, "Environment Variables"; compute-runtime, execution_environment.cpp
(comparePciIdBusNumber, parseAffinityMask); DPC++, "ONEAPI_DEVICE_SELECTOR".
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from numapin.base.text import GPU_PREFIX, listed, not_none
from numapin.errors import UsageError
from numapin.topology.address import pci_order
from numapin.topology.visible import apply_visibility, with_unknown_order, with_visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numapin.topology.model import Gpu
    from numapin.topology.readings import PciReading, Readings

    Environ: TypeAlias = Mapping[str, str]
    Seen: TypeAlias = tuple[tuple[Gpu, ...], tuple[str, ...]]
    """GPUs with `visible` and `cuda_index`, and notes."""

DISPLAY: Final = 0x03  # the base class of GPUs on PCI: the upper half of a device's class
ACCELERATOR: Final = 0x1200  # the class of AMD's accelerators on PCI

_CUDA, _ROCR, _HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_MASK, _SELECTOR, _HIERARCHY = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "ZE_FLAT_DEVICE_HIERARCHY"
_BY_ADDRESS: Final = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
PCI_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The variable by which CUDA numbers GPUs in the order of their PCI addresses; HIP has none, Level Zero needs none."""


class GpuVendor(StrEnum):
    """The maker of a GPU, which decides the runtime that ranks use it with."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"


BY_PCI_ID: Final = {0x10DE: GpuVendor.NVIDIA, 0x1002: GpuVendor.AMD, 0x8086: GpuVendor.INTEL}

_OCTAL: Final = r"0[0-7]{1,9}"
_C_NUMBER: Final = rf"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]{{1,8}}|{_OCTAL}|0|[1-9][0-9]{{0,9}})"
_ROCR_UUID_LENGTHS: Final = range(len(GPU_PREFIX) + 1, len(GPU_PREFIX) + 17)
_ALL_GPUS: Final = r"(?:level_zero|\*):(?:gpu|\*)"


class VendorSupport(NamedTuple):
    """One vendor's row in the table."""

    name: str  # in messages
    torch_word: str  # for its devices
    runtime: str  # which shows ranks its devices
    # They hide GPUs; the last to work, which is the usual one, comes first. All of numapin learns them from here.
    hiding_variables: tuple[str, ...]
    mark_visible: Callable[[tuple[Gpu, ...], Environ], Seen]  # returns the GPUs as the runtime shows them
    # Returns the variables that show some of the visible GPUs, in this order, to a process. Raises UsageError for a GPU
    # that they cannot name.
    variables_for: Callable[[Sequence[Gpu], Environ], dict[str, str]]
    # Returns why the runtime may number several GPUs in another order than ours, or "".
    why_order_unknown: Callable[[Sequence[tuple[Gpu, PciReading]], Environ], str]
    driver_remedy: str  # if no driver serves a GPU
    kubernetes_resource: str  # of its device plugin
    hwloc_name: re.Pattern[str]  # of a GPU's device in hwloc XML, with its number
    hwloc_uuid: str  # the name of its UUID there
    apptainer_options: tuple[str, ...] = ()  # by which containers get its devices, where binding /dev is not enough
    keeps_list_order: bool = True  # whether the runtime numbers GPUs in the order in which these variables name them
    order_remedy: str = ""  # the end of a sentence on GPUs of unknown order


def support_of(vendor: GpuVendor | None) -> VendorSupport:
    """Return what is known of a vendor, which is NVIDIA where none is known."""
    return _TABLE[vendor or GpuVendor.NVIDIA]


def is_gpu(vendor: GpuVendor | None, device_class: int, address: str) -> bool:
    """Return whether a PCI device is a GPU for computing, by its class and address; an unknown vendor's is not."""
    if vendor is GpuVendor.AMD and device_class == ACCELERATOR:
        return True
    is_integrated = vendor is GpuVendor.INTEL and pci_order(address)[:2] == (0, 0)
    return vendor is not None and device_class >> 8 == DISPLAY and not is_integrated


def hiding_variables() -> tuple[str, ...]:
    """Return the variables that hide GPUs from a process, of all vendors; of one vendor's, the last to work is first.

    A variable of several vendors has the place that the last of them gives it, so CUDA's comes after HIP's.
    """
    names = [name for support in _TABLE.values() for name in support.hiding_variables]
    return tuple(name for place, name in enumerate(names, 1) if name not in names[place:])


def preferred(readings: Readings) -> GpuVendor | None:
    """Return the vendor whose GPUs the ranks use.

    It is NVIDIA if its driver lists a GPU. Vendors whose drivers serve no GPU here come last. Of the others, a GPU that
    is more than a screen counts as much as one that a driver serves.
    """

    def rank(vendor: GpuVendor) -> tuple[bool, int]:
        gpus = readings.gpus_on_pci(vendor)
        is_more_than_a_screen, has_driver = any(not gpu.is_vga for gpu in gpus), any(gpu.is_driven for gpu in gpus)
        return any(gpu.is_driven is not False for gpu in gpus), is_more_than_a_screen + has_driver

    if readings.nvml.gpus or any(gpu.is_driven for gpu in readings.gpus_on_pci(GpuVendor.NVIDIA)):
        return GpuVendor.NVIDIA
    return max((vendor for vendor in VENDORS if readings.gpus_on_pci(vendor)), key=rank, default=None)


def seen_by_ranks(gpus: tuple[Gpu, ...], environ: Environ, *, unusable: Collection[int] = ()) -> Seen:
    """Return the GPUs, in the order given, with `visible` and `cuda_index` as the ranks' runtime sees them, and notes.

    `unusable` are the indices of GPUs that no process can use.
    """
    usable = tuple(gpu for gpu in gpus if gpu.index not in unusable)
    seen, notes = support_of(usable[0].vendor).mark_visible(usable, environ) if usable else ((), ())
    by_index = {gpu.index: gpu for gpu in seen}
    return tuple(by_index.get(gpu.index) or replace(gpu, visible=False, cuda_index=None) for gpu in gpus), notes


def first_visible(gpus: tuple[Gpu, ...], environ: Environ) -> int | None:
    """Return the index of a process's device 0; None if its runtime shows no GPU or the order is unknown."""
    vendors = {gpu.vendor for gpu in gpus if gpu.visible}
    of_used_vendors = tuple(gpu for gpu in gpus if gpu.vendor in vendors) or gpus
    seen, _ = seen_by_ranks(of_used_vendors, environ)
    return next((gpu.index for gpu in seen if gpu.cuda_index == 0), None)


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


def _cuda_variables(gpus: Sequence[Gpu], _environ: Environ) -> dict[str, str]:
    for gpu in gpus:
        if gpu.uuid is None:
            raise UsageError(
                f"--gpus: the UUID of {gpu.label} is unknown; only NVML reports it", "see why with: numapin doctor"
            )
        if gpu.mig:
            raise UsageError(
                f"--gpus: {gpu.label} is cut into {len(gpu.mig)} MIG instances, which it cannot choose from",
                f"name one: {_CUDA}={gpu.mig[0].uuid}",
            )
    return {_CUDA: ",".join(not_none(gpu.uuid for gpu in gpus))}


# --- AMD -------------------------------------------------------------------------------------------------------------


def _seen_by_hip(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    remaining: list[Gpu] = sorted(gpus, key=lambda gpu: gpu.index)
    notes: list[str] = []
    if _ROCR in environ:
        remaining, notes = _listed(_ROCR, environ[_ROCR], remaining)
    name = _hip_variable(environ)
    if name:
        remaining, lost = _listed(name, environ[name], remaining)
        notes += lost
    else:
        empty = [name for name in (_HIP, _CUDA) if name in environ][:1]
        notes += [f"{each} is empty, which hides no GPU from HIP; to hide them all: export {each}=-1" for each in empty]
    return with_visible(gpus, remaining), tuple(notes)


def _hip_variable(environ: Environ) -> str | None:
    """Return the name of the list that HIP reads."""
    return next((name for name in (_HIP, _CUDA) if environ.get(name)), None)


def _entries(text: str) -> list[str]:
    """Return the entries of a list, without an empty one at its end."""
    entries = text.split(",")
    return entries if entries[-1] else entries[:-1]


def _listed(name: str, text: str, gpus: Sequence[Gpu]) -> tuple[list[Gpu], list[str]]:
    """Return the GPUs that a list names, and a note if it ends early or is empty; a bad entry ends it."""
    found: list[Gpu] = []
    for position, entry in enumerate(_entries(text)):
        gpu = _find_by_rocr(entry, gpus) if name == _ROCR else _find_by_hip(entry, gpus)
        if gpu is None or (gpu in found and name == _ROCR):  # HIP skips a GPU that is named again
            if position == 0 and entry.strip() in ("", "-1"):
                break
            problem = f"{entry.strip()!r} is not a device or is named twice, so the list ends there"
            return found, [f"{name}={text}: {problem}; list the devices with: rocminfo"]
        if gpu not in found:
            found.append(gpu)
    return found, [] if found else [f"{name}={text} hides every GPU; to use them: unset {name}"]


def _c_number(text: str) -> int | None:
    """Return a number as C's strtol reads it with base 0: decimal, hexadecimal (0x1) or octal (01)."""
    match = re.fullmatch(_C_NUMBER, text)
    if match is None:
        return None
    number = int(match[2], 8 if re.fullmatch(_OCTAL, match[2]) else 0)
    return -number if match[1] == "-" else number


def _find_by_rocr(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    entry = entry.strip().upper()
    if not entry.startswith("G"):
        return _at(_c_number(entry), gpus)
    matches = [gpu for gpu in gpus if (gpu.uuid or "").upper().startswith(entry)]
    return matches[0] if len(matches) == 1 and len(entry) in _ROCR_UUID_LENGTHS else None


def _find_by_hip(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if GPU_PREFIX in entry:
        return next((gpu for gpu in gpus if entry in (gpu.uuid or "")), None)
    number = _c_number(entry)
    return _at(number, gpus) if entry == str(number) else None


def _at(number: int | None, gpus: Sequence[Gpu]) -> Gpu | None:
    return gpus[number] if number is not None and 0 <= number < len(gpus) else None


def _hip_variables(gpus: Sequence[Gpu], environ: Environ) -> dict[str, str]:
    """Set CUDA_VISIBLE_DEVICES, and HIP_VISIBLE_DEVICES where it is set and would win. ROCr's stays in effect.

    torchrun's --virtual-local-rank sets the former only, so that the latter must not appear without need.
    """
    entries = list(dict.fromkeys(_entries(environ.get(_hip_variable(environ) or "", ""))))
    numbers = not_none(gpu.cuda_index for gpu in gpus)
    text = ",".join(entries[number] if entries else str(number) for number in numbers)
    return {_CUDA: text} | ({_HIP: text} if _HIP in environ else {})


def _why_hip_order_unknown(devices: Sequence[tuple[Gpu, PciReading]], _environ: Environ) -> str:
    """Return a text if the KFD's nodes are not in the description, as in hwloc's and RCCL's files."""
    if all(pci.is_driven is not None for _, pci in devices):
        return ""
    gpus = listed("gpu", [gpu.index for gpu, _ in devices])
    why = "because this description has no KFD topology; ranks use the order of their indices"
    return f"HIP's order of {gpus} is unknown, {why}"


# --- Intel -----------------------------------------------------------------------------------------------------------


def _seen_by_level_zero(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    mask, numbers = environ.get(_MASK, "default"), _mask_numbers(environ)
    selector, hierarchy = environ.get(_SELECTOR), environ.get(_HIERARCHY, "FLAT").upper()
    why_unknown = ""
    if selector and not re.fullmatch(_ALL_GPUS, selector, re.IGNORECASE):
        why_unknown = f"{_SELECTOR}={selector} is not understood, so the GPU of each rank is unknown; use {_MASK}"
    elif hierarchy != "FLAT" and any(gpu.partition is not None for gpu in gpus):
        why_unknown = f"{_HIERARCHY}={hierarchy} is not supported on GPUs with several tiles; type: unset {_HIERARCHY}"
    elif "." in mask:
        why_unknown = f"{_MASK}={mask} names tiles, which is not understood; name whole devices"
    elif None in numbers:
        problem = "is not a list of numbers, so the GPU of each rank is unknown"
        why_unknown = f"{_MASK}={mask} {problem}; type: unset {_MASK}"
    if why_unknown:
        return with_unknown_order(gpus), (why_unknown,)

    in_order: list[Gpu] = sorted(gpus, key=lambda gpu: gpu.index)
    masked = sorted(set(not_none(numbers)))  # a set: Level Zero numbers the devices in it in their own order
    missing = [number for number in masked if not 0 <= number < len(in_order)]
    notes: tuple[str, ...] = ()
    if masked and len(missing) == len(masked):
        notes = (f"{_MASK}={mask} hides every GPU; to use them: unset {_MASK}",)
    elif missing:
        notes = (f"{_MASK}={mask}: there is no device {missing[0]}; list the devices with: xpu-smi discovery",)
    named = [in_order[number] for number in masked if number not in missing] if masked else in_order
    return with_visible(gpus, named), notes


def _mask_numbers(environ: Environ) -> list[int | None]:
    """Return a number for each entry of the mask, None for other text; no entries: every device is visible."""
    mask = environ.get(_MASK, "default")
    return [] if mask in ("", "default") else list(map(_c_number, mask.split(",")))


def _level_zero_variables(gpus: Sequence[Gpu], environ: Environ) -> dict[str, str]:
    """Name the devices by their numbers without a mask."""
    numbers = not_none(gpu.cuda_index for gpu in gpus)
    if len(numbers) < len(gpus):
        raise UsageError("--gpus: Level Zero's numbers of the GPUs are unknown", "see why with: numapin topo")
    masked = sorted({number for number in not_none(_mask_numbers(environ)) if number >= 0})
    return {_MASK: ",".join(str(masked[number] if masked else number) for number in numbers)}


def _why_level_zero_order_unknown(devices: Sequence[tuple[Gpu, PciReading]], environ: Environ) -> str:
    if environ.get(_BY_ADDRESS, "0") not in ("", "0"):
        why = "counts integrated graphics before other GPUs, so the GPU of each rank is assumed"
        return f"{_BY_ADDRESS}={environ[_BY_ADDRESS]} {why}; type: unset {_BY_ADDRESS}"
    unknown = ", ".join(gpu.label for gpu, pci in devices if not pci.tiles_known)
    if not unknown:
        return ""
    why = "and each tile is a device, so the GPU of each rank is assumed"
    return f"the number of tiles of {unknown} is unknown, {why}; list the devices with: xpu-smi discovery"


# --- the table -------------------------------------------------------------------------------------------------------

_TABLE: Final[Mapping[GpuVendor, VendorSupport]] = {
    GpuVendor.NVIDIA: VendorSupport(
        name="NVIDIA",
        torch_word="cuda",
        runtime="CUDA",
        hiding_variables=(_CUDA,),
        mark_visible=lambda gpus, environ: apply_visibility(
            gpus, visible_devices=environ.get(_CUDA), device_order=environ.get("CUDA_DEVICE_ORDER")
        ),
        variables_for=_cuda_variables,
        why_order_unknown=lambda _gpus, _environ: "",  # GPUs of unknown order have no `cuda_index`
        driver_remedy="load the driver, or give the container the GPUs: docker run --gpus all",
        kubernetes_resource="nvidia.com/gpu",
        apptainer_options=("--nv",),
        hwloc_name=re.compile(r"nvml([0-9]{1,4})"),  # its CUDA and OpenCL devices are numbered in other orders
        hwloc_uuid="NVIDIAUUID",
        order_remedy="CUDA_DEVICE_ORDER=PCI_BUS_ID gives CUDA a known order",
    ),
    GpuVendor.AMD: VendorSupport(
        name="AMD",
        torch_word="cuda",
        runtime="HIP",
        hiding_variables=(_HIP, _CUDA, _ROCR),
        mark_visible=_seen_by_hip,
        variables_for=_hip_variables,
        why_order_unknown=_why_hip_order_unknown,
        driver_remedy=(
            "load the driver, or give the container its devices: docker run --device /dev/kfd --device /dev/dri"
        ),
        kubernetes_resource="amd.com/gpu",
        apptainer_options=("--rocm",),
        hwloc_name=re.compile(r"rsmi([0-9]{1,4})"),
        hwloc_uuid="AMDUUID",
    ),
    GpuVendor.INTEL: VendorSupport(
        name="Intel",
        torch_word="xpu",
        runtime="XPU",
        hiding_variables=(_MASK,),
        mark_visible=_seen_by_level_zero,
        variables_for=_level_zero_variables,
        why_order_unknown=_why_level_zero_order_unknown,
        driver_remedy="load the driver, or give the container its devices: docker run --device /dev/dri",
        kubernetes_resource="gpu.intel.com/i915",
        hwloc_name=re.compile(r"ze([0-9]{1,4})"),
        hwloc_uuid="LevelZeroUUID",
        keeps_list_order=False,
    ),
}
VENDORS: Final = tuple(_TABLE)  # all vendors, in the order in which they are preferred if a machine has GPUs of several
