"""Stage 3: torch's elastic agent, which starts, watches and restarts the ranks, with five additions. Edge.

Comes in: a `Job`, the signals for its ranks, a check of the machine before a restart, which raises NumapinError if this
host can no longer take part, and a check of the folder for the ranks' logs. Goes out: an agent that replaces torch's.
Knows nothing of NUMA. It adds the signals, both checks, one grace period for all the ways in which ranks are ended, and
a wait for dying ranks before others start.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from numapin.errors import NumapinError
from numapin.rank import signals

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from numapin.launcher.torchrun import Job

    _Own = tuple[Job, signals.Mailbox, Callable[[], None], Callable[[], LogsSpecs | None]]

# How long to wait for killed ranks before others replace them: giving back GPU memory takes seconds, and the new ranks
# need it. A rank that still exists after this time may never end.
_DEATH_S: Final = 30


@contextmanager
def replacing_torch_agent(
    job: Job, mailbox: signals.Mailbox, before_restart: Callable[[], None], new_logs: Callable[[], LogsSpecs | None]
) -> Iterator[None]:
    """Make torch's launcher create our agent.

    `new_logs` is called before ranks start. It returns where their logs go now, None if that has not changed.

    torch's `launch_agent` takes no agent as an argument, and a copy of its 150 lines would not follow torch's changes.
    """
    theirs = vars(api)["LocalElasticAgent"]
    vars(api)["LocalElasticAgent"] = partial(_Agent, own=(job, mailbox, before_restart, new_logs))
    try:
        yield
    finally:
        vars(api)["LocalElasticAgent"] = theirs


class _Agent(LocalElasticAgent):
    """torch's agent with our additions."""

    def __init__(self, *args: Any, own: _Own, **kwargs: Any) -> None:  # noqa: ANN401 - the installed torch's own arguments
        super().__init__(*args, **kwargs)
        self._job, self._mailbox, self._before_restart, self._new_logs = own

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._others_continue(worker_group):
            self._logs_specs = self._new_logs() or self._logs_specs
        with signals.kept_from_children():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        self._give_grace()
        self._mailbox.address(ids)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._mailbox.deliver()
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        with self._others_continue(worker_group):
            self._before_restart()
        super()._restart_workers(worker_group)

    @contextmanager
    def _others_continue(self, worker_group: WorkerGroup) -> Iterator[None]:
        """If the body raises NumapinError, stop the ranks of this host; the others continue if they can."""
        try:
            yield
        except NumapinError:
            self._stop_workers(worker_group)
            if (worker_group.group_world_size or 1) > self._job.min_max_nodes[0]:
                # Leaving with an error would close the rendezvous for the hosts that can continue.
                worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
            raise

    def _give_grace(self) -> None:
        """Use one grace period wherever torch ends ranks; its own option applies to signals only."""
        context, seconds = self._pcontext, self._job.shutdown_timeout_s
        if context is None or seconds is None:
            return
        close = context.close

        def close_in_time(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            del timeout
            close(death_sig, seconds)
            # torch 2.13 waits this long after SIGKILL, too, and then starts new ranks while old ones are still dying.
            deadline = time.monotonic() + _DEATH_S
            for handler in getattr(context, "subprocess_handlers", {}).values():
                with suppress(subprocess.TimeoutExpired):
                    handler.proc.wait(max(0, deadline - time.monotonic()))

        context.close = close_in_time  # type: ignore[method-assign] # for this object only
