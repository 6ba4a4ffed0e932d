"""The GPU that a process uses.

1. A list of devices (CUDA_VISIBLE_DEVICES) that differs from the command's and has one entry: the process uses that
   device, as a Ray actor does.
2. A launcher's variable for the local rank (LOCAL_RANK, SLURM_LOCALID, …) that differs from the command's: rank n uses
   device n mod G of its devices.
3. Otherwise the process says so itself: torch.cuda.set_device(n), or the first context that it creates.
"""

from __future__ import annotations

import re

from numapin.base.gpu_uuid import GPU_PREFIX, MIG_PREFIX, uuid_digits
from numapin.children.table import SLURM_RANK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from numapin.children.table import ChildTable, DeviceEntry

_INDEX: Final = re.compile(r"[ \t]*\+?(\d{1,6})(?!\d)", re.ASCII)  # as topology.visible reads it
_IN_STEP: Final = "SLURM_STEP_TASKS_PER_NODE"


class UnknownDevice(Exception):  # noqa: N818 - names what is unknown
    """A device of a process that cannot be found in the plan; its text says why, with the remedy."""


def known_device(table: ChildTable, environ: Mapping[str, str]) -> tuple[DeviceEntry, str] | None:
    """Return the GPU that the environment gives to this process alone, and the variable; None if it gives none.

    Raises UnknownDevice if the list names one device that the plan does not have.
    """
    changed = _changed_list(table, environ)
    if changed is not None and len(_entries(environ[changed])) == 1:
        return device_of(table, environ, 0), f"{changed}={environ[changed]}"
    name = _rank_variable(table, environ)
    count = num_visible(table, environ)
    if name is None or not count:
        return None
    return device_of(table, environ, int(environ[name]) % count), f"{name}={environ[name]}"


def num_visible(table: ChildTable, environ: Mapping[str, str]) -> int:
    """Return the number of devices that the process sees."""
    changed = _changed_list(table, environ)
    return len(table.devices) if changed is None else len(_entries(environ[changed]))


def device_of(table: ChildTable, environ: Mapping[str, str], number: int) -> DeviceEntry:
    """Return the GPU with this number in the process's own list of devices. Raises UnknownDevice."""
    changed = _changed_list(table, environ)
    if changed is None:
        return _numbered(table, number)
    entries = _entries(environ[changed])
    if not 0 <= number < len(entries):
        raise UnknownDevice(f"there is no device {number}: {changed}={environ[changed][:60]}")
    return _named(table, changed, entries[number])


def _numbered(table: ChildTable, number: int) -> DeviceEntry:
    """Return the GPU with this number among those that the command sees. Raises UnknownDevice."""
    found = next((entry for entry in table.devices if entry.number == number), None)
    if found is None:
        raise UnknownDevice(f"there is no device {number}: the command sees {len(table.devices)}")
    return found


def _changed_list(table: ChildTable, environ: Mapping[str, str]) -> str | None:
    """Return the list of devices that differs from the command's. Raises UnknownDevice if several say different things.

    An unset list that the command had shows devices that the plan does not have.
    """
    changed = [name for name in table.lists if environ.get(name) != table.saw.get(name)]
    if not changed:
        return None
    _require_same_value(environ, changed)
    return changed[0]


def _require_same_value(environ: Mapping[str, str], names: Sequence[str]) -> None:
    removed = [name for name in names if name not in environ]
    if removed:
        hint = "leave it set, or give the process a list of its own"
        raise UnknownDevice(f"it may see GPUs that the plan does not have, because {removed[0]} was unset; {hint}")
    if len({environ[name] for name in names}) > 1:
        settings = ", ".join(f"{name}={environ[name][:60]}" for name in names)
        raise UnknownDevice(f"numapin cannot combine the lists of devices {settings}; set only one of them")


def _entries(text: str) -> Sequence[str]:
    """Return the entries of a list of devices, up to the first that no device can have."""
    entries = []
    for entry in text.split(","):
        if not (_INDEX.match(entry) or entry.startswith((GPU_PREFIX, MIG_PREFIX))):
            break
        entries.append(entry)
    return entries


def _named(table: ChildTable, variable: str, entry: str) -> DeviceEntry:
    """Return the GPU that an entry of a list names. Raises UnknownDevice."""
    found = [each for each in table.devices if _is_meant(each, entry)]
    if len(found) != 1:
        problem = f"{variable} names {entry[:60]}, which is not one of the GPUs that the command saw"
        raise UnknownDevice(f"{problem}; see them with: numapin topo")
    return found[0]


def _is_meant(device: DeviceEntry, entry: str) -> bool:
    """Return whether an entry of a list means this GPU, by its index or by its UUID."""
    match = _INDEX.match(entry)
    return _is_called(device, entry) if match is None else device.bare == int(match[1])


def _is_called(entry: DeviceEntry, name: str) -> bool:
    if name.startswith(MIG_PREFIX):
        parent = name.removeprefix(MIG_PREFIX).partition("/")[0]
        return name in entry.mig or (parent.startswith(GPU_PREFIX) and _has_uuid(entry, parent))
    return _has_uuid(entry, name)


def _has_uuid(entry: DeviceEntry, name: str) -> bool:
    digits = uuid_digits(name)
    return bool(digits) and uuid_digits(entry.uuid or "").startswith(digits)


def _rank_variable(table: ChildTable, environ: Mapping[str, str]) -> str | None:
    """Return the first variable with a local rank that the command did not have; None if there is none."""
    ranks = (name for name in table.saw if name not in table.lists)
    return next((name for name in ranks if _names_rank(table, environ, name)), None)


def _names_rank(table: ChildTable, environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable has a local rank that the command did not have; Slurm's counts in a step only."""
    value = environ.get(name, "")
    counts = name != SLURM_RANK or _IN_STEP in environ
    return counts and value != table.saw[name] and _is_number(value)


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 6
