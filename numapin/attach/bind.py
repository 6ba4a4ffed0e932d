"""`numapin attach`: bind all threads of the targets, then move their pages if requested.

All threads are bound before any page moves, so that pages that are touched meanwhile are local.

A thread inherits its CPUs from the one that starts it. So processes and threads are listed again until all that are new
have inherited the planned CPUs: then everything that starts later is started by a bound thread.

Pages of files do not move: they are the page cache, which belongs to all processes. Nor do mappings that the program
itself placed by a policy of their own.
"""

from __future__ import annotations

import errno
import mmap
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.attach.report import STAYS, Attached, AttachedRank, BoundProcess, ProcessPages, undo_commands
from numapin.attach.targets import examine, other_processes
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import render_size
from numapin.base.text import counted
from numapin.errors import LibnumaError, MachineError, UsageError
from numapin.observe.find import LIST_PROCESSES
from numapin.observe.model import MemoryKind
from numapin.observe.read import read_memory
from numapin.system import numa_maps, proc, threads
from numapin.system.pages import FINAL, Stay, move_pages
from numapin.system.threads import ThreadId, is_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numapin.attach.targets import Aim, AttachOptions, Target
    from numapin.observe.model import Policy
    from numapin.plan.model import RankPlan
    from numapin.system.proc import StrPath

_MOST_LOOKS: Final = 100
_RESTLESS: Final = "it starts processes or threads faster than they can be bound; some may have started unbound"
_BYTES_PER_CALL: Final = mmap.PAGESIZE << 13  # 32 MiB with 4 KiB pages: Ctrl-C and the progress wait for no more
_INTERRUPTED: Final = "interrupted"
_UNREADABLE: Final = "its memory cannot be read, so no page was moved; run this as the job's user, or as root"


def attach(aim: Aim, options: AttachOptions, *, progress: Callable[[int, int, int], None]) -> Attached:
    """Bind all targets, and move their pages if requested.

    `progress` is called with a process id, the bytes of its memory that were done, and their total. Raises UsageError
    if every target ended first.
    """
    all_pids = {target.subject.pid for target in aim.targets}
    ranks: list[AttachedRank] = []
    former: dict[ThreadId, CpuSet] = {}
    changed: list[ThreadId] = []
    starts: dict[int, int] = {}
    interrupted = False
    for target in aim.targets:
        pid = target.subject.pid
        problem = "interrupted"
        processes: tuple[BoundProcess, ...] = ()
        if not interrupted:
            binder = Binder(target, options, without=(aim.apart | all_pids) - {pid})
            processes = binder.run()
            interrupted, problem = binder.interrupted, "it ended before"
            former |= binder.former
            changed += binder.changed
            starts |= binder.starts
        ranks.append(
            AttachedRank(
                pid=pid,
                gpu_source=target.gpu_source,
                requested=target.plan,
                processes=processes,
                problem=None if processes else problem,
            )
        )
    if not any(rank.processes for rank in ranks):
        if interrupted:
            raise KeyboardInterrupt
        pids = ", ".join(str(rank.pid) for rank in ranks)
        ended = f"process {pids} ended before it was" if len(ranks) == 1 else f"processes {pids} ended before they were"
        raise UsageError(f"{ended} bound; nothing was changed", LIST_PROCESSES)

    for number, rank in enumerate(ranks):
        looked_at = []
        for process in rank.processes:
            if interrupted:
                looked_at.append(process)
                continue
            main = ThreadId(process.pid, process.pid, starts[process.pid])
            with_pages, interrupted = _with_pages(process, main, rank.requested, options, progress)
            looked_at.append(with_pages)
        ranks[number] = replace(rank, processes=tuple(looked_at))
    return Attached(
        dry_run=options.dry_run,
        migrate=options.migrate,
        interrupted=interrupted,
        undo=() if options.dry_run else undo_commands(former, changed),
        warnings=aim.warnings,
        ranks=tuple(ranks),
    )


def _with_pages(
    process: BoundProcess,
    main: ThreadId,
    plan: RankPlan,
    options: AttachOptions,
    progress: Callable[[int, int, int], None],
) -> tuple[BoundProcess, bool]:
    """Return a process with its memory, which is moved if requested, and whether Ctrl-C ended that.

    What was bound is reported in any case. `main` is its main thread: another process may have its id by now.
    """
    pid, interrupted = process.pid, False
    shortfalls: list[str] = []
    pages = None
    try:
        if not is_same(main):
            return process, False
        memory = memory_of(pid, plan.nodes)
        if memory is None:
            shortfalls += [_UNREADABLE] if options.migrate else []
        elif options.dry_run or not options.migrate:
            shortfalls = [*policy_shortfalls(memory, plan)]
            pages = ProcessPages(
                policy=memory.policy_name,
                before=memory.by_node,
                after=None,
                far_bytes=memory.far_bytes,
                moved_bytes=0,
                stays={},
            )
        else:
            pages, interrupted = move(main, plan, memory, partial(progress, pid))
            stays = [f"{render_size(size)} stay on other nodes: {STAYS[word]}" for word, size in pages.stays.items()]
            shortfalls = [*policy_shortfalls(memory, plan), *stays]
    except proc.Gone:
        return process, False
    except KeyboardInterrupt:
        return process, True
    except (MachineError, OSError) as error:
        words = error.message if isinstance(error, MachineError) else str(error)
        shortfalls = [f"its memory cannot be read: {words}"]
    return replace(process, pages=pages, shortfalls=(*process.shortfalls, *shortfalls)), interrupted


