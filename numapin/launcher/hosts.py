"""The meeting of a job's hosts before its ranks start.

- A job on one host has no rendezvous. The launcher serves the ranks' store on one address, by default the loopback.
- Several hosts that know each other make a roll call: `fixed_hosts`.
- Other hosts meet in torch's rendezvous. The state of its c10d store is a pickle, which anyone who reaches the port
  can replace. So it is signed with the rendezvous id, which never enters the store, and read only if it is valid.

Of torch this uses the public interface of its rendezvous only. All hosts of a job run numapin: a host under torchrun
neither answers a roll call nor signs its state.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from numapin.base.stderr import say
from numapin.errors import NumapinError, Stopped, UsageError
from numapin.launcher.ranks import StopSignal
from numapin.launcher.store_server import LOOPBACK, STORE_HINT, listen, serving, torch_folder, why_not_served

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Self

    from torch.distributed import Store  # type: ignore[attr-defined] # torch marks no exports
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from numapin.launcher.failure import RanksFailed
    from numapin.launcher.options import Job
    from numapin.launcher.ranks import Alarm

T = TypeVar("T")
_LOOK_S: Final = 0.05
_SIGNED_C10D: Final = "numapin-c10d"
_NUM_MAC_BYTES: Final = 32
_BARRIER: Final = "torchelastic/agent/terminal_state"
_BARRIER_S: Final = 300
# Each host writes its own key before it reads the other, so of two hosts at least one sees the other.
_SUCCEEDED: Final = "numapin/hosts-that-succeeded"
_RESTARTING: Final = "numapin/hosts-that-restart"
_SEE_OTHERS: Final = "see what numapin printed on the other hosts"
_NOT_MET: Final = {
    "RendezvousClosedError": ("the job has ended on another host", _SEE_OTHERS),
    "RendezvousConnectionError": (
        "the rendezvous host has ended its launcher, or cannot be reached",
        "see what numapin printed there, and whether --rdzv-endpoint is right",
    ),
    "RendezvousTimeoutError": (
        "the other hosts of the job did not come in time",
        "start it on all of them, or wait for longer with: --rdzv-conf join_timeout=SECONDS",
    ),
}
"""The message and the hint for each of torch's rendezvous errors, by its name."""


class NotMet(NumapinError):  # noqa: N818 - the event, as in BindingRefused
    """The hosts of a job do not meet, so no round can begin."""


class HostPlace(NamedTuple):
    """This host's part in a round: its number, those of its first rank, and the store of the ranks."""

    group_rank: int
    num_hosts: int
    num_ranks: int  # of this host
    first_rank: int
    world_size: int
    first_role_rank: int
    role_size: int
    address: str
    port: int
    run_id: str  # as the ranks see it
    is_served: bool = True  # a launcher serves the store; otherwise rank 0 does

    def shared_variables(
        self, environ: Mapping[str, str], *, role: str = "default", restarts: int = 0, max_restarts: int = 0
    ) -> dict[str, str]:
        """Return the environment with torchrun's variables that all ranks of this host have."""
        return {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **environ,
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "ROLE_WORLD_SIZE": str(self.role_size),
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
            "ROLE_NAME": role,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(self.is_served),
        }


def why_torch(job: Job) -> str:
    """Return why the hosts of a job need torch to meet, or its ranks torch's own store; "" if they need neither."""
    if job.is_fixed:
        return ""
    if not job.is_single_host:
        return f"--nnodes {job.min_max_nodes[1]}"
    return why_not_served(torch_folder()) or ""


def meeting_of(job: Job) -> str:
    """Return in words how the hosts of a job meet."""
    if job.is_single_host:
        return "without a rendezvous, because the job has one host"
    if job.is_fixed:
        where = job.rdzv_endpoint or f"{job.master_addr} port {job.master_port or '29500 (default)'}"
        return f"without a rendezvous: this is host {job.node_rank} of {job.nnodes[1]}, and host 0 is at {where}"
    return f"through the rendezvous of several hosts: {job.rdzv_backend} at {job.rdzv_endpoint}"


