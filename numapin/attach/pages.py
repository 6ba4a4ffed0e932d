"""Find the nodes of a process's pages, and move the pages to its own.

Pages of files are left out: they are the page cache, which belongs to all processes. So are mappings that the program
itself placed by a policy of their own.
"""

from __future__ import annotations

import errno
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.attach.report import ProcessPages
from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError
from numapin.observe.model import MemoryKind
from numapin.observe.read import read_memory
from numapin.system import numa_maps, proc
from numapin.system.pages import FINAL, Stay, move_pages
from numapin.system.threads import is_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numapin.observe.model import Policy
    from numapin.plan.model import RankPlan
    from numapin.system.proc import StrPath
    from numapin.system.threads import ThreadId

_PAGES_PER_CALL: Final = 1 << 13  # 32 MiB of 4 KiB pages: Ctrl-C and the progress wait for no more
_INTERRUPTED: Final = "interrupted"


class Region(NamedTuple):
    """A mapping with pages on other nodes than the planned ones."""

    start: int
    end: int
    page_bytes: int
    far_bytes: int

    @property
    def pieces(self) -> Iterator[range]:
        """The addresses of its pages, in pieces for one call each. No huge page is in two: it would be counted once."""
        size = _PAGES_PER_CALL * self.page_bytes
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


def planned_nodes(plan: RankPlan) -> CpuSet:
    """Return the nodes on which the pages of a rank belong."""
    return plan.nodes or (CpuSet() if plan.node is None else CpuSet({plan.node}))


def policy_shortfalls(memory: ProcessMemory, plan: RankPlan) -> tuple[str, ...]:
    """Return why future pages do not go to the planned nodes, if the policy of the process forbids that."""
    nodes, policy = planned_nodes(plan), memory.policy
    if policy is None or policy.mode in ("default", "local") or not nodes or policy.nodes <= nodes:
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
    nodes, total = planned_nodes(plan), memory.movable_bytes
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
