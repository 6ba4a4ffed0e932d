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
from numapin.errors import MachineError, UsageError
from numapin.plan.model import GpuRef, Plan
from numapin.plan.nics import exported, without_users
from numapin.rank import bind, handover
from numapin.rank.become import BINDING, become, read_binding
from numapin.rank.inherited import raise_open_files
from numapin.tasks.identify import is_wrapper_of, parse_count
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
    allowed = CpuSet(os.sched_getaffinity(0))
    if file is not None:
        source = plan_path(file, environ)
        text = read_plan_file(source)
    elif (own := _own_binding(task, environ)) is not None:
        return Slice(rank=inside(own, allowed), source=_GIVEN)
    else:
        try:
            there = handover.planned(environ)
        except OSError as error:
            path = error.filename or handover.PLAN
            raise MachineError(f"{path} cannot be read: {error.strerror}", _WRITE_ONE) from None
        if there is None:
            return None
        text, source = there
    plan = Plan.from_json(text, source=source)
    visible = _one_visible(environ) if any(rank.gpu for rank in plan.ranks) else None
    part = slice_of(plan, task, source=source, visible=visible, ask=lambda: _only_gpu(environ))
    return replace(part, rank=inside(part.rank, allowed))


def _own_binding(task: Task, environ: Mapping[str, str]) -> RankPlan | None:
    """Return this rank's slice from NUMAPIN_BINDING; None without one. A rank of another launcher may inherit it."""
    if BINDING not in environ or task.variable != "LOCAL_RANK":
        return None
    planned = read_binding(environ[BINDING])
    if planned.local_rank == task.rank:
        return planned
    # torchrun's --virtual-local-rank sets LOCAL_RANK=0 in every rank. RANK then gives the local rank, if every host has
    # the same number of ranks.
    rank = parse_count(environ.get("RANK", ""))
    if "TORCHELASTIC_RUN_ID" not in environ or task.rank != 0 or rank is None or not task.size:
        return None
    return planned if rank % task.size == planned.local_rank else None


def plan_path(named: str, environ: Mapping[str, str]) -> str:
    """Return the path of the plan that --plan names: a file, a folder with plan.json, or a run. Raises UsageError."""
    if os.path.isfile(named) and not named.startswith("@"):
        return named
    from numapin.launcher.run_folder import find_file  # here: most plans are files

    return find_file(named, handover.PLAN, environ)


def read_plan_file(path: str) -> str:
    """Return the text of a plan file, which may come from anyone. Raises MachineError."""
    try:
        content = read_file(path, max_bytes=handover.MAX_FILE_BYTES, what="plan")
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}", _WRITE_ONE) from None
    return content.decode(errors="replace")


def _one_visible(environ: Mapping[str, str]) -> str | None:
    """Return the only entry of the list of GPUs that this task sees; None if it lists several GPUs or none."""
    from numapin.topology.vendors import hiding_variables  # here: a rank that has its slice does not need them
    from numapin.topology.visible import hides_all

    # Of several lists, the last one that takes effect counts: HIP's come after ROCr's.
    visible = next((environ[name].strip().rstrip(", ") for name in hiding_variables() if name in environ), "")
    return None if not visible or "," in visible or hides_all(visible) else visible


def _only_gpu(environ: Mapping[str, str]) -> GpuRef | None:
    """Ask the driver which GPU this task sees, because the plan does not have its UUID. None: unknown."""
    from numapin.topology.discover import discover

    seen = discover(environ=environ).visible_gpus
    return GpuRef(index=seen[0].index, uuid=seen[0].uuid, pci=seen[0].pci) if len(seen) == 1 else None


def launcher_cpus(task: Task) -> CpuSet | None:
    """Return the CPUs of the process that started this task (torchrun, Open MPI's daemon, slurmstepd).

    It is the nearest ancestor that was not started with a rank in its environment. Those below it are wrappers of the
    task, such as shell scripts. None: it cannot be seen, e.g. from a container.
    """
    from numapin.system.proc import environment_of, parent_of  # here: not needed with a plan at hand

    pid = os.getppid()
    while pid > 0 and is_wrapper_of(environment_of(pid) or {}, task):
        pid = parent_of(pid)
    try:
        return CpuSet(os.sched_getaffinity(pid)) if pid > 0 else None
    except OSError:
        return None


def enter(part: Slice, task: Task, command: Sequence[str], *, strict: bool, verbose: bool) -> NoReturn:
    """Bind this process, report the result, and become the command.

    Raises BindingRefused with `strict` if anything cannot be bound exactly as planned, and UsageError for no command.
    """
    if not command[0]:
        raise UsageError("the command is empty", "numapin exec -- COMMAND…")
    applied = bind.apply(part.rank)
    (planned,), kept = without_users([part.rank], os.environ)
    rank = bind.as_bound(planned, applied.shortfalls)
    if strict:
        rank.require_exact(see="numapin exec --verbose")
    if task.rank == 0:  # the warnings about the whole host
        for text in (*part.warnings, *kept):
            say(f"warning: {text}")
    if not rank.exact:
        say(f"warning: rank {task.rank}: {rank.reason}")
    more_files = raise_open_files()
    if verbose:
        for text in filter(None, (*_details(part, task, applied), more_files)):
            say(f"rank {task.rank}: {text}")
    become(list(command), json.dumps(rank.to_json()), rank.num_threads, exported(rank))


def _details(part: Slice, task: Task, applied: bind.Applied) -> tuple[str, ...]:
    """Return what --verbose reports: what was found, what was planned, and what holds."""
    rank = part.rank
    is_ignored = BINDING in os.environ and part.source != _GIVEN
    memory = f"{applied.memory or 'unknown'} {cpu_set.render(applied.nodes)}".rstrip()
    threads = f"OMP_NUM_THREADS={rank.num_threads}"
    if "OMP_NUM_THREADS" in os.environ:
        threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} was set and is kept"
    return (
        f"this is {task}",
        *task.notes,
        *part.notes,
        *([f"{BINDING} was set and is ignored"] if is_ignored else []),
        f"the plan: {part.source}",
        f"the reason: {rank.reason}",
        f"bound to: CPUs {cpu_set.render(applied.cpus)}, memory {memory}",
        threads,
    )
