"""The live screen of `numapin top`. Edge.

Comes in: one `Top` after another. Goes out: frames on a terminal until q, Ctrl-C or the end of the job; then the last
figures stay on the normal screen.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Final

from numapin.base.stderr import say
from numapin.cli.full_screen import END_OF_INPUT, FullScreen
from numapin.cli.output import show
from numapin.errors import NumapinError, UsageError
from numapin.observe.history import History

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from numapin.observe.top import Top
    from numapin.view.top_screen import TopScreen
    from numapin.view.top_view import TopView

ONCE: Final = "numapin top --once"
_FIRST_S: Final = 0.3  # until the first frame
_QUIT: Final = ("q", "Q", END_OF_INPUT)


def terminal() -> Console:
    """Return stdout as a terminal whose lines can be redrawn. Raises UsageError if it is not."""
    from rich.console import Console

    if sys.stdout is None or not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal", f"type: {ONCE}")
    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_dumb_terminal:
        raise UsageError(f"TERM={os.environ['TERM']}: this terminal cannot redraw lines", f"type: {ONCE}")
    return console


def watch(console: Console, follow: Callable[[Callable[[], object]], Iterator[Top]], interval_s: float) -> None:
    """Show what `follow` yields until the job ends. Raises KeyboardInterrupt on q, and NumapinError or Stopped."""
    try:
        with FullScreen(console) as screen:
            frames = _Frames(console, screen, interval_s)
            for seen in follow(frames.wait):
                frames.show(seen)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise NumapinError("the terminal is gone", f"without a terminal, type: {ONCE}") from None
    frames.keep_last()
    say("the job ended")


class _Frames:
    """The frames, and the keys pressed between them."""

    def __init__(self, console: Console, screen: FullScreen, interval_s: float) -> None:
        from numapin.view.gauges import ASCII, BLOCKS
        from numapin.view.top_view import TopView

        self._glyphs = BLOCKS if console.encoding.lower().startswith("utf") else ASCII
        self._screen, self._interval_s, self._wait_s = screen, interval_s, min(_FIRST_S, interval_s)
        self._history, self._view = History(), TopView()
        self._now: TopScreen | None = None
        self._shown: TopScreen | None = None
        self._last_alive: TopScreen | None = None

    def show(self, seen: Top) -> None:
        """Show the job now, unless the screen is paused."""
        from numapin.view.top_screen import TopScreen

        self._history = self._history.added(seen)
        self._now = TopScreen(top=seen, history=self._history, view=self._view, glyphs=self._glyphs)
        if not seen.has_ended:
            self._last_alive = self._now
        if not self._view.is_paused:
            self._shown = self._now
        self._draw()

    def wait(self) -> None:
        """Wait until the next sample is due, and do what the keys ask for. Raises KeyboardInterrupt on q."""
        for key in self._screen.keys(self._wait_s):
            if key in _QUIT:
                raise KeyboardInterrupt
            self._press(key)
        self._wait_s = self._interval_s

    def _press(self, key: str) -> None:
        shown = self._shown
        rows = [] if shown is None else [rank.plan.local_rank for rank in shown.rows]
        self._view = self._view.pressed(key, rows)
        if not self._view.is_paused:
            self._shown = self._now
        self._draw()

    def _draw(self) -> None:
        from numapin.view.visible import visible

        if self._shown is None:
            return
        self._shown = _with_view(self._shown, self._view)
        width, height = self._screen.size
        lines = self._shown.lines(width=width, height=height)
        for line in lines:
            visible(line)
        self._screen.draw(lines)

    def keep_last(self) -> None:
        """Print the last figures of a job that has ended."""
        from rich.console import Group

        last = self._last_alive or self._now
        if last is not None:
            show(Group(*last.final(width=self._screen.size[0])))


def _with_view(screen: TopScreen, view: TopView) -> TopScreen:
    from dataclasses import replace

    return screen if screen.view == view else replace(screen, view=view)
