"""The parts that all job scripts have, as text for bash. Pure.

Comes in: a `JobRequest`. Goes out: quoted words, and the lines that start them, wait for them and pass signals on. All
words of the user go through `quote`; everything else is numapin's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.quoting import quote
from numapin.jobs.image import for_apptainer
from numapin.jobs.request import Form, JobRequest, Launch
from numapin.topology.model import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Every DataLoader worker holds pipes and memory; the usual limit of 1024 files is too low for eight ranks' loaders.
OPEN_FILES: Final = 'ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"'

# With another agent's USE_AGENT_STORE, no rank of a job without agents would serve the store, and all would wait.
# Variables that users set for their own launcher (TORCHELASTIC_ENABLE_FILE_TIMER) stay. OMP_NUM_THREADS is the user's,
# unless a launcher has set it.
_NO_OTHER_RUNS: Final = """\
# If this job was submitted by a rank of another job, remove that rank's variables.
if [ -n "${TORCHELASTIC_RUN_ID-}${NUMAPIN_BINDING-}" ]; then
    unset TORCHELASTIC_{RUN_ID,USE_AGENT_STORE,RESTART_COUNT,MAX_RESTARTS,ERROR_FILE,TIMER_FILE}
    unset GROUP_{RANK,WORLD_SIZE} ROLE_{NAME,RANK,WORLD_SIZE} OMP_NUM_THREADS
