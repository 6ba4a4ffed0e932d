"""The plan of `numapin exec --children` as each Python below the command finds it, and the GPU that a process uses.

The plan is the variable NUMAPIN_CHILDREN. Its text has lines, then JSON in the last line. The lines are read by the
hook in every Python, so they take no parser: "3", or "3 strict"; then each variable that may name a device, as the
command saw it: NAME if it was unset, else NAME=VALUE. A process whose variable differs was given a device of its own:

1. A list of devices (CUDA_VISIBLE_DEVICES) that differs from the command's and has one entry: the process uses that
   device, as a Ray actor does.
2. A launcher's variable for the local rank (LOCAL_RANK, SLURM_LOCALID, …) that differs from the command's: rank n uses
   device n mod G of its devices.
3. Otherwise the process says so itself: torch.cuda.set_device(n), or the first context that it creates.
"""

from __future__ import annotations

import json
import re

from numapin.base.text import GPU_PREFIX, MIG_PREFIX, uuid_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_SLURM_RANK: Final = "SLURM_LOCALID"
_IN_STEP: Final = "SLURM_STEP_TASKS_PER_NODE"
_FIRST: Final = "3"
_INDEX: Final = re.compile(r"[ \t]*\+?(\d{1,6})(?!\d)", re.ASCII)  # as topology.visible reads it


class UnknownDevice(Exception):  # noqa: N818 - names what is unknown
    """A device of a process that cannot be found in the plan; its text says why, with the remedy."""


class DeviceEntry:
    """A GPU of the plan: its names, and the slice of the plan for processes that use it."""

    __slots__ = ("bare", "index", "mig", "number", "pci", "slice", "uuid")

    def __init__(
        self,
        *,
        number: int,  # among the devices that the command sees, which is also its rank in the plan
        bare: int | None,  # if nothing hid devices, which is what an index in CUDA_VISIBLE_DEVICES means
        index: int,
        uuid: str | None,
        pci: str | None,
        mig: Sequence[str],
        slice: str,  # noqa: A002 - the field's name in the JSON
    ) -> None:
        self.number, self.bare, self.index = number, bare, index
        self.uuid, self.pci, self.mig, self.slice = uuid, pci, tuple(mig), slice

    @property
    def name(self) -> str:
        """The name that messages use, as in `numapin topo`."""
        return "an unknown GPU" if self.index < 0 else f"GPU {self.index}"

    def is_called(self, entry: str) -> bool:
        """Return whether an entry of a list of devices means this GPU, by its index or by its UUID."""
        index = _INDEX.match(entry)
        if index is not None:
            return self.bare == int(index[1])
        if entry.startswith(MIG_PREFIX):
            return entry in self.mig
        digits = uuid_digits(entry)
        return bool(digits) and uuid_digits(self.uuid or "").startswith(digits)


class ChildTable:
    """The contents of NUMAPIN_CHILDREN."""

    __slots__ = ("allowed_cpus", "devices", "lists", "run", "saw", "strict", "verbose")

    def __init__(
        self,
        *,
        devices: Sequence[DeviceEntry],
        allowed_cpus: str,  # those that the command may use, as a list
        run: str,
        strict: bool,
        verbose: bool,
        lists: Sequence[str],  # the variables that list devices: a process does not import the table of vendors
        saw: Mapping[str, str | None],  # the command's values of these, and of other variables that may name a device
    ) -> None:
        self.devices, self.allowed_cpus, self.run = tuple(devices), allowed_cpus, run
        self.strict, self.verbose, self.lists, self.saw = strict, verbose, tuple(lists), dict(saw)

    def render(self) -> str:
        """Return the text of the variable. A value with a line break is written as if the variable were unset."""
        lines = [f"{_FIRST} strict" if self.strict else _FIRST]
        for name, value in self.saw.items():
            lines.append(name if value is None or "\n" in value else f"{name}={value}")
        content = {
            "allowed_cpus": self.allowed_cpus,
            "run": self.run,
            "verbose": self.verbose,
            "lists": self.lists,
            "devices": [{name: getattr(entry, name) for name in entry.__slots__} for entry in self.devices],
        }
        return "\n".join((*lines, json.dumps(content)))

    @classmethod
    def parse(cls, text: str) -> ChildTable:
        """Read the text of the variable. Raises ValueError, KeyError or TypeError for anything else."""
        first, *lines, last = text.split("\n")
        if first.split()[0] != _FIRST:
            msg = "it was written by another version of numapin"
            raise ValueError(msg)
        saw: dict[str, str | None] = {}
        for line in lines:
            name, equals, value = line.partition("=")
            saw[name] = value if equals else None
        content = json.loads(last)
        return cls(
            devices=[DeviceEntry(**entry) for entry in content["devices"]],
            allowed_cpus=content["allowed_cpus"],
            run=content["run"],
            strict="strict" in first.split(),
            verbose=content["verbose"],
            lists=content["lists"],
            saw=saw,
        )


