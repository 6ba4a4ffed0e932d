"""Let rank 0 of `numapin.spawn` listen on a port that no other user can take first. Edge.

Comes in: a port of the loopback that is bound and not yet listened on, as the descriptor that rank 0 inherits.
Goes out: a torch whose TCPStore serves on that descriptor, where it would bind the port itself.

Another user can bind a port as long as its holder has SO_REUSEADDR and does not listen; torch needs SO_REUSEADDR to
bind a port that is held, and could not bind it without. So the port stays bound by one socket, without that option,
from its choice to the end of the run, and torch is given that socket (`master_listen_fd`). It is bound to 127.0.0.1,
where torch's own would listen on every address. Source: inet_csk_bind_conflict() in net/ipv4/inet_connection_sock.c.

Ranks import this before the function: torch is patched when the function imports it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ADDRESS: Final = "127.0.0.1"
_MODULE: Final = "torch.distributed.rendezvous"
_LOOPBACK: Final = (ADDRESS, "localhost")


@contextmanager
def reserved_port() -> Iterator[socket.socket]:
    """Hold a free port of the loopback; every other bind of it fails, whichever user and options it comes from."""
    with socket.socket() as held:
        held.bind((ADDRESS, 0))
        yield held


def port_of(held: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    port: int = held.getsockname()[1]
    return port


def serve_on(descriptor: int) -> None:
    """Have torch's store listen on this socket when it is asked to listen on its port. torch need not be loaded."""
    os.set_inheritable(descriptor, False)
    loaded = sys.modules.get(_MODULE)  # a sitecustomize may have imported it
    if loaded is None:
        sys.meta_path.insert(0, _StoreWatch(descriptor))
    else:
        _patch(loaded.TCPStore, descriptor)


class _StoreWatch:
    """A finder that finds nothing itself: it patches TCPStore once torch's rendezvous module is loaded."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders have for torch's module; None for every other module."""
        del path, target
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _after(spec.loader, self._descriptor)
        return spec


def _after(loader: Any, descriptor: int) -> None:  # noqa: ANN401 - what the path's finder returned
    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # this function, which hid the method
        loader.exec_module(module)
        _patch(module.TCPStore, descriptor)

    loader.exec_module = exec_module


def _patch(store: Any, descriptor: int) -> None:  # noqa: ANN401 - torch's class
    """Give the class's server our socket. In place, because other modules have imported the class by then.

    Each server gets a duplicate, which it closes: a function may make one process group after another.
    """
    torchs_own = store.__init__
    with socket.socket(fileno=os.dup(descriptor)) as held:
        ours = port_of(held)

    @wraps(torchs_own)
    def __init__(  # noqa: N807 - it becomes the class's
        self: object, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any,  # noqa: ANN401, FBT001, FBT002
        **options: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        if is_master and port == ours and host_name in _LOOPBACK:
            options.setdefault("master_listen_fd", os.dup(descriptor))
        torchs_own(self, host_name, port, world_size, is_master, *rest, **options)

    store.__init__ = __init__
