"""A connection between two launchers that carries lines of JSON, signed if both know the job's secret.

Both sides greet each other with a random number. The key of a connection is made of the secret and both numbers, and
what is signed includes the direction and the number of the message, so no message can be repeated elsewhere.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from numapin.base.strict_json import decode

if TYPE_CHECKING:
    from collections.abc import Mapping

    T = TypeVar("T", int, str)

FORMAT: Final = 1
_MOST_BYTES: Final = 4096  # of one message
_UNSIGNED: Final = "-"
# A host that has lost its power is noticed after 5 minutes. Ranks may do without the launchers' network for so long.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 60, socket.TCP_KEEPCNT: 4}


class ConnectionEnded(Exception):  # noqa: N818 - the event
    """The other side has closed the connection, or cannot be reached any more."""


class PeerRefused(Exception):  # noqa: N818 - the event
    """The other side has sent what no launcher of this job sends."""


class PeerUnsigned(PeerRefused):
    """The other side does not know the secret of this one."""


class Message:
    """The fields of a message. Reading one that is missing or of another type raises PeerRefused."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    @property
    def kind(self) -> str:
        """The kind of message."""
        return self.text("kind")

    def number(self, name: str) -> int:
        """Return a number, 0 or more."""
        value = self._of_type(name, int)
        if value < 0:
            raise PeerRefused(f"{name} is {value}")
        return value

    def optional_number(self, name: str) -> int | None:
        """Return a number, None for null."""
        return None if self._fields.get(name) is None else self.number(name)

    def text(self, name: str) -> str:
        """Return a text."""
        return self._of_type(name, str)

    def _of_type(self, name: str, kind: type[T]) -> T:
        value = self._fields.get(name)
        if type(value) is not kind:  # bool is no number
            raise PeerRefused(f"its message has no {name}")
        return value


class Connection:
    """One side of a connection. Nothing here waits."""

    def __init__(self, opened: socket.socket, *, secret: bytes | None, is_server: bool) -> None:
        self._socket, self._secret, self._is_server = opened, secret, is_server
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            opened.setsockopt(socket.IPPROTO_TCP, option, value)
        self._nonce, self._key = os.urandom(16).hex(), b""
        self._lines, self._rest = deque[bytes](), b""
        self._num_sent = self._num_received = 0
        self.is_greeted = False
        self._write(_UNSIGNED, json.dumps({"numapin": FORMAT, "nonce": self._nonce}))

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, kind: str, **fields: int | str | None) -> None:
        """Send a message. If the kernel's buffer is full, the other side has stopped reading: end the connection.

        The next `receive` raises ConnectionEnded.
        """
        body = json.dumps({"kind": kind, **fields})
        mac = self._mac(body, self._num_sent, from_server=self._is_server)
        self._num_sent += 1
        self._write(mac, body)

    def receive(self) -> Message | None:
        """Return the next message, None if no more has arrived. Raises ConnectionEnded, PeerRefused."""
        while True:
            while self._lines:
                message = self._read(self._lines.popleft())
                if message is not None:
                    return message
            try:
                part = self._socket.recv(_MOST_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionEnded(error.strerror or str(error)) from None
            if not part:
                raise ConnectionEnded("it closed the connection")
            *lines, self._rest = (self._rest + part).split(b"\n")
            if max(map(len, (*lines, self._rest))) > _MOST_BYTES:
                raise PeerRefused(f"it sent a line of more than {_MOST_BYTES} bytes")
            self._lines += lines

    def _read(self, line: bytes) -> Message | None:
        """Return the message of a line, None for the greeting."""
        mac, _, body = line.decode(errors="replace").partition(" ")
        try:
            fields = decode(body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise PeerRefused("it is not a launcher of numapin")
        message = Message(fields)
        if not self.is_greeted:
            if message.number("numapin") != FORMAT:
                raise PeerRefused("it has another version of numapin")
            nonces = (self._nonce, message.text("nonce"))
            if not nonces[1].isascii():  # a lone surrogate cannot be encoded
                raise PeerRefused("it is not a launcher of numapin")
            of_server, of_client = nonces if self._is_server else reversed(nonces)
            if self._secret is not None:
                self._key = hmac.digest(self._secret, f"numapin hosts {of_server} {of_client}".encode(), "sha256")
            self.is_greeted = True
            return None
        wanted = self._mac(body, self._num_received, from_server=not self._is_server)
        self._num_received += 1
        if not hmac.compare_digest(mac.encode(), wanted.encode()):
            raise PeerUnsigned("its messages are not signed with the rendezvous id of this host (PET_RDZV_ID)")
        return message

    def _mac(self, body: str, number: int, *, from_server: bool) -> str:
        if self._secret is None:
            return _UNSIGNED
        return hmac.digest(self._key, f"{int(from_server)} {number} {body}".encode(), "sha256").hex()

    def _write(self, mac: str, body: str) -> None:
        data = f"{mac} {body}\n".encode()
        try:
            sent = self._socket.send(data)
        except OSError:
            sent = 0
        if sent < len(data):
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
