"""`numapin.spawn`: a function in bound ranks, for notebooks and schedulers. Edge.

Comes in: a function, its arguments and binding options. Goes out: what each rank returned. The flow is that of
`numapin run`, without torch: topology, plan, shim; each shim becomes a Python that loads the function
(`spawned.py`). Pickling and the import of the caller's script are those of multiprocessing's spawn.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import uuid
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from math import inf
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker
from multiprocessing import spawn as mp_spawn
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, TypeVar

from numapin.base.cpu_set import CpuSet
from numapin.base.printable import printable
from numapin.errors import UsageError
from numapin.launcher import run_folder
from numapin.launcher.rehearse import in_thread, rehearse
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.request import Bind, Request, parse_bind, parse_gpus, parse_memory
from numapin.rank import handover, shim, signals
from numapin.spawning import meeting
from numapin.spawning.ranks import RankProcess, none_left, results_of
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numapin.plan.model import Plan

T = TypeVar("T")

# `python -c` looks for modules in the working directory first: not for ours. The caller's path comes with the call.
_CHILD: Final = (
    f"import sys; sys.path[:] = filter(None, sys.path); {shim.FIND_NUMAPIN}; "
    "from numapin.spawning.child import main; main()"
)
_MODULE: Final = "put it into a module, which a new process can import: from train import train"


def spawn(  # noqa: PLR0913 - the options of the command line
    fn: Callable[..., T],
    args: Sequence[object] = (),
    *,
    nproc_per_node: int | None = None,
    bind: str = "node",
    memory: str | None = None,
    cpus_per_rank: int | None = None,
    smt: bool = True,
    reserve_cpus: str = "",
    gpus: str | None = None,
    gpu_nodes: Mapping[str, int] | None = None,
    strict: bool = False,
    timeout: float | None = None,
    shutdown_timeout: float = 30,
) -> tuple[T, ...]:
    """Call `fn(*args)` in bound ranks of this host, and return what each rank returned.

    A rank is bound before `fn` is unpickled. It has the variables of `numapin run`: RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT and the others. Unlike with torch.multiprocessing.spawn, `fn` does not receive the rank.

    MASTER_PORT is reserved for the process group that rank 0 creates in its own process; no other process can listen
    on it. A program that `fn` starts needs a MASTER_PORT of its own for its process group.

    If a rank fails, or on Ctrl-C, all ranks are ended: SIGTERM, then SIGKILL for them and what they started.

    Args:
        fn: A function at the top level of a module, or of a script that calls this under
            `if __name__ == "__main__":`. It is pickled by reference.
        args: Its arguments; they are pickled.
        nproc_per_node: The number of ranks. None: one per visible GPU, or one rank without GPUs.
        bind: Which CPUs a rank may use, as in `--bind`.
        memory: The memory policy, as in `--memory`: `"preferred"`, `"bind=0"`. None: the default of `bind`.
        cpus_per_rank: At most this many logical CPUs per rank, not shared.
        smt: Whether to use all hardware threads of a core, or one.
        reserve_cpus: CPUs that no rank gets, such as `"0-1"`.
        gpus: GPUs in the order of the ranks, as in `--gpus`.
        gpu_nodes: GPU to node, for GPUs whose node the machine does not report, or reports wrongly.
        strict: Raise BindingRefused if a binding cannot be applied exactly. Otherwise the rank gets what is possible,
            with a RuntimeWarning.
        timeout: Seconds from the start of the ranks until all must have returned. None: no limit.
        shutdown_timeout: Seconds from SIGTERM to SIGKILL, at most.

    Returns:
        What each rank returned, in the order of ranks. Results are pickled: return values on the CPU.

    Raises:
        RankError: A rank died, `timeout` is over, or a rank's exception cannot be pickled. An exception that can be
            pickled is raised itself, with the rank's traceback as its cause.
        UsageError: An argument is invalid.
        MachineError: The machine cannot be read.
        PlanError: There is no feasible plan.
        BindingRefused: `strict` is set and a binding was refused. No rank has started then.

    Example:
        ```python
        import numapin

        from train import train

        losses = numapin.spawn(train, (0.1,), nproc_per_node=4, bind="exclusive")
        ```
    """
    _check_seconds("timeout", inf if timeout is None else timeout)
    _check_seconds("shutdown_timeout", shutdown_timeout)
    nproc_per_node = _read("nproc_per_node", int, nproc_per_node, kind=Integral)
    cpus_per_rank = _read("cpus_per_rank", int, cpus_per_rank, kind=Integral)
    gpu_nodes = _read("gpu_nodes", _homes, gpu_nodes, kind=Mapping)
    payload, fds = _pickled(fn, tuple(args))
    topology = discover(environ=os.environ, gpu_nodes=(gpu_nodes or {}).items())
    policy = _read("memory", parse_memory, memory)
    request = Request(
        bind=_read("bind", parse_bind, bind) or Bind.NODE,
        **(policy._asdict() if policy else {}),
        num_ranks=default_num_ranks(topology) if nproc_per_node is None else nproc_per_node,
        cpus_per_rank=cpus_per_rank,
        smt=smt,
        reserve_cpus=_read("reserve_cpus", CpuSet.parse, reserve_cpus) or CpuSet(),
        gpus=_read("gpus", parse_gpus, gpus),
    )
    request, environment = settle_gpus(topology, request)
    plan = rehearse(make_plan(topology, request), strict=strict, within=in_thread)
    for text in plan.warnings:
        warnings.warn(printable(f"numapin.spawn: {text}"), RuntimeWarning, stacklevel=2)
    with _meeting(plan, environment) as (variables, port), none_left(shutdown_timeout) as ranks:
        _start(plan, ranks, variables, payload, fds, port.fileno())
        return results_of(ranks, timeout_s=timeout)


@contextmanager
def _meeting(plan: Plan, environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], socket.socket]]:
    """Yield the variables of all ranks and the socket that holds MASTER_PORT. It and the run's folder last as long."""
    with run_folder.run_directory(os.environ) as run_dir, meeting.reserved_port() as held:
        variables = {**os.environ, **environment, **_job_variables(len(plan.ranks), meeting.port_of(held))}
        handover.hand_over(plan, run_dir, variables)
        yield variables, held


