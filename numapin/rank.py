"""Stage 4: the shim that each rank starts as. Edge.

Comes in: `--local-rank=N --exec=PROGRAM ARGUMENTS…`, as the launcher wrote it, and the run directory in
NUMAPIN_RUN_DIR. Binds this process, records what the kernel says about it, and execs the user's command. Goes out: the
user's program, in the same process, bound; with NUMAPIN_BINDING (its slice of the plan, JSON) in its environment.

It is started with `python -I -S`, without site-packages, so that it costs milliseconds: this module and what it imports
may use the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from numapin import bind, rundir
from numapin.errors import NumapinError
from numapin.plan import Plan

if TYPE_CHECKING:
    from numapin.plan import RankPlan


def main() -> None:
    """Bind, record, and become the user's command; never returns.

    LOCAL_RANK is not asked: --virtual-local-rank makes it 0 in every rank. Leaves with status 127 where the command
    does not exist and 126 where it cannot be executed, as a shell does.
    """
    local_rank = sys.argv[1].removeprefix("--local-rank=")
    command = [part for part in (sys.argv[2].removeprefix("--exec="),) if part] + sys.argv[3:]
    run_dir = os.environ["NUMAPIN_RUN_DIR"]
    text, source = rundir.take_plan(os.environ)
    rank = Plan.from_json(text, source=source).ranks[int(local_rank)]
    applied = bind.apply(rank)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    record = {
        "schema": "numapin.observed/1",
        "local_rank": rank.local_rank,
        "rank": int(os.environ.get("RANK", local_rank)),
        "restart": int(restart),
        "pid": os.getpid(),
        "requested": rank.to_json(),
        "applied": applied.to_json(),
    }
    _tell_surprises(rank, applied)
    try:
        rundir.write_json(run_dir, f"observed-{local_rank}-{restart}.json", record)
    except NumapinError as error:  # a full disk is no reason to lose the job
        sys.stderr.write(f"numapin: rank {local_rank}: no record of the binding: {error.message}\n")
    os.environ["NUMAPIN_BINDING"] = json.dumps(rank.to_json())
    os.environ.setdefault("OMP_NUM_THREADS", str(rank.num_threads))
    _become(command)


def _tell_surprises(rank: RankPlan, applied: bind.Applied) -> None:
    """Say what the launcher's rehearsal did not foresee; what it did is in the reason, and was said once."""
    for text in applied.shortfalls:
        if text not in rank.reason:
            sys.stderr.write(f"numapin: rank {rank.local_rank}: {text}\n")
    sys.stderr.flush()


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.stderr.write(f"numapin: {command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
