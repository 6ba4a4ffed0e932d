"""Bind this process, once its GPU is known.

Rules:

- What the environment says is a first guess: the first set_device replaces it, also for what the process starts later.
- A process that takes a second GPU is widened to the CPUs of both; if their nodes differ, the memory of the thread that
  takes it becomes local to its CPU. Other threads keep their policy, because Linux lets no thread set another's.
- Children that have no GPU of their own follow the process: those that come later inherit its binding, and those that
  are there already (a forkserver, workers) are bound to its CPUs.
- A child that has a record of its own, and what is below it, is never touched.

Errors never reach the program: the hook reports them. With --strict the process ends with status 5.
"""

from __future__ import annotations

import json
import os
import sys
from _thread import RLock, get_native_id

from numapin.base.cpu_set import CpuSet
from numapin.children import records
from numapin.children.devices import UnknownDevice, device_of, known_device, num_visible
from numapin.children.reporting import record, report, report_unknown
from numapin.children.table import ChildTable
from numapin.rank import bind
from numapin.rank.become import BINDING, CHILDREN
from numapin.rank.handover import RankSlice
from numapin.system import numa_maps, proc
from numapin.system.threads import bind_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Final

    from numapin.children.table import DeviceEntry
    from numapin.rank.bind import Applied, Bindable


class TakenGpus:
    """The GPUs that this process uses, with their slices of the plan; `had` are the CPUs that it was bound to so far.

    `is_guess`: only its environment says so. `is_asked`: the program called `bind_this_process`.
    """

    def __init__(self, *, inherited: int | None) -> None:
        self.pid = os.getpid()
        self.had = {frozenset(os.sched_getaffinity(0))}
        self.slices: dict[int, RankSlice] = {}
        self.names: dict[int, str] = {}
        self.inherited = inherited
        self.is_guess = False
        self.is_asked = False
        self.allocated: dict[int, int] | None = None
        self.applied: Applied | None = None
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
            self.taken = TakenGpus(inherited=_inherited(os.environ))
        return self.taken

    def forked(self) -> None:
        """Begin anew in a forked child; the lock may be held by a thread that does not exist here."""
        parent, self.lock, self.taken, self.lists = self.taken, RLock(), None, None
        if parent is not None and parent.slices:
            self.taken = TakenGpus(inherited=_only(parent.slices))


_SEVERAL: Final = "several_gpus"
"""In NUMAPIN_BINDING: the process uses other GPUs, too, so a child that names one does not have it yet."""
_own: Final = _Process()
os.register_at_fork(after_in_child=_own.forked)


def _only(numbers: Collection[int]) -> int | None:
    """Return the number of the GPU that a child follows; None if its parent has several, so that it follows none."""
    return next(iter(numbers)) if len(numbers) == 1 else None


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
        if _own.current().slices:
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
            report_unknown(plan, str(error))


def take_one_of(numbers: Sequence[int], how: str) -> None:
    """Bind this process to the first of the devices that it has contexts on, unless it is bound to one of them.

    A library may have made another context beside that of the process's own GPU, often on device 0.
    """
    plan = table()
    if plan is None:
        return
    with _own.lock:
        own = [number for number in numbers if _has(plan, number)]
        take((own or [*numbers])[0], how)


def _has(plan: ChildTable, number: int) -> bool:
    try:
        return device_of(plan, environ(), number).number in _own.current().slices
    except UnknownDevice:
        return False


def only_device() -> bool:
    """Return whether this process sees one device, so that it can use no other."""
    plan = table()
    try:
        return plan is not None and num_visible(plan, environ()) == 1
    except UnknownDevice:
        return False


def is_settled() -> bool:
    """Return whether this process has named a GPU."""
    with _own.lock:
        taken = _own.current()
        return bool(taken.slices) and not taken.is_guess


# --- taking a GPU ----------------------------------------------------------------------------------------------------