def _start(  # noqa: PLR0913, PLR0917 - what a rank needs
    plan: Plan, ranks: list[RankProcess], variables: Mapping[str, str], payload: bytes, fds: Sequence[int], port: int
) -> None:
    """Start the ranks, and let them go when all are in the list: one that an interrupt keeps out of it leaves.

    `port` is the descriptor of the socket that holds MASTER_PORT; rank 0 gets it.
    """
    with os.fdopen(os.memfd_create("numapin-call"), "wb") as file:
        file.write(payload)
        file.flush()
        for local_rank in range(len(plan.ranks)):
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    own = [file.fileno(), theirs.fileno(), *([port] if local_rank == 0 else [])]
                    process = _process(local_rank, variables, own, fds)
                    ranks.append(RankProcess(local_rank, process, ours))
                except BaseException:
                    ours.close()
                    raise
    for started in ranks:
        started.go()


def _process(
    local_rank: int, variables: Mapping[str, str], own: Sequence[int], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start the shim, which becomes the Python that makes the call; `own` is what `spawned.main` is told of."""
    tracker = _tracker()
    passed = (*own, *fds, *(() if tracker is None else (tracker,)))
    python = os.fsdecode(mp_spawn.get_executable())
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
    call = [_CHILD, str(-1 if tracker is None else tracker), *map(str, own)]
    start = ["-I", "-S", "-c", shim.CODE, f"--local-rank={local_rank}", f"--launcher={os.getpid()}"]
    with signals.kept_from_children():
        return subprocess.Popen(  # waited for by Rank
            [python, *start, f"--exec={python}", *flags, "-u", "-c", *call],
            env={**variables, **_rank_variables(local_rank)},
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's to handle, and all that a rank starts ends with it
        )


def _job_variables(num_ranks: int, port: int) -> dict[str, str]:
    """Return what all ranks have in their environment, as torchrun sets it; no agent keeps a store for them."""
    return {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(num_ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": meeting.ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _rank_variables(local_rank: int) -> dict[str, str]:
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(local_rank))


class _Spawning:
    """Stands for the process that multiprocessing would start: locks, queues and shared tensors ask for it.

    Each rank inherits the descriptors under the same numbers.
    """

    DupFd = popen_spawn_posix._DupFd  # noqa: SLF001 - what spawn uses

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Have the ranks inherit a descriptor; return its number there."""
        self.fds.append(fd)
        return fd


def _pickled(fn: Callable[..., object], args: tuple[object, ...]) -> tuple[bytes, list[int]]:
    """Return the pickled call, after what prepares a process for it, and the descriptors it needs.

    Raises UsageError for what no new process could load.
    """
    try:
        preparation = mp_spawn.get_preparation_data("numapin")
    except RuntimeError:  # multiprocessing's own check
        raise UsageError(
            "numapin.spawn was called while a rank imported the script that calls it",
            'put the call under: if __name__ == "__main__":',
        ) from None
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", None) == "__main__" and not preparation.keys() & _IMPORTABLE:
        raise UsageError(
            f"{name} is defined in a notebook or at a prompt, where no other process finds it: functions are "
            "pickled by reference",
            f"{_MODULE} (in a notebook a cell that begins with %%writefile train.py makes one)",
        )
    spawning, buffer = _Spawning(), io.BytesIO()
    context.set_spawning_popen(spawning)  # type: ignore[arg-type] # it has what pickling asks for
    try:
        reduction.dump(preparation, buffer)
        reduction.dump((fn, args), buffer)
    except Exception as error:
        raise UsageError(f"{name} or its arguments cannot be pickled: {error}", _MODULE) from error
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue(), spawning.fds


_IMPORTABLE: Final = frozenset({"init_main_from_name", "init_main_from_path"})


def _tracker() -> int | None:
    """Return the descriptor of multiprocessing's resource tracker if it runs: pickling a lock has started it."""
    fd: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined] # noqa: SLF001 - as spawn
    return fd


