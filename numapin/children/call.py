"""`numapin.bind_this_process`: bind this process to a GPU from its own code.

Below `numapin exec --children` the plan is the command's; anywhere else the machine is read here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.children import own
from numapin.children.records import bytes_away
from numapin.children.table import UnknownDevice, device_of, make_table
from numapin.errors import BindingRefused, UsageError
from numapin.plan.make import make_plan
from numapin.plan.request import Bind, Memory, Request
from numapin.rank.become import BINDING, read_binding
from numapin.rank.handover import slice_text
from numapin.topology.address import pci_address
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.children.table import ChildTable, DeviceEntry
    from numapin.plan.model import GpuRef
    from numapin.topology.model import Topology

_BEFORE: Final = "NUMAPIN_CPUS_BEFORE"
"""The CPUs of a process before it bound itself; a child that inherited its binding may plan with them."""
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)
_DEVICES: Final = "name a device as 1, 'cuda:1', torch.device('cuda', 1), by UUID or by PCI address; see: numapin topo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessBinding:
    """The binding of a process, as the kernel reports it.

    Attributes:
        gpu: The GPU that it is bound to.
        cpus: The CPUs that its threads may use.
        memory: The memory policy of the calling thread. None: the kernel does not report it.
        nodes: The nodes of the policy.
        exact: Whether the process got what was requested.
        reason: Why it got these CPUs and this memory, and what was refused, with the remedy.
        allocated_before: The bytes of private memory on each node before the call; they stay where they are. None: the
            kernel does not report them.
        away_bytes: The part of them that is not on the nodes of the plan. None: unknown.
    """

    gpu: GpuRef | None
    cpus: CpuSet
    memory: str | None
    nodes: CpuSet
    exact: bool
    reason: str
    allocated_before: Mapping[int, int] | None
    away_bytes: int | None


def bind_this_process(
    device: object, *, bind: Bind | str | None = None, memory: Memory | str | None = None, strict: bool = False
) -> ProcessBinding:
    """Bind this process, with all its threads, to the CPUs and the memory of a GPU's NUMA node.

    Call it as early as possible, before the program allocates memory and, if it can, before it imports torch. Threads
    that exist are bound, too; the memory policy is the calling thread's, and that of threads and processes that it
    starts later. Threads that exist already allocate on the node that they run on. A second call replaces the first.

    The plan is made as if one process used each GPU of the host, so `exclusive` leaves the others their share. Below
    `numapin exec --children`, and without `bind` and `memory`, it is the command's plan.

    Args:
        device: The number of a CUDA device as this process counts, "cuda:1", a `torch.device`, a UUID, or a PCI
            address. "cuda" is torch's current device.
        bind: The CPUs to use, as for `Request`. None: all of the GPU's node.
        memory: The memory policy, as for `Request`. None: preferred.
        strict: Raise if the kernel refuses a part of the binding. What it accepted stays.

    Returns:
        What was bound, why, and how much memory was allocated before.

    Raises:
        UsageError: There is no such device, or a word is none of the choices.
        MachineError: The machine cannot be read.
        PlanError: No CPU is left for the process.
        BindingRefused: `strict`, and the process did not get what was requested.

    Example:
        ```python
        import numapin

        bound = numapin.bind_this_process("cuda:0")
        print(bound.cpus, bound.reason)
        ```
    """
    given = own.table()
    number = _number(device)
    if given is not None and bind is None and memory is None:
        table, entry = given, _entry_of_command(given, device, number)
    else:
        request = Request(bind=bind or Bind.NODE, memory=memory)
        table, entry = _planned_here(given, device, number, request)
    taken = own.take_entry(table, entry, "numapin.bind_this_process")
    rank = read_binding(os.environ[BINDING])
    if strict:
        rank.require_exact(see="numapin topo")
    applied, before = taken.applied, taken.allocated
    if applied is None:
        raise BindingRefused("the process was not bound", "report this as a bug")
    return ProcessBinding(
        gpu=rank.gpu,
        cpus=CpuSet(applied.cpus),
        memory=applied.memory,
        nodes=CpuSet(applied.nodes),
        exact=rank.exact,
        reason=rank.reason,
        allocated_before=before,
        away_bytes=None if before is None or not rank.nodes else bytes_away(before, rank.nodes),
    )


def _number(device: object) -> int | None:
    """Return the number of a device: 1 for 1 and cuda:1, torch's current one for cuda; None for another GPU's name.

    Raises UsageError for what is no GPU.
    """
    if isinstance(device, bool) or device is None:
        raise UsageError(f"{device!r} is not a device", _DEVICES)
    if isinstance(device, int):
        return device
    text = str(device)
    if isinstance(device, str) and _NUMBER.fullmatch(text):
        return int(text)
    kind, _, number = text.partition(":")
    if kind in ("cuda", "xpu") and _NUMBER.fullmatch(number):
        return int(number)
    if kind in ("cuda", "xpu") and not number:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else 0
    if not isinstance(device, str) or not device or kind in ("cpu", "meta", "mps"):
        raise UsageError(f"{device!r} is not a GPU", _DEVICES)
    return None


def _entry_of_command(table: ChildTable, device: object, number: int | None) -> DeviceEntry:
    """Return the device's entry in the command's plan. Raises UsageError."""
    if number is not None:
        try:
            return device_of(table, own.environ(), number)
        except UnknownDevice as error:
            raise UsageError(str(error), _DEVICES) from None
    key = pci_address(str(device)) or str(device).strip().lower()
    found = [
        entry
        for entry in table.devices
        if key in {name.lower() for name in (entry.uuid, entry.pci, *entry.mig) if name}
    ]
    if len(found) != 1:
        raise UsageError(f"{device!r} is not one of the GPUs that the command sees", _DEVICES)
    return found[0]


def _planned_here(
    given: ChildTable | None, device: object, number: int | None, request: Request
) -> tuple[ChildTable, DeviceEntry]:
    """Read the machine, plan for one process on each of its GPUs, and return the plan and this device's entry."""
    topology = _read_machine(None if given is None else given.allowed_cpus)
    if number is None:
        index = topology.find_gpu(str(device), option="device").index
    else:
        visible = topology.visible_gpus
        if not visible:
            raise UsageError("this process sees no GPU to bind to", "see why with: numapin topo")
        numbers = {gpu.cuda_index: gpu.index for gpu in visible}
        if number not in numbers:
            why = f"{len(visible)} {'is' if len(visible) == 1 else 'are'} visible"
            if None in numbers:
                why = "their order is unknown (export CUDA_DEVICE_ORDER=PCI_BUS_ID)"
            raise UsageError(f"there is no device {number} among this process's GPUs: {why}", _DEVICES)
        index = numbers[number]

    vendors = {gpu.index: gpu.vendor for gpu in topology.gpus}
    gpus = [other for other, vendor in vendors.items() if vendor == vendors[index]]
    plan = make_plan(topology, Request(bind=request.bind, memory=request.memory, rank_gpus=gpus))
    slices = [slice_text(rank) for rank in plan.ranks]
    run = "" if given is None else given.run
    table = make_table(plan, topology, own.environ(), slices=slices, run=run)
    return table, {entry.index: entry for entry in table.devices}[index]


def _read_machine(command_cpus: str | None) -> Topology:
    """Read the machine with the CPUs that this process, or the one that it follows, had before it was bound.

    `command_cpus` are those of `exec --children`, if it bound the process.
    """
    current = os.sched_getaffinity(0)
    of_binding = None  # the CPUs of the binding that this process inherited; taskset may have changed its own
    with suppress(KeyError, ValueError, TypeError):
        of_binding = CpuSet.parse(str(json.loads(os.environ[BINDING])["cpus"]))
    if of_binding != CpuSet(current):
        os.environ[_BEFORE] = str(CpuSet(current))
    with suppress(OSError, ValueError):
        os.sched_setaffinity(0, CpuSet.parse(os.environ.get(_BEFORE) or command_cpus or str(CpuSet(current))))
    try:
        return discover(environ=own.environ())
    finally:
        os.sched_setaffinity(0, current)
