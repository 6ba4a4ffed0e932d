"""Starts and ends of ranks, and a signal that comes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from numapin import Request, make_plan
from numapin.errors import NumapinError, Stopped
from tests.pictures import golden_machine
from tests.unit.launcher.seam import (
    Alarm,
    HostPlace,
    Hosts,
    LastLook,
    Mailbox,
    NotMet,
    RankOutput,
    StartedRank,
    launch,
    notes_of,
    parse,
    ranks,
)


@pytest.mark.parametrize("argument", ["a\0b", "x" * (1 << 18)], ids=["NUL", "too long"])
def test_a_rank_that_cannot_be_started(argument: str) -> None:
    """It is an error of ours that names the rank and the reason."""
    job = parse(["train.py", argument], {}, {}, python="python3", prog="numapin run")
    with pytest.raises(NumapinError, match="rank 0 cannot be started: "):
        launch.start_rank(job, 0, {}, RankOutput("error.json"))


def test_a_rank_that_sigkill_does_not_end(tmp_path: Path) -> None:
    """Neither the account nor the message of a stopped job says that the rank has ended."""
    plan = make_plan(golden_machine("2pkg-2node-smt2-8gpu-h100"), Request(num_ranks=2))
    started: Any = [StartedRank(number, SimpleNamespace(pid=40 + number)) for number in range(2)]  # type: ignore[arg-type]
    started[0].status, started[1].asked_s = 3, 100.0
    files = [RankOutput(str(tmp_path / f"error-{number}.json")) for number in range(2)]
    failed = launch.RoundFailed(frozenset({1}), LastLook({41: "stack"}, None, None))
    job = parse(["train.py"], {}, {}, python="python3", prog="numapin run")
    place = HostPlace(0, 1, 2, 4, 8, 4, 8, "127.0.0.1", 1, "job")
    first, rank = launch.failure_of(job, plan, place, started, files, failed=failed, kills_before=None).failure.ranks
    assert (first.rank, first.end, first.gpu, first.node) == (4, "exit status 3", 0, plan.ranks[0].node)
    assert (rank.rank, rank.state, rank.end, rank.stack) == (5, "left", "still there after SIGKILL", "stack")
    error = RuntimeError()
    assert notes_of(error) == ""
    error.add_note("rank 3 (pid 41): still there")
    assert Stopped(signal.SIGTERM, notes_of(error)).message == "stopped by SIGTERM; rank 3 (pid 41): still there"


STAYS = "while :; do sleep 0.01; done"


class _Others(Hosts):
    """Other hosts: how many wait in each of their rounds, once a rank is ready; or the end of the rendezvous."""

    def __init__(self, *news: int | NotMet) -> None:
        self.news, self.num_rounds = news, 0

    def join(self, alarm: Alarm) -> HostPlace:
        alarm.ring()
        self.num_rounds += 1
        if self.num_rounds > len(self.news):
            raise NotMet("the others did not come")
        return HostPlace(0, 1, 1, 0, 1, 0, 1, "127.0.0.1", 1, "job")

    def num_waiting(self) -> int:
        news = self.news[self.num_rounds - 1] if Path("ready").exists() else 0
        if isinstance(news, NotMet):
            raise news
        return news


@pytest.mark.parametrize(
    ("program", "news", "wanted"),
    [
        ("exit 3", (0,), "train.sh: rank 0 failed first: exit status 3"),
        (
            "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; touch ready; sleep 300",
            (0, NotMet("it is lost")),
            "it is lost",
        ),
        (f"trap 'kill $PPID' TERM; touch ready; {STAYS}", (1,), "stopped by SIGTERM; no rank is running"),
        (
            f"trap 'kill $PPID' TERM; touch ready; {STAYS}",
            (NotMet("it is lost"),),
            "stopped by SIGTERM; no rank is running",
        ),
    ],
    ids=[
        "no restart",
        "a failure before a restart",
        "a signal while ranks end for other hosts",
        "a signal after the rendezvous is lost",
    ],
)
def test_what_ends_a_job(
    program: str, news: tuple[int | NotMet, ...], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure without a restart; what came after a restart, and not the failure before; a signal in any case."""
    (tmp_path / "train.sh").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "train.sh").chmod(0o755)
    words = ["--max-restarts=2", "--monitor-interval=0", "--shutdown-timeout=1", "--no-python", "./train.sh"]
    job = parse(words, {}, {}, python="python3", prog="numapin run")
    plan = make_plan(golden_machine("2pkg-2node-smt2-8gpu-h100"), Request(num_ranks=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "hosts_of", lambda *_: _Others(*news))
    with mock.patch.dict(os.environ), pytest.raises(NumapinError) as raised:
        launch.launch(plan, job, str(tmp_path), Mailbox(), lambda: None)
    assert raised.value.message.removeprefix("./") == wanted


@pytest.mark.parametrize("is_heard", [False, True], ids=["of this host", "heard from another"])
def test_one_press_of_ctrl_c(monkeypatch: pytest.MonkeyPatch, *, is_heard: bool) -> None:
    """It may arrive twice, from a terminal and from `timeout` or another host; half a second later it is a new one."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(ranks, "time", clock)
    with Alarm({signal.SIGINT}) as alarm:
        if is_heard:
            alarm.stop(signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)
            assert alarm.take_signal() == signal.SIGINT
        for now_s, is_urgent in ((100.4, False), (100.6, True)):
            clock.monotonic = lambda now_s=now_s: now_s
            signal.raise_signal(signal.SIGINT)
            assert alarm.is_urgent() == is_urgent


def test_a_handler_that_is_not_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preloaded library may have installed one, which Python cannot restore: the job ends as without it."""
    with monkeypatch.context() as patch, Alarm({signal.SIGUSR2}):
        patch.setattr(signal, "signal", lambda *_: None)
        alarm = Alarm({signal.SIGUSR2}).__enter__()
        patch.undo()
        alarm.__exit__(None, None, None)
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.parametrize("is_killed", [False, True], ids=["running", "dying"])
def test_a_rank_that_is_dying_was_not_ended_by_us(*, is_killed: bool) -> None:
    """A process that dies is not counted with the running ones, although its end has not been seen."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        if is_killed:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        rank = StartedRank(0, process)
        assert rank.is_running == (not is_killed)
        rank.status = 0
        assert not rank.is_running
        process.kill()
