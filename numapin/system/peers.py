"""The users at the other ends of TCP connections within this host, as the kernel reports them: sock_diag(7).

/proc/net/tcp reports the same, but reading it takes 12 ms, because the kernel walks through its whole table.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from contextlib import closing
from typing import Final

# From the kernel's include/uapi/linux/netlink.h, sock_diag.h and inet_diag.h.
_NETLINK_SOCK_DIAG: Final = 4
_NLM_F_REQUEST: Final = 1
_NLMSG_ERROR: Final = 2
_SOCK_DIAG_BY_FAMILY: Final = 20
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, number, port
_REQUEST: Final = struct.Struct("=BBBxI")  # family, protocol, extensions, states; then a socket
_SOCKET: Final = struct.Struct("!HH16s16s12s")  # ports, addresses, interface and cookie
_ANSWER: Final = struct.Struct("!xBxxHH32x12x12x4s")  # state, ports, user in this machine's byte order
_ESTABLISHED: Final = 1
_ANY: Final = bytes(4) + b"\xff" * 8  # interface and cookie
_ALL_STATES: Final = 0xFFFFFFFF
_LIMIT_S: Final = 1  # the kernel answers while it takes the request
_NOT_THERE: Final = (errno.ENOENT, errno.ECONNREFUSED)


class LocalPeers:
    """Asks the kernel whose processes have made connections. Takes 50 us for each."""

    def __init__(self) -> None:
        """Raise OSError if the kernel does not report users, or reports a wrong one for this process's."""
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG)
        self._netlink.settimeout(_LIMIT_S)
        try:
            self._require_own_user()
        except OSError:
            self.close()
            raise

    def _require_own_user(self) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()),
            closing(server.accept()[0]) as accepted,
        ):
            user = self.user_of(accepted)
        if user != os.geteuid():
            raise OSError(errno.EOPNOTSUPP, f"it reports user {user} for a connection of user {os.geteuid()}")

    def close(self) -> None:
        """Close the socket to the kernel."""
        self._netlink.close()

    def user_of(self, connection: socket.socket) -> int | None:
        """Return the user of the socket at the other end; None if no established one is in this network namespace.

        A socket that was closed has no user any more, and the kernel reports 0, so only established ones count. Raises
        OSError.
        """
        family = connection.family
        (address, port), (own_address, own_port) = connection.getpeername()[:2], connection.getsockname()[:2]
        addresses = [socket.inet_pton(family, text).ljust(16, b"\0") for text in (address, own_address)]
        wanted = _SOCKET.pack(port, own_port, *addresses, _ANY)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + wanted
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
        self._netlink.send(header + request)
        answer = self._netlink.recv(1 << 12)
        if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
            (number,) = struct.unpack_from("=i", answer, _HEADER.size)
            if -number in _NOT_THERE:
                return None
            raise OSError(-number, os.strerror(-number))
        # The addresses may be written in another way: torch connects to 127.0.0.1 from an IPv6 socket.
        state, found_port, found_own_port, user = _ANSWER.unpack_from(answer, _HEADER.size)
        is_wanted = (port, own_port) == (found_port, found_own_port)  # else it is the answer to a request before
        return int.from_bytes(user, sys.byteorder) if state == _ESTABLISHED and is_wanted else None
