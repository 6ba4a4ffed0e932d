"""Take over a terminal, draw lines on it, read keys, and give it back as it was. Edge.

Comes in: lines, and keys that a person presses. Goes out: the lines on the terminal's other screen, and names of keys.
On any end the terminal gets its settings, its cursor and its former contents back; Ctrl-Z gives it back until `fg`.
Handlers of signals never write, because a signal may come in the middle of a write.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from numapin.errors import Stopped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType
    from typing import Self

    from rich.console import Console
    from rich.text import Text

RESIZED: Final = "resized"
END_OF_INPUT: Final = "end of input"
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, cursor off, clear
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_REDRAWING: Final = (signal.SIGWINCH, signal.SIGTSTP)
_HELD: Final = {*_ENDING, signal.SIGINT, signal.SIGTSTP}
_GOES_ON: Final = "the job goes on"
_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
}
_KEY: Final = re.compile(rb"\x1b(?:[\[O][0-9;]*[A-Za-z~])?|[^\x1b]", re.DOTALL)


class FullScreen:
    """A terminal that this process has for itself, as a context.

    SIGTERM, SIGHUP and SIGQUIT end the context with `Stopped`. Without a keyboard, no keys are read.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._has_keys = sys.stdin is not None and sys.stdin.isatty()
        self._settings: list[Any] = []
        self._drawn: list[Text | None] = []
        self._keys: list[str] = []
        self._former: dict[signal.Signals, Any] = {}
        self._wake, self._woken = -1, -1

    @property
    def size(self) -> tuple[int, int]:
        """The columns and rows of the terminal."""
        return self._console.size

    def __enter__(self) -> Self:
        """Take the terminal over."""
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with _held_signals():
            for number in (*_ENDING, *_REDRAWING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._signaled)
            signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            self._take()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back. Raises OSError if it is gone."""
        with _held_signals():
            signal.set_wakeup_fd(-1)
            while self._former:
                signal.signal(*self._former.popitem())
            os.close(self._wake)
            os.close(self._woken)
            self._give_back()

    def draw(self, lines: Sequence[Text]) -> None:
        """Draw the lines that differ from those on the screen. They must fit; see `visible` for their characters."""
        before = self._drawn + [None] * (len(lines) - len(self._drawn))
        changed = ((row, line) for row, line in enumerate(lines) if not _is_same(line, before[row]))
        output = "".join(f"\x1b[{row + 1};1H\x1b[2K{self._rendered(line)}" for row, line in changed)
        if len(lines) < len(self._drawn):
            output += f"\x1b[{len(lines) + 1};1H\x1b[J"
        self._drawn = [*lines]
        _write(output)

    def key(self, wait_s: float) -> str | None:
        """Return the next key, RESIZED, or END_OF_INPUT; None if this time passes without one."""
        if self._keys:
            return self._keys.pop(0)
        sources = [self._woken, sys.stdin.fileno()] if self._has_keys else [self._woken]
        ready = select.select(sources, [], [], max(wait_s, 0.0))[0]
        if self._woken in ready:
            self._wake_up(signals=os.read(self._woken, 4096))
            return RESIZED
        if not ready:
            return None
        typed = os.read(sys.stdin.fileno(), 256)
        if not typed:
            return END_OF_INPUT
        self._keys = [_NAMES.get(key, key.decode("latin-1")) for key in _KEY.findall(typed)]
        return self._keys.pop(0)

    def keys(self, wait_s: float) -> Iterator[str]:
        """Yield the keys that are pressed within this time."""
        end_s = time.monotonic() + wait_s
        while (key := self.key(end_s - time.monotonic())) is not None:
            yield key

    def _rendered(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="crop", soft_wrap=True)
        return captured.get()

    def _wake_up(self, signals: bytes) -> None:
        """Do what the signals with these numbers ask for, and clear the screen."""
        if signal.SIGTSTP in signals:
            self._suspend()
        self._measure()
        self._drawn = []
        _write("\x1b[2J")

    def _suspend(self) -> None:
        """Give the terminal back and stop until `fg`.

        The kernel ignores SIGTSTP in an orphaned process group (ssh -t, kubectl exec), where no shell could continue
        this process. SIGSTOP would stop it for good.
        """
        with _held_signals():
            self._give_back()
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})  # stops here
            signal.signal(signal.SIGTSTP, handler)
            self._take()

    def _measure(self) -> None:
        """Read the size of the terminal: rich prefers COLUMNS and LINES, which do not follow the window."""
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        known = self._console.size
        self._console.size = known._replace(width=columns or known.width, height=rows or known.height)

    def _take(self) -> None:
        if self._has_keys:
            import termios
            import tty

            self._settings = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        self._measure()
        self._drawn = []
        _write(_ENTER)

    def _give_back(self) -> None:
        if self._has_keys:
            import termios

            with suppress(termios.error):  # the terminal is gone, which the next line reports
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)
        _write(_LEAVE)

    @staticmethod
    def _signaled(number: int, _frame: FrameType | None) -> None:
        """End the context, or let `key` find the signal in its pipe."""
        if number in _ENDING:
            _end(number, _frame)


def _is_same(line: Text, drawn: Text | None) -> bool:
    """Return whether a line is on the screen already; rich compares the texts and the styles of their parts."""
    return drawn is not None and line == drawn and line.style == drawn.style


def _write(text: str) -> None:
    """Write control sequences and rendered lines, all at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the block with `Stopped` on SIGTERM, SIGHUP or SIGQUIT, unless the parent process ignores the signal."""
    watched = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, _end) for number in watched}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number), _GOES_ON)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Hold back signals, so that the terminal is taken or given back as a whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
