"""PCI addresses as text."""

from __future__ import annotations

import re
from typing import Final

_PCI: Final = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", re.ASCII)


def pci_address(text: str | None) -> str | None:
    """Return a PCI address in the kernel's spelling ("0000:1b:00.0"), or None if the text is not one.

    NVML writes 8 domain digits in upper case, hwloc and the kernel 4 in lower case; larger domains keep theirs.
    """
    match = _PCI.fullmatch((text or "").strip())
    if match is None:
        return None
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def pci_order(address: str | None) -> tuple[int, ...]:
    """Return domain, bus, device and function, CUDA's sort key too; an empty tuple, which sorts first, if unknown."""
    match = _PCI.fullmatch(address or "")
    return () if match is None else tuple(int(part, 16) for part in match.groups("0"))
