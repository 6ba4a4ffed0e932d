"""The effect of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER on the list of GPUs.

The rules are from NVIDIA's documents (CUDA Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA
Device Enumeration"). Where these are silent, they describe what driver 580.159.04 did with each form on two H200s:

- The first entry sets the kind of the list: indices, "GPU-" or "MIG-". An entry of another kind is a bad entry.
- A bad entry ends the list; the entries before it count. A list that starts with one ("", "-1", "NoDevFiles", "void")
  hides every GPU.
- An index is read as by C's strtol: white space, a sign and decimal digits; anything after the digits is ignored
  ("0x1", "0-1" and "0;1" are 0). It counts in CUDA's order, not in NVML's.
- A UUID is 32 hexadecimal digits in either case; dashes do not matter, and anything after the 32 digits is ignored.
  Fewer digits are enough if only one GPU's UUID starts so, with nothing after them. A blank before "GPU-" is not
  skipped.
- A device that is named twice before the list ends makes CUDA refuse to start (CUDA_ERROR_INVALID_DEVICE).

MIG: drivers before R570 show a process a single MIG instance and no other device; later ones show one instance of each
GPU instance, and whole GPUs too. A `Gpu` has one CUDA index, so the older rule is modeled.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.text import GPU_PREFIX, MIG_PREFIX, uuid_digits
from numapin.topology.address import pci_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Gpu

_INDEX: Final = re.compile(r"[ \t\n\v\f\r]*([+-]?)0*(\d{1,9})(?!\d)", re.ASCII)
_HIDE_ALL: Final = frozenset({"", "-1", "nodevfiles", "void", "none"})


class _VisibleDevice(NamedTuple):
    """The device that one entry names: a GPU, or one MIG instance of it."""

    gpu: Gpu
    mig: str | None = None

    def __str__(self) -> str:
        return self.gpu.label if self.mig is None else f"a MIG instance of {self.gpu.label}"


def apply_visibility(
    gpus: tuple[Gpu, ...], *, visible_devices: str | None, device_order: str | None
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs, in the order given, with `visible` and `cuda_index` set as CUDA sees them, and notes.

    `visible_devices` and `device_order` are the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, None if unset.
    If it is unknown which GPUs CUDA shows, or in which order, all stay visible and none has a CUDA index.
    """
    in_order, why_unknown = _cuda_order(gpus, device_order)
    devices: list[_VisibleDevice] | None = [_VisibleDevice(gpu) for gpu in in_order]
    notes: list[str] = []
    if visible_devices is not None:
        devices, notes = _read_list(visible_devices, in_order)
    if why_unknown and devices and _kind(visible_devices or "") == "":  # how many devices is known, but not which
        devices, notes = None, [*notes, why_unknown]
    if devices is None:
        return with_unknown_order(gpus), tuple(notes)

    split = next((device for device in devices if device.gpu.mig), None)
    if split is not None:
        if len(devices) > 1:
            alone = "drivers before R570 show a process one MIG instance and nothing else"
            remedy = "start a run for each instance, or list whole GPUs only, by UUID"
            notes.append(f"only {split} counts as visible to CUDA: {alone}; {remedy}")
        if split.mig is None:
            remedy = f"choose: export CUDA_VISIBLE_DEVICES={split.gpu.mig[0].uuid}"
            notes.append(f"{split.gpu.label} is split into MIG instances, and CUDA uses only the first; {remedy}")
        devices = [split]
    return with_visible(gpus, [device.gpu for device in devices]), tuple(notes)


