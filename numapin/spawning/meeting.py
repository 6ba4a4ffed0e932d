"""A port on which rank 0 of `numapin.spawn` listens and that no other user can take first.

Another user can bind a port whose holder has SO_REUSEADDR and does not listen yet, and torch can bind a held port only
if the holder has SO_REUSEADDR. So one socket without that option holds the port from its choice to the end of the run,
and torch is given that socket (`master_listen_fd`). It is bound to 127.0.0.1; torch's own would listen on every
address. Source: inet_csk_bind_conflict() in net/ipv4/inet_connection_sock.c.

Ranks import this before the function, and torch is patched when the function imports it.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Final, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ADDRESS: Final = "127.0.0.1"
_MODULE: Final = "torch.distributed.rendezvous"
_LOOPBACK: Final = (ADDRESS, "localhost")
_AFTER_PORT: Final = ("world_size", "is_master")  # the third and fourth argument of torch's TCPStore


class _StoreLoader(Protocol):
    """The loader of a module, as an object whose method can be replaced."""

    exec_module: Callable[[ModuleType], None]


class _StoreClass(Protocol):
    """The class torch.distributed.TCPStore, as an object whose constructor can be replaced."""

    __init__: Callable[..., None]


@contextmanager
def reserved_port() -> Iterator[socket.socket]:
    """Hold a free loopback port, which no other socket can bind, under any user and with any options."""
    with socket.socket() as held:
        held.bind((ADDRESS, 0))
        yield held


def port_of(held: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    port: int = held.getsockname()[1]
    return port


def serve_on(descriptor: int) -> None:
    """Make torch's store serve on this socket whenever it is asked for the socket's port.

    If torch is not imported yet, it is patched when it is.
    """
    os.set_inheritable(descriptor, False)
    loaded = sys.modules.get(_MODULE)  # a sitecustomize may have imported it
    if loaded is None:
        sys.meta_path.insert(0, _StoreWatch(descriptor))
    else:
        _patch(loaded.TCPStore, descriptor)


class _StoreWatch:
    """A finder that only patches: it has TCPStore patched once torch's rendezvous module has been run.

    Programs also ask for a module's spec to see whether there is one, so it patches until then.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the other finders' spec for torch's module, and None for every other module."""
        if name != _MODULE:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            self._patch_after_import(cast("_StoreLoader", spec.loader))
        return spec

    def _patch_after_import(self, loader: _StoreLoader) -> None:
        """Have the loader patch TCPStore once it has run its module. The module keeps its ordinary loader and spec."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this function, which hides the method
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _patch(module.TCPStore, self._descriptor)

        loader.exec_module = exec_module


def _patch(store: _StoreClass, descriptor: int) -> None:
    """Make servers of this class use our socket. In place, because other modules have imported the class by then.

    Each server gets a duplicate, which it closes: a function may create several process groups, one after another.
    """
    torchs_own = store.__init__  # type: ignore[misc] # of the class, not of an instance
    with socket.socket(fileno=os.dup(descriptor)) as held:
        held_port = port_of(held)

    @wraps(torchs_own)
    def serve_on_held(self: object, host_name: str, port: int, *positional: object, **named: object) -> None:
        is_master = dict(zip(_AFTER_PORT, positional, strict=False), **named).get("is_master", False)
        if is_master and port == held_port and host_name in _LOOPBACK:
            named.setdefault("master_listen_fd", os.dup(descriptor))
        torchs_own(self, host_name, port, *positional, **named)

    store.__init__ = serve_on_held  # type: ignore[misc]
