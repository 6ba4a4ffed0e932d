"""Stage 3: the server of the ranks' store.

torch's own server would do the same, but loading torch takes a second and 200 MB. The socket listens from the moment on
at which the port is known, so no other user can take the port. On a loopback address, only this user and root can
connect. Whether the installed torch's clients can be served is found out without importing it.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import socket
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.stderr import say
from numapin.errors import UsageError
from numapin.launcher.store import RankStore, StoreClient, StoreRefusal
from numapin.system.peers import LocalPeers

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK: Final = "127.0.0.1"
_OWN_ADDRESS: Final = "give an address of this host with --local-addr"
_LISTEN_HINTS: Final = {errno.EADDRNOTAVAIL: _OWN_ADDRESS, errno.EADDRINUSE: "choose another --master-port"}
_BACKLOG: Final = 2048  # as in torch's own store: all ranks connect at the same moment
_PART_BYTES: Final = 1 << 18
_PAUSE_S: Final = 0.1
STORE_HINT: Final = "let torch serve it: numapin run --rdzv-backend static --rdzv-endpoint localhost:29500"
_FULL: Final = (errno.EMFILE, errno.ENFILE)
_NEWEST: Final = (2, 15)  # the newest torch whose clients ran against our store


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


@contextmanager
def serving(listening: socket.socket, *, hint: str = STORE_HINT) -> Iterator[None]:
    """Serve a new store on a listening socket, in a thread, until the end of the block.

    `hint` is for clients that cannot be served: by default what to do in `numapin run`.
    """
    peers, address = None, listening.getsockname()[0]
    if address.startswith("127.") or address == "::1":  # else other hosts may connect
        try:
            peers = LocalPeers()
        except OSError as error:
            say(
                f"warning: any local user can connect to the ranks' store, because the kernel reports no users: {error}"
            )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = (listening, theirs, peers, hint)
        thread = threading.Thread(target=_serve, args=arguments, name="numapin-store", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ours.shutdown(socket.SHUT_WR)
            thread.join()


def _serve(listening: socket.socket, end: socket.socket, peers: LocalPeers | None, hint: str) -> None:
    """Serve until `end` is closed at the other side. Signals are for the main thread, which must wake up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        server = _StoreServer(listening, selector, peers, hint)
        selector.register(end, selectors.EVENT_READ)
        try:
            while True:
                ready = [key for key, _ in selector.select(None if server.paused_at_s is None else _PAUSE_S)]
                if any(key.fileobj is end for key in ready):
                    return
                for key in ready:
                    server.attend(key.data)
                server.end_pause()
        except Exception as error:
            say(f"the ranks' store has failed: {error!r}; hint: {hint}")
            raise
        finally:
            server.close()
            listening.close()  # else new clients would connect and wait


class _StoreServer:
    """The connections of a store. While `paused_at_s` is set, it accepts no new ones."""

    def __init__(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        peers: LocalPeers | None = None,
        hint: str = STORE_HINT,
    ) -> None:
        self._listening, self._selector, self._peers, self._hint = listening, selector, peers, hint
        self._store = RankStore()
        self._connections: dict[StoreClient, socket.socket] = {}
        self._told: set[str] = set()  # the kinds of events that have been reported
        self.paused_at_s: float | None = None
        selector.register(listening, selectors.EVENT_READ)

    def attend(self, client: StoreClient | None) -> None:
        """Do what the socket of a client, or the listening one (None), is ready for."""
        if client is None:
            self._accept()
        if client in self._connections:  # not dropped since the selector returned
            self._send(client)
        if client in self._connections:  # not dropped by _send
            self._receive(client)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        if self._peers is not None:
            self._peers.close()

    def end_pause(self) -> None:
        """Accept new clients again, if the pause is over."""
        if self.paused_at_s is not None and time.monotonic() >= self.paused_at_s + _PAUSE_S:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self.paused_at_s = None

    def _accept(self) -> None:
        """Accept a client of this user or root. On failure, new ones wait for a moment; others are served meanwhile."""
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _FULL:
                self._say_once(
                    "full",
                    f"the ranks' store cannot accept more connections than {len(self._connections)}: {error.strerror}; "
                    "hint: raise the limit with: ulimit -n",
                )
            self._selector.unregister(self._listening)  # else it would stay ready
            self.paused_at_s = time.monotonic()
            return
        try:
            user = os.geteuid() if self._peers is None else self._peers.user_of(connection)
            if user not in (0, os.geteuid()):
                if user is not None:
                    text = f"the ranks' store refused a connection of user {user}; if a rank runs as that user, hint:"
                    self._say_once("user", f"{text} {self._hint}")
                connection.close()
                return
            client = StoreClient()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, client)
        except OSError:  # it is closed already, or the kernel has no memory; torch's client connects again
            connection.close()
            return
        self._connections[client] = connection

    def _say_once(self, kind: str, text: str) -> None:
        """Report the first event of a kind only: anyone who can connect could cause many."""
        if kind not in self._told:
            self._told.add(kind)
            say(text)

    def _receive(self, client: StoreClient) -> None:
        try:
            part = self._connections[client].recv(_PART_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        client.received += part
        try:
            self._store.receive(client)
        except StoreRefusal as refusal:
            if client.is_valid:  # strangers are not worth a message
                text = f"the ranks' store closed a connection: {refusal}"
                if refusal.is_unknown:
                    text = f"a program asked the ranks' store for {refusal}; hint: {self._hint}"
                self._say_once("refusal", text)
            part = b""
        for other in self._store.take_answered():
            self._send(other)
        if not part:
            self._drop(client)

    def _send(self, client: StoreClient) -> None:
        """Send as much as the client takes now; the selector reports when it takes more."""
        connection = self._connections.get(client)
        if connection is None:
            return
        try:
            sent = connection.send(client.answers) if client.answers else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(client)
            return
        del client.answers[:sent]
        self._store.count(client)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.answers else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, client)

    def _drop(self, client: StoreClient) -> None:
        """Close a connection that ended."""
        connection = self._connections.pop(client, None)
        if connection is not None:
            self._store.forget(client)
            self._selector.unregister(connection)
            connection.close()


# --- the clients -----------------------------------------------------------------------------------------------------


def torch_folder() -> Path | None:
    """Return the folder of the installed torch, None if there is none."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def why_not_served(folder: Path | None) -> str | None:
    """Return why the clients of the torch in a folder cannot be served; None if they can, or if there is no torch."""
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"__version__\s*=\s*['\"](([0-9]+)\.([0-9]+)[^'\"]*)", text)
    if found is None:
        return "this numapin does not know the store of torch of unknown version"
    is_known = (int(found[2]), int(found[3])) <= _NEWEST
    return None if is_known else f"this numapin does not know the store of torch {found[1]}"
