"""`numapin.spawn`: a function in bound ranks, for notebooks and schedulers.

The flow is the same as in `numapin run`: topology, plan, store, shim. Each shim becomes a Python that loads the
function (`child.py`). Pickling and the import of the caller's script work as in multiprocessing's spawn.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from multiprocessing import context, reduction, resource_tracker
from multiprocessing import spawn as mp_spawn
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from numapin.base.cpu_set import CpuSet
from numapin.base.printable import printable
from numapin.errors import UsageError
from numapin.launcher import ranks as rank_processes
from numapin.launcher import run_folder
from numapin.launcher.hosts import OneHost
from numapin.launcher.ranks import ended_on_error, guarded
from numapin.launcher.rehearse import in_thread, rehearse
from numapin.launcher.store_server import torch_folder, why_not_served
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.request import Bind, Request, parse_bind, parse_gpus, parse_memory
from numapin.rank import handover, shim
from numapin.spawning.child import InheritedDescriptor
from numapin.spawning.ranks import RankProcess, results_of
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.plan.model import Plan

T = TypeVar("T")

# `python -c` puts the working directory first on sys.path, where it could hide our modules. The caller's path comes
# with the call.
_CHILD: Final = (
    f"import sys; sys.path[:] = filter(None, sys.path); {shim.FIND_NUMAPIN}; "
    "from numapin.spawning.child import main; main()"
)
_USE_MODULE: Final = "put it into a module, which a new process can import: from train import train"


def spawn(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    *,
    num_ranks: int | None = None,
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

    A rank is bound before `fn` is unpickled. It has the environment variables that `numapin run` sets: RANK,
    LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the others. Unlike torch.multiprocessing.spawn, this does not
    pass the rank to `fn`.

    The calling process serves the ranks' store on MASTER_PORT, so `fn` must not set MASTER_ADDR or MASTER_PORT. A
    program that `fn` starts needs a store of its own for its process group.

    If a rank fails, or on Ctrl-C, all ranks and the processes they started get SIGTERM, then SIGKILL.

    Args:
        fn: A function at the top level of a module, or of a script that calls `spawn` under
            `if __name__ == "__main__":`. It is pickled by reference.
        args: The arguments of `fn`. They are pickled.
        num_ranks: The number of ranks. None: one per visible GPU, or one rank without GPUs.
        bind: The CPUs that a rank may use, as in `--bind`.
        memory: The memory policy, as in `--memory`: `"preferred"`, `"bind=0"`. None:
            `preferred`, or `none` with `bind="none"`.
        cpus_per_rank: At most this many logical CPUs per rank, not shared.
        smt: Use all hardware threads of a core. False: one per core.
        reserve_cpus: CPUs that no rank gets, such as `"0-1"`.
        gpus: GPUs in the order of the ranks, as in `--gpus`.
        gpu_nodes: The node of each GPU whose node the machine does not report, or reports wrongly.
        strict: Raise BindingRefused if a binding cannot be applied exactly. Otherwise the rank gets what is possible,
            with a RuntimeWarning.
        timeout: Seconds from the start of the ranks until all must have returned. None: no limit.
        shutdown_timeout: At most this many seconds from SIGTERM to SIGKILL.

    Returns:
        The ranks' return values, in the order of ranks. They are pickled, so return values on the CPU.

    Raises:
        RankError: A rank died, `timeout` expired, or a rank's exception cannot be pickled. An exception that can be
            pickled is raised itself, with the rank's traceback as its cause.
        UsageError: An argument is invalid.
        MachineError: The machine cannot be read.
        PlanError: There is no feasible plan.
        BindingRefused: `strict` is set and a binding was refused. No rank has been started.

    Example:
        ```python
        import numapin

        from train import train  # a module of yours

        if __name__ == "__main__":  # ranks import the script, too
            losses = numapin.spawn(train, (0.1,), num_ranks=4, bind="exclusive")
        ```
    """
    _check_seconds("timeout", inf if timeout is None else timeout)
    _check_seconds("shutdown_timeout", shutdown_timeout)
    homes = _read("gpu_nodes", _homes, gpu_nodes, kind=Mapping) or {}
    policy = _read("memory", parse_memory, memory)
    request = Request(
        bind=_read("bind", parse_bind, bind) or Bind.NODE,
        memory=policy and policy.memory,
        memory_nodes=policy and policy.memory_nodes,
        num_ranks=_read("num_ranks", int, num_ranks, kind=Integral),
        cpus_per_rank=_read("cpus_per_rank", int, cpus_per_rank, kind=Integral),
        smt=smt,
        reserve_cpus=_read("reserve_cpus", CpuSet.parse, reserve_cpus) or CpuSet(),
        gpus=_read("gpus", parse_gpus, gpus),
    )
    call = _pickled(fn, tuple(args))
    plan, environment = _plan(request, homes, strict=strict)
    for text in plan.warnings:
        warnings.warn(printable(f"numapin.spawn: {text}"), RuntimeWarning, stacklevel=2)
    ranks: list[RankProcess] = []
    num_ranks = len(plan.ranks)
    host = OneHost(num_ranks, uses_torch=why_not_served(torch_folder()) is not None)
    with run_folder.run_directory(os.environ) as run_dir, guarded(run_dir), host:
        shared = host.join().shared_variables(num_ranks, run_id=str(uuid.uuid4()), environ=os.environ)
        variables = {**os.environ, **environment, **shared}
        handover.hand_over(plan, run_dir, variables)
        with ended_on_error(ranks, run_dir, shutdown_timeout):
            _start(num_ranks, ranks, variables, call)
            return results_of(ranks, timeout_s=timeout)


