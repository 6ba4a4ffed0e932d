"""The connection between `bench train`'s measuring process and a rank: a line of JSON each way. Edge.

Comes in: a socket. Goes out: messages. It ends when either side ends, so that no rank outlives the benchmark. The
socket is named relative to the working directory, because Linux allows only 108 bytes.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET: Final = "ranks.sock"


class Line:
    """A connection that sends and receives dicts."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")

    @classmethod
    def connected(cls, path: str) -> Self:
        """Connect to a listening socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return cls(connection)

    def __enter__(self) -> Self:
        """Return the connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, content: Mapping[str, object]) -> None:
        """Send a message."""
        self._socket.sendall(json.dumps(content, default=str).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message; None: the other side has ended."""
        line = self._reader.readline()
        content: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return content

    def close(self) -> None:
        """End the connection."""
        self._reader.close()
        self._socket.close()