@dataclass(slots=True, kw_only=True)
class _Tally:
    name: str
    threads: int = 0
    changed: int = 0
    narrower: int = 0
    ended: int = 0
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)


class Binder:
    """Binds one target. `interrupted` is set if Ctrl-C ended it early; what was done by then is in the results.

    The processes in `without` and those below them are left out. `former` has the CPUs of all threads before, except
    for those that started meanwhile and had inherited the planned ones. `changed` are the threads that got other CPUs.
    """

    def __init__(self, target: Target, options: AttachOptions, *, without: frozenset[int] = frozenset()) -> None:
        self._target, self._options, self._without = target, options, without
        self.former: dict[ThreadId, CpuSet] = {}
        self.changed: list[ThreadId] = []
        self.starts: dict[int, int] = {}
        self._seen: set[ThreadId] = set()
        self._tallies: dict[int, _Tally] = {}
        self._notes = list(target.shortfalls)
        self.interrupted = False

    def run(self) -> tuple[BoundProcess, ...]:
        """Bind; return the processes, the target first. Empty if it ended before."""
        try:
            for _ in range(_MOST_LOOKS):
                if not self._bind_new_threads() or self._options.dry_run:
                    break
            else:
                self._notes.append(_RESTLESS)
        except KeyboardInterrupt:
            self.interrupted = True
        processes = []
        for pid, tally in self._tallies.items():
            refused = [f"{counted(number, 'thread')} {text}" for text, number in tally.refusals.items()]
            processes.append(
                BoundProcess(
                    pid=pid,
                    name=tally.name,
                    threads=tally.threads,
                    changed=tally.changed,
                    narrower=tally.narrower,
                    ended=tally.ended,
                    cpus_before=CpuSet(tally.before),
                    cpus=CpuSet(tally.after),
                    pages=None,
                    shortfalls=(*refused, *(self._notes if pid == self._target.subject.pid else [])),
                )
            )
        return tuple(processes)

    def _new_threads(self) -> list[ThreadId]:
        """Return the threads that exist now and were not seen before; none once the target has ended."""
        subject, processes = self._target.subject, other_processes()
        if subject.pid not in processes or processes[subject.pid].start != subject.start:
            return []
        below = proc.descendants(subject.pid, proc.children_of(processes), without=self._without)
        found: list[ThreadId] = []
        for pid in (subject.pid, *below):
            try:
                examined, listed = examine(pid), threads.threads_of(pid)
            except MachineError:
                note = f"child process {pid} belongs to another user and was left as it is"
                self._notes += [] if note in self._notes else [note]
                continue
            except (UsageError, proc.Gone):  # it has ended, or is a thread of the kernel
                continue
            if examined.start == processes[pid].start:
                self.starts[pid] = examined.start
                self._tallies.setdefault(pid, _Tally(name=examined.name))
                found += [thread for thread in listed if thread not in self._seen]
        return found

    def _bind_new_threads(self) -> bool:
        """Bind new threads, and note their CPUs before; return whether there was anything to bind."""
        planned, unseen, is_first_look = self._target.plan.cpus, self._new_threads(), not self._seen
        before: dict[ThreadId, CpuSet] = {}
        for thread in unseen:  # all, before any is changed: undoing needs the CPUs of every thread of a changed process
            tally = self._tallies[thread.pid]
            tally.threads += 1
            try:
                before[thread] = cpus = threads.cpus_of(thread)
            except proc.Gone:
                tally.ended += 1
            except OSError as error:
                tally.refusals[f"cannot be examined ({error.strerror})"] += 1
            else:
                if is_first_look or cpus != planned:
                    self.former[thread] = cpus
        self._seen.update(unseen)

        has_bound = False
        for thread, cpus in before.items():
            tally, see = self._tallies[thread.pid], f"see: cat /proc/{thread.pid}/cgroup"
            tally.before |= cpus
            is_narrower = cpus < planned and not self._options.widen
            if cpus == planned or is_narrower:
                tally.narrower += is_narrower
                tally.after |= cpus
                continue
            has_bound = True
            try:
                found = planned if self._options.dry_run else threads.set_cpus(thread, planned)
            except proc.Gone:
                tally.ended += 1
                continue
            except OSError as error:
                refusal = f"did not get CPUs {planned} ({error.strerror}) and stay where they were; {see}"
                tally.refusals[refusal] += 1
                tally.after |= cpus
                continue
            except KeyboardInterrupt:  # it may have come after the change
                self.changed.append(thread)
                raise
            if found != cpus:
                tally.changed += 1
                self.changed.append(thread)
            tally.after |= found
            if found != planned:
                tally.refusals[f"did not get CPUs {planned - found}, which the cpuset excludes; {see}"] += 1
        return has_bound