def take_entry(plan: ChildTable, entry: DeviceEntry, how: str) -> TakenGpus:
    """Bind this process to a GPU instead of those that it uses so far, and return the result. It says nothing."""
    with _own.lock:
        taken = _own.current()
        taken.inherited, taken.is_guess = None, False
        taken.is_asked = True
        _bind_to(plan, taken, {}, entry, how)
        return taken


def _take(plan: ChildTable, entry: DeviceEntry, how: str, *, is_guess: bool) -> None:
    taken = _own.current()
    if _is_taken(taken, entry):
        taken.is_guess = taken.is_guess and is_guess
        return
    others = {} if taken.is_guess else taken.slices
    taken.is_guess, taken.is_asked = is_guess, False
    _bind_to(plan, taken, others, entry, how)
    report(plan, taken, how)


def _bind_to(plan: ChildTable, taken: TakenGpus, others: Mapping[int, RankSlice], entry: DeviceEntry, how: str) -> None:
    """Bind this process to a GPU beside the others that it keeps. Interrupted, it is not taken to be bound."""
    taken.slices = dict(others)
    try:
        _add(taken, entry)
        _bind(plan, taken, how)
    except BaseException:  # Ctrl-C, too: the next set_device binds it
        taken.slices.pop(entry.number, None)
        taken.names.pop(entry.number, None)
        raise


def _is_taken(taken: TakenGpus, entry: DeviceEntry) -> bool:
    """Return whether this process has the GPU already, by itself or from the process that it follows."""
    return entry.number in taken.slices or (not taken.slices and entry.number == taken.inherited)


def _add(taken: TakenGpus, entry: DeviceEntry) -> None:
    if not taken.slices:
        taken.names.clear()
        taken.allocated = numa_maps.private_bytes(taken.pid)
    taken.slices[entry.number] = RankSlice(entry.slice)
    taken.names[entry.number] = entry.name


def _bind(plan: ChildTable, taken: TakenGpus, how: str) -> None:
    """Bind all threads as the slices say, and the processes that follow; record the result."""
    first = next(iter(taken.slices.values()))
    wanted = _wanted(taken)
    taken.had.add(frozenset(os.sched_getaffinity(0)))  # the process that it follows may have been bound meanwhile
    taken.applied = _applied(taken, wanted)
    threads = bind_threads(taken.pid, wanted.cpus, before=taken.had)
    taken.had.add(frozenset(os.sched_getaffinity(0)))
    shortfalls = (*_of_several_nodes(taken, taken.applied), *taken.applied.shortfalls, *threads.refusals)
    taken.surprises = [text for text in shortfalls if text not in first.json]
    _set_environment(first, taken)
    if not taken.is_guess:
        _keep_rank_from_children()
    if plan.run:
        record(plan, taken, how)
        _bind_followers(plan, taken.pid, wanted.cpus)


def _applied(taken: TakenGpus, wanted: Bindable) -> Applied:
    """Bind this thread; return what holds for the main thread, unless the program asked for this one."""
    applied = bind.apply(wanted)
    if taken.is_asked or get_native_id() == taken.pid:
        return applied
    return bind.of_main_thread(applied, numa_maps.main_policy(taken.pid))


def _wanted(taken: TakenGpus) -> Bindable:
    """Return the binding for all GPUs of this process."""
    slices = list(taken.slices.values())
    return slices[0] if len(slices) == 1 else _Widened(slices)


def _of_several_nodes(taken: TakenGpus, applied: Applied) -> tuple[str, ...]:
    """Return a message if the GPUs of this process are on several nodes."""
    slices = taken.slices.values()
    if len({own.node for own in slices}) == 1:
        return ()
    gpus = ", ".join(taken.names.values())
    cpus = CpuSet().union(*(own.cpus for own in slices))
    where = f"it may run on the CPUs of all these nodes, {cpus}, and {_policy_of_several(applied)}"
    return (f"process {taken.pid} uses GPUs of several nodes ({gpus}): {where}; start one process per GPU",)


