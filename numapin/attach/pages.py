"""Where the pages of a process are, and moving them to its nodes. Edge.

Comes in: a process id and its plan. Goes out: `ProcessPages`. Pages of files are left out: they are the page cache,
which belongs to all processes. So are mappings that the program itself placed by a policy of their own.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.attach.changes import ProcessPages
from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError
from numapin.observe.model import MemoryKind
from numapin.observe.read import has_gpu_files, kind_of
from numapin.system import numa_maps, proc
from numapin.system.affinity import ThreadId, is_same
from numapin.system.migrate import FINAL, Stay, move_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numapin.plan.model import RankPlan

_FOLLOWS_CPUS: Final = ("default", "local")
_PAGES_PER_CALL: Final = 1 << 13  # 32 MiB of 4 KiB pages: Ctrl-C and the progress wait for no more
_INTERRUPTED: Final = "interrupted"
_OWN_POLICY: Final = "policy"
_UNSEEN: Final = "unseen"


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

    policy: str | None
    policy_nodes: CpuSet
    by_node: Mapping[int, int]
    regions: tuple[Region, ...]
    own_bytes: int

    @property
    def far_bytes(self) -> int:
        """The bytes on other nodes than the planned ones."""
        return self.own_bytes + self.movable_bytes

    @property
    def movable_bytes(self) -> int:
        """The part of them that can be moved, as far as the mappings tell."""
        return sum(region.far_bytes for region in self.regions)

    @property
    def pieces(self) -> Iterator[tuple[Region, range]]:
        """The pieces of all regions, each with its region."""
        return ((region, piece) for region in self.regions for piece in region.pieces)


def planned_nodes(plan: RankPlan) -> CpuSet:
    """Return the nodes on which the pages of a rank belong."""
    return plan.nodes or (CpuSet() if plan.node is None else CpuSet({plan.node}))


def policy_shortfalls(memory: ProcessMemory, plan: RankPlan) -> tuple[str, ...]:
    """Return why future pages do not go to the planned nodes, if the policy of the process forbids that."""
    nodes = planned_nodes(plan)
    if memory.policy in (None, *_FOLLOWS_CPUS) or not nodes or memory.policy_nodes <= nodes:
        return ()
    return (
        f"its memory policy is {memory.policy}, and no other process can change that: new pages go there; start the "
        "job with numapin, or without numactl --membind",
    )


def described(memory: ProcessMemory) -> ProcessPages:
    """Return the report of memory that is not to be moved."""
    return ProcessPages(
        policy=memory.policy,
        before=memory.by_node,
        after=None,
        far_bytes=memory.far_bytes,
        moved_bytes=0,
        stays={},
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def read_memory(pid: int, nodes: CpuSet) -> ProcessMemory | None:
    """Return the memory of a process; `nodes` are the planned ones. None: it is not reported. Raises Gone."""
    folder = proc.folder_of(pid)
    try:
        text, maps = proc.read(f"{folder}/numa_maps"), proc.read(f"{folder}/maps")
    except PermissionError:
        return None
    except proc.Gone:
        proc.stat(folder)  # raises Gone if the process has ended, too
        return None  # a kernel without NUMA
    if not text:
        raise proc.Gone
    try:
        mappings = list(numa_maps.parse(text))
    except ValueError as error:
        raise proc.garbled(f"{folder}/numa_maps", str(error)) from None
    return _memory(mappings, numa_maps.ends(maps), nodes, has_gpu=has_gpu_files(text))


def _memory(
    mappings: Iterable[numa_maps.Mapping], ends: Mapping[int, int], nodes: CpuSet, *, has_gpu: bool
) -> ProcessMemory:
    kinds = [(mapping, kind_of(mapping.words, has_gpu=has_gpu)) for mapping in mappings]
    counted = [mapping for mapping, kind in kinds if kind is not MemoryKind.FILE]
    stack = next((mapping for mapping, kind in kinds if kind is MemoryKind.STACK), None)
    is_own = partial(_is_own, process_policy=("default", "") if stack is None else (stack.mode, stack.nodes))
    own_bytes = sum(_far_bytes(mapping, nodes) for mapping in filter(is_own, counted))
    return ProcessMemory(
        policy=None if stack is None else f"{stack.mode}:{CpuSet.parse(stack.nodes)}".removesuffix(":"),
        policy_nodes=CpuSet() if stack is None else CpuSet.parse(stack.nodes),
        by_node=_by_node(counted),
        regions=tuple(_regions(filterfalse(is_own, counted), ends, nodes)),
        own_bytes=own_bytes,
    )


def _by_node(mappings: Iterable[numa_maps.Mapping]) -> Counter[int]:
    by_node: Counter[int] = Counter()
    for mapping in mappings:
        by_node.update(mapping.bytes_by_node)
    return by_node


def _far_bytes(mapping: numa_maps.Mapping, nodes: CpuSet) -> int:
    return sum(size for node, size in mapping.bytes_by_node.items() if node not in nodes)


def _regions(mappings: Iterable[numa_maps.Mapping], ends: Mapping[int, int], nodes: CpuSet) -> Iterator[Region]:
    """Yield the mappings with pages elsewhere that can be moved: their end and page size are known."""
    for mapping in mappings:
        end, far_bytes = ends.get(mapping.start), _far_bytes(mapping, nodes)
        if far_bytes and end is not None and mapping.page_bytes:
            yield Region(mapping.start, end, mapping.page_bytes, far_bytes)


def _is_own(mapping: numa_maps.Mapping, process_policy: tuple[str, str]) -> bool:
    """Return whether a mapping has a policy of its own that names nodes."""
    return mapping.nodes != "" and (mapping.mode, mapping.nodes) != process_policy


# --- moving ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Move:
    """Moves the pages of one process to its planned nodes.

    Attributes:
        main: The main thread of the process.
        plan: Its plan.
        progress: Called with the bytes that were done and their total.
        end: The reason why the rest was not tried, a word of `STAYS`. None: everything was tried.
    """

    main: ThreadId
    plan: RankPlan
    progress: Callable[[int, int], None]
    end: str | None = None
    _moved_bytes: int = 0
    _stays: Counter[str] = field(default_factory=Counter)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it early."""
        return self.end == _INTERRUPTED

    def run(self, memory: ProcessMemory) -> ProcessPages:
        """Move the pages in `memory`, and read back where they are. Raises Gone."""
        nodes = planned_nodes(self.plan)
        self._try_to_move(memory, nodes)
        after = read_memory(self.main.pid, nodes) or memory
        self._stays[self.end or _UNSEEN] += max(0, after.movable_bytes - self._stays.total())
        self._stays[_OWN_POLICY] = after.own_bytes
        return ProcessPages(
            policy=memory.policy,
            before=memory.by_node,
            after=after.by_node,
            far_bytes=memory.far_bytes,
            moved_bytes=self._moved_bytes,
            stays=dict(+self._stays),
        )

    def _try_to_move(self, memory: ProcessMemory, nodes: CpuSet) -> None:
        """Move the pages; note in `end` what stopped that."""
        try:
            self._move_all(memory, nodes)
        except KeyboardInterrupt:
            self.end = _INTERRUPTED
        except LibnumaError:
            self.end = Stay.REFUSED
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                raise
            self.end = Stay.REFUSED

    def _move_all(self, memory: ProcessMemory, nodes: CpuSet) -> None:
        node = self.plan.node if self.plan.node in nodes else min(nodes, default=None)
        if node is None:
            return
        total = memory.movable_bytes
        for region, piece in memory.pieces:
            self._move_piece(region, piece, node, nodes)
            self.progress(min(total, self._moved_bytes + self._stays.total()), total)
            if self.end is not None:
                return

    def _move_piece(self, region: Region, piece: range, node: int, nodes: CpuSet) -> None:
        """Move some pages of a region; set `end` if the others need not be tried."""
        if not is_same(self.main):
            raise proc.Gone
        moved = move_pages(self.main.pid, piece, node, within=nodes)
        self._moved_bytes += moved.num_moved * region.page_bytes
        self._stays.update({reason: pages * region.page_bytes for reason, pages in moved.stays.items()})
        self.end = next((reason for reason in moved.stays if reason in FINAL), None)