def _plan(request: Request, gpu_nodes: Mapping[str, int], *, strict: bool) -> tuple[Plan, dict[str, str]]:
    """Return the plan for this machine, rehearsed, and the variables that show its GPUs to the ranks."""
    topology = discover(environ=os.environ, gpu_nodes=gpu_nodes.items())
    if request.num_ranks is None:
        request = replace(request, num_ranks=default_num_ranks(topology))
    request, environment = settle_gpus(topology, request, os.environ)
    return rehearse(make_plan(topology, request), strict=strict, within=in_thread), environment


_IMPORTABLE: Final = frozenset({"init_main_from_name", "init_main_from_path"})
"""Entries of multiprocessing's preparation data, one of which says how a new process imports the script."""


class _PickledCall(NamedTuple):
    """A pickled call, preceded by the pickled preparation of its process, and the descriptors it needs."""

    content: bytes
    descriptors: tuple[int, ...]


def _start(num_ranks: int, ranks: list[RankProcess], variables: Mapping[str, str], call: _PickledCall) -> None:
    """Start the ranks, add them to `ranks`, and then let all of them load the call."""
    with os.fdopen(os.memfd_create("numapin-call"), "wb") as file:
        file.write(call.content)
        file.flush()
        for _ in range(num_ranks):
            _add_rank(ranks, variables, [file.fileno()], call.descriptors)
    for started in ranks:
        started.go()


def _add_rank(
    ranks: list[RankProcess], variables: Mapping[str, str], own: Sequence[int], shared: Sequence[int]
) -> None:
    """Start the next rank and add it to `ranks`. If that is interrupted, the closed socket makes the rank exit.

    `own` are the descriptors that `child.main` takes after the socket; `shared` those that the pickled call names.
    """
    local_rank = len(ranks)
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = _process(local_rank, variables, [theirs.fileno(), *own], shared)
            ranks.append(RankProcess(local_rank, process, ours))
        except BaseException:
            ours.close()
            raise


