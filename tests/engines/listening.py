"""The ports on which a process and its descendants listen, from /proc."""

from __future__ import annotations

import os
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from tests.engines.seam import proc

_LISTEN = "0A"


class Port(NamedTuple):
    """A listening socket."""

    pid: int
    address: str
    port: int


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *proc.descendants(pid, proc.children_of())]


def ports_of(pid: int) -> list[Port]:
    """Return the ports on which a process and its descendants listen; for a shared socket, the first holder."""
    owners: dict[str, int] = {}
    for member in tree(pid):
        for target in _links(Path(f"/proc/{member}/fd")):
            if target.startswith("socket:["):
                owners.setdefault(target.removeprefix("socket:[").removesuffix("]"), member)
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [
        Port(owners[row[9]], _address(row[1].partition(":")[0]), int(row[1].partition(":")[2], 16))
        for row in rows
        if row[3] == _LISTEN and row[9] in owners
    ]


def _links(folder: Path) -> list[str]:
    try:
        return [os.readlink(entry) for entry in folder.iterdir()]  # noqa: PTH115 - "socket:[1]" is no path
    except (FileNotFoundError, ProcessLookupError):
        return []  # the process has ended, or has just closed the socket


def _address(text: str) -> str:
    """Return an address of /proc/net/tcp, which consists of four-byte words in the host's byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ip_address(b"".join(words))
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)
