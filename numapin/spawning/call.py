"""`numapin.spawn`: a function in bound ranks, for notebooks and schedulers.

The flow is the same as in `numapin run`: topology, plan, store, shim. Each shim becomes a Python that loads the
function (`child.py`). Pickling and the import of the caller's script work as in multiprocessing's spawn.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker
from multiprocessing import spawn as mp_spawn
from multiprocessing.connection import wait
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, TypeVar

from numapin.base.text import printable
from numapin.errors import RankError, UsageError
from numapin.launcher.guardian import LOOK_S
from numapin.launcher.hosts import OneHost
from numapin.launcher.ranks import StartedRank, ended_on_error, guarded, names_of, running_after, start
from numapin.launcher.rehearse import in_thread, rehearse
from numapin.launcher.run_folder import run_directory
from numapin.launcher.store_server import torch_folder, why_not_served
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.request import Request, parse_memory
from numapin.rank import handover, shim
from numapin.spawning.child import NUM_SIZE_BYTES, Answer, Outcome
from numapin.system import cgroup
from numapin.system.proc import is_dying
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
_STORE_HINT: Final = "give its process group a port of its own, e.g. with init_method='tcp://127.0.0.1:PORT'"
_USE_MODULE: Final = "put it into a module, which a new process can import: from train import train"
_SEE_OPTIONS: Final = "see the options with: numapin plan --help"
_PART_BYTES: Final = 1 << 20
# How long a rank that begins to exit may take: giving back GPU memory takes seconds.
_DYING_S: Final = 5
_RETURN_CPU_VALUES: Final = "return plain CPU values"
_PROBLEMS: Final = {
    Outcome.RAISED: ("{} raised an exception", ""),
    Outcome.UNPICKLABLE: ("the result of {} cannot be pickled", _RETURN_CPU_VALUES),
    Outcome.UNLOADABLE: (
        "{} could not load fn or its arguments",
        "fn and its arguments must be importable from a module or script; the traceback names what was not",
    ),
}


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

    The calling process serves the ranks' store on MASTER_PORT. `fn` may also name a place of its own, as for
    torch.multiprocessing.spawn. A program that `fn` starts needs a port of its own for its process group.

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
        RankError: A rank died or raised an exception, whose traceback is in the message, or `timeout` expired.
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
    for name, seconds in (("timeout", inf if timeout is None else timeout), ("shutdown_timeout", shutdown_timeout)):
        if not isinstance(seconds, Real) or not float(seconds) >= 0:  # NaN is refused, too
            problem = f"{name} is {seconds!r}; it must be a number of seconds, 0 or more"
            raise UsageError(problem, "give a number, such as 60")
    homes = gpu_nodes or {}
    if not isinstance(homes, Mapping) or not all(
        isinstance(gpu, str) and isinstance(node, Integral) for gpu, node in homes.items()
    ):
        problem = f"gpu_nodes is {homes!r}; it must map text to whole numbers, as {{'0': 1}} does"
        raise UsageError(problem, _SEE_OPTIONS)
    try:
        policy = None if memory is None else parse_memory(str(memory))
    except ValueError as error:
        raise UsageError(f"memory: {error}", _SEE_OPTIONS) from None
    request = Request(
        bind=bind,
        memory=policy and policy.memory,
        memory_nodes=policy and policy.memory_nodes,
        num_ranks=num_ranks,
        cpus_per_rank=cpus_per_rank,
        smt=smt,
        reserve_cpus=reserve_cpus,
        gpus=gpus,
    )
    call, descriptors = _pickled(fn, tuple(args))

    topology = discover(environ=os.environ, gpu_nodes=homes.items())
    if request.num_ranks is None:
        request = replace(request, num_ranks=default_num_ranks(topology))
    request, environment = settle_gpus(topology, request, os.environ)
    plan = rehearse(make_plan(topology, request), strict=strict, within=in_thread)
    for text in plan.warnings:
        warnings.warn(printable(f"numapin.spawn: {text}"), RuntimeWarning, stacklevel=2)

    ranks = list[RankProcess]()
    uses_torch = why_not_served(torch_folder()) is not None
    host = OneHost(len(plan.ranks), uses_torch=uses_torch, store_hint=_STORE_HINT)
    with run_directory(os.environ) as run_dir, guarded(run_dir), host:
        variables = host.join().shared_variables({**os.environ, **environment})
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # of ports other than MASTER_PORT; see child.ask_the_caller
        handover.hand_over(plan, run_dir, variables)
        with ended_on_error(ranks, run_dir, shutdown_timeout):
            _start(plan, ranks, variables, call, descriptors)
            return results_of(ranks, timeout_s=timeout)


def _pickled(fn: Callable[..., object], args: tuple[object, ...]) -> tuple[bytes, list[int]]:
    """Pickle multiprocessing's preparation of a new process, then the call; return the descriptors it needs, too.

    Raises UsageError if no new process could load it.
    """
    try:
        preparation = mp_spawn.get_preparation_data("numapin")  # sys.path, how to import the script, and others
    except RuntimeError:  # multiprocessing's own check
        raise UsageError(
            "numapin.spawn was called while a rank imported the script that calls it",
            'put the call under: if __name__ == "__main__":',
        ) from None
    name = getattr(fn, "__qualname__", repr(fn))
    is_importable = not preparation.keys().isdisjoint({"init_main_from_name", "init_main_from_path"})
    if getattr(fn, "__module__", None) == "__main__" and not is_importable:
        raise UsageError(
            f"{name} is defined in a notebook or at a prompt, where no other process finds it: functions are "
            "pickled by reference",
            f"{_USE_MODULE} (in a notebook, a cell that begins with %%writefile train.py creates one)",
        )
    # Pickling locks, queues and shared tensors asks the process that multiprocessing would start for descriptors. This
    # one is never started; it collects them, and each rank inherits them under the same numbers.
    process = object.__new__(popen_spawn_posix.Popen)
    process._fds = []  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    context.set_spawning_popen(process)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump((fn, args), buffer)
    except Exception as error:
        raise UsageError(f"{name} or its arguments cannot be pickled: {error}", _USE_MODULE) from error
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue(), process._fds  # type: ignore[attr-defined]


def _start(
    plan: Plan, ranks: list[RankProcess], variables: Mapping[str, str], call: bytes, descriptors: Sequence[int]
) -> None:
    """Start the ranks, add each to `ranks`, and then let all of them load the call."""
    # multiprocessing's resource tracker, if it is running; pickling a lock starts it
    tracker: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    python = os.fsdecode(mp_spawn.get_executable())
    flags = mp_spawn.get_command_line()[1:-3]  # between the executable and multiprocessing's own program
    with os.fdopen(os.memfd_create("numapin-call"), "wb") as file:
        file.write(call)
        file.flush()
        inherited = (file.fileno(), *descriptors, *(() if tracker is None else (tracker,)))
        for planned in plan.ranks:
            local_rank = planned.local_rank
            numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(local_rank))
            ours, theirs = socket.socketpair()
            own = map(str, (-1 if tracker is None else tracker, theirs.fileno(), file.fileno()))
            try:
                process = start(
                    local_rank,
                    python,
                    python,
                    [*flags, "-u", "-c", _CHILD, *own],
                    {**variables, **numbers, handover.SLICE: handover.slice_text(planned)},
                    pass_fds=(theirs.fileno(), *inherited),
                    stdin=subprocess.DEVNULL,
                )
                ranks.append(RankProcess(local_rank, process, ours))
            except BaseException:
                ours.close()  # makes the rank exit, which may not be in the list
                raise
            finally:
                theirs.close()
    for rank in ranks:
        with suppress(OSError):  # it may have ended
            rank.pipe.send(b"\n")  # all ranks are known, so an error ends all of them


# --- the ranks and their answers -------------------------------------------------------------------------------------


class RankProcess(StartedRank):
    """A rank's process and the socket for its answer."""

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
        super().__init__(local_rank, process)
        self.pipe = pipe  # closed once no answer can come any more: each rank answers once
        self.answer: Answer | None = None  # once all of it is here
        self.kills_before = cgroup.read_kills()
        self._content = bytearray()
        pipe.setblocking(False)

    @property
    def talks(self) -> bool:
        """Return whether an answer may still come."""
        return self.pipe.fileno() >= 0

    def look(self) -> None:
        """Update the status, then read what has arrived of the answer: all of it if the process has ended."""
        super().look()
        while self.talks:
            try:
                part = self.pipe.recv(_PART_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            self._content += part
            size = int.from_bytes(self._content[:NUM_SIZE_BYTES], "little")
            if 0 < size == len(self._content) - NUM_SIZE_BYTES:
                self.answer = pickle.loads(memoryview(self._content)[NUM_SIZE_BYTES:])
            if self.answer is not None or not part:
                self.pipe.close()
                self._content = bytearray()

    def close(self) -> None:
        """Close the socket, and reap the process if it has ended."""
        self.pipe.close()
        super().close()


def results_of(ranks: Sequence[RankProcess], *, timeout_s: float | None) -> tuple[Any, ...]:
    """Return the results of all ranks in their order, or raise the first error.

    A rank that died comes before the failures it caused. RankError says that a rank died, took too long, or that its
    answer cannot be used.
    """
    deadline = inf if timeout_s is None else time.monotonic() + timeout_s
    results: dict[int, object] = {}
    while running := [rank for rank in ranks if rank.status is None]:
        if time.monotonic() > deadline:
            raise RankError(f"{names_of(running)} did not end within {timeout_s:g} s", "give spawn a longer timeout")
        wait([rank.pipe for rank in running if rank.talks], LOOK_S)
        for rank in running:
            rank.look()
        for rank in running:
            if rank.status is not None and rank.answer is None:
                raise _death_of(rank)
        for rank in running:
            if rank.answer is not None and rank.local_rank not in results:
                results[rank.local_rank] = _result_of(rank, rank.answer, ranks)
            if rank.status:  # a result counts only if the rank ends well
                raise _death_of(rank)
    return tuple(results[rank.local_rank] for rank in ranks)


def _result_of(rank: RankProcess, answer: Answer, ranks: Sequence[RankProcess]) -> object:
    """Return a rank's result, or raise its error; if another rank died without an answer, raise that as the cause.

    A dying rank closes its sockets before its end can be seen, so another rank may report the broken connection first.
    A rank that ends well looks as if it were dying, too, but has answered by the end of the wait.
    """
    name = f"rank {rank.local_rank}"
    if answer.outcome is Outcome.RETURNED:
        try:
            return pickle.loads(answer.content)
        except Exception as error:
            raise RankError(f"the result of {name} cannot be unpickled here: {error}", _RETURN_CPU_VALUES) from error
    dying = [other for other in ranks if other.answer is None and (not other.talks or is_dying(other.process.pid))]
    running_after(dying, _DYING_S)
    what, hint = _PROBLEMS[answer.outcome]
    raised = RankError(f"{what.format(name)}:\n{answer.content.decode().rstrip()}", hint)
    dead = next((other for other in dying if other.answer is None), None)
    if dead is not None:
        raise _death_of(dead) from raised
    raise raised


def _death_of(rank: RankProcess) -> RankError:
    """Return the error for a rank that ended without a result, or failed after it."""
    from numapin.launcher.failure import name_of_signal  # ranks that succeed do not need it

    name, see_output = names_of([rank]), "see its output above"
    if rank.status is None:
        return RankError(f"{name} began to exit and has not ended after {_DYING_S} s", f"{see_output}, and: dmesg")
    if rank.status >= 0:
        when = "" if rank.answer else " before fn returned"
        hint = f"{see_output}; fn must return, not call sys.exit or os._exit"
        return RankError(f"{name} exited with status {rank.status}{when}", hint)
    problem = f"{name} was killed by {name_of_signal(-rank.status)}"
    if rank.status != -signal.SIGKILL:
        return RankError(problem, see_output)
    reason = cgroup.explain(rank.kills_before)
    if reason is None:
        return RankError(problem, f"{see_output}; the kernel sends SIGKILL when memory is short, see: dmesg")
    return RankError(f"{problem}: {reason}", cgroup.REMEDY)
