"""How a measuring process talks with the harness. Edge.

Comes in, on stdin: a spec as a line of JSON, a byte for "measure now", then a byte before the next spec, or the end of
the file. Goes out: JSON lines on what was stdout: {"state": "warm"}, then {"figures": …, "details": …}, or
{"skipped": …} or {"failed": …}. What anything else prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import select
from math import isfinite
from typing import TYPE_CHECKING, Any

from numapin.base.strict_json import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Harness:
    """The measuring process's view of the harness."""

    def __init__(self) -> None:
        """Keep stdout for this talk alone."""
        self._out = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)

    def next_spec(self) -> dict[str, Any] | None:
        """Wait for what to measure; None is the end."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(_STDIN, 1)  # no more than the line: what follows is for others to read
            if not byte:
                return None
            line += byte
        spec: dict[str, Any] = json.loads(line)
        return spec

    def wait_for_start(self, idle: Callable[[], object]) -> None:
        """Say that all is warm, and go on calling `idle` until the harness has heard so from every process."""
        self._tell({"state": "warm"})
        self._until_told(idle)

    def report(
        self, figures: Mapping[str, float], *, details: Mapping[str, object], idle: Callable[[], object]
    ) -> None:
        """Hand the figures over, and go on calling `idle`, so that slower processes measure under the same load."""
        if odd := [name for name, figure in figures.items() if not isfinite(figure)]:
            msg = f"{odd[0]} is {figures[odd[0]]}, which is not a figure"
            raise ValueError(msg)
        self._tell({"figures": dict(figures), "details": dict(details)})
        self._until_told(idle)

    def skip(self, why: str) -> None:
        """Say why this cannot be measured here."""
        self._tell({"skipped": why})

    def fail(self, error: BaseException) -> None:
        """Say what went wrong, at once: threads that the peer left behind may keep this process from ending."""
        self._tell({"failed": f"{type(error).__name__}: {error}"})

    def _tell(self, content: Mapping[str, object]) -> None:
        os.write(self._out, encode(content, indent=None, default=str).encode() + b"\n")

    def _until_told(self, idle: Callable[[], object]) -> None:
        while not select.select([_STDIN], [], [], 0)[0]:
            idle()
        os.read(_STDIN, 1)


def serve(measure: Callable[[dict[str, Any], Harness], None]) -> None:
    """Measure what the harness asks for. A library that is not installed is a reason to skip."""
    harness = Harness()
    while (spec := harness.next_spec()) is not None:
        try:
            measure(spec, harness)
        except ModuleNotFoundError as error:
            harness.skip(f"{error.name} is not installed")
        except BaseException as error:
            harness.fail(error)
            raise
