"""Make the `ChildTable` of a command or of a process. Edge (only because `handover` is).

Comes in: a `Plan` with one rank per GPU, the machine, and an environment. Goes out: the plan as processes find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.children.table import LISTS, SLURM_RANK, ChildTable, DeviceEntry
from numapin.rank import handover
from numapin.tasks.identify import LAUNCHERS
from numapin.topology.parts import GpuVendor
from numapin.topology.visible import apply_visibility

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Gpu, Topology


def make_table(  # noqa: PLR0913 - what goes into it
    plan: Plan,
    topology: Topology,
    environ: Mapping[str, str],
    *,
    run: str,
    match: str | None,
    strict: bool,
    verbose: bool,
) -> ChildTable:
    """Return the plan as the processes find it. `environ` is the command's."""
    bare = _bare_numbers(topology, environ)
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    found = ((rank, by_index.get(rank.gpu.index) if rank.gpu else None) for rank in plan.ranks)
    devices = [
        DeviceEntry(
            number=rank.local_rank,
            bare=None if gpu is None else bare.get(gpu.index),
            index=-1 if gpu is None else gpu.index,
            uuid=None if gpu is None else gpu.uuid,
            pci=None if gpu is None else gpu.pci,
            mig=() if gpu is None else tuple(mig.uuid for mig in gpu.mig),
            slice=handover.slice_text(rank),
        )
        for rank, gpu in found
    ]
    names = (*LISTS, *(variable for variable, _ in LAUNCHERS), SLURM_RANK)
    saw = {name: environ.get(name) for name in names}
    return ChildTable(devices=devices, run=run, match=match, strict=strict, verbose=verbose, saw=saw)


def _bare_numbers(topology: Topology, environ: Mapping[str, str]) -> dict[int, int | None]:
    """Return each GPU's number if no variable hid any, which is what an index in such a variable means, by its index.

    NVIDIA's list is not relative to another list. Other vendors' may be, so with one their indices are unknown.
    """
    gpus: Sequence[Gpu] = topology.gpus
    if any(name in environ for name in LISTS):
        order = environ.get("CUDA_DEVICE_ORDER")
        nvidia = tuple(gpu for gpu in gpus if gpu.vendor is GpuVendor.NVIDIA)
        gpus, _ = apply_visibility(nvidia, visible_devices=None, device_order=order)
    return {gpu.index: gpu.cuda_index for gpu in gpus}