class Hosts:
    """The hosts of a job, as one of them sees them. What is here suits a job on one host."""

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leave the job."""

    def join(self, alarm: Alarm) -> HostPlace:
        """Begin a round with the other hosts. Raises NotMet, and StopSignal if a signal comes meanwhile."""
        raise NotImplementedError

    def num_waiting(self) -> int:
        """Return the number of hosts that wait for the next round."""
        return 0

    def has_failed_elsewhere(self) -> bool:
        """Return whether the ranks of this host have to end because the job has failed on another one."""
        return False

    def must_wait(self) -> bool:
        """Return whether to watch on for other hosts, although the ranks of this one have succeeded."""
        return False

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Tell the other hosts at once about an exception in this block, which ends the ranks of this host."""
        return nullcontext()

    def agree_on_first(self, failed: RanksFailed, _: Alarm) -> RanksFailed:
        """Return the account of this host's ranks with what is known of other hosts."""
        return failed

    def leave_round(self) -> None:
        """Let other hosts know that the ranks of this one are about to be restarted."""

    def let_others_continue(self) -> None:
        """Leave a job that other hosts can continue without this one."""

    def succeeded(self, alarm: Alarm) -> None:
        """Tell other hosts that the ranks of this one have succeeded, and wait for theirs if that is necessary."""


