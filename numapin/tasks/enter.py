"""Bind this process as one of its host's tasks, and become the command.

This must be quick: it does not import click, and reads the machine only if NVML has to identify the GPU that a task
sees (`_only_gpu`).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.files import read_file
from numapin.base.stderr import say
from numapin.errors import MachineError
from numapin.plan.model import GpuRef, Plan
from numapin.plan.nics import exported, without_users
from numapin.rank import bind, handover
from numapin.rank.become import BINDING, become, read_binding
from numapin.tasks.identify import parse_count
from numapin.tasks.slice import Slice, inside, slice_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from numapin.plan.model import RankPlan
    from numapin.tasks.identify import Task

_GIVEN: Final = f"{BINDING}, set for this rank"
_WRITE_ONE: Final = "write one with: numapin plan --nproc-per-node N --json > FILE"


def find_slice(task: Task, environ: Mapping[str, str], *, file: str | None) -> Slice | None:
    """Return this task's part of an existing plan, inside the CPUs it may use; None if there is no plan.

    1. `file`, which the user named.
    2. The slice that `numapin run` gave this rank, if the rank's program started `numapin exec`.
    3. The plan in the run directory.

    Raises MachineError if the plan cannot be read and UsageError if it is not for this task.
    """
    found = _find_plan(task, environ, file)
    if found is None:
        return None
    allowed = CpuSet(os.sched_getaffinity(0))
    if found.source == _GIVEN and found.rank.cpus == allowed:
        return found  # as numapin has bound this rank
    return replace(found, rank=inside(found.rank, allowed))


def _find_plan(task: Task, environ: Mapping[str, str], file: str | None) -> Slice | None:
    if file is not None:
        path = plan_path(file, environ)
        return _slice(read_plan_file(path), task, environ, source=path)
    if (own := _own_binding(task, environ)) is not None:
        return Slice(rank=own, source=_GIVEN)
    return _of_run(task, environ)


def _of_run(task: Task, environ: Mapping[str, str]) -> Slice | None:
    """Return this task's part of the plan in the run directory. Raises MachineError if that cannot be read."""
    try:
        there = handover.planned(environ)
    except OSError as error:
        raise MachineError(f"{error.filename or handover.PLAN} cannot be read: {error.strerror}", _WRITE_ONE) from None
    return None if there is None else _slice(there[0], task, environ, source=there[1])


def _own_binding(task: Task, environ: Mapping[str, str]) -> RankPlan | None:
    """Return this rank's slice from NUMAPIN_BINDING, or None if it is unset or belongs to another rank.

    Everything that a rank starts inherits the variable, e.g. ranks of another launcher, or a job that it submits.
    """
    if BINDING not in environ or task.variable != "LOCAL_RANK":
        return None
    rank = read_binding(environ[BINDING])
    return rank if rank.local_rank in (task.rank, _virtual_rank(task, environ)) else None


def _virtual_rank(task: Task, environ: Mapping[str, str]) -> int | None:
    """Return the local rank that torchrun's --virtual-local-rank may hide: it sets LOCAL_RANK=0 in every rank.

    RANK gives it if every host has the same number of ranks.
    """
    rank = parse_count(environ.get("RANK", ""))
    is_torchs = "TORCHELASTIC_RUN_ID" in environ and task.rank == 0
    return rank % task.size if is_torchs and rank is not None and task.size else None


def plan_path(named: str, environ: Mapping[str, str]) -> str:
    """Return the path of the plan that --plan names: a file, a folder with plan.json, or a run. Raises UsageError."""
    if os.path.isfile(named) and not named.startswith("@"):
        return named
    from numapin.launcher.run_folder import find_file  # here: most plans are files

    return find_file(named, handover.PLAN, environ)


def read_plan_file(path: str) -> str:
    """Return the text of a plan file that the user named and that may come from anyone. Raises MachineError."""
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
    """Return the only entry of the list of GPUs that this task sees; None if it lists several GPUs or none.

    Of several lists, the last one that takes effect counts: HIP's come after ROCr's.
    """
    from numapin.topology.vendors import hiding_variables  # here: a rank that has its slice does not need them
    from numapin.topology.visible import hides_all

    visible = next((environ[name].strip() for name in hiding_variables() if name in environ), "")
    return None if not visible or "," in visible or hides_all(visible) else visible


def _only_gpu(environ: Mapping[str, str]) -> GpuRef | None:
    """Ask the driver which GPU this task sees, because the plan does not have its UUID. None: unknown.

    An index is not enough: in a container or cgroup of its own, every task has index 0.
    """
    from numapin.topology.discover import discover

    seen = discover(environ=environ).visible_gpus
    return GpuRef(index=seen[0].index, uuid=seen[0].uuid, pci=seen[0].pci) if len(seen) == 1 else None


# --- becoming the command --------------------------------------------------------------------------------------------


def enter(part: Slice, task: Task, command: Sequence[str], *, strict: bool, verbose: bool) -> NoReturn:
    """Bind this process, report the result, and become the command.

    Raises BindingRefused with `strict` if anything cannot be bound exactly as planned.
    """
    applied = bind.apply(part.rank)
    (planned,), kept = without_users([part.rank], os.environ)
    rank = bind.as_bound(planned, applied.shortfalls)
    if strict:
        rank.require_exact(see="numapin exec --verbose")
    _warn(task, rank, (*part.warnings, *kept))
    if verbose:
        _say_each(f"rank {task.rank}: ", _details(part, task, applied))
    become(list(command), json.dumps(rank.to_json()), rank.num_threads, exported(rank))


def _warn(task: Task, rank: RankPlan, of_host: tuple[str, ...]) -> None:
    """Print the warnings about the whole host, which its first task prints, and about this task's rank."""
    if task.rank == 0:
        _say_each("warning: ", of_host)
    if not rank.exact:
        say(f"warning: rank {task.rank}: {rank.reason}")


def _say_each(prefix: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        say(f"{prefix}{text}")


def _details(part: Slice, task: Task, applied: bind.Applied) -> tuple[str, ...]:
    """Return what --verbose reports: what was found, what was planned, and what holds."""
    rank = part.rank
    memory = f"{applied.memory or 'unknown'} {cpu_set.render(applied.nodes)}".rstrip()
    return (
        f"this is {task}",
        *(*task.notes, *part.notes, *_ignored_binding(part)),
        f"the plan: {part.source}",
        f"the reason: {rank.reason}",
        f"bound to: CPUs {cpu_set.render(applied.cpus)}, memory {memory}",
        _threads(rank),
    )


def _ignored_binding(part: Slice) -> tuple[str, ...]:
    is_ignored = BINDING in os.environ and part.source != _GIVEN
    return (f"{BINDING} was set and is ignored",) if is_ignored else ()


def _threads(rank: RankPlan) -> str:
    kept = os.environ.get("OMP_NUM_THREADS")
    return f"OMP_NUM_THREADS={rank.num_threads}" if kept is None else f"OMP_NUM_THREADS={kept} was set and is kept"
