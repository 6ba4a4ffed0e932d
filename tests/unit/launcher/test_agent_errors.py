"""The errors of torch's agent as the command line reports them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from numapin.errors import NumapinError, Stopped
from numapin.launcher import leftovers
from numapin.launcher.agent_errors import own_errors
from numapin.launcher.exit_barrier import HostSucceededError
from numapin.launcher.failure import EndedRank, RanksFailed
from numapin.plan.make import make_plan
from numapin.plan.request import Request
from tests.pictures import golden_machine

if TYPE_CHECKING:
    from pathlib import Path

PLAN = make_plan(golden_machine("2pkg-2node-smt2-8gpu-h100"), Request())


def ended(rank: int, exitcode: int) -> EndedRank:
    """Return the end of a rank."""
    return EndedRank(
        local_rank=rank, rank=rank, pid=1, exitcode=exitcode, ended_s=9, was_ended=False, error_file="", error=None
    )


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            HostSucceededError(),
            "the ranks of another host have succeeded, so it cannot take part in a restart",
            "on the other hosts",
        ),
        (RendezvousClosedError(), "the job has ended on another host", "on the other hosts"),
        (RendezvousTimeoutError(), "the other hosts of the job did not come in time", "join_timeout"),
        (
            RendezvousConnectionError("no way"),
            "the rendezvous host has ended its launcher, or cannot be reached",
            "--rdzv-endpoint",
        ),
        (RendezvousError("no way"), "the hosts of the job did not meet: no way", "on the other hosts"),
    ],
)
def test_hosts_that_do_not_meet(error: Exception, message: str, hint: str) -> None:
    """Errors of the rendezvous are one line and a hint, not a traceback."""
    with pytest.raises(NumapinError) as caught, own_errors("train.py", PLAN, is_only_host=False):
        raise error
    assert (caught.value.message, caught.value.exit_code) == (message, 1)
    assert hint in caught.value.hint


def failing_round(error: BaseException, exitcode: int, restarts_left: int, *, is_only_host: bool) -> None:
    """Raise an error after the account of a failed round."""
    with own_errors("train.py", PLAN, is_only_host=is_only_host) as failed_round:
        failed_round([ended(0, exitcode)], restarts_left)
        raise error


def test_a_rendezvous_closed_after_a_failed_round(capfd: pytest.CaptureFixture[str]) -> None:
    """The failure of this host's ranks is reported, as that of this host."""
    with pytest.raises(RanksFailed) as caught:
        failing_round(RendezvousClosedError(), 3, 1, is_only_host=False)
    assert caught.value.failure.summary == "rank 0 failed first on this host: exit status 3"
    assert capfd.readouterr().err == (
        "numapin: round 1: rank 0 failed first on this host: exit status 3; the ranks are restarted, 0 restarts left\n"
        "numapin: the job has ended on another host; the ranks are not restarted\n"
    )


@pytest.mark.parametrize(
    ("exitcode", "restarts_left", "has_cause"),
    [(3, 0, True), (3, 1, False), (-signal.SIGTERM, 0, False)],
    ids=["failed", "restarted", "of the same signal"],
)
def test_a_signal_while_a_failed_job_ends(exitcode: int, restarts_left: int, *, has_cause: bool) -> None:
    """The signal decides; the failure before it is its cause, unless the ranks had been restarted."""
    with pytest.raises(Stopped) as caught:
        failing_round(SignalException("", signal.SIGTERM), exitcode, restarts_left, is_only_host=True)
    assert caught.value.exit_code == 143
    assert isinstance(caught.value.__cause__, RanksFailed) == has_cause


def test_a_rank_that_does_not_end(tmp_path: Path) -> None:
    """The message of a stopped job names it. The stand-in is a child that leads a session, as each rank."""
    text = "import os, sys; open(sys.argv[1], 'w').close(); sys.stdin.read()"
    command = [sys.executable, "-c", text, str(tmp_path / "here")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        with pytest.raises(Stopped) as caught, own_errors("train.py", PLAN, is_only_host=True):
            raise SignalException("", signal.SIGTERM)
        assert leftovers.ranks_left() == [process.pid]
        assert caught.value.message == (
            f"stopped by SIGTERM; pid {process.pid}: still there 30 s after SIGKILL; see: cat /proc/PID/stack"
        )
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert leftovers.ranks_left() == []  # a zombie has ended