def with_visible(gpus: tuple[Gpu, ...], in_order: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return all GPUs, of which those in `in_order` are visible and have the numbers of that order."""
    numbers = {gpu.index: number for number, gpu in enumerate(in_order)}
    return tuple(replace(gpu, visible=gpu.index in numbers, cuda_index=numbers.get(gpu.index)) for gpu in gpus)


def with_unknown_order(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return all GPUs as visible, in an order that is unknown."""
    return tuple(replace(gpu, visible=True, cuda_index=None) for gpu in gpus)


def hides_all(entry: str) -> bool:
    """Return whether an entry is one of the words for no GPU at all, such as Slurm's NoDevFiles."""
    return entry.strip().lower() in _HIDE_ALL


def _cuda_order(gpus: tuple[Gpu, ...], device_order: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs in CUDA's order before any list, and why that order is unknown ("" if it is known).

    CUDA sorts by PCI address if CUDA_DEVICE_ORDER says so, else by speed (FASTEST_FIRST). GPUs of one name are equally
    fast and keep the order of their addresses.
    """
    if len(gpus) == 1:
        return gpus, ""
    if any(gpu.pci is None for gpu in gpus):
        return gpus, "CUDA's order of the GPUs is unknown because some PCI addresses are; name them by UUID"
    by_address = tuple(sorted(gpus, key=lambda gpu: pci_order(gpu.pci)))
    names = {gpu.name for gpu in gpus}
    are_equally_fast = len(names) == 1 and None not in names
    if device_order == "PCI_BUS_ID" or are_equally_fast:
        return by_address, ""
    shown = ", ".join(sorted({name or "unknown" for name in names}))
    return by_address, (
        f"CUDA puts the fastest of different GPUs first ({shown}), so its order is unknown; "
        "type: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


def _read_list(text: str, gpus: Sequence[Gpu]) -> tuple[list[_VisibleDevice] | None, list[str]]:
    """Read a list against the GPUs in CUDA's order, up to its first bad entry; None: it is unknown what it names."""
    variable, entries, kind = f"CUDA_VISIBLE_DEVICES={text}", text.split(","), _kind(text)
    devices: list[_VisibleDevice] = []
    for position, entry in enumerate(entries):
        found = _find_uuid(entry, kind, gpus) if kind else _find_index(entry, gpus)
        if found is not None:
            if found in devices:
                return [], [f"{variable} names {found} twice, so CUDA refuses to start; name each device once"]
            devices.append(found)
            continue
        if kind and kind == _kind(entry) and any(gpu.uuid is None for gpu in gpus):
            unknown = "the UUIDs of some GPUs are unknown (is the driver loaded?)"
            return None, [f"{variable} cannot be checked: {unknown}; check it with: nvidia-smi -L"]
        if not devices and hides_all(entry):
            return [], [f"{variable} hides every GPU from CUDA; to use them: unset CUDA_VISIBLE_DEVICES"]
        if not any(map(str.strip, entries[position:])):  # "0,1," loses nothing
            return devices, []
        loss = "CUDA ignores it and everything after it" if devices else "CUDA sees no GPU"
        problem = f"{entry!r} does not name a device, so {loss}; list the devices with: nvidia-smi -L"
        return devices, [f"{variable}: {problem}"]
    return devices, []


def _kind(entry: str) -> str:
    """Return "GPU-", "MIG-", or "" for an index and anything else."""
    return next((prefix for prefix in (GPU_PREFIX, MIG_PREFIX) if entry.startswith(prefix)), "")


def _find_index(entry: str, gpus: Sequence[Gpu]) -> _VisibleDevice | None:
    match = _INDEX.match(entry)
    number = int(match[1] + match[2]) if match else -1
    return _VisibleDevice(gpus[number]) if 0 <= number < len(gpus) else None


def _find_uuid(entry: str, kind: str, gpus: Sequence[Gpu]) -> _VisibleDevice | None:
    known = [(gpu.uuid, _VisibleDevice(gpu)) for gpu in gpus]
    if kind == MIG_PREFIX:
        known = [(mig.uuid, _VisibleDevice(gpu, mig.uuid)) for gpu in gpus for mig in gpu.mig]
        exact = dict(known).get(entry)
        if exact is not None:
            return exact
    digits = uuid_digits(entry, kind) if entry.startswith(kind) else ""
    fits = [device for uuid, device in known if uuid and digits and uuid_digits(uuid, kind).startswith(digits)]
    return fits[0] if len(fits) == 1 else None
