"""Signals for the ranks: kept until ranks handle them, sent to children only, and harmless to the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.needs import needs_root
from tests.unit.rank.seam import signals

CHILD = """
import os, select, signal, sys
print("up", flush=True)
sys.stdin.readline()
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"took\\n"))  # print would not go on inside of the next line's
print("handles", flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]:  # the handler of a signal just before a read waits for its end
    pass
sys.stdin.readline()
"""


@pytest.fixture
def mailbox() -> Iterator[signals.Mailbox]:
    """Give a mailbox that handles this process's signals, and restore the handlers afterwards."""
    before = {number: signal.getsignal(number) for number in signals.FORWARDED}
    yield signals.open_mailbox()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Give a child that handles SIGUSR1 after it has read a line, and ends at the next line."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True) as process:
        assert line(process) == "up"
        yield process
        process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def handles(process: subprocess.Popen[str]) -> None:
    """Let the child install its handler."""
    say(process)
    assert line(process) == "handles"


def test_a_signal_waits_for_the_handler(
    mailbox: signals.Mailbox, child: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank without a handler is not signaled, which is reported; once it has a handler it gets the signal, once."""
    mailbox.address({0: child.pid})
    signal.raise_signal(signal.SIGUSR1)
    mailbox.deliver()
    mailbox.deliver()
    assert capfd.readouterr().err.count("SIGUSR1 is kept for rank 0 until a handler is installed") == 1
    assert child.poll() is None
    handles(child)
    mailbox.deliver()
    assert line(child) == "took"
    mailbox.deliver()
    say(child)
    assert (line(child), child.wait()) == ("", 0)


def test_only_children_are_signalled(mailbox: signals.Mailbox) -> None:
    """A process that is not our child, or does not exist, is not signaled, and the signal is kept.

    A signal of --signals-to-handle is no longer handled here.
    """
    mailbox.address({0: os.getppid(), 1: 2**22 + 1})
    signal.raise_signal(signal.SIGUSR1)
    mailbox.deliver()
    assert mailbox._undelivered == {signal.SIGUSR1: {0, 1}}
    mailbox.leave({signal.SIGUSR2, signal.SIGTERM})
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) == mailbox.receive


@pytest.mark.parametrize("comes_first", [True, False], ids=["before the end", "after the end"])
def test_a_restart_gets_what_a_dead_rank_had_not(
    mailbox: signals.Mailbox, child: subprocess.Popen[str], *, comes_first: bool
) -> None:
    """A rank that died did not get the signal, whether it was kept or arrived before the rank's successor.

    All restarted ranks get it, also that of a rank that had it.
    """
    handles(child)
    with subprocess.Popen(["sleep", "60"]) as former:
        mailbox.address({0: former.pid, 1: child.pid})
        if comes_first:
            signal.raise_signal(signal.SIGUSR1)
        former.kill()
    if not comes_first:
        signal.raise_signal(signal.SIGUSR1)
    mailbox.deliver()
    assert line(child) == "took"
    mailbox.address({0: os.getppid(), 1: child.pid})
    mailbox.deliver()
    assert line(child) == "took"
    assert mailbox._undelivered == {signal.SIGUSR1: {0}}


def test_a_signal_that_is_to_end_the_job() -> None:
    """One of --signals-to-handle that came before these were known ends the launcher."""
    code = (
        "import signal; from numapin.rank import signals as mail; mailbox = mail.open_mailbox(); "
        "signal.raise_signal(signal.SIGUSR1); mailbox.leave({signal.SIGUSR1})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGUSR1


@needs_root
def test_a_rank_of_another_user() -> None:
    """A rank that may not be signaled, such as a setuid program, does not end the launcher, and is reported once."""
    launcher = (
        "import codecs, os, signal, subprocess, sys\n"
        "from numapin.rank import signals as mail\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdin=-1, stdout=-1, text=True)\n"
        "print(file=child.stdin, flush=True)\n"
        "child.stdout.readline(), child.stdout.readline()\n"
        "codecs.lookup('ascii')  # nobody may not read the interpreter's folder\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "mailbox = mail.open_mailbox()\n"
        "mailbox.address({0: child.pid})\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
        "mailbox.deliver()\n"
    )
    done = subprocess.run([sys.executable, "-c", launcher], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("numapin: the kernel does not let SIGUSR1 through to process") == 1


@pytest.mark.parametrize("wrapper", ["sh", None])
def test_a_program_below_a_shell(
    mailbox: signals.Mailbox, capfd: pytest.CaptureFixture[str], wrapper: str | None
) -> None:
    """A shell has no handler, but may have started the program that has; a Python rank's children get nothing."""
    mailbox.wrapper = wrapper
    with subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; true', sys.executable, CHILD], stdin=-1, stdout=-1, text=True
    ) as shell:
        assert line(shell) == "up"
        mailbox.address({0: shell.pid})
        signal.raise_signal(signal.SIGUSR1)
        mailbox.deliver()
        where = "in sh or below it " if wrapper else ""
        assert f"SIGUSR1 is kept for rank 0 until a handler {where}is installed" in capfd.readouterr().err
        handles(shell)
        mailbox.deliver()
        say(shell)
        assert line(shell) == ("took" if wrapper else "")


def test_processes_started_meanwhile_hold_signals_back() -> None:
    """A child that is signaled while it starts survives, drops the signal, and gets the next one."""
    code = (
        "import sys; sys.stdin.readline(); from numapin.rank import become; become.accept(); "
        "print('on', flush=True); input()"
    )
    with signals.kept_from_children():
        process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    with process:
        process.send_signal(signal.SIGUSR1)
        say(process)
        assert line(process) == "on"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(300) == -signal.SIGUSR1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(signals.FORWARDED)
