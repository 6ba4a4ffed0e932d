"""Make the `ChildTable` of a command or of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.children.table import SLURM_RANK, ChildTable, DeviceEntry
from numapin.rank import handover
from numapin.tasks.identify import RANK_VARIABLES
from numapin.topology.parts import GpuVendor
from numapin.topology.vendors import hiding_variables, support_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.plan.model import Plan, RankPlan
    from numapin.topology.model import Gpu, Topology


def make_table(
    plan: Plan,
    topology: Topology,
    environ: Mapping[str, str],
    *,
    run: str,
    strict: bool,
    verbose: bool,
) -> ChildTable:
    """Return the plan as the processes find it. `environ` is the command's."""
    bare = _bare_numbers(topology, environ)
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    devices = [_entry(rank, by_index, bare) for rank in plan.ranks]
    lists = hiding_variables()
    saw = {name: environ.get(name) for name in (*lists, *RANK_VARIABLES, SLURM_RANK)}
    return ChildTable(
        devices=devices,
        allowed_cpus=str(topology.allowed.cpus),
        run=run,
        strict=strict,
        verbose=verbose,
        lists=lists,
        saw=saw,
    )


def _entry(rank: RankPlan, by_index: Mapping[int, Gpu], bare: Mapping[int, int | None]) -> DeviceEntry:
    """Return the entry of a rank's GPU, which is unknown if the machine does not have it."""
    number, own = rank.local_rank, handover.slice_text(rank)
    gpu = None if rank.gpu is None else by_index.get(rank.gpu.index)
    if gpu is None:
        return DeviceEntry(number=number, bare=None, index=-1, uuid=None, pci=None, mig=(), slice=own)
    mig = [instance.uuid for instance in gpu.mig]
    number_if_all = bare.get(gpu.index)
    return DeviceEntry(
        number=number, bare=number_if_all, index=gpu.index, uuid=gpu.uuid, pci=gpu.pci, mig=mig, slice=own
    )


def _bare_numbers(topology: Topology, environ: Mapping[str, str]) -> dict[int, int | None]:
    """Return each GPU's number if no variable hid any, which is what an index in such a variable means, by its index.

    NVIDIA's list is not relative to another list. Other vendors' may be, so with one their indices are unknown.
    """
    none_hidden = environ.keys().isdisjoint(hiding_variables())
    gpus = topology.gpus if none_hidden else _all_nvidia(topology, environ)
    return {gpu.index: gpu.cuda_index for gpu in gpus}


def _all_nvidia(topology: Topology, environ: Mapping[str, str]) -> Sequence[Gpu]:
    """Return NVIDIA's GPUs as CUDA would number them if no variable hid any."""
    nvidia = tuple(gpu for gpu in topology.gpus if gpu.vendor is GpuVendor.NVIDIA)
    support = support_of(GpuVendor.NVIDIA)
    none_hidden = {name: value for name, value in environ.items() if name not in support.hiding_variables}
    gpus, _ = support.mark_visible(nvidia, none_hidden)
    return gpus
