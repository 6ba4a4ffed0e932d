"""Lists of devices in environment variables, as the runtimes of AMD and Intel read them. Pure.

Comes in: the text of a variable, and GPUs in the runtime's order. Goes out: the GPUs that it names, and notes. CUDA's
lists have more forms: topology/visible.py reads them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.gpu_uuid import GPU_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.model import Gpu

_INDEX: Final = re.compile(r"\s*[0-9]{1,9}\s*")


class Variable(NamedTuple):
    """A variable that is set."""

    name: str
    text: str

    def __str__(self) -> str:
        """Return the assignment."""
        return f"{self.name}={self.text}"

    @property
    def entries(self) -> list[str]:
        """The entries of the list."""
        return [entry.strip() for entry in self.text.split(",")]


def first_set(names: Sequence[str], environ: Mapping[str, str]) -> Variable | None:
    """Return the first of several variables that is set."""
    return next((Variable(name, environ[name]) for name in names if name in environ), None)


def chosen(variable: Variable, gpus: Sequence[Gpu], *, see: str) -> tuple[list[Gpu], tuple[str, ...]]:
    """Return the GPUs that a list names; the first entry that names none, or one again, ends it.

    Args:
        variable: The list: indices into `gpus`, or UUIDs.
        gpus: The GPUs in the order in which the runtime counts them.
        see: The command that lists the devices, for the note.

    Returns:
        The GPUs in the order of the list, and a note if the list ends early or is empty.
    """
    found: list[Gpu] = []
    for position, entry in enumerate(variable.entries):
        gpu = _named(entry, gpus)
        if gpu is None or gpu in found:
            return found, _loss(variable, variable.entries[position:], see)
        found.append(gpu)
    return found, ()


def _named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if _INDEX.fullmatch(entry):
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not entry.startswith(GPU_PREFIX):
        return None
    matches = [gpu for gpu in gpus if (gpu.uuid or "").lower() == entry.lower()]
    return matches[0] if len(matches) == 1 else None


def _loss(variable: Variable, rest: list[str], see: str) -> tuple[str, ...]:
    """Note what is lost from the entry on at which a list ends."""
    if len(rest) == len(variable.entries) and rest[0] in ("", "-1"):
        return (f"{variable} hides every GPU; to use them: unset {variable.name}",)
    if not any(rest):  # "0,1," loses nothing
        return ()
    return (f"{variable}: {rest[0]!r} names no further device, so the list ends there; list the devices with: {see}",)
