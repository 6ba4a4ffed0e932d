"""How a host leaves a job of several: counted where others wait for it, and the rendezvous closed or not."""

from __future__ import annotations

import signal
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch marks no exports
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from numapin.errors import UsageError
from tests.unit.launcher.seam import HostPlace, NotMet, SeveralHosts, StopSignal, hosts, parse


class Waiting:
    """Stands in for the launcher's signals; none comes, unless `rings`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def ring(self) -> None:
        if self.error is not None:
            raise self.error


class Gone:
    def add(self, *_: object) -> int:
        raise RuntimeError("no connection")

    wait = add


def host(store: Any = None, *, num_hosts: int = 2, backend: str = "c10d") -> tuple[Any, list[str]]:
    """Return a host that has met others in `store`, and the list of what it does to the rendezvous."""
    made: Any = SeveralHosts.__new__(SeveralHosts)
    done: list[str] = []
    made._handler = SimpleNamespace(
        shutdown=lambda: done.append(f"closed before {num_arrived(made._store)}"),
        set_closed=lambda: done.append("closed for those that wait"),
    )
    made._job = SimpleNamespace(rdzv_backend=backend)
    made._store = HashStore() if store is None else store
    made._stays_open, made.run_id, made._num_ranks = False, "job", 1
    made.place = HostPlace(0, num_hosts, 1, 0, num_hosts, 0, num_hosts, "head", 1, "job")
    return made, done


def num_arrived(store: Any) -> int | str:
    """Return the number of hosts in the exit barrier."""
    return "any" if store is None else store.add(f"{hosts._BARRIER}/num_members", 0)


def leave(made: Any, error: BaseException | None) -> None:
    made.__exit__(None if error is None else type(error), error, None)


@pytest.mark.parametrize(
    ("error", "stays_open", "closes", "arrives"),
    [
        (ValueError(), False, True, 1),
        (StopSignal(signal.SIGTERM), False, False, 0),  # the host may come back
        (NotMet("a GPU is gone", ""), True, False, 0),  # enough others are left, which meet again
    ],
    ids=repr,
)
def test_an_error(error: BaseException, arrives: int, *, stays_open: bool, closes: bool) -> None:
    """The rendezvous is closed first: the host that serves it may end as soon as it is released."""
    made, done = host()
    made._stays_open = stays_open
    leave(made, error)
    assert (done, num_arrived(made._store)) == (["closed before 0"] if closes else [], arrives)


def test_a_signal_ends_a_wait() -> None:
    """A signal ends the waits for other hosts' ranks, and for a round, through which torch would let none for long."""
    made, _ = host()
    with pytest.raises(StopSignal):
        made.succeeded(Waiting(StopSignal(signal.SIGTERM)))
    assert num_arrived(made._store) == 1
    never = threading.Event()
    made._handler.next_rendezvous = never.wait
    with pytest.raises(StopSignal):
        made.join(Waiting(StopSignal(signal.SIGTERM)))
    never.set()


def meet(*options: str) -> SeveralHosts:
    job = parse(("--nnodes=1:2", *options, "train.py"), {}, {}, python="python3", prog="numapin run")
    return SeveralHosts(job, 1, Waiting())  # type: ignore[arg-type] # of the launcher's signals, `ring` is enough


@pytest.mark.parametrize(
    ("backend", "endpoint", "settings"),
    [
        ("c10dd", "localhost:1", "a=b"),
        ("static", "head", "a=b"),
        ("c10d", "", "local_addr=x"),
    ],
)
def test_what_torch_refuses(backend: str, endpoint: str, settings: str) -> None:
    """The message names the option, and the hint one that works, instead of torch's traceback."""
    with pytest.raises(UsageError, match=f"--rdzv-backend {backend}: ") as raised:
        meet("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-conf", settings)
    assert raised.value.hint == "several hosts meet with: --rdzv-backend c10d --rdzv-endpoint HOST:PORT"


def test_an_address_in_brackets() -> None:
    """MASTER_ADDR has none, as under torchrun."""
    assert meet("--rdzv-backend=static", "--rdzv-endpoint=[::1]:29511")._master == ("::1", 29511)


def test_the_host_of_the_rendezvous_is_gone() -> None:
    """That ends the job here with one line; there is nothing to close, and success or failure are no other error."""
    made, done = host(Gone())

    def unreachable() -> int:
        raise RendezvousConnectionError("frame #0: c10::Error")

    made._handler.num_nodes_waiting = unreachable
    with pytest.raises(NotMet, match="the rendezvous host has ended its launcher, or cannot be reached") as raised:
        made.num_waiting()
    assert "c10" not in raised.value.message
    leave(made, raised.value)
    assert done == []
    made, done = host(Gone())
    made._handler.shutdown = lambda: done.append("closed")
    made.leave_round()
    made.succeeded(Waiting())
    leave(made, ValueError())
    assert done == ["closed"]


def test_hosts_that_restart_and_hosts_that_succeed() -> None:
    """A host that has succeeded stays in the round, so others would restart in vain: the job ends. This is no lost GPU.

    One that succeeds while another restarts closes the rendezvous, which ends that wait. In torch's static rendezvous a
    host restarts alone. A host that only arrives, after an error, does not keep others from meeting again.
    """
    succeeded, _ = host(num_hosts=1)
    succeeded.succeeded(Waiting())
    failed, _ = host(succeeded._store)
    with pytest.raises(NotMet, match="the ranks of another host have succeeded"):
        failed.leave_round()
    made, done = host(num_hosts=1)
    host(made._store)[0].leave_round()
    made.succeeded(Waiting())
    assert done == ["closed for those that wait"]
    alone, done = host(num_hosts=1, backend="static")
    alone.leave_round()
    alone.succeeded(Waiting())
    alone.leave_round()
    assert done == []
    arrived, _ = host()
    leave(arrived, ValueError())
    arrived.leave_round()


def test_numbers_of_ranks() -> None:
    """The first host counts for all: by host, and by role, as torch does."""
    store = HashStore()
    jobs = [("trainer", 4), ("reader", 2), ("trainer", 4)]
    for number, (role, size) in enumerate(jobs):  # the first host waits for the others', in a real job
        store.set(
            f"torchelastic/role_info/{number}", f'{{"role": "{role}", "rank": {number}, "local_world_size": {size}}}'
        )
    found: list[list[int]] = []
    for number, (role, size) in enumerate(jobs):
        made, _ = host(store, num_hosts=3, backend="static")
        made._job.role, made._num_ranks, made._master = role, size, ("10.0.0.1", 29500)
        made._handler.next_rendezvous = partial(SimpleNamespace, store=store, rank=number, world_size=3)
        place = made.join(Waiting())
        assert (place.group_rank, place.num_hosts, place.address, place.port) == (number, 3, "10.0.0.1", 29500)
        found.append([place.first_rank, place.world_size, place.first_role_rank, place.role_size])
    assert found == [[0, 10, 0, 8], [4, 10, 0, 2], [6, 10, 4, 8]]
