"""Bind this process, once its GPU is known.

Rules:

- What the environment says is a first guess: the first set_device replaces it, also for what the process starts later.
- A process that takes a second GPU stays where it is. If that GPU is on another node, a warning says so, once.
- Children that have no GPU of their own follow the process: those that come later inherit its binding, and those that
  are there already (a forkserver, workers) are bound to its CPUs.
- A child that has a record of its own, or is a rank of a numapin below, is never touched, nor is what is below it.

Errors never reach the program: the hook reports them. With --strict the process ends with status 5.
"""

from __future__ import annotations

import json
import os
import sys
import time
from _thread import RLock, get_native_id
from contextlib import suppress

from numapin.base.cpu_set import CpuSet
from numapin.children import records
from numapin.children.table import ChildTable, UnknownDevice, device_of, known_device, num_visible
from numapin.rank import bind
from numapin.rank.become import BINDING, CHILDREN
from numapin.rank.handover import OBSERVED, RankSlice
from numapin.system import numa_maps, proc
from numapin.system.threads import bind_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Final

    from numapin.children.table import DeviceEntry
    from numapin.rank.bind import Applied


class TakenGpus:
    """The GPU that this process is bound to, with its slice of the plan, and the names of all that it uses."""

    def __init__(self, *, inherited: int | None) -> None:
        self.pid = os.getpid()
        self.had = {frozenset(os.sched_getaffinity(0))}  # the CPUs that it was bound to so far
        self.number: int | None = None  # of the GPU in the plan
        self.slice: RankSlice | None = None
        self.names: list[str] = []
        self.inherited = inherited  # the GPU of the process that this one follows
        self.is_guess = False  # only its environment says so
        self.is_asked = False  # the program called `bind_this_process`
        self.allocated: dict[int, int] | None = None
        self.applied: Applied | None = None
        self.torch_threads: tuple[int, int] | None = None  # the number that it was lowered to, and the former one
        self.surprises: list[str] = []


class _Process:
    """What this process knows of itself; a fork starts anew, with the binding that it inherited."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.table: ChildTable | None = None
        self.taken: TakenGpus | None = None
        self.lists: dict[str, str | None] | None = None
        """The lists of devices as they were when CUDA read them; None: it has not done so yet."""

    def current(self) -> TakenGpus:
        """Return the state of this process, made at its first use."""
        if self.taken is None:
            inherited: int | None = None
            with suppress(KeyError, ValueError, TypeError):
                inherited = int(json.loads(os.environ[BINDING])["local_rank"])
            self.taken = TakenGpus(inherited=inherited)
        return self.taken

    def forked(self) -> None:
        """Begin anew in a forked child; the lock may be held by a thread that does not exist here."""
        parent, self.lock, self.taken, self.lists = self.taken, RLock(), None, None
        if parent is not None and parent.slice is not None:
            self.taken = TakenGpus(inherited=parent.number)


_NUM_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SOON_S: Final = 0.01
_LATER_S: Final = 0.5
_NUM_SOON: Final = 1000
_own: Final = _Process()
os.register_at_fork(after_in_child=_own.forked)


def fix_devices() -> None:
    """Note that the runtime has read the lists of devices: later changes are for processes that this one starts."""
    plan = table()
    if _own.lists is None and plan is not None:
        _own.lists = {name: os.environ.get(name) for name in plan.lists}


def environ() -> Mapping[str, str]:
    """Return this process's environment, with the lists of devices that its runtime has read."""
    if _own.lists is None:
        return os.environ
    settings = {**os.environ, **_own.lists}
    return {name: value for name, value in settings.items() if value is not None}


def table() -> ChildTable | None:
    """Return the plan that this process inherited; None if there is none. Raises ValueError if it is malformed."""
    if _own.table is None and CHILDREN in os.environ:
        try:
            _own.table = ChildTable.parse(os.environ[CHILDREN])
        except (ValueError, KeyError, TypeError) as error:
            msg = f"{CHILDREN} was not written by this version of numapin: {error}"
            raise ValueError(msg) from None
    return _own.table


def take_known(moment: str) -> None:
    """Bind this process if its environment names its GPU; `moment` says when, for messages."""
    plan = table()
    if plan is None:
        return
    with _own.lock:
        if _own.current().slice is not None:
            return
        try:
            found = known_device(plan, environ())
            if found is not None:
                entry, variable = found
                _take(plan, entry, f"{variable}, {moment}", is_guess=True)
        except UnknownDevice:  # reported if the process uses it
            return


