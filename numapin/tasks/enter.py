"""Bind this process as one of its host's tasks, and become the command. Edge.

Comes in: which task this is, and a plan that was made once: a file, or what `numapin run` or a run directory left.
Goes out: the command, in the same process, bound. It must be quick: click is not imported, and a reader of the machine
only where NVML must tell which GPU a task sees (`_only_gpu`).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.regular_file import read_file
from numapin.base.stderr import say
from numapin.errors import MachineError
from numapin.plan.model import GpuRef, Plan
from numapin.rank import bind, handover
from numapin.rank.become import BINDING, become
from numapin.rank.binding import read_binding
from numapin.tasks.identify import number
from numapin.tasks.slice import Slice, inside, slice_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from numapin.plan.model import RankPlan
    from numapin.tasks.identify import Task

_GIVEN: Final = f"{BINDING}, which this rank was given"
_WRITE_ONE: Final = "write one with: numapin plan --nproc-per-node N --json > FILE"


def find_slice(task: Task, environ: Mapping[str, str], *, file: str | None) -> Slice | None:
    """Return this task's part of the plan that there is, inside the CPUs it may use; None where there is no plan.

    1. `file`, as the user named it.
    2. What `numapin run` gave this very rank, for a command of its that starts this.
    3. The plan in the run directory.

    Raises MachineError where it cannot be read and UsageError where it is not for this task.
    """
    found = _found(task, environ, file)
    if found is None:
        return None
    return replace(found, rank=inside(found.rank, CpuSet(os.sched_getaffinity(0))))


def _found(task: Task, environ: Mapping[str, str], file: str | None) -> Slice | None:
    if file is not None:
        return _slice(read_plan_file(file), task, environ, source=file)
    if (own := _own_binding(task, environ)) is not None:
        return Slice(rank=own, source=_GIVEN)
    try:
        there = handover.planned(environ)
    except OSError as error:
        raise MachineError(f"{error.filename or handover.PLAN} cannot be read: {error.strerror}", _WRITE_ONE) from None
    return None if there is None else _slice(there[0], task, environ, source=there[1])


def _own_binding(task: Task, environ: Mapping[str, str]) -> RankPlan | None:
    """Return what `numapin run` gave this rank, None where there is none, or what there is was another rank's.

    All that a rank starts inherits it: ranks of a launcher of its own, a job that is submitted from there.
    """
    if BINDING not in environ or task.variable != "LOCAL_RANK":
        return None
    rank = read_binding(environ[BINDING])
    return rank if rank.local_rank in (task.rank, _virtual_rank(task, environ)) else None


def _virtual_rank(task: Task, environ: Mapping[str, str]) -> int | None:
    """Return which local rank of torch's a 0 may stand for: --virtual-local-rank makes LOCAL_RANK 0 in every rank.

    RANK tells it where every host has as many ranks.
    """
    rank = number(environ.get("RANK", ""))
    is_torchs = "TORCHELASTIC_RUN_ID" in environ and task.rank == 0
    return rank % task.size if is_torchs and rank is not None and task.size else None


def read_plan_file(path: str) -> str:
    """Return the text of the file that the user named, which may be anybody's. Raises MachineError."""
    try:
        content = read_file(path, max_bytes=handover.MAX_FILE_BYTES, what="plan")
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}", _WRITE_ONE) from None
    return content.decode(errors="replace")


def _slice(text: str, task: Task, environ: Mapping[str, str], *, source: str) -> Slice:
    plan = Plan.from_json(text, source=source)
    visible = _one_visible(environ) if any(rank.gpu for rank in plan.ranks) else None
    return slice_of(plan, task, source=source, visible=visible, ask=lambda: _only_gpu(environ))


def _one_visible(environ: Mapping[str, str]) -> str | None:
    """Return what CUDA_VISIBLE_DEVICES calls the one GPU that this task sees, None where it lists several, or none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not visible or "," in visible:
        return None
    if visible.startswith("GPU-"):
        return visible
    from numapin.topology.visible import hides_all  # here: most tasks see a UUID or several GPUs, and are spared it

    return None if hides_all(visible) else visible


def _only_gpu(environ: Mapping[str, str]) -> GpuRef | None:
    """Ask NVML which GPU this task sees, because the plan has no such UUID. None where it cannot tell.

    An index says nothing by itself: in a container or cgroup of its own every task's is 0.
    """
    from numapin.topology.discover import discover

    seen = discover(environ=environ).visible_gpus
    return GpuRef(index=seen[0].index, uuid=seen[0].uuid, pci=seen[0].pci) if len(seen) == 1 else None


# --- becoming the command --------------------------------------------------------------------------------------------


def enter(part: Slice, task: Task, command: Sequence[str], *, strict: bool, verbose: bool) -> NoReturn:
    """Bind this process, say what came of it, and become the command.

    Raises BindingRefused with `strict`, where anything cannot be bound exactly as planned.
    """
    applied = bind.apply(part.rank)
    rank = bind.as_bound(part.rank, applied.shortfalls)
    if strict:
        rank.require_exact(see="numapin exec --verbose")
    if task.rank == 0:
        for text in part.warnings:
            say(f"warning: {text}")
    if not rank.exact:
        say(f"warning: rank {task.rank}: {rank.reason}")
    if verbose:
        for text in _story(part, task, applied):
            say(f"rank {task.rank}: {text}")
    become(list(command), json.dumps(rank.to_json()), rank.num_threads)


def _story(part: Slice, task: Task, applied: bind.Applied) -> tuple[str, ...]:
    """Say what was found, what was planned, and what holds."""
    rank = part.rank
    held = f"{applied.memory or 'unknown'} {cpu_set.render(applied.nodes)}".rstrip()
    threads = os.environ.get("OMP_NUM_THREADS")
    ignored = (f"{BINDING} was set, and does not count",) if BINDING in os.environ and part.source != _GIVEN else ()
    return (
        f"this is {task}",
        *(*task.notes, *part.notes, *ignored),
        f"the plan: {part.source}",
        f"the reason: {rank.reason}",
        f"bound to: CPUs {cpu_set.render(applied.cpus)}, memory {held}",
        f"OMP_NUM_THREADS={rank.num_threads}" if threads is None else f"OMP_NUM_THREADS={threads} was set, and stays",
    )
