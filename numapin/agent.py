"""Stage 3: torch's elastic agent, which starts, watches and restarts the ranks, with what it lacks. Edge.

Comes in: `Care`, which says what is done for the ranks beside torch's own work. Goes out: an agent in the place of
torch's. Knows nothing of NUMA. What is added: signals to the ranks, one grace period however ranks are ended, and a
look at the machine before ranks are restarted.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from numapin import mail
from numapin.errors import NumapinError

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """What is done for ranks beside torch's own work.

    `mailbox` has the signals for them. `shutdown_timeout_s` is what ranks get between SIGTERM and SIGKILL, None for
    torch's own time. `before_restart` raises NumapinError where this host can no longer take part. With fewer than
    `min_nodes` hosts the job is over.
    """

    mailbox: mail.Mailbox
    shutdown_timeout_s: int | None
    before_restart: Callable[[], None]
    min_nodes: int


@contextmanager
def in_place_of_torchs(care: Care) -> Iterator[None]:
    """Have torch's launcher make our agent: `launch_agent` takes none, and is 150 lines that change with torch."""
    theirs = vars(api)["LocalElasticAgent"]
    vars(api)["LocalElasticAgent"] = partial(_Agent, care=care)
    try:
        yield
    finally:
        vars(api)["LocalElasticAgent"] = theirs


class _Agent(LocalElasticAgent):
    def __init__(self, *args: Any, care: Care, **kwargs: Any) -> None:  # noqa: ANN401 - those of the installed torch
        super().__init__(*args, **kwargs)
        self._care = care

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with mail.kept_from_children():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        self._give_grace()
        self._care.mailbox.address(ids)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._care.mailbox.deliver()
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        try:
            self._care.before_restart()
        except NumapinError:
            self._stop_workers(worker_group)
            if (worker_group.group_world_size or 1) > self._care.min_nodes:
                # Leaving with an error closes the rendezvous for the hosts that could go on.
                worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
            raise
        super()._restart_workers(worker_group)

    def _give_grace(self) -> None:
        """Have ranks be ended after the same time by all of torch's ways; its own option counts for signals only."""
        context, seconds = self._pcontext, self._care.shutdown_timeout_s
        if context is None or seconds is None:
            return
        close = context.close

        def close_in_time(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            del timeout
            close(death_sig, seconds)

        context.close = close_in_time  # type: ignore[method-assign] # of this one object
