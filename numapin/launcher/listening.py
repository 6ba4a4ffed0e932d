"""Stage 3: the port of the ranks' store on one host. Edge.

Comes in: an address of this host and a port. Goes out: a socket that listens there, and nowhere else. It listens from
the moment on at which the port is known, so no other user can take the port.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from numapin.errors import UsageError

LOOPBACK: Final = "127.0.0.1"
_OWN_ADDRESS: Final = "give an address of this host with --local-addr"
_LISTEN_HINTS: Final = {errno.EADDRNOTAVAIL: _OWN_ADDRESS, errno.EADDRINUSE: "choose another --master-port"}
_BACKLOG: Final = 2048  # as in torch's own store: all ranks connect at the same moment


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on one address only, on a free port if `port` is 0. Raises UsageError."""
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{address} is not an address of this host: {error}", _OWN_ADDRESS) from None
    problem = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, protocol, _, place in places:
        try:
            listening = socket.socket(family, kind, protocol)
        except OSError as error:  # IPv6 may be off
            problem = error
            continue
        try:
            # On a chosen port, the next round must not wait for the old connections to expire.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port != 0)
            listening.bind(place)
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            problem = error
        else:
            return listening
    hint = _LISTEN_HINTS.get(problem.errno or 0, "see the limits of this process with: ulimit -a")
    raise UsageError(f"cannot listen on {address} port {port or '(any)'}: {problem.strerror}", hint)