def _policy_of_several(applied: Applied) -> str:
    """Return the words for the policy of the main thread: another thread that takes a GPU cannot change it."""
    if applied.memory in ("local", "none"):  # without a policy, memory is local, too
        return "its memory policy is local"
    kept = f"{applied.memory or 'unknown'} {CpuSet(applied.nodes)}".rstrip()
    return f"the memory policy of its main thread stays {kept}, which no other thread can change"


class _Widened:
    """The binding of a process with several GPUs: the CPUs of all; their memory policy if they agree on it."""

    def __init__(self, slices: Sequence[RankSlice]) -> None:
        first = slices[0]
        self.cpus: frozenset[int] = frozenset().union(*(own.cpus for own in slices))
        self.nodes, self.node = first.nodes, first.node
        self.memory = _common_memory(slices)
        self.within = _common_limit(slices)


def _common_memory(slices: Sequence[RankSlice]) -> str:
    """Return the memory policy that all slices agree on; "local" if they differ."""
    first = slices[0].memory
    agree = len({(own.memory, own.nodes) for own in slices}) == 1
    return first if agree or first == "none" else "local"


def _common_limit(slices: Sequence[RankSlice]) -> frozenset[int] | None:
    """Return the CPUs of all slices' limits; None if no slice has one."""
    limited = [own.within for own in slices if own.within]
    return frozenset().union(*limited) if limited else None


def _bind_followers(plan: ChildTable, pid: int, cpus: frozenset[int]) -> None:
    """Bind the processes that this one has started before, as far as they have no GPU of their own.

    Those that have one are left out, with all that is below them.
    A child that binds itself at this moment wins: its record, which may appear meanwhile, has its CPUs.
    """
    for child, start in [*proc.descendants_of(pid, without=records.pids_apart(plan.run))]:
        bind_threads(child, cpus, start=start)
        _restore_own_cpus(plan, child, start)


def _restore_own_cpus(plan: ChildTable, child: int, start: int) -> None:
    """Give a child that has bound itself meanwhile the CPUs of its record."""
    path = records.bound_pids(plan.run).get(child)
    theirs = records.cpus_of(path) if path else None
    if theirs:
        bind_threads(child, CpuSet.parse(theirs), start=start)


def _set_environment(own: RankSlice, taken: TakenGpus) -> None:
    """Let this program, and what it starts, find its slice and its number of threads."""
    os.environ[BINDING] = _binding(own, taken)
    if "torch" not in sys.modules:  # later it would change only what the process starts
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, own.num_threads)))


def _keep_rank_from_children() -> None:
    """Let processes that this one starts follow it, although they inherit its local rank, which may be wrong.

    In the plan that they find, its variables have the values of this process, so only a different value names a GPU.
    """
    plan = table()
    if plan is None:
        return
    ranks = {name: os.environ.get(name) for name in plan.saw if name not in plan.lists}
    if any(plan.saw[name] != value for name, value in ranks.items()):
        _own.table = plan.with_saw(ranks)
        os.environ[CHILDREN] = _own.table.render()


def _binding(own: RankSlice, taken: TakenGpus) -> str:
    """Return the slice as JSON, with what differs from the plan."""
    changes: dict[str, object] = {_SEVERAL: True} if len(taken.slices) > 1 else {}
    planned = json.loads(own.json)
    if taken.surprises:
        changes |= {"exact": False, "reason": "; ".join((planned["reason"], *taken.surprises))}
    return json.dumps({**planned, **changes}) if changes else own.json


def _inherited(environ: Mapping[str, str]) -> int | None:
    """Return the number of the GPU of the process that this one follows; None if that process has several."""
    try:
        binding = json.loads(environ[BINDING])
        return None if _SEVERAL in binding else int(binding["local_rank"])
    except (KeyError, ValueError, TypeError):
        return None
