"""A host that ends in any way but success is counted where hosts that succeeded wait for it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch marks no exports
from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.elastic.utils import store as store_functions
from torch.distributed.launcher import api

from numapin.errors import NumapinError
from numapin.launcher import exit_barrier
from numapin.launcher.agent import replacing_torch_agent
from numapin.launcher.rendezvous import SIGNED_C10D

NOTHING: Any = None
TWO_HOSTS: Any = SimpleNamespace(min_max_nodes=(2, 2))
ONE_OR_TWO: Any = SimpleNamespace(min_max_nodes=(1, 2))


class Round(LocalElasticAgent):
    """An agent of two hosts, in whose round something happens."""

    def __init__(self, happens: Any) -> None:
        self.happens = happens
        self.done: list[str] = []
        self._store: Any = HashStore()
        handler = SimpleNamespace(shutdown=self.close, get_backend=lambda: SIGNED_C10D, set_closed=self.close)
        spec = SimpleNamespace(rdzv_handler=handler)
        self._worker_group: Any = SimpleNamespace(group_world_size=2, spec=spec, state=WorkerState.HEALTHY)

    def run(self, role: str = "") -> RunResult:
        """Let it happen."""
        del role
        self.happens(self)
        return RunResult(state=self._worker_group.state, return_values={}, failures={})

    def close(self) -> bool:
        """Close the rendezvous."""
        self.done.append(f"closed before {self.num_arrived()}")
        return True

    def num_arrived(self) -> int:
        """Return the number of hosts in the exit barrier."""
        number: int = self._store.add(f"{server._TERMINAL_STATE_SYNC_ID}{store_functions._NUM_MEMBERS}", 0)
        return number

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self.done.append("stopped")

    def _exit_barrier(self) -> None:
        store_functions._barrier_nonblocking(self._store, 2, server._TERMINAL_STATE_SYNC_ID)


def agent_in(monkeypatch: pytest.MonkeyPatch, happens: Any, job: Any = TWO_HOSTS, before_restart: Any = NOTHING) -> Any:
    """Return our agent in such a round."""
    monkeypatch.setitem(vars(api), "LocalElasticAgent", Round)
    with replacing_torch_agent(job, NOTHING, before_restart, NOTHING, NOTHING):
        return vars(api)["LocalElasticAgent"](happens)


def run_and_leave(agent: Any) -> None:
    """Run the agent and close its rendezvous, as torch's `launch_agent` does."""
    try:
        agent.run("trainer")
    finally:
        agent._worker_group.spec.rdzv_handler.shutdown()


def in_state(agent: Any, state: WorkerState) -> None:
    """Change the state of the ranks."""
    agent._worker_group.state = state


def test_ranks_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous is closed first: the host that serves it may end as soon as it is released."""
    agent = agent_in(monkeypatch, lambda agent: in_state(agent, WorkerState.FAILED))
    run_and_leave(agent)
    assert (agent.done, agent.num_arrived()) == (["closed before 0"], 1)


@pytest.mark.parametrize("error", [RendezvousClosedError(), ValueError(), KeyboardInterrupt()], ids=repr)
def test_an_error(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the agent, also if restarts are left, the others do not wait for it."""

    def happens(agent: Any) -> None:
        in_state(agent, WorkerState.STOPPED)
        raise error

    agent = agent_in(monkeypatch, happens)
    with pytest.raises(type(error)):
        run_and_leave(agent)
    assert (agent.done, agent.num_arrived()) == (["closed before 0"], 1)


