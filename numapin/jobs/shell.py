r"""What every job script does, as text for bash. Pure.

Comes in: a `JobRequest`. Goes out: words that are quoted already, and the lines that start them, watch over them and
pass signals on. A word that is the user's goes through `quote`; everything else is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.quoting import quote
from numapin.jobs.image import for_apptainer
from numapin.jobs.request import Form, JobRequest, Launch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Every DataLoader worker holds pipes and memory; the usual 1024 are too few for eight ranks' loaders.
OPEN_FILES: Final = 'ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"'

# With an agent's USE_AGENT_STORE no rank of a job without agents would serve the store, and all would wait for it. What
# users set for their own launcher (TORCHELASTIC_ENABLE_FILE_TIMER) stays; OMP_NUM_THREADS is theirs outside of any.
_NO_OTHER_RUNS: Final = """\
# Submitted from below a launcher: what that gave its own rank is not for the ranks of this job.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}"""

_MEETING_PLACE: Final = ("--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"')

# torch reads PET_RDZV_ID as --rdzv-id, which `ps` would show to every user of the node.
RENDEZVOUS_ID: Final = """\
# Launchers trust only what is signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export PET_RDZV_ID"""

_SAVED: Final = 'if [ "$told" = 1 ] && [ "$status" = 0 ]; then # it saved, and is not done'

# What a rank's start needs of this shell; mpirun passes nothing on but what it is told to.
FORWARD: Final = """\
forward=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHONPATH | PYTHONHOME | VIRTUAL_ENV | CONDA_PREFIX | HOME | TMPDIR) ;;
        MASTER_* | PET_* | CUDA_* | NCCL_* | GLOO_* | UCX_* | OMP_* | TORCH* | PYTORCH_*) ;;
        NUMAPIN_* | HF_* | WANDB_*) ;;
        *) continue ;;
    esac
    forward+=(-x "$name")
done"""


def statement(*groups: Iterable[str]) -> str:
    """Return one command: a group of words a line, continued."""
    return " \\\n    ".join(" ".join(group) for group in map(tuple, groups) if group)


def script(*parts: str | Iterable[str]) -> str:
    """Return a script of its parts, an empty line between two; what is empty is left out."""
    texts = (part if isinstance(part, str) else "\n".join(part) for part in parts)
    return "\n\n".join(text for text in texts if text) + "\n"


def preparation(request: JobRequest, *, folder: str = "") -> list[str]:
    """Return what comes first: a clean environment, `folder` where the manager starts elsewhere, the user's own lines.

    bash's strict mode comes after them: `activate` scripts of others may not stand it.
    """
    there = [f"cd {folder} || exit"] if folder else []
    return [_NO_OTHER_RUNS, *there, *request.setup, "set -euo pipefail"]


def started(request: JobRequest, rank_variables: str, meeting: str, *, apptainer: bool = True) -> list[Iterable[str]]:
    """Return what each task becomes, a group of words a line: its shell, the container, numapin, the user's program.

    The shell puts into the environment what only the task knows: `rank_variables` for the form of a task a rank,
    `meeting` for that of a task a node, where there are several. `apptainer` is False where the manager itself puts the
    image round the task.
    """
    own = rank_variables if request.form is Form.TASK else meeting if request.nodes > 1 else ""
    lines = ["bash -c '", f"    {OPEN_FILES}", *([f"    export {own}"] if own else []), '    exec "$@"\' bash']
    return [["\n".join(lines)], _container(request) if apptainer else [], *_numapin(request)]


def _container(request: JobRequest) -> list[str]:
    image = request.container
    if image is None:
        return []
    return ["apptainer", "exec", "--nv", for_apptainer(image)]


def _numapin(request: JobRequest) -> list[Iterable[str]]:
    own = [*request.options, *(["--dataloader=numapin"] if request.dataloader else [])]
    if request.form is Form.TASK:
        return [["numapin", "exec", *map(quote, own), "--"], map(quote, command(request))]
    nodes = [f"--nnodes={request.nodes}"] if request.nodes > 1 else []
    start = ["numapin", "run", *nodes, f"--nproc-per-node={request.ranks}"]
    return [start, _MEETING_PLACE if nodes else [], map(quote, own), map(quote, run_command(request))]


def run_command(request: JobRequest) -> tuple[str, ...]:
    """Return the end of a `numapin run` line."""
    flag = {Launch.MODULE: ("--module",), Launch.PROGRAM: ("--no-python",)}
    return *flag.get(request.launch, ()), *request.command


def command(request: JobRequest) -> tuple[str, ...]:
    """Return the command line that a rank becomes, as `numapin run` would start it."""
    python = {Launch.SCRIPT: ("python", "-u"), Launch.MODULE: ("python", "-u", "-m")}
    return *python.get(request.launch, ()), *request.command


def run_to_its_end(
    request: JobRequest, start: str, *, timer_s: int | None = None, requeue: str = "", preempted: str = ""
) -> list[str]:
    """Return the lines that run `start`, and what a signal does.

    Without --signal and `requeue` the script becomes `start`. Else it waits for it and passes SIGUSR1 on: `timer_s`
    seconds after the start, where the manager cannot be told to send it. `requeue` then puts the job back into its
    queue, where the program ended well: it saved, and is not done. `preempted` is a command that says whether the
    manager made the program end, which then goes back however it ended.
    """
    if request.signal_s is None and not requeue:
        return [f"exec {start}"]
    lines = [
        f"{start} &",
        "run=$!",
        f"heard=0{' told=0' if requeue else ''}",
        f"trap 'heard=$((heard + 1)); {'told=1; ' if requeue else ''}kill -USR1 \"$run\" || true' USR1",
        "trap 'heard=$((heard + 1)); kill -TERM \"$run\" || true' TERM",
        *(_timer(timer_s) if timer_s else ()),
        "status=0",
        'wait "$run" || status=$?',
        'while [ "$heard" -gt 0 ]; do # a signal ends the waiting, not the run',
        "    heard=$((heard - 1)) status=0",
        '    wait "$run" || status=$?',
        "done",
        "trap : USR1 TERM # the run is over, and its number may be another's",
        *(['kill "$timer" 2>/dev/null || true'] if timer_s else []),
        *(
            [f"if {preempted}; then", "    told=1 status=0 # the ranks were told to end", "fi"]
            if requeue and preempted
            else []
        ),
        *([_SAVED, f"    {requeue}", "fi"] if requeue else []),
    ]
    return [*lines, 'exit "$status"']


def _timer(after_s: int) -> Sequence[str]:
    return (
        "(",
        f"    sleep {after_s} &",
        "    trap 'kill \"$!\"; exit' TERM",
        '    wait "$!"',
        "    kill -USR1 $$",
        ") &",
        "timer=$!",
    )
