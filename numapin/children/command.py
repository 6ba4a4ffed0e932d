"""Start the command of `numapin exec --children`, wait for it, and report what was bound.

The command itself is not bound: each process below it binds itself once it has a GPU (`own.py`). This process waits,
passes signals on, keeps the run's folder alive, which `numapin verify` reads, and removes it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from numapin.base.redact import without_secrets
from numapin.base.stderr import say
from numapin.base.text import counted
from numapin.children import frameworks, records
from numapin.children.table import make_table
from numapin.errors import PlanError, UsageError
from numapin.launcher.init import supervise
from numapin.launcher.rehearse import rehearse
from numapin.launcher.run_folder import run_directory
from numapin.plan.make import make_plan
from numapin.plan.nics import OURS
from numapin.rank import handover
from numapin.rank.become import BINDING, CHILDREN, FORWARDED, execute
from numapin.rank.hook_env import refusal, with_hook
from numapin.system import calls

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from numapin.children.table import ChildTable
    from numapin.plan.request import Request
    from numapin.topology.model import Topology

_MAX_VARIABLE_BYTES: Final = 120_000  # Linux allows 128 KiB


def run_with_children(
    topology: Topology,
    request: Request,
    command: Sequence[str],
    environ: MutableMapping[str, str],
    *,
    strict: bool,
    verbose: bool,
) -> int:
    """Run the command; every Python process below it that uses a GPU binds itself as planned for that GPU.

    Returns the command's exit status, -n after signal n. With `strict`, a process that cannot be bound as planned ends;
    the status is 5 if the command succeeds all the same, or if no process was bound.
    """
    if not command[0]:
        raise UsageError("the command is empty", "numapin exec --children -- COMMAND…")
    if not topology.visible_gpus:
        raise PlanError(
            "--children: no GPU is visible here, so there is nothing to bind to", "see why with: numapin topo"
        )
    why = refusal(command)
    if why is not None:  # its Python ignores PYTHONPATH
        hint = "leave that option out, or call numapin.bind_this_process in the program"
        problem = f"{why}, so that process cannot be bound if it uses a GPU"
        if strict:
            raise UsageError(f"--children --strict: {problem}", hint)
        say(f"warning: {problem}; {hint}")

    plan = rehearse(make_plan(topology, request), strict=strict)
    for text in dict.fromkeys(plan.warnings):
        say(f"warning: {text}")
    with run_directory(environ, report=say if verbose else None) as folder:
        handover.write_json(folder, handover.PLAN, plan.to_json())
        handover.write_json(folder, handover.COMMAND, {"argv": without_secrets(sys.argv), "pid": os.getpid()})
        slices = [handover.slice_text(rank) for rank in plan.ranks]
        table = make_table(plan, topology, environ, slices=slices, run=folder, strict=strict, verbose=verbose)
        return conclude(table, _run(command, _environment(table, environ)))


def _environment(table: ChildTable, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the command's environment: with the plan and the hook, and without an outer run's binding and NIC.

    Variables that switch off the binding of frameworks are set, unless the user has set them.

    Raises PlanError if the plan is too long for a variable.
    """
    text = table.render()
    if len(text) > _MAX_VARIABLE_BYTES:
        raise PlanError(
            f"--children: the plan of {len(table.devices)} GPUs is too long to pass on", "select fewer GPUs with --gpus"
        )
    of_outer = {BINDING, OURS, *environ.get(OURS, "").split(":")}
    kept = {name: value for name, value in environ.items() if name not in of_outer}
    return {**frameworks.variables(), **kept, CHILDREN: text, "PYTHONPATH": with_hook(kept.get("PYTHONPATH", ""))}


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command in a child; pass signals on; return its status, or -n after signal n.

    If this process is killed, the kernel kills the command, too.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is inherited as ignored, the exit status is lost
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            calls.end_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.environ.clear()
            os.environ.update(environ)
            signal.pthread_sigmask(signal.SIG_SETMASK, (*set(before) - set(FORWARDED),))
            execute(list(command))
        except OSError as error:
            say(f"error: {command[0]} cannot be started: {error}")
        finally:
            os._exit(126)
    try:
        return supervise(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def conclude(table: ChildTable, status: int) -> int:
    """Say what was bound; return the status, or 5 if the command succeeded and `--strict` was not kept."""
    is_strict = table.strict and status == 0
    is_gone = not os.path.isdir(table.run)
    bound = records.read_all(table.run, handover.OBSERVED, with_keys=("gpus", "surprises"))
    unknown = records.read_all(table.run, records.UNBOUND, with_keys=("why",))
    problem = None
    if is_gone and is_strict:
        problem = f"the run's folder {table.run} is gone, so it is unknown which processes were bound"
    elif not (is_gone or bound or unknown) and status == 0:  # a command that failed had perhaps not come so far
        problem = (
            "no Python process below the command was seen to use a GPU, so none was bound; numapin cannot "
            "see Python with -I, -E or -S, or without PYTHONPATH, or of another user, or ranks of a numapin below: see "
            "docs/guides/frameworks.md"
        )
    if problem:
        say(f"error: --strict: {problem}" if is_strict else f"warning: {problem}")
    elif table.verbose and bound:
        num_gpus = len({gpu for record in bound for gpu in record["gpus"]})
        were = "was" if len(bound) == 1 else "were"
        say(f"{counted(len(bound), 'process')} used {counted(num_gpus, 'GPU')} and {were} bound")
    is_kept = problem is None and not unknown and not any(record["surprises"] for record in bound)
    return status if is_kept or not is_strict else records.REFUSED_STATUS