fi
[ -z "${NUMAPIN_BINDING-}" ] || unset NUMAPIN_{BINDING,RUN_DIR,DATALOADER,TRACE}
# shellcheck disable=SC2086 # the names of variables that --nic-env set
[ -z "${NUMAPIN_NIC_ENV-}" ] || unset ${NUMAPIN_NIC_ENV//:/ } NUMAPIN_NIC_ENV"""

_RENDEZVOUS: Final = ("--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"')

# torch reads PET_RDZV_ID as --rdzv-id, which `ps` would show to every user of the host.
RENDEZVOUS_ID: Final = """\
# Launchers trust only messages that are signed with this random id; see docs/security.md.
PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n') || PET_RDZV_ID=
if [ "${#PET_RDZV_ID}" != 32 ]; then
    echo "numapin job: no random rendezvous id: od -N16 /dev/urandom failed on $HOSTNAME" >&2
    exit 1
fi
export PET_RDZV_ID"""

_GPU_OPTIONS: Final = {GpuVendor.NVIDIA: ("--nv",), GpuVendor.AMD: ("--rocm",), GpuVendor.INTEL: ()}
"""The options by which Apptainer gives a container the GPUs; it binds /dev, which is all that Intel's need."""

_IF_SAVED: Final = 'if [ "$ending" = 1 ] && [ "$status" = 0 ]; then # it saved, and is not done'

# The variables that ranks need; mpirun exports only those that it is given.
FORWARD: Final = """\
forward=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHONPATH | PYTHONHOME | VIRTUAL_ENV | CONDA_PREFIX | HOME | TMPDIR) ;;
        MASTER_* | PET_* | CUDA_* | NCCL_* | GLOO_* | UCX_* | NVSHMEM_* | OMP_* | TORCH* | PYTORCH_*) ;;
        NUMAPIN_* | HF_* | WANDB_*) ;;
        *) continue ;;
    esac
    forward+=(-x "$name")
done"""


def statement(*groups: Iterable[str]) -> str:
    """Return one command of several lines, with one group of words per line."""
    return " \\\n    ".join(" ".join(group) for group in map(tuple, groups) if group)


def script(*parts: str | Iterable[str]) -> str:
    """Join parts to a script, with an empty line between them. Empty parts are left out."""
    return "\n\n".join(filter(None, map(_lines, parts))) + "\n"


def _lines(part: str | Iterable[str]) -> str:
    return part if isinstance(part, str) else "\n".join(part)


def preparation(request: JobRequest, *, folder: str = "") -> list[str]:
    """Return the first lines: a clean environment, `cd folder` if the manager starts elsewhere, the user's own lines.

    bash's strict mode comes last, because `activate` scripts may fail in it.
    """
    change_folder = [f"cd {folder} || exit"] if folder else []
    return [_NO_OTHER_RUNS, *change_folder, *request.setup, "set -euo pipefail"]


def directives(mark: str, options: Mapping[str, object]) -> list[str]:
    """Return a manager's directives, one per line, from option texts and the values that follow them directly.

    True is an option without a value. None, False, 0 and empty values leave the option out.
    """
    return [f"{mark} {option}{'' if value is True else value}" for option, value in options.items() if value]


def started(request: JobRequest, rank_variables: str, meeting: str, *, apptainer: bool = True) -> list[Iterable[str]]:
    """Return the command of each task, one group of words per line: shell, container, numapin, the user's program.

    The shell exports the variables that only the task knows: `rank_variables` with one task per rank, `meeting` with
    one task per host and several hosts. `apptainer` is False if the manager itself runs the task in the image.
    """
    variables = _task_variables(request, rank_variables, meeting)
    exports = [f"    export {variables}"] if variables else []
    lines = ["bash -c '", f"    {OPEN_FILES}", *exports, '    exec "$@"\' bash']
    return [["\n".join(lines)], _container(request) if apptainer else [], *_numapin(request)]


def _task_variables(request: JobRequest, rank_variables: str, meeting: str) -> str:
    """Return the variables that a task exports. `numapin run` on a single host needs none."""
    if request.form is Form.TASK:
        return rank_variables
    return meeting if request.nodes > 1 else ""


def _container(request: JobRequest) -> list[str]:
    image = request.container
    if image is None:
        return []
    return ["apptainer", "exec", *_GPU_OPTIONS[request.vendor], for_apptainer(image)]


def _numapin(request: JobRequest) -> list[Iterable[str]]:
    options = [quote(option) for option in request.run_options]
    if request.form is Form.TASK:
        return [["numapin", "exec", *options, "--"], map(quote, command(request))]
    nnodes = [f"--nnodes={request.nodes}"] if request.nodes > 1 else []
    rendezvous = _RENDEZVOUS if request.nodes > 1 else ()
    start = ["numapin", "run", *nnodes, f"--nproc-per-node={request.num_ranks}"]
    return [start, rendezvous, options, map(quote, run_command(request))]


def run_command(request: JobRequest) -> tuple[str, ...]:
    """Return the end of a `numapin run` line."""
    flag = {Launch.MODULE: ("--module",), Launch.PROGRAM: ("--no-python",)}
    return *flag.get(request.launch, ()), *request.command


def command(request: JobRequest) -> tuple[str, ...]:
    """Return a rank's command line, as `numapin run` would start it."""
    python = {Launch.SCRIPT: ("python", "-u"), Launch.MODULE: ("python", "-u", "-m")}
    return *python.get(request.launch, ()), *request.command


def run_to_its_end(
    request: JobRequest, start: str, *, timer_s: int | None = None, requeue: str = "", preempted: str = ""
) -> list[str]:
    """Return the lines that run `start` and handle signals.

    Without --signal and `requeue` the script becomes `start`. Otherwise it waits for it and passes SIGUSR1 on, which it
    sends itself `timer_s` seconds after the start if the manager cannot. If the program then ends with status 0, it has
    saved and is not done: `requeue` puts the job back into its queue. `preempted` is a command that succeeds if the
    manager ended the program; then the job is requeued whatever its status is.
    """
    if request.signal_s is None and not requeue:
        return [f"exec {start}"]
    return [
        f"{start} &",
        "run=$!",
        *_traps(sets_ending=bool(requeue)),
        *(_timer(timer_s) if timer_s else ()),
        *_WAIT,
        *(['kill "$timer" 2>/dev/null || true'] if timer_s else ()),
        *(_requeue(requeue, preempted) if requeue else ()),
        'exit "$status"',
    ]


def _traps(*, sets_ending: bool) -> Sequence[str]:
    """Return the lines that pass SIGUSR1 and SIGTERM on; `ending` records that the job was asked to save and end."""
    initial, on_usr1 = (" ending=0", "ending=1; ") if sets_ending else ("", "")
    return (
        f"signals=0{initial}",
        f"trap 'signals=$((signals + 1)); {on_usr1}kill -USR1 \"$run\" || true' USR1",
        "trap 'signals=$((signals + 1)); kill -TERM \"$run\" || true' TERM",
    )


_WAIT: Final = (
    "status=0",
    'wait "$run" || status=$?',
    'while [ "$signals" -gt 0 ]; do # a signal interrupts wait, not the run',
    "    signals=$((signals - 1)) status=0",
    '    wait "$run" || status=$?',
    "done",
    "trap : USR1 TERM # the run has ended, and its pid may be reused",
)


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


def _requeue(requeue: str, preempted: str) -> Sequence[str]:
    check = [f"if {preempted}; then", "    ending=1 status=0 # the manager ended the ranks", "fi"] if preempted else []
    return (*check, _IF_SAVED, f"    {requeue}", "fi")
