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
from numapin.children.devices import UnknownDevice, device_of
from numapin.children.made import make_table
from numapin.children.reporting import bytes_away
from numapin.errors import BindingRefused, NumapinError, UsageError
from numapin.plan.make import make_plan
from numapin.plan.request import Bind, Memory, Request
from numapin.rank.become import BINDING, read_binding
from numapin.topology.address import pci_address
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.children.own import TakenGpus
    from numapin.children.table import ChildTable, DeviceEntry
    from numapin.plan.model import GpuRef, RankPlan
    from numapin.topology.model import Gpu, Topology

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
    table, entry = _planned(device, bind, memory)
    taken = own.take_entry(table, entry, "numapin.bind_this_process")
    rank = read_binding(os.environ[BINDING])
    if strict:
        rank.require_exact(see="numapin topo")
    return _result(rank, taken)


def _result(rank: RankPlan, taken: TakenGpus) -> ProcessBinding:
    applied, before = taken.applied, taken.allocated
    if applied is None:
        raise BindingRefused("the process was not bound", "report this as a bug")
    away = None if before is None or not rank.nodes else bytes_away(before, rank.nodes)
    return ProcessBinding(
        gpu=rank.gpu,
        cpus=CpuSet(applied.cpus),
        memory=applied.memory,
        nodes=CpuSet(applied.nodes),
        exact=rank.exact,
        reason=rank.reason,
        allocated_before=before,
        away_bytes=away,
    )


def _planned(device: object, bind: Bind | str | None, memory: Memory | str | None) -> tuple[ChildTable, DeviceEntry]:
    """Return the plan, which is the command's if there is one and the caller asks for nothing else, and the entry."""
    given = own.table()
    if given is not None and bind is None and memory is None:
        return given, _entry_of_command(given, device)
    return _planned_here(given, device, Request(bind=bind or Bind.NODE, memory=memory))


def _entry_of_command(table: ChildTable, device: object) -> DeviceEntry:
    """Return the device's entry in the command's plan. Raises UsageError."""
    number = _number(device)
    if number is None:
        return _entry_of_name(table, device)
    try:
        return device_of(table, own.environ(), number)
    except UnknownDevice as error:
        raise UsageError(str(error), _DEVICES) from None


def _entry_of_name(table: ChildTable, device: object) -> DeviceEntry:
    found = [entry for entry in table.devices if _goes_by(entry, str(device))]
    if len(found) != 1:
        raise UsageError(f"{device!r} is not one of the GPUs that the command sees", _DEVICES)
    return found[0]


def _goes_by(entry: DeviceEntry, key: str) -> bool:
    names = {name.lower() for name in (entry.uuid, entry.pci, *entry.mig) if name}
    return (pci_address(key) or key.strip().lower()) in names


def _planned_here(given: ChildTable | None, device: object, request: Request) -> tuple[ChildTable, DeviceEntry]:
    """Read the machine, plan for one process on each of its GPUs, and return the plan and this device's entry."""
    topology = _read_machine(None if given is None else given.allowed_cpus)
    index = _index(topology, device)
    gpus = _gpus_of_vendor(topology, index)
    try:
        plan = make_plan(topology, Request(bind=request.bind, memory=request.memory, rank_gpus=gpus))
    except NumapinError as error:
        error.use_hint_for_fixed_ranks()  # a call does not take --nproc-per-node
        raise
    run = given.run if given is not None else ""
    table = make_table(plan, topology, own.environ(), run=run, strict=False, verbose=False)
    return table, {entry.index: entry for entry in table.devices}[index]


def _gpus_of_vendor(topology: Topology, index: int) -> list[int]:
    """Return the indices of the GPUs of the same vendor as the one with this index."""
    vendors = {gpu.index: gpu.vendor for gpu in topology.gpus}
    return [other for other, vendor in vendors.items() if vendor == vendors[index]]


def _read_machine(command_cpus: str | None) -> Topology:
    """Read the machine with the CPUs that this process, or the one that it follows, had before it was bound.

    `command_cpus` are those of `exec --children`, if it bound the process.
    """
    current = os.sched_getaffinity(0)
    if not _has_cpus_of_binding(current):
        os.environ[_BEFORE] = str(CpuSet(current))
    with suppress(OSError, ValueError):
        os.sched_setaffinity(0, CpuSet.parse(os.environ.get(_BEFORE) or command_cpus or str(CpuSet(current))))
    try:
        return discover(environ=own.environ())
    finally:
        os.sched_setaffinity(0, current)


def _has_cpus_of_binding(current: set[int]) -> bool:
    """Return whether this process has the CPUs of the binding that it inherited; taskset may have changed them."""
    try:
        return CpuSet.parse(str(json.loads(os.environ[BINDING])["cpus"])) == CpuSet(current)
    except (KeyError, ValueError, TypeError):
        return False


def _index(topology: Topology, device: object) -> int:
    """Return the index of a GPU by the number of its device, or by its name. Raises UsageError."""
    number = _number(device)
    if number is None:
        return topology.find_gpu(str(device), option="device").index
    visible = topology.visible_gpus
    if not visible:
        raise UsageError("this process sees no GPU to bind to", "see why with: numapin topo")
    found = next((gpu for gpu in visible if gpu.cuda_index == number), None)
    if found is None:
        why = _why_not_found(visible)
        raise UsageError(f"there is no device {number} among this process's GPUs: {why}", _DEVICES)
    return found.index


def _why_not_found(visible: Sequence[Gpu]) -> str:
    if any(gpu.cuda_index is None for gpu in visible):
        return "their order is unknown (export CUDA_DEVICE_ORDER=PCI_BUS_ID)"
    return f"{len(visible)} {'is' if len(visible) == 1 else 'are'} visible"


def _number(device: object) -> int | None:
    """Return the number of a device; None for another name. Raises UsageError for what is no device."""
    if isinstance(device, bool) or device is None:
        raise UsageError(f"{device!r} is not a device", _DEVICES)
    if isinstance(device, int):
        return device
    return _number_in(device)


def _number_in(device: object) -> int | None:
    """Return the number in a device's text: 1 for 1 and cuda:1, the current device's for cuda, None for a UUID."""
    if isinstance(device, str) and _NUMBER.fullmatch(device):
        return int(device)
    kind, _, number = str(device).partition(":")
    if _is_runtimes(kind, number):
        return int(number) if number else _current()
    if _may_name_gpu(device, kind):
        return None
    raise UsageError(f"{device!r} is not a GPU", _DEVICES)


def _is_runtimes(kind: str, number: str) -> bool:
    """Return whether this is a device as the runtime numbers it: cuda or cuda:1."""
    return kind in ("cuda", "xpu") and number.isdecimal() == bool(number)


def _may_name_gpu(device: object, kind: str) -> bool:
    return isinstance(device, str) and bool(device) and kind not in ("cpu", "meta", "mps")


def _current() -> int:
    """Return torch's current device; 0 if it has none yet."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else 0