def take(number: int, how: str, *, is_guess: bool = False) -> None:
    """Bind this process to the GPU that its runtime numbers so."""
    plan = table()
    if plan is None or number < 0:
        return
    with _own.lock:
        if not is_guess:
            fix_devices()
        try:
            _take(plan, device_of(plan, environ(), number), how, is_guess=is_guess)
        except UnknownDevice as error:
            records.report_unknown(plan, str(error))


def take_one_of(numbers: Sequence[int], how: str) -> None:
    """Bind this process to the first of the devices that it has contexts on, unless it is bound to one of them.

    A library may have made another context beside that of the process's own GPU, often on device 0.
    """
    plan = table()
    if plan is None:
        return
    with _own.lock:
        chosen = numbers[0]
        for number in numbers:
            with suppress(UnknownDevice):
                if device_of(plan, environ(), number).number == _own.current().number:
                    chosen = number
                    break
        take(chosen, how)


def is_settled() -> bool:
    """Return whether this process has named a GPU."""
    with _own.lock:
        taken = _own.current()
        return taken.slice is not None and not taken.is_guess


# --- taking a GPU ----------------------------------------------------------------------------------------------------


def take_entry(plan: ChildTable, entry: DeviceEntry, how: str) -> TakenGpus:
    """Bind this process to a GPU instead of the one that it has, and return the result. It says nothing."""
    with _own.lock:
        taken = _own.current()
        taken.inherited, taken.is_guess = None, False
        taken.is_asked = True
        _bind_to(plan, taken, entry, how)
        return taken


def _take(plan: ChildTable, entry: DeviceEntry, how: str, *, is_guess: bool) -> None:
    """Bind this process to a GPU, unless it has one already, by itself or from the process that it follows."""
    taken = _own.current()
    if entry.number == (taken.inherited if taken.slice is None else taken.number):
        if taken.is_guess and not is_guess:  # the framework may have been imported since
            records.report_frameworks(plan)
        taken.is_guess = taken.is_guess and is_guess
    elif taken.slice is None or taken.is_guess:
        taken.is_guess, taken.is_asked = is_guess, False
        _bind_to(plan, taken, entry, how)
        records.report(plan, taken, how)
    elif entry.name not in taken.names:
        taken.names.append(entry.name)
        if RankSlice(entry.slice).node != taken.slice.node:
            gpus = f"process {taken.pid} uses GPUs of several nodes ({', '.join(taken.names)})"
            stays = f"it stays on the CPUs and the memory of the first, {taken.slice.cpus}; start one process per GPU"
            taken.surprises.append(f"{gpus}: {stays}")
        if plan.run:
            records.record(plan, taken, how)
        records.report_surprises(plan, taken)


def _bind_to(plan: ChildTable, taken: TakenGpus, entry: DeviceEntry, how: str) -> None:
    """Bind all threads to a GPU as its slice says, and the processes that follow; record the result.

    Interrupted, the process is not taken to be bound.
    """
    taken.names, taken.allocated = [entry.name], numa_maps.private_bytes(taken.pid)
    taken.number, taken.slice = entry.number, RankSlice(entry.slice)
    try:
        _bind(plan, taken, taken.slice, how)
    except BaseException:  # Ctrl-C, too: the next set_device binds it
        taken.number, taken.slice = None, None
        raise