class OneHost(Hosts):
    """A job on one host: each round has a new store, so that restarted ranks never read keys of earlier ones."""

    def __init__(
        self,
        num_ranks: int,
        address: str | None = None,
        port: int | None = None,
        *,
        run_id: str | None = None,
        uses_torch: bool,
        store_hint: str = STORE_HINT,
    ) -> None:
        self._address, self._port = address or LOOPBACK, port or 0
        self.run_id, self._store_hint = run_id or str(uuid.uuid4()), store_hint
        self._num_ranks, self._open = num_ranks, ExitStack()
        self._uses_torch = uses_torch
        self._torchs_store: Any = None

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self._open.close()
        self._torchs_store = None  # closes the port; a traceback may keep this object

    def join(self, _: Alarm | None = None) -> HostPlace:
        """Begin a round. Raises UsageError for an address that this host does not have."""
        self._open.close()
        self._torchs_store = None  # closes the port of the round before
        listening = self._open.enter_context(listen(self._address, self._port))
        port, size = listening.getsockname()[1], self._num_ranks
        if self._uses_torch:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._torchs_store = TCPStore(
                self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        else:
            self._open.enter_context(serving(listening, hint=self._store_hint))
        return HostPlace(0, 1, size, 0, size, 0, size, self._address, port, self.run_id)


class SeveralHosts(Hosts):
    """A job on several hosts, in torch's rendezvous, which is closed at the end, but not after a signal."""

    def __init__(self, job: Job, num_ranks: int, alarm: Alarm) -> None:
        """Connect to the rendezvous. Raises NotMet, UsageError, and StopSignal if a signal comes meanwhile."""
        from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        self._job, self._num_ranks = job, num_ranks
        self._store: Any = None
        self._ranks_store: Any = None
        self.place: HostPlace | None = None
        self._stays_open = False  # the other hosts continue without this one, or the rendezvous is gone
        backend, run_id = job.rdzv_backend, job.rdzv_id
        self.run_id = job.run_id or str(uuid.uuid4())
        if backend == "c10d":
            backend, self.run_id = _SIGNED_C10D, public_id(self.run_id)
            with suppress(ValueError):  # registered before
                rendezvous_handler_registry.register(_SIGNED_C10D, _meet_signed)
            problem = why_known(run_id, is_typed=job.is_id_typed)
            if problem:
                say(
                    f"warning: {problem}: anyone who knows it and can reach the rendezvous can run code as you; make "
                    "one with openssl rand -hex 16 and set it on every host, without --rdzv-id: export PET_RDZV_ID=…"
                )
        elif backend == "etcd-v2":
            say(
                "warning: the rendezvous state in etcd-v2 is a pickle that numapin does not sign: anyone who can write "
                f"to {job.rdzv_endpoint} can run code as you; use --rdzv-backend c10d"
            )
        least, most = job.min_max_nodes
        settings: dict[str, Any] = {"timeout": 900, **job.rdzv_conf}
        endpoint = job.rdzv_endpoint
        if backend == "static":
            settings["rank"] = job.node_rank
            endpoint = endpoint or f"{job.master_addr}:{job.master_port or 29500}"
        if not {"rdzv_endpoint", "master_addr"} & job.typed:
            say(
                f"--nnodes {most}: waiting for the other hosts at {endpoint or 'localhost:29400'}, on this host; "
                "name another with --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
            )
        address = job.local_addr
        try:
            parameters = RendezvousParameters(backend, endpoint, run_id, least, most, local_addr=address, **settings)
            self._handler: RendezvousHandler = interruptible(lambda: get_rendezvous_handler(parameters), alarm)
            if backend == "static":
                self._master = parse_rendezvous_endpoint(endpoint, -1)  # the handler has refused one without a port
        except (TypeError, ValueError) as error:  # TypeError: a setting has the name of another option's
            hint = "several hosts meet with: --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
            raise UsageError(f"--rdzv-backend {job.rdzv_backend}: {error}", hint) from None
        except Exception as error:  # noqa: BLE001 - the backend may raise anything
            raise _not_met(error) from None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the rendezvous; then count this host where hosts that succeeded wait for the others."""
        if isinstance(error, (StopSignal, Stopped)) or self._stays_open:
            return  # the host may come back, or the others continue without it
        with suppress(Exception):  # the store is gone: the error that ends the job counts
            self._handler.shutdown()
        if error is not None and self._store is not None:
            with suppress(Exception):
                self._arrive()

    def join(self, alarm: Alarm) -> HostPlace:
        """Meet the other hosts of the next round. Raises NotMet, and StopSignal if a signal comes meanwhile."""
        self._ranks_store = None  # closes the port of the round before
        # Else torch would serve one store for all rounds, which it announces in the first only; we serve one in each.
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        former = os.environ.get(name)
        os.environ[name] = "1"
        try:
            self._store, self.place = interruptible(self._meet, alarm)
        except Exception as error:  # noqa: BLE001 - the backend may raise anything
            raise _not_met(error) from None
        finally:
            del os.environ[name]
            if former is not None:
                os.environ[name] = former
        return self.place

    def _meet(self) -> tuple[Store, HostPlace]:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        info = self._handler.next_rendezvous()
        store, number, num_hosts = info.store, info.rank, info.world_size
        # The first host numbers the ranks: each host's first rank, the number of all, and both within its role.
        mine = {"role": self._job.role, "rank": number, "local_world_size": self._num_ranks}
        store.set(f"torchelastic/role_info/{number}", json.dumps(mine))
        if number == 0:
            hosts = [json.loads(store.get(f"torchelastic/role_info/{host}")) for host in range(num_hosts)]
            for host, numbers in enumerate(numbered([(told["role"], told["local_world_size"]) for told in hosts])):
                store.set(f"torchelastic/assigned_ranks/{host}", json.dumps(numbers))
        assigned: list[int] = json.loads(store.get(f"torchelastic/assigned_ranks/{number}"))
        first_rank, world_size, first_role_rank, role_size = assigned

        if self._job.rdzv_backend == "static":
            address, port = self._master
        else:
            address = info.bootstrap_store_info.master_addr  # type: ignore[union-attr] # of a c10d rendezvous
            if number == 0:
                self._ranks_store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
                store.set("numapin/ranks-store", str(self._ranks_store.port))
            port = int(store.get("numapin/ranks-store"))
        place = (first_rank, world_size, first_role_rank, role_size, address, port, self.run_id)
        return store, HostPlace(number, num_hosts, self._num_ranks, *place)

    def num_waiting(self) -> int:
        """Return the number of hosts that wait for the next round. Raises NotMet if the rendezvous is gone."""
        try:
            return self._handler.num_nodes_waiting()
        except Exception as error:  # noqa: BLE001 - the backend may raise anything
            # torch would log a failure to close a rendezvous that is gone.
            self._stays_open = type(error).__name__ == "RendezvousConnectionError"
            raise _not_met(error) from None

    def leave_round(self) -> None:
        """Let the other hosts of this round know that this one is about to restart its ranks.

        Raises NotMet if the ranks of a host have succeeded, so that no other round can follow. That host remains in
        this round until it has left the exit barrier, and then closes the rendezvous.
        """
        num_succeeded = 0
        with suppress(RuntimeError):  # the store is gone, which the rendezvous reports
            self._store.add(_RESTARTING, 1)
            num_succeeded = self._store.add(_SUCCEEDED, 0)
        if num_succeeded:
            raise NotMet("the ranks of another host have succeeded, so it cannot take part in a restart", _SEE_OTHERS)

    def let_others_continue(self) -> None:
        """Do not close the rendezvous if the other hosts are enough."""
        self._stays_open = self.place is not None and self.place.num_hosts > self._job.min_max_nodes[0]

    def succeeded(self, alarm: Alarm) -> None:
        """Wait until the ranks of all hosts have ended, as torchrun does: the first host serves the store.

        If another host restarts its ranks, it waits in vain for this one: close the rendezvous, which ends that wait.
        In other rendezvous than c10d, a host may be able to restart its ranks alone, so nothing is noted there.
        """
        with suppress(RuntimeError):  # the store is gone
            if self._job.rdzv_backend == "c10d":
                self._store.add(_SUCCEEDED, 1)
                if self._store.add(_RESTARTING, 0):
                    self._handler.set_closed()
            self._arrive()
        # To ask again and again would end in an error with C++ frames once the host that serves the store has left.
        with suppress(RuntimeError):  # the store is gone, or the time is up
            interruptible(lambda: self._store.wait([f"{_BARRIER}/last_member"], timedelta(seconds=_BARRIER_S)), alarm)

    def _arrive(self) -> None:
        """Count this host in the exit barrier. torch counts only hosts that succeeded, so these wait in vain."""
        if self.place is not None and self._store.add(f"{_BARRIER}/num_members", 1) == self.place.num_hosts:
            self._store.set(f"{_BARRIER}/last_member", "<val_ignored>")


def numbered(hosts: Sequence[tuple[str, int]]) -> list[tuple[int, int, int, int]]:
    """Return for each host, given its role and its number of ranks, the numbers of its ranks.

    They are its first rank, the number of all ranks, and both within its role.
    """
    of_role: Counter[str] = Counter()
    for role, size in hosts:
        of_role[role] += size
    numbers, first, first_of_role = list[tuple[int, int, int, int]](), 0, Counter[str]()
    for role, size in hosts:
        numbers.append((first, sum(of_role.values()), first_of_role[role], of_role[role]))
        first, first_of_role[role] = first + size, first_of_role[role] + size
    return numbers


def import_torch() -> None:
    """Import the parts of torch that this module uses, with its C++ log off unless the user asked for it.

    It would log each try to reach a host that has not started yet, or has ended, with twenty frames.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_asked_for = name in os.environ
    os.environ.setdefault(name, "FATAL")
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401 - the import is the effect

    if not is_asked_for:
        del os.environ[name]  # the ranks' logs stay


def interruptible(call: Callable[[], T], alarm: Alarm, limit_s: float = math.inf) -> T:
    """Return what the call returns, or raise what it raises; raise StopSignal if a signal comes meanwhile.

    torch's C++ code lets no signal through while it waits, so a thread makes the call. A signal leaves it behind, and
    so does the time limit, with TimeoutError: a name server has no other.
    """
    until_s = time.monotonic() + limit_s
    returned: list[T] = []
    raised: list[Exception] = []

    def make() -> None:
        try:
            returned.append(call())
        except Exception as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=make, name="numapin-rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        alarm.ring()
        if time.monotonic() > until_s:
            raise TimeoutError(f"no answer in {limit_s:.0f} s")
        thread.join(_LOOK_S)
    alarm.ring()
    if raised:
        raise raised[0]
    return returned[0]


def count_devices(wanted: str) -> int:
    """Return the number of ranks that --nproc-per-node means to torch: cpu, or a kind of device. Raises ValueError."""
    from torch.distributed.run import determine_local_world_size

    return determine_local_world_size(wanted) or 0


def _not_met(error: Exception) -> NotMet:
    message, hint = _NOT_MET.get(type(error).__name__, (f"the hosts of the job did not meet: {error}", _SEE_OTHERS))
    return NotMet(message, hint)


def why_known(run_id: str, *, is_typed: bool) -> str | None:
    """Return why other users can know the id, and sign a state of their own; None if it looks like a secret.

    A secret has hexadecimal digits, as in a UUID, or is a text of mixed case, as in base64.
    """
    digits = run_id.replace("-", "").lower()
    is_hex = len(digits) >= 16 and set("0123456789abcdef").issuperset(digits)
    has_mixed_case = any(map(str.islower, run_id)) and any(map(str.isupper, run_id))
    is_token = len(run_id) >= 20 and has_mixed_case
    is_number = digits.isdecimal()  # a date, or the number of a job
    is_varied = len(set(digits)) >= 6  # of 40,000 random ids of 16 hexadecimal digits, one has fewer different ones
    if not (is_hex or is_token) or is_number or not is_varied:
        return f"the rendezvous id {run_id!r} is easy to guess"
    return "ps shows --rdzv-id to every user of this host" if is_typed else None


def public_id(run_id: str) -> str:
    """Return the public form of a rendezvous id: a digest, from which a random id cannot be recovered."""
    import hashlib  # here, because a job on one host does not need it

    return hashlib.sha256(b"numapin rendezvous " + run_id.encode()).hexdigest()


def _meet_signed(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return torch's own c10d handler on a signed state; it and the store see the digest of the id only."""
    import copy
    import hmac

    from torch.distributed.elastic.rendezvous.api import RendezvousStateError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    secret = parameters.run_id.encode()
    public = copy.copy(parameters)
    public.run_id = public_id(parameters.run_id)

    def verified(signed: bytes) -> bytes:
        mac, state = signed[:_NUM_MAC_BYTES], signed[_NUM_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(secret, state, "sha256")):
            raise RendezvousStateError(
                "the rendezvous state is not signed with this job's --rdzv-id: a host has another id or runs torchrun, "
                "or another user writes to the rendezvous port"
            )
        return state

    class SignedBackend(C10dRendezvousBackend):
        """torch's c10d backend, which accepts only a state that is signed with the rendezvous id."""

        @property
        def name(self) -> str:
            return _SIGNED_C10D

        def get_state(self) -> tuple[bytes, Any] | None:
            found = super().get_state()
            return None if found is None else (verified(found[0]), found[1])

        def set_state(self, state: bytes, token: object = None) -> tuple[bytes, Any, bool] | None:
            if token and not isinstance(token, bytes):  # never valid; torch would read the state with `get_state`
                found = self.get_state()
                return None if found is None else (*found, False)
            written = super().set_state(hmac.digest(secret, state, "sha256") + state, token)
            return None if written is None else (verified(written[0]), *written[1:])

    _, store = create_backend(public)
    return create_handler(store, SignedBackend(store, public.run_id), public)