def _process(
    local_rank: int, variables: Mapping[str, str], own: Sequence[int], shared: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start the shim, which becomes the Python that makes the call."""
    tracker = _tracker()
    python = os.fsdecode(mp_spawn.get_executable())
    flags = mp_spawn.get_command_line()[1:-3]  # between the executable and multiprocessing's own program
    call = [_CHILD, str(-1 if tracker is None else tracker), *map(str, own)]
    return rank_processes.start(
        local_rank,
        python,
        python,
        [*flags, "-u", "-c", *call],
        {**variables, **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(local_rank))},
        pass_fds=(*own, *shared, *(() if tracker is None else (tracker,))),
        stdin=subprocess.DEVNULL,
    )


class _Spawning:
    """A stand-in for the process that multiprocessing would start. Pickling locks, queues and shared tensors needs one.

    Each rank inherits the descriptors under the same numbers.
    """

    DupFd = InheritedDescriptor

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Have the ranks inherit a descriptor; return its number there."""
        self.descriptors.append(fd)
        return fd


def _pickled(fn: Callable[..., object], args: tuple[object, ...]) -> _PickledCall:
    """Pickle the call and the preparation of its process. Raises UsageError if no new process could load it."""
    preparation = _preparation()
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", None) == "__main__" and not preparation.keys() & _IMPORTABLE:
        raise UsageError(
            f"{name} is defined in a notebook or at a prompt, where no other process finds it: functions are "
            "pickled by reference",
            f"{_USE_MODULE} (in a notebook, a cell that begins with %%writefile train.py creates one)",
        )
    spawning, buffer = _Spawning(), io.BytesIO()
    context.set_spawning_popen(spawning)  # type: ignore[arg-type] # pickling needs these two attributes only
    try:
        reduction.dump(preparation, buffer)
        reduction.dump((fn, args), buffer)
    except Exception as error:
        raise UsageError(f"{name} or its arguments cannot be pickled: {error}", _USE_MODULE) from error
    finally:
        context.set_spawning_popen(None)
    return _PickledCall(buffer.getvalue(), tuple(spawning.descriptors))


def _preparation() -> dict[str, Any]:
    """Return multiprocessing's data for a new process: sys.path, the script and others."""
    try:
        return mp_spawn.get_preparation_data("numapin")
    except RuntimeError:  # multiprocessing's own check
        raise UsageError(
            "numapin.spawn was called while a rank imported the script that calls it",
            'put the call under: if __name__ == "__main__":',
        ) from None


def _tracker() -> int | None:
    """Return the descriptor of multiprocessing's resource tracker if it is running; making a lock starts it."""
    fd: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined] # noqa: SLF001 - as spawn
    return fd


_SEE_OPTIONS: Final = "see the options with: numapin plan --help"
_KINDS: Final[Mapping[type, str]] = {
    str: "text, as on the command line",
    Integral: "a whole number",
    Mapping: "a mapping of GPUs to nodes",
}


def _read(name: str, parse: Callable[[Any], T], given: object, *, kind: type = str) -> T | None:
    """Parse an option as the command line does; None means not given. Raises UsageError."""
    if given is None:
        return None
    if not isinstance(given, kind):
        raise UsageError(f"{name} is {given!r}; it must be {_KINDS[kind]}", _SEE_OPTIONS)
    try:
        return parse(given)
    except ValueError as error:
        raise UsageError(f"{name}: {error}", _SEE_OPTIONS) from None


def _homes(gpu_nodes: Mapping[str, int]) -> dict[str, int]:
    """Return the node of each GPU. Raises ValueError for keys or values of another type."""
    if not all(isinstance(gpu, str) and isinstance(node, Integral) for gpu, node in gpu_nodes.items()):
        msg = f"{dict(gpu_nodes)!r} does not map text to whole numbers, as {{'0': 1}} does"
        raise ValueError(msg)
    return dict(gpu_nodes)


def _check_seconds(name: str, seconds: object) -> None:
    """Raise UsageError unless this is a number of seconds, 0 or more; inf means no limit, NaN is refused."""
    if not isinstance(seconds, Real) or not float(seconds) >= 0:
        raise UsageError(
            f"{name} is {seconds!r}; it must be a number of seconds, 0 or more", "give a number, such as 60"
        )
