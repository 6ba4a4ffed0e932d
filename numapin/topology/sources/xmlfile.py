"""XML machine files as plain elements with line numbers.

A DOCTYPE with declarations is refused, depth and the number of elements are bounded, and the caller bounds the file's
size, so that no file is expensive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from xml.parsers import expat

from numapin.base import cpu_set
from numapin.base.bounds import MAX_ELEMENTS
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

_HINT: Final = (
    "write the file again with hwloc 2 or 3: lstopo --of xml FILE, or with NCCL: NCCL_TOPO_DUMP_FILE=FILE in the "
    "environment of a job"
)
# Bounds, not formats: a mask of 8192 CPUs has 2816 characters, and PCI trees are some 20 bridges deep.
_MAX_MASK: Final = 4096
_MAX_DEPTH: Final = 100
_MAX_ATTRIBUTES: Final = 100  # hwloc writes some 40
_NUMBER: Final = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Element:
    """One element: its tag, its place in the file, and its content. Equal only to itself.

    `sets` is shared by all elements of a file. All methods raise MachineFileError for a malformed value.
    """

    source: str
    tag: str
    line: int
    attributes: dict[str, str]
    sets: cpu_set.Sets = field(repr=False)
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def word(self, name: str) -> str:
        """Return an attribute, or "" if it is missing."""
        return self.attributes.get(name, "").strip()

    def text(self, name: str) -> str | None:
        """Return an attribute, or None if it is missing or blank."""
        return self.word(name) or None

    def number(self, name: str) -> int | None:
        """Return a non-negative number, or None if it is missing or -1."""
        text = self.text(name)
        if text in {None, "-1"}:
            return None
        if text is None or not _NUMBER.fullmatch(text):
            raise self.error(f"{name}={text!r} is not a number")
        return int(text)

    def optional_id(self, name: str) -> int | None:
        """Return the number of a CPU or a node, or None if it is missing or -1."""
        number = self.number(name)
        if number is not None and number >= cpu_set.MAX_ID:
            raise self.error(f"{name}={number} is larger than any CPU or node number")
        return number

    def id(self, name: str) -> int:
        """Return the required number of a CPU or a node."""
        number = self.optional_id(name)
        if number is None:
            raise self.error(f"{name} is missing")
        return number

    def members(self, name: str) -> CpuSet:
        """Return a set written as a hexadecimal mask, empty if it is missing."""
        text = self.word(name)
        if not text:
            return CpuSet()
        if len(text) > _MAX_MASK:
            raise self.error(f"{name} is {len(text)} characters long; at most {_MAX_MASK} are accepted")
        try:
            return self.sets.get(text, cpu_set.parse_mask)
        except ValueError as error:
            raise self.error(f"{name}: {error}") from None

    def named(self, *tags: str) -> Iterator[Element]:
        """Yield the children with one of these tags, in order."""
        return (child for child in self.children if child.tag in tags)

    def walk(self, above: tuple[Element, ...] = ()) -> Iterator[tuple[Element, tuple[Element, ...]]]:
        """Yield this element and all below it in document order, each with the elements above it, nearest first."""
        todo = [(self, above)]
        while todo:
            element, outer = todo.pop()
            yield element, outer
            inner = (element, *outer) if element.children else ()
            todo += ((child, inner) for child in reversed(element.children))

    def error(self, problem: str, *, hint: str = _HINT) -> MachineFileError:
        """Return an error that names the file, the line and the element."""
        return MachineFileError(f"{self.source}: line {self.line}: <{self.tag}>: {problem}", hint)


def parse(text: str, *, source: str) -> Element:
    """Parse an XML document and return its root.

    An encoding declaration is ignored: `text` is decoded already. A DOCTYPE that names a DTD is accepted, and the
    DTD is not read. Raises MachineFileError if the text is not well-formed, its DOCTYPE contains declarations, or it
    exceeds the bounds.
    """
    parser = expat.ParserCreate(encoding="utf-8")
    parser.buffer_text = True
    sets = cpu_set.Sets()
    top = Element(source=source, tag="", line=0, attributes={}, sets=sets)
    open_elements = [top]
    num_left = MAX_ELEMENTS

    def refusal(problem: str) -> MachineFileError:
        return MachineFileError(f"{source}: line {parser.CurrentLineNumber}: {problem}", _HINT)

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal num_left
        num_left -= 1
        if len(open_elements) > _MAX_DEPTH:
            raise refusal(f"<{tag}> is more than {_MAX_DEPTH} elements deep")
        if len(attributes) > _MAX_ATTRIBUTES:
            raise refusal(f"<{tag}> has {len(attributes)} attributes; at most {_MAX_ATTRIBUTES} are accepted")
        if num_left < 0:
            raise refusal(f"there are more than {MAX_ELEMENTS} elements, the most that are accepted")
        line = parser.CurrentLineNumber
        element = Element(source=source, tag=tag, line=line, attributes=attributes, sets=sets)
        open_elements[-1].children.append(element)
        open_elements.append(element)

    def characters(text: str) -> None:
        open_elements[-1].texts.append(text)

    def doctype(_name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        # Entities and default values of attributes would make a small file large.
        if has_declarations:
            raise refusal("the DOCTYPE contains declarations, such as entities; machine files may not declare any")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _tag: open_elements.pop()
    parser.CharacterDataHandler = characters
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text.encode(errors="replace"), True)
    except expat.ExpatError as error:
        where = f"line {error.lineno}, column {error.offset + 1}"
        raise MachineFileError(f"{source}: {where}: not XML: {expat.ErrorString(error.code)}", _HINT) from None
    finally:
        # Break the reference cycle with the parser, which keeps all names of the file alive.
        parser.StartElementHandler = parser.EndElementHandler = None
        parser.CharacterDataHandler = parser.StartDoctypeDeclHandler = None
    return top.children[0]
