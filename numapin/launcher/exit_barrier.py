"""Stage 3: torch's exit barrier, where hosts whose ranks have succeeded wait for the others. Edge.

Comes in: the store that the hosts of a round share. Goes out: this host counted in the barrier, or known to have
succeeded or to restart. torch counts only hosts that succeeded, so these would wait for one that failed until the
barrier's time is up, 300 s. The store has other keys in each round (torch's static rendezvous has one round only).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.utils import store as store_functions

from numapin.launcher.rendezvous import SIGNED_C10D

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # torch marks no exports
    from torch.distributed.elastic.rendezvous import RendezvousHandler

# Each host writes its own key before it reads the other, so of two hosts at least one sees the other.
_SUCCEEDED: Final = "numapin/hosts-that-succeeded"
_RESTARTING: Final = "numapin/hosts-that-restart"


class HostSucceededError(RendezvousClosedError):
    """The ranks cannot be restarted, because those of another host have succeeded."""


def arrive(store: Store, num_hosts: int | None) -> None:
    """Count this host in torch's exit barrier without waiting there.

    torch's public `barrier` has no such form: with a short time limit, c10d logs warnings. If a later torch renames or
    changes its private function, the others wait, as under torchrun.
    """
    count = vars(store_functions).get("_barrier_nonblocking")
    name = vars(server).get("_TERMINAL_STATE_SYNC_ID")
    if count is None or name is None:
        return
    with suppress(RuntimeError, TypeError):  # the store is gone, or another torch: the error that ends the job counts
        count(store=store, world_size=num_hosts, key_prefix=name)


def note_success(handler: RendezvousHandler, store: Store) -> None:
    """Let the other hosts of this round know that the ranks of this one have succeeded.

    If another host restarts its ranks, it waits in vain for this one: close the rendezvous, which ends that wait.

    In other rendezvous than c10d, a host may be able to restart its ranks alone, so nothing is noted there.
    """
    if handler.get_backend() != SIGNED_C10D:
        return
    with suppress(RuntimeError, RendezvousError):  # the store is gone, which torch's barrier reports
        store.add(_SUCCEEDED, 1)
        if store.add(_RESTARTING, 0):
            handler.set_closed()


def leave_round(store: Store) -> None:
    """Let the other hosts of this round know that this one is about to restart its ranks.

    Raises HostSucceededError if the ranks of a host have succeeded, so that no other round can follow. That host
    remains in this round until it has left the exit barrier, and then closes the rendezvous.
    """
    num_succeeded = 0
    with suppress(RuntimeError):  # the store is gone, which the rendezvous reports
        store.add(_RESTARTING, 1)
        num_succeeded = store.add(_SUCCEEDED, 0)
    if num_succeeded:
        raise HostSucceededError("the ranks of another host have succeeded")
