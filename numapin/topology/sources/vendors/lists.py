"""Lists of devices in environment variables, as the runtimes of AMD and Intel read them. Pure.

Comes in: the text of a variable, and GPUs in the runtime's order. Goes out: the GPUs that it names, and notes. CUDA's
lists have more forms: topology/visible.py reads them.

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

Source: ROCR-Runtime, core/runtime/amd_filter_device.cpp; clr, device/rocm/rocdevice.cpp, Device::init;
compute-runtime, execution_environment.cpp, parseAffinityMask.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.gpu_uuid import GPU_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.topology.model import Gpu

_OCTAL: Final = re.compile(r"0[0-7]{1,9}")
_C_NUMBER: Final = re.compile(rf"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]{{1,8}}|{_OCTAL.pattern}|0|[1-9][0-9]{{0,9}})")
_ROCR_UUID_LENGTHS: Final = range(len(GPU_PREFIX) + 1, len(GPU_PREFIX) + 17)


class Variable(NamedTuple):
    """A variable that is set."""

    name: str
    text: str

    def __str__(self) -> str:
        """Return the assignment."""
        return f"{self.name}={self.text}"

    @property
    def entries(self) -> list[str]:
        """The entries of the list, without an empty one at its end."""
        entries = self.text.split(",")
        return entries if entries[-1] else entries[:-1]


def c_number(text: str) -> int | None:
    """Return a number as C's strtol reads it with base 0: decimal, hexadecimal (0x1) or octal (01)."""
    match = _C_NUMBER.fullmatch(text)
    if match is None:
        return None
    octal = _OCTAL.fullmatch(match[2])
    number = int(match[2], 8 if octal else 0)
    return -number if match[1] == "-" else number


def find_by_rocr(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that an entry of ROCR_VISIBLE_DEVICES names."""
    entry = entry.strip().upper()
    if not entry.startswith("G"):
        return _at(c_number(entry), gpus)
    matches = [gpu for gpu in gpus if (gpu.uuid or "").upper().startswith(entry)]
    return matches[0] if len(matches) == 1 and len(entry) in _ROCR_UUID_LENGTHS else None


def find_by_hip(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that an entry of HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES names."""
    if GPU_PREFIX in entry:
        return next((gpu for gpu in gpus if entry in (gpu.uuid or "")), None)
    number = c_number(entry)
    return _at(number, gpus) if entry == str(number) else None


def _at(number: int | None, gpus: Sequence[Gpu]) -> Gpu | None:
    return gpus[number] if number is not None and 0 <= number < len(gpus) else None


def listed_gpus(
    variable: Variable,
    gpus: Sequence[Gpu],
    find: Callable[[str, Sequence[Gpu]], Gpu | None],
    *,
    skips_repeats: bool,
    list_command: str,
) -> tuple[list[Gpu], tuple[str, ...]]:
    """Return the GPUs that a list names; the first entry that names none ends it.

    Args:
        variable: The list.
        gpus: The GPUs in the order in which the runtime counts them.
        find: The function that returns the GPU of an entry.
        skips_repeats: Whether a GPU that is named again is skipped; otherwise it ends the list.
        list_command: The command that lists the devices, for the note.

    Returns:
        The GPUs in the order of the list, and a note if the list ends early or is empty.
    """
    found: list[Gpu] = []
    for position, entry in enumerate(variable.entries):
        gpu = find(entry, gpus)
        if gpu is None or (gpu in found and not skips_repeats):
            return found, _loss(variable, position, list_command)
        if gpu not in found:
            found.append(gpu)
    return found, () if found else (_hides_all(variable),)


def _loss(variable: Variable, position: int, list_command: str) -> tuple[str, ...]:
    """Note what is lost from the entry on at which a list ends."""
    entry = variable.entries[position].strip()
    if position == 0 and entry in ("", "-1"):
        return (_hides_all(variable),)
    problem = f"{entry!r} is not a device or is named twice, so the list ends there"
    return (f"{variable}: {problem}; list the devices with: {list_command}",)


def _hides_all(variable: Variable) -> str:
    return f"{variable} hides every GPU; to use them: unset {variable.name}"