# --- pages -----------------------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """A mapping with pages on other nodes than the planned ones."""

    start: int
    end: int
    page_bytes: int
    far_bytes: int

    @property
    def pieces(self) -> Iterator[range]:
        """The addresses of its pages, in pieces for one call each. No huge page is in two: it would be counted once."""
        size = max(self.page_bytes, _BYTES_PER_CALL)
        begins = range(self.start - self.start % size, self.end, size)
        return (range(max(at, self.start), min(at + size, self.end), self.page_bytes) for at in begins)


class ProcessMemory(NamedTuple):
    """The memory of a process, files not counted.

    `regions` have pages on other nodes than the planned ones; `own_bytes` are those of them that the program placed by
    a policy of the mapping, which are not in `regions`.
    """

    policy: Policy | None
    by_node: Mapping[int, int]
    regions: tuple[Region, ...]
    own_bytes: int

    @property
    def policy_name(self) -> str | None:
        """The policy as numa_maps writes it; None: unknown."""
        return None if self.policy is None else str(self.policy)

    @property
    def far_bytes(self) -> int:
        """The bytes on other nodes than the planned ones."""
        return self.own_bytes + self.movable_bytes

    @property
    def movable_bytes(self) -> int:
        """The bytes on other nodes than the planned ones that can be moved, as far as the mappings tell."""
        return sum(region.far_bytes for region in self.regions)


def policy_shortfalls(memory: ProcessMemory, plan: RankPlan) -> tuple[str, ...]:
    """Return why future pages do not go to the planned nodes, if the policy of the process forbids that."""
    policy = memory.policy
    if policy is None or policy.nodes <= plan.nodes:  # `default` and `local` have no nodes
        return ()
    return (
        f"its memory policy is {policy}, and no other process can change that: new pages go there; start the "
        "job with numapin, or without numactl --membind",
    )


def memory_of(pid: int, nodes: CpuSet, *, root: StrPath = proc.LIVE) -> ProcessMemory | None:
    """Return the memory of a process; `nodes` are the planned ones. None: it is not reported. Raises Gone.

    A mapping that has another policy than the process, with nodes, was placed by the program itself. Pages can be moved
    where the end and the page size of their mapping are known.
    """
    folder = proc.folder_of(pid, root)
    reading = read_memory(folder)
    if reading.unreadable is not None:
        return None
    try:
        ends = numa_maps.ends(proc.read(f"{folder}/maps"))
    except PermissionError:
        return None
    by_node: Counter[int] = Counter()
    regions, own_bytes = [], 0
    for mapping, policy, kind in reading.mappings:
        if kind is MemoryKind.FILE:
            continue
        by_node.update(mapping.bytes_by_node)
        far_bytes = sum(size for node, size in mapping.bytes_by_node.items() if node not in nodes)
        end = ends.get(mapping.start)
        if policy.nodes and policy != reading.policy:
            own_bytes += far_bytes
        elif far_bytes and end is not None and mapping.page_bytes:
            regions.append(Region(mapping.start, end, mapping.page_bytes, far_bytes))
    return ProcessMemory(policy=reading.policy, by_node=by_node, regions=tuple(regions), own_bytes=own_bytes)


def move(
    main: ThreadId, plan: RankPlan, memory: ProcessMemory, progress: Callable[[int, int], None]
) -> tuple[ProcessPages, bool]:
    """Move pages to the planned nodes, and read back where they are; return also whether Ctrl-C ended it early.

    `main` is the main thread of the process. `progress` is called with the bytes that were done and their total. Raises
    Gone.
    """
    nodes, total = plan.nodes, memory.movable_bytes
    node = plan.node if plan.node in nodes else min(nodes, default=None)
    moved_bytes = 0
    stays: Counter[str] = Counter()
    pieces = ((region, piece) for region in memory.regions for piece in region.pieces)
    end: str | None = None  # why the rest was not tried, a word of `STAYS`
    try:
        for region, piece in pieces:
            if node is None or end is not None:
                break
            if not is_same(main):
                raise proc.Gone
            moved = move_pages(main.pid, piece, node, within=nodes)
            moved_bytes += moved.num_moved * region.page_bytes
            stays.update({reason: pages * region.page_bytes for reason, pages in moved.stays.items()})
            end = next((reason for reason in moved.stays if reason in FINAL), None)
            progress(min(total, moved_bytes + stays.total()), total)
    except KeyboardInterrupt:
        end = _INTERRUPTED
    except LibnumaError:
        end = Stay.REFUSED
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        end = Stay.REFUSED
    after = memory_of(main.pid, nodes) or memory
    stays[end or "unseen"] += max(0, after.movable_bytes - stays.total())
    stays["policy"] = after.own_bytes
    pages = ProcessPages(
        policy=memory.policy_name,
        before=memory.by_node,
        after=after.by_node,
        far_bytes=memory.far_bytes,
        moved_bytes=moved_bytes,
        stays=dict(+stays),
    )
    return pages, end == _INTERRUPTED
