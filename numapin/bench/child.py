"""The measuring process's end of the protocol with the harness.

Other output to stdout goes to stderr.
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
    """The connection of a measuring process to the harness."""

    def __init__(self) -> None:
        """Reserve stdout for the protocol."""
        self._out = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)

    def next_spec(self) -> dict[str, Any] | None:
        """Wait for the next spec; return None at the end."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(_STDIN, 1)  # one byte at a time: what follows the line is for _wait
            if not byte:
                return None
            line += byte
        spec: dict[str, Any] = json.loads(line)
        return spec

    def wait_for_start(self, idle: Callable[[], object]) -> None:
        """Report that this process is warm, and call `idle` until every process is."""
        self._write({"state": "warm"})
        self._wait(idle)

    def report(
        self, figures: Mapping[str, float], *, details: Mapping[str, object], idle: Callable[[], object]
    ) -> None:
        """Report the figures, and keep calling `idle`, so that slower processes measure under the same load."""
        odd = [name for name, figure in figures.items() if not isfinite(figure)]
        if odd:
            msg = f"{odd[0]} is {figures[odd[0]]}, not a finite number"
            raise ValueError(msg)
        self._write({"figures": dict(figures), "details": dict(details)})
        self._wait(idle)

    def fail(self, error: BaseException) -> None:
        """Report an error at once: threads that the peer left behind may keep this process from exiting."""
        self._write({"failed": f"{type(error).__name__}: {error}"})

    def _write(self, content: Mapping[str, object]) -> None:
        os.write(self._out, encode(content, indent=None, default=str).encode() + b"\n")

    def _wait(self, idle: Callable[[], object]) -> None:
        while not select.select([_STDIN], [], [], 0)[0]:
            idle()
        os.read(_STDIN, 1)


def serve(measure: Callable[[dict[str, Any], Harness], None]) -> None:
    """Measure each spec that the harness sends."""
    harness = Harness()
    while (spec := harness.next_spec()) is not None:
        try:
            measure(spec, harness)
        except BaseException as error:
            harness.fail(error)
            raise