def _bind(plan: ChildTable, taken: TakenGpus, wanted: RankSlice, how: str) -> None:
    taken.had.add(frozenset(os.sched_getaffinity(0)))  # the process that it follows may have been bound meanwhile
    num_cpus = [len(cpus) for cpus in taken.had]
    applied = bind.apply(wanted)
    if not taken.is_asked and get_native_id() != taken.pid:  # what holds is the main thread's policy, not this one's
        applied = bind.of_main_thread(applied, numa_maps.main_policy(taken.pid))
    taken.applied = applied
    refusals = bind_threads(taken.pid, wanted.cpus, before=taken.had)
    taken.had.add(frozenset(os.sched_getaffinity(0)))
    taken.surprises = [text for text in (*applied.shortfalls, *refusals) if text not in wanted.json]

    # This program, and what it starts, find its slice with what differs from the plan, and its number of threads.
    binding = json.loads(wanted.json)
    if taken.surprises:
        binding |= {"exact": False, "reason": "; ".join((binding["reason"], *taken.surprises))}
    os.environ[BINDING] = json.dumps(binding)
    num_threads = max(1, wanted.num_threads)
    torch = sys.modules.get("torch")
    if torch is None:  # later it would change only what the process starts
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    elif not any(map(os.environ.get, _NUM_THREADS)) and get_native_id() == taken.pid:  # the number is the main thread's
        former = getattr(torch, "get_num_threads", int)()  # 0 if torch is half imported
        if former > num_threads and not is_chosen(former, before=num_cpus, now=len(wanted.cpus)):
            torch.set_num_threads(num_threads)
            taken.torch_threads = num_threads, former
    if not taken.is_guess:
        _keep_rank_from_children()
    if not plan.run:
        return
    records.record(plan, taken, how)
    # The processes that this one has started before follow it, as far as they have no GPU of their own; those that have
    # one are left out, with all that is below them, and so are ranks that numapin has bound, e.g. of a `numapin run`. A
    # child that binds itself at this moment wins: its record, which may appear meanwhile, has its CPUs.
    recorded = records.running(plan.run, records.UNBOUND, OBSERVED)
    for child, start in [*proc.descendants_of(taken.pid, is_apart=lambda pid: pid in recorded or _is_rank(pid))]:
        bind_threads(child, wanted.cpus, start=start)
        _, theirs = records.running(plan.run, OBSERVED).get(child, ("", {}))
        applied_there = theirs.get("applied")
        if isinstance(applied_there, dict) and "cpus" in applied_there:
            bind_threads(child, CpuSet.parse(applied_there["cpus"]), start=start)


def _is_rank(pid: int) -> bool:
    """Return whether a process began as a rank of a numapin below the command (`become.become`)."""
    environment = proc.environment_of(pid) or {}
    return BINDING in environment and CHILDREN not in environment


def is_chosen(num_threads: int, *, before: Collection[int], now: int) -> bool:
    """Return whether the program has set torch's number of threads, and the CPUs that it has `now` are enough for it.

    torch's own number is that of the CPUs it had `before` or, with MKL, of their cores; SMT gives a core two CPUs.
    """
    return num_threads <= now and not any(num_threads in (num_cpus, num_cpus // 2) for num_cpus in before)


def _keep_rank_from_children() -> None:
    """Let processes that this one starts follow it, although they inherit its local rank, which may be wrong.

    In the plan that they find, its variables have the values of this process, so only a different value names a GPU.
    The plan that others hold stays as it is.
    """
    plan = table()
    if plan is None:
        return
    ranks = {name: os.environ.get(name) for name in plan.saw if name not in plan.lists}
    if any(plan.saw[name] != value for name, value in ranks.items()):
        _own.table = ChildTable.parse(plan.render())
        _own.table.saw.update(ranks)
        os.environ[CHILDREN] = _own.table.render()


# --- the first CUDA context ------------------------------------------------------------------------------------------


def cuda_is_initialized(report: Callable[[Exception], None]) -> None:
    """Bind a process that sees one device; of several, it gets that of its first context, unless it names one before.

    `torch.ones(1, device="cuda:1")` does not call set_device, and CUDA does not report new contexts. So a thread asks
    the driver, which takes microseconds. `report` is called with an error that ends it.
    """
    fix_devices()
    plan = table()
    if plan is None or is_settled():
        return
    is_only = False
    with suppress(UnknownDevice):
        is_only = num_visible(plan, environ()) == 1
    if is_only:  # it can use no other
        take(0, "CUDA was initialized")
        return
    from threading import Thread

    from numapin.system import cuda

    driver = cuda.driver()
    if driver is None:
        take(0, "CUDA was initialized", is_guess=True)
        return

    def take_first_context() -> None:
        try:
            turn = 0
            while not is_settled():
                active = driver.active_devices()
                if active:
                    take_one_of(active, "its first CUDA context")
                    return
                time.sleep(_SOON_S if turn < _NUM_SOON else _LATER_S)
                turn += 1
        except Exception as error:  # noqa: BLE001 - the program must go on
            report(error)

    Thread(target=take_first_context, name="numapin-context", daemon=True).start()