def make_table(
    plan: Plan,
    topology: Topology,
    environ: Mapping[str, str],
    *,
    slices: Sequence[str],
    run: str = "",
    strict: bool = False,
    verbose: bool = False,
) -> ChildTable:
    """Return the plan as the processes find it.

    `environ` is the command's; `slices` are the texts of the plan's ranks (`handover.slice_text`), in their order.
    """
    from numapin.tasks.identify import RANK_VARIABLES  # here: a process that finds its table needs none of these
    from numapin.topology.vendors import GpuVendor, hiding_variables, support_of

    lists = hiding_variables()
    bare = {gpu.index: gpu.cuda_index for gpu in topology.gpus}
    if not environ.keys().isdisjoint(lists):
        # NVIDIA's list is not relative to another list, so its GPUs have the numbers that CUDA gives them without one.
        # Other vendors' lists may be relative, so their indices are unknown.
        support = support_of(GpuVendor.NVIDIA)
        nvidia = tuple(gpu for gpu in topology.gpus if gpu.vendor is GpuVendor.NVIDIA)
        without = {name: value for name, value in environ.items() if name not in support.hiding_variables}
        bare = {gpu.index: gpu.cuda_index for gpu in support.mark_visible(nvidia, without)[0]}

    by_index = {gpu.index: gpu for gpu in topology.gpus}
    devices = []
    for rank, own in zip(plan.ranks, slices, strict=True):
        gpu = None if rank.gpu is None else by_index.get(rank.gpu.index)
        devices.append(
            DeviceEntry(
                number=rank.local_rank,
                bare=None if gpu is None else bare.get(gpu.index),
                index=-1 if gpu is None else gpu.index,  # -1: the machine does not have it
                uuid=None if gpu is None else gpu.uuid,
                pci=None if gpu is None else gpu.pci,
                mig=() if gpu is None else [instance.uuid for instance in gpu.mig],
                slice=own,
            )
        )
    return ChildTable(
        devices=devices,
        allowed_cpus=str(topology.allowed.cpus),
        run=run,
        strict=strict,
        verbose=verbose,
        lists=lists,
        saw={name: environ.get(name) for name in (*lists, *RANK_VARIABLES, _SLURM_RANK)},
    )


# --- the GPU that a process uses -------------------------------------------------------------------------------------


def known_device(table: ChildTable, environ: Mapping[str, str]) -> tuple[DeviceEntry, str] | None:
    """Return the GPU that the environment gives to this process alone, and the variable; None if it gives none.

    Raises UnknownDevice if the list names one device that the plan does not have.
    """
    changed = _changed_list(table, environ)
    count = num_visible(table, environ)
    if changed is not None and count == 1:
        return device_of(table, environ, 0), f"{changed}={environ[changed]}"
    for name, value_of_command in table.saw.items():
        value = environ.get(name, "")
        is_rank = name not in table.lists and (name != _SLURM_RANK or _IN_STEP in environ)  # Slurm's: in a step only
        is_number = value.isascii() and value.isdecimal() and len(value) <= 6
        if count and is_rank and is_number and value != value_of_command:
            return device_of(table, environ, int(value) % count), f"{name}={value}"
    return None


def num_visible(table: ChildTable, environ: Mapping[str, str]) -> int:
    """Return the number of devices that the process sees. Raises UnknownDevice."""
    changed = _changed_list(table, environ)
    return len(table.devices) if changed is None else len(_entries(environ[changed]))


def device_of(table: ChildTable, environ: Mapping[str, str], number: int) -> DeviceEntry:
    """Return the GPU with this number in the process's own list of devices. Raises UnknownDevice."""
    changed = _changed_list(table, environ)
    if changed is None:
        numbered = next((entry for entry in table.devices if entry.number == number), None)
        if numbered is None:
            raise UnknownDevice(f"there is no device {number}: the command sees {len(table.devices)}")
        return numbered
    entries = _entries(environ[changed])
    if not 0 <= number < len(entries):
        raise UnknownDevice(f"there is no device {number}: {changed}={environ[changed][:60]}")
    found = [device for device in table.devices if device.is_called(entries[number])]
    if len(found) != 1:
        problem = f"{changed} names {entries[number][:60]}, which is not one of the GPUs that the command saw"
        raise UnknownDevice(f"{problem}; see them with: numapin topo")
    return found[0]


def _changed_list(table: ChildTable, environ: Mapping[str, str]) -> str | None:
    """Return the list of devices that differs from the command's. Raises UnknownDevice if several say different things.

    An unset list that the command had shows devices that the plan does not have.
    """
    changed = [name for name in table.lists if environ.get(name) != table.saw.get(name)]
    removed = [name for name in changed if name not in environ]
    if removed:
        hint = "leave it set, or give the process a list of its own"
        raise UnknownDevice(f"it may see GPUs that the plan does not have, because {removed[0]} was unset; {hint}")
    if len({environ[name] for name in changed}) > 1:
        settings = ", ".join(f"{name}={environ[name][:60]}" for name in changed)
        raise UnknownDevice(f"numapin cannot combine the lists of devices {settings}; set only one of them")
    return changed[0] if changed else None


def _entries(text: str) -> Sequence[str]:
    """Return the entries of a list of devices, up to the first that no device can have."""
    entries = []
    for entry in text.split(","):
        if not (_INDEX.match(entry) or entry.startswith((GPU_PREFIX, MIG_PREFIX))):
            break
        entries.append(entry)
    return entries