_OPTIONS: Final = "see the options with: numapin plan --help"
_KINDS: Final[Mapping[type, str]] = {
    str: "text, as on the command line",
    Integral: "a whole number",
    Mapping: "a mapping of GPUs to nodes",
}


def _read(name: str, parse: Callable[[Any], T], given: object, *, kind: type = str) -> T | None:
    """Read an option as the command line does; None is one that was not given. Raises UsageError."""
    if given is None:
        return None
    if not isinstance(given, kind):
        raise UsageError(f"{name} is {given!r}; it must be {_KINDS[kind]}", _OPTIONS)
    try:
        return parse(given)
    except ValueError as error:
        raise UsageError(f"{name}: {error}", _OPTIONS) from None


def _homes(gpu_nodes: Mapping[str, int]) -> dict[str, int]:
    if not all(isinstance(gpu, str) and isinstance(node, Integral) for gpu, node in gpu_nodes.items()):
        msg = f"{dict(gpu_nodes)!r} does not map text to whole numbers, as {{'0': 1}} does"
        raise ValueError(msg)
    return dict(gpu_nodes)


def _check_seconds(name: str, seconds: object) -> None:
    """Raise UsageError for what is no time to wait; NaN is none, inf is one without an end."""
    if not isinstance(seconds, Real) or not float(seconds) >= 0:
        raise UsageError(f"{name} is {seconds!r}; it must be seconds, and not negative", "give seconds, such as 60")
