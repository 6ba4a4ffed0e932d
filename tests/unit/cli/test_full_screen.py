"""A program that takes a terminal over: it stops and continues, follows the window, and leaves no traces."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l\x1b[2J", b"\x1b[?25h\x1b[?1049l"
PROGRAM = """
import io, os, signal, sys
from rich.console import Console
from rich.text import Text
from numapin.cli.full_screen import FullScreen
from numapin.errors import Stopped

class Interrupted(io.FileIO):
    "A terminal in whose third write SIGTSTP arrives."
    num_writes = 0
    def write(self, data):
        self.num_writes += 1
        if self.num_writes == 3:
            signal.raise_signal(signal.SIGTSTP)
        return super().write(data)

if "interrupted" in sys.argv:
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(Interrupted(1, "w", closefd=False)))
try:
    with FullScreen(Console(color_system=None)) as screen:
        key = "start"
        while key != "q":
            width, height = screen.size
            screen.draw([Text(f"{key} {width}x{height}".ljust(width, "."))])
            key = screen.key(30.0)
except Stopped as error:
    sys.exit(error.exit_code)
"""


class _Screen:
    """The program on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self.master, self.seen = process, master, b""

    def read_until(self, text: bytes) -> None:
        """Read the output until this text comes."""
        while text not in self.seen:
            assert select.select([self.master], [], [], 10)[0], self.seen
            self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(text)[2]

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def quit(self) -> int:
        """Press q; return the status."""
        os.write(self.master, b"q")
        return self.process.wait(10)


@contextmanager
def _program(
    *arguments: str, has_shell: bool = True, size: tuple[int, int] = (24, 80), **environ: str
) -> Iterator[_Screen]:
    """Run the program; without a shell, it is alone in its session, as a command of `ssh -t` is."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "TERM": "xterm", **environ},
        stdin=slave,
        stdout=slave,
        start_new_session=not has_shell,
        process_group=0 if has_shell else None,
    )
    os.close(slave)
    try:
        yield _Screen(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_it_stops_and_continues() -> None:
    """On Ctrl-Z the terminal is as before and the shell sees a stopped job; fg draws the screen again."""
    with _program() as screen:
        before = termios.tcgetattr(screen.master)
        screen.read_until(b"start 80x24")
        assert termios.tcgetattr(screen.master) != before
        screen.send(signal.SIGTSTP)
        stopped = os.waitid(os.P_PID, screen.process.pid, os.WSTOPPED)
        assert stopped is not None
        assert stopped.si_status == signal.SIGTSTP
        screen.read_until(LEAVE)
        assert termios.tcgetattr(screen.master) == before
        screen.send(signal.SIGCONT)
        screen.read_until(ENTER)
        screen.read_until(b"resized 80x24")
        screen.send(signal.SIGTSTP)  # again
        os.waitid(os.P_PID, screen.process.pid, os.WSTOPPED)
        screen.send(signal.SIGCONT)
        screen.read_until(b"resized 80x24")
        assert screen.quit() == 0
        assert termios.tcgetattr(screen.master) == before


def test_without_a_shell_it_goes_on() -> None:
    """Where no shell could continue it, Ctrl-Z only draws the screen again."""
    with _program(has_shell=False) as screen:
        screen.read_until(b"start 80x24")
        screen.send(signal.SIGTSTP)
        screen.read_until(b"resized 80x24")
        assert screen.quit() == 0


def test_a_signal_in_the_middle_of_a_write() -> None:
    """It waits until the write is done."""
    with _program("interrupted", has_shell=False) as screen:
        screen.read_until(b"start 80x24")
        os.write(screen.master, b"x")
        screen.read_until(b"resized 80x24")
        assert screen.quit() == 0


def test_quit_signal_restores_the_terminal() -> None:
    r"""Ctrl-\ ends it with status 131; the terminal has its settings and its cursor back."""
    with _program() as screen:
        before = termios.tcgetattr(screen.master)
        screen.read_until(b"start 80x24")
        screen.send(signal.SIGQUIT)
        assert screen.process.wait(10) == 128 + signal.SIGQUIT
        screen.read_until(LEAVE)
        assert termios.tcgetattr(screen.master) == before


def test_it_follows_the_window() -> None:
    """Exported sizes do not hide a new one; lines use its whole width."""
    with _program(COLUMNS="80", LINES="24") as screen:
        screen.read_until(b"start 80x24")
        fcntl.ioctl(screen.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        screen.send(signal.SIGWINCH)
        screen.read_until(b"resized 100x30".ljust(100, b"."))
        assert screen.quit() == 0


def test_a_terminal_without_a_size() -> None:
    """A terminal that reports 0 has the size of the environment."""
    with _program(size=(0, 0), COLUMNS="70", LINES="20") as screen:
        screen.read_until(b"start 70x20")
        assert screen.quit() == 0
