"""Parse numa_maps, the kernel's list of mappings with the nodes of their pages (proc_pid_numa_maps(5)).

The ends of mappings come from the text of a maps file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

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


def ends(maps: str) -> dict[int, int]:
    """Return the end of each mapping by its start, from the text of a `maps` file (proc_pid_maps(5))."""
    found = (_RANGE.match(line) for line in maps.split("\n"))
    return {int(line[1], 16): int(line[2], 16) for line in found if line}


def parse(text: str) -> Iterator[Mapping]:
    """Yield the mappings in the order of their addresses. Raises ValueError with the first malformed line."""
    for line in text.removesuffix("\n").split("\n"):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(repr(line[:80]))
        yield Mapping(int(found["start"], 16), found["mode"], found["nodes"] or "", found["words"])
