"""Our agent beside others' replacements of torch's."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from numapin.launcher import leftovers
from numapin.launcher.agent import replacing_torch_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING: Any = None


class Theirs(LocalElasticAgent):
    """Somebody else's agent."""

    def __init__(self, spec: object, **options: object) -> None:
        self.given = (spec, options)

    def _start_workers(self, worker_group: object) -> dict[int, Any]:
        return {0: worker_group}


def makes_theirs(spec: object, **options: object) -> Theirs:
    """Make an agent, as a patch may that is a function."""
    return Theirs(spec, **options)


class Mailbox:
    """Takes ids."""

    def __init__(self) -> None:
        self.ids: dict[int, Any] = {}

    def address(self, ids: dict[int, Any]) -> None:
        """Keep them."""
        self.ids = ids


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    torchs = vars(api)["LocalElasticAgent"]
    yield
    vars(api)["LocalElasticAgent"] = torchs


@pytest.mark.parametrize("theirs", [Theirs, makes_theirs])
def test_anothers_agent_gets_our_additions(theirs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaced torch's agent before us makes the agent, runs inside of our steps, and is put back."""
    monkeypatch.setenv("NUMAPIN_RUN_DIR", "/nonexistent")
    vars(api)["LocalElasticAgent"] = theirs
    mailbox: Any = Mailbox()
    with replacing_torch_agent(NOTHING, mailbox, lambda: None, lambda: None, NOTHING):
        ours = vars(api)["LocalElasticAgent"]
        assert isinstance(ours, type) == isinstance(theirs, type)
        agent = ours("spec", start_method="spawn")
    assert vars(api)["LocalElasticAgent"] is theirs
    assert isinstance(agent, Theirs)
    assert agent.given == ("spec", {"start_method": "spawn"})
    agent._logs_specs, agent._pcontext = NOTHING, None
    assert agent._start_workers(NOTHING) == mailbox.ids == {0: None}


def test_a_patch_that_came_later_stays() -> None:
    """A replacement on top of ours belongs to somebody who will undo it."""
    with replacing_torch_agent(NOTHING, NOTHING, lambda: None, lambda: None, NOTHING):
        vars(api)["LocalElasticAgent"] = Theirs
    assert vars(api)["LocalElasticAgent"] is Theirs


class Interrupted(BaseException):
    """What a signal raises."""


class Process:
    """A rank's process, of which the tests know the end."""

    def __init__(self, pid: int, status: int | None) -> None:
        self.pid, self.returncode = pid, status

    def poll(self) -> int | None:
        """Return the status."""
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the status, that of a kill if there was none."""
        assert timeout > 0
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode
        return self.returncode


@pytest.mark.parametrize(
    ("statuses", "killed"), [((1, None), [10**8 + 100, 10**8 + 1]), ((0, 0), [])], ids=["failed", "succeeded"]
)
def test_what_an_interrupted_end_leaves(
    statuses: tuple[int | None, ...], killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch gives up while it ends ranks, they are killed with what they started, unless all have succeeded."""

    class Stopping(Theirs):
        def run(self, role: str = "") -> Any:
            raise Interrupted(role)

    processes = [Process(10**8 + number, status) for number, status in enumerate(statuses)]
    asked: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(leftovers, "in_sessions", lambda leaders: [min(leaders) + 100])
    monkeypatch.setattr(leftovers, "ask", lambda pids, number: asked.extend((pid, number) for pid in pids))
    vars(api)["LocalElasticAgent"] = Stopping
    with replacing_torch_agent(NOTHING, NOTHING, lambda: None, lambda: None, NOTHING):
        agent = vars(api)["LocalElasticAgent"]("spec")
    handlers = {number: SimpleNamespace(proc=process) for number, process in enumerate(processes)}
    agent._pcontext = SimpleNamespace(subprocess_handlers=handlers)
    agent._worker_group = SimpleNamespace(state=WorkerState.HEALTHY)
    with pytest.raises(Interrupted):
        agent.run("trainer")
    assert asked == [(pid, signal.SIGKILL) for pid in killed]
