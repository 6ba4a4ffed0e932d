"""Read numa_maps, the kernel's list of mappings with the nodes of their pages (proc_pid_numa_maps(5)).

The ends of mappings come from the text of a maps file. Programs of `numapin exec --children` import this.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE: Final = re.compile(
    r"(?P<start>[0-9a-f]+) (?P<mode>(?:weighted )?[a-z]+(?: \(many\))?)(?:=[a-z|]+)?"
    r"(?::(?P<nodes>[0-9,-]+))?(?P<words>(?: .*)?)"
)
_PAGES_OF_NODE: Final = re.compile(r" N(\d{1,6})=(\d{1,18})(?= |$)", re.ASCII)
_PAGE_KB: Final = re.compile(r" kernelpagesize_kB=(\d{1,12})(?= |$)", re.ASCII)
_RANGE: Final = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ", re.ASCII)


class Mapping(NamedTuple):
    """One mapping: its start address, its policy (mode and node list as written), and the rest of its line."""

    start: int
    mode: str
    nodes: str
    words: str

    @property
    def page_bytes(self) -> int | None:
        """The size of its pages; None if it has none."""
        page = _PAGE_KB.search(self.words)
        return int(page[1]) * 1024 if page else None

    @property
    def bytes_by_node(self) -> dict[int, int]:
        """The bytes on each node; a huge page counts as one page of the size in kernelpagesize_kB."""
        page_bytes = self.page_bytes or 0  # a mapping without a page has no size
        return {int(node): int(count) * page_bytes for node, count in _PAGES_OF_NODE.findall(self.words)}


def parse(text: str) -> Iterator[Mapping]:
    """Yield the mappings of a numa_maps file in the order of their addresses.

    Raises ValueError with the first malformed line.
    """
    for line in text.removesuffix("\n").split("\n"):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(repr(line[:80]))
        yield Mapping(int(found["start"], 16), found["mode"], found["nodes"] or "", found["words"])


def ends(maps: str) -> dict[int, int]:
    """Return the end of each mapping by its start, from the text of a `maps` file (proc_pid_maps(5))."""
    found = (_RANGE.match(line) for line in maps.split("\n"))
    return {int(line[1], 16): int(line[2], 16) for line in found if line}


def main_policy(pid: int) -> tuple[str, CpuSet] | None:
    """Return the memory policy of a process's main thread, in the kernel's words, and its nodes; None: unknown.

    The kernel shows it at the stack. Other threads can ask the kernel for their own policy only.
    """
    stack = next((mapping for mapping in _mappings(pid) or () if " stack" in mapping.words), None)
    return None if stack is None else (stack.mode, CpuSet.parse(stack.nodes))


def private_bytes(pid: int) -> dict[int, int] | None:
    """Return the bytes of a process's heap, stacks and anonymous mappings on each node; None if they are unknown.

    Memory of files and of shared objects is not counted: other processes may have placed it. The kernel walks the page
    tables once, which takes about 1 ms per 100 MB of small pages.
    """
    mappings = _mappings(pid)
    if mappings is None:
        return None
    sizes: Counter[int] = Counter()
    for mapping in mappings:
        if " file=" not in mapping.words:
            sizes.update(mapping.bytes_by_node)
    return dict(sorted(sizes.items()))


def _mappings(pid: int) -> list[Mapping] | None:
    try:
        return list(parse(proc.read(f"{proc.folder_of(pid)}/numa_maps")))
    except (proc.Gone, OSError, ValueError):  # another user's process, or a kernel without numa_maps
        return None