@pytest.mark.parametrize("error", [None, KeyError("late")], ids=repr)
def test_ranks_that_succeeded_count_once(error: KeyError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier has counted this host; a second time would release hosts before others have ended."""

    def happens(agent: Any) -> None:
        in_state(agent, WorkerState.SUCCEEDED)
        agent._exit_barrier()
        if error:
            raise error

    agent = agent_in(monkeypatch, happens)
    with pytest.raises(KeyError) if error else nullcontext():
        run_and_leave(agent)
    assert (agent.done, agent.num_arrived()) == (["closed before 1"], 1)


def test_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that never met others has no store, and closes the rendezvous as before."""

    def happens(agent: Any) -> None:
        agent._store = None
        agent.num_arrived = lambda: "any"
        raise KeyError("no round")

    agent = agent_in(monkeypatch, happens)
    with pytest.raises(KeyError, match="no round"):
        run_and_leave(agent)
    assert agent.done == ["closed before any"]


@pytest.mark.parametrize(
    ("job", "done"), [(TWO_HOSTS, ["stopped", "closed before 0"]), (ONE_OR_TWO, ["stopped"])], ids=["two", "elastic"]
)
def test_a_host_that_leaves(job: Any, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that lost a GPU is counted, too, where it leaves the rendezvous open for the others."""

    def fail() -> None:
        raise NumapinError("a GPU is gone", "")

    agent = agent_in(monkeypatch, lambda agent: agent._restart_workers(agent._worker_group), job, fail)
    with pytest.raises(NumapinError, match="a GPU is gone"):
        run_and_leave(agent)
    assert (agent.done, agent.num_arrived()) == (done, 1)


def test_no_restart_after_a_host_has_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That host stays in the round, so a restart would wait in vain. This is not a lost GPU: the job ends."""
    succeeded = agent_in(monkeypatch, NOTHING)
    succeeded._exit_barrier()
    asked: list[str] = []
    failed = agent_in(
        monkeypatch,
        lambda agent: agent._restart_workers(agent._worker_group),
        ONE_OR_TWO,
        lambda: asked.append("before a restart"),
    )
    failed._store = succeeded._store
    with pytest.raises(exit_barrier.HostSucceededError, match="the ranks of another host have succeeded"):
        run_and_leave(failed)
    assert (failed.done, failed.num_arrived(), asked) == (["closed before 1"], 2, [])


def test_success_while_another_host_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host waits in vain for this one. Closing the rendezvous ends that, and the stores stay until then."""
    agent = agent_in(monkeypatch, NOTHING)
    exit_barrier.leave_round(agent._store)
    agent._exit_barrier()
    assert (agent.done, agent.num_arrived()) == (["closed before 0"], 1)


def test_other_rendezvous_than_c10d(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's static one, a host restarts alone, and may succeed after others."""
    agent = agent_in(monkeypatch, NOTHING)
    agent._worker_group.spec.rdzv_handler.get_backend = lambda: "static"
    exit_barrier.leave_round(agent._store)
    agent._exit_barrier()
    exit_barrier.leave_round(agent._store)
    assert agent.done == []


def test_a_host_that_only_arrives_does_not_keep_others_from_restarting() -> None:
    """The hosts that a lost one leaves behind meet again without it."""
    store = HashStore()
    exit_barrier.arrive(store, 2)
    exit_barrier.leave_round(store)


class Gone:
    """A store whose host has ended."""

    def add(self, key: str, number: int) -> int:
        """Fail as torch's does."""
        raise RuntimeError(f"no connection for {key} {number}")


def test_a_store_that_is_gone() -> None:
    """Neither this host's success nor its failure becomes another error."""
    gone: Any = Gone()
    handler: Any = SimpleNamespace(get_backend=lambda: SIGNED_C10D)
    exit_barrier.arrive(gone, 2)
    exit_barrier.note_success(handler, gone)
    exit_barrier.leave_round(gone)


@pytest.mark.parametrize("theirs", [None, lambda store: store], ids=["renamed", "other arguments"])
def test_another_torch(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch's private function changes, the others wait, as under torchrun, and the job's own error stays."""
    monkeypatch.setitem(vars(store_functions), "_barrier_nonblocking", theirs)
    store = HashStore()
    exit_barrier.arrive(store, 1)
    assert store.num_keys() == 0
