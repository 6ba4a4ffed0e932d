"""Stage 3: the meeting point of launchers and ranks, closed to other users. Edge.

Comes in: torch's rendezvous parameters. Goes out: a rendezvous handler for torch's agent.

- A job on one host has no rendezvous store. The ranks' store listens on one address, by default the loopback.
- Several hosts meet in torch's c10d store, whose state torch unpickles. Anyone who reaches the port can write there, so
  the state is signed with the rendezvous id, which never enters the store. Nothing is unpickled without a valid
  signature.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined] # torch marks no exports
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from numapin.launcher.listening import LOOPBACK, listen

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousParameters

ONE_HOST: Final = "numapin-one-host"
SIGNED_C10D: Final = "numapin-c10d"
_NUM_MAC_BYTES: Final = 32


def register() -> None:
    """Register both handlers with torch, which finds a rendezvous backend by its name."""
    rendezvous_handler_registry.register(ONE_HOST, OneHost)
    rendezvous_handler_registry.register(SIGNED_C10D, _meet_signed)


class OneHost(RendezvousHandler):
    """The rendezvous of a job on one host: always complete, with no store that other users could reach.

    Each round has a new store for the ranks, so restarted ranks never read keys of earlier ones.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._address = parameters.local_addr or LOOPBACK
        self._port = int(parameters.get("port", 0))
        self._ranks_store: TCPStore | None = None
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        """Return True: the launcher serves the ranks' store, even under TORCH_DISABLE_SHARE_RDZV_TCP_STORE."""
        return True

    def get_backend(self) -> str:
        """Return the name under which torch created this handler."""
        return ONE_HOST

    def get_run_id(self) -> str:
        """Return the id of the run, which the ranks find in TORCHELASTIC_RUN_ID."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin a round with this host alone. Raises UsageError for an address that this host does not have."""
        self._ranks_store = None  # closes the port of the round before
        listening = listen(self._address, self._port)
        port = listening.getsockname()[1]
        self._ranks_store = TCPStore(
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        """Return whether the job has ended."""
        return self._is_closed

    def set_closed(self) -> None:
        """Mark the job as ended."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no host can join."""
        return 0

    def shutdown(self) -> bool:
        """Close the ranks' store."""
        self._ranks_store = None
        self._is_closed = True
        return True


class _SignedBackend(C10dRendezvousBackend):
    """torch's c10d backend, which accepts only a state that is signed with the rendezvous id.

    The store's keys contain a digest of the id, so listing the keys does not reveal the id.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._secret = run_id.encode()
        super().__init__(store, public_id(run_id))

    @property
    def name(self) -> str:
        """Return the name under which torch created this backend."""
        return SIGNED_C10D

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token. Raises RendezvousStateError if the signature is missing or wrong."""
        found = super().get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, Any, bool] | None:
        """Write a state; return the stored state, its token, and whether it is the one that was given."""
        if token and not isinstance(token, bytes):  # never valid; torch would read the state with `get_state`
            found = self.get_state()
            return None if found is None else (*found, False)
        written = super().set_state(self._sign(state), token)
        return None if written is None else (self._verified(written[0]), *written[1:])

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, "sha256") + state

    def _verified(self, signed: bytes) -> bytes:
        mac, state = signed[:_NUM_MAC_BYTES], signed[_NUM_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(self._secret, state, "sha256")):
            raise RendezvousStateError(
                "the rendezvous state is not signed with this job's --rdzv-id: a host has another id or runs torchrun, "
                "or another user writes to the rendezvous port"
            )
        return state


class _StorePerRound(DynamicRendezvousHandler):
    """torch's handler, with a new store for the ranks in each round.

    torch 2.13 keeps the store of the first round and publishes its address in that round only. A host that joins later
    would wait for it and fail, and restarted ranks would read addresses of the ranks before them. If told not to share
    it (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), torch announces a free port, which another user can take before rank 0
    listens on it. Here the launcher of the first host listens before it announces the port.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts, and serve a new store on the first host."""
        self._bootstrap_store_info = None  # torch then makes a store, and publishes its address
        self._shared_tcp_store_server = None  # closes the port of the round before
        return super().next_rendezvous()


def public_id(run_id: str) -> str:
    """Return the public form of a rendezvous id: a digest, from which a random id cannot be recovered."""
    return hashlib.sha256(b"numapin rendezvous " + run_id.encode()).hexdigest()


def _meet_signed(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return torch's own c10d handler on a signed state."""
    public = copy.copy(parameters)
    public.run_id = public_id(parameters.run_id)
    _, store = create_backend(public)
    # The handler gets the digest, too: torch's names for all keys begin with its run id.
    handler = create_handler(store, _SignedBackend(store, parameters.run_id), public)
    return _with_store_per_round(handler)


def _with_store_per_round(handler: RendezvousHandler) -> RendezvousHandler:
    """Give a handler a new store in each round. A torch with other attributes is told not to share its store."""
    if all(hasattr(handler, name) for name in ("_bootstrap_store_info", "_shared_tcp_store_server")):
        handler.__class__ = _StorePerRound
    else:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return handler
