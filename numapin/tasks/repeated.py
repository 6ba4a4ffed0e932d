"""A launcher that another launcher starts several times on one host: `srun -n 2 numapin run train.py`.

Each of these launchers would start a job of its own, with a world of its own and on the same GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.tasks.identify import find_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.tasks.identify import Task

# The start of the command that starts one task per host, and of the one that starts all ranks, by the variable of the
# local rank.
_COMMANDS: Final = {
    "OMPI_COMM_WORLD_LOCAL_RANK": ("mpirun --map-by ppr:1:node", "mpirun"),
    "MV2_COMM_WORLD_LOCAL_RANK": ("mpirun -ppn 1", "mpirun"),
    "MPI_LOCALRANKID": ("mpirun -ppn 1", "mpirun"),
    "PMI_LOCAL_RANK": ("mpiexec -ppn 1", "mpiexec"),
    "PALS_LOCAL_RANKID": ("mpiexec --ppn 1", "mpiexec"),
    "FLUX_TASK_LOCAL_ID": ("flux run --tasks-per-node=1", "flux run"),
    "JSM_NAMESPACE_LOCAL_RANK": ("jsrun --tasks_per_rs 1 --rs_per_host 1", "jsrun"),
    "SLURM_LOCALID": ("srun --ntasks-per-node=1", "srun"),
}


def repeated_task(environ: Mapping[str, str]) -> Task | None:
    """Return which of several tasks on this host this launcher is; None if it is the only one or if that is unknown.

    A launcher inside a rank, e.g. for an evaluation, is there on purpose.
    """
    if "LOCAL_RANK" in environ:
        return None
    try:
        task = find_task(environ)
    except UsageError:
        return None
    return task if task.size is not None and task.size > 1 else None


def message(task: Task) -> str:
    """Return what is wrong with a launcher that is one of several tasks."""
    settings = ", ".join(task.settings)
    return (
        f"{task.size} launchers are started on this host ({settings}), and each starts a job of its own, on the same "
        "GPUs unless they are hidden"
    )


def remedy(task: Task) -> str:
    """Return the commands that start one job on this host."""
    once, all_ranks = _COMMANDS[task.variable or ""]
    return f"for one job: {once} numapin run …; or bind the tasks: {all_ranks} … numapin exec -- python train.py"
