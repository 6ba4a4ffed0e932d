"""AMD's GPUs: their runtimes' variables. Pure.

Comes in: GPUs and the variables of ROCr and HIP. Goes out: the GPUs that HIP shows a process.

The variables work one after the other: ROCR_VISIBLE_DEVICES chooses from all GPUs; HIP_VISIBLE_DEVICES, or if it is not
set or empty CUDA_VISIBLE_DEVICES, chooses from the remaining ones, by their new numbers. An empty list hides every GPU
from ROCr, but none from HIP. This is what HIP does; `torch.cuda.device_count()` reads the variables itself, and counts
no GPU if HIP's list is empty.

No AMD machine was at hand: files, documentation and source code only.
Source: ROCm's documentation, "GPU isolation techniques"; the sources of ROCr and HIP that lists.py names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from numapin.base.not_none import not_none
from numapin.base.plural import listed
from numapin.topology.model import GpuVendor
from numapin.topology.readings import ACCELERATOR, DISPLAY
from numapin.topology.sources.vendors.lists import Variable, find_by_hip, find_by_rocr, listed_gpus
from numapin.topology.sources.vendors.seam import VendorSupport
from numapin.topology.visible import with_visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Gpu
    from numapin.topology.sources.vendors.seam import Device, Environ, Seen

_ROCR: Final = "ROCR_VISIBLE_DEVICES"
_HIP: Final = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_LIST_COMMAND: Final = "rocminfo"


def _is_gpu(device_class: int, _address: str) -> bool:
    return device_class >> 8 == DISPLAY or device_class == ACCELERATOR


def _why_order_unknown(devices: Sequence[Device], _environ: Environ) -> str:
    """Return a text if the KFD's nodes are not in the description, as in hwloc's and RCCL's files."""
    if all(pci.is_driven is not None for _, pci in devices):
        return ""
    gpus = listed("gpu", [gpu.index for gpu, _ in devices])
    why = "because this description has no KFD topology; ranks use the order of their indices"
    return f"HIP's order of {gpus} is unknown, {why}"


def _mark_visible(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    remaining: list[Gpu] = sorted(gpus, key=lambda gpu: gpu.index)
    notes: tuple[str, ...] = ()
    if _ROCR in environ:
        variable = Variable(_ROCR, environ[_ROCR])
        remaining, notes = listed_gpus(
            variable, remaining, find_by_rocr, skips_repeats=False, list_command=_LIST_COMMAND
        )
    hip_list = _hip_list(environ)
    if hip_list is not None:
        remaining, lost = listed_gpus(hip_list, remaining, find_by_hip, skips_repeats=True, list_command=_LIST_COMMAND)
        notes += lost
    return with_visible(gpus, remaining), (*notes, *_empty_notes(environ))


def _hip_list(environ: Environ) -> Variable | None:
    """Return the list that HIP reads."""
    return next((Variable(name, environ[name]) for name in _HIP if environ.get(name)), None)


def _empty_notes(environ: Environ) -> tuple[str, ...]:
    empty = [name for name in _HIP if environ.get(name) == ""]
    if not empty or _hip_list(environ) is not None:
        return ()
    return (f"{empty[0]} is empty, which hides no GPU from HIP; to hide them all: export {empty[0]}=-1",)


def _variables_for(gpus: Sequence[Gpu], environ: Environ) -> dict[str, str]:
    """Set CUDA_VISIBLE_DEVICES, and HIP_VISIBLE_DEVICES where it is set and would win. ROCr's stays in effect.

    torchrun's --virtual-local-rank sets the former only, so that the latter must not appear without need.
    """
    entries = _hip_entries(environ)
    numbers = not_none(gpu.cuda_index for gpu in gpus)
    text = ",".join(entries[number] if entries else str(number) for number in numbers)
    own, cuda = _HIP
    return {cuda: text} | ({own: text} if own in environ else {})


def _hip_entries(environ: Environ) -> list[str]:
    """Return the entries of the list that HIP reads, each once; none if there is no list."""
    hip_list = _hip_list(environ)
    return list(dict.fromkeys(hip_list.entries)) if hip_list else []


AMD: Final = VendorSupport(
    vendor=GpuVendor.AMD,
    is_gpu=_is_gpu,
    hwloc_name=re.compile(r"rsmi([0-9]{1,4})"),
    hwloc_uuid="AMDUUID",
    why_order_unknown=_why_order_unknown,
    mark_visible=_mark_visible,
    variables_for=_variables_for,
    hiding_variables=(*_HIP, _ROCR),
    driver_remedy=(
        "load the driver, or give the container its devices: docker run --device /dev/kfd --device /dev/dri"
    ),
)
