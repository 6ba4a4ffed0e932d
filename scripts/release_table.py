"""The table of the trials of `make release`. Comes in: their results. Goes out: docs/tested.md and the raw output."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

PAGE: Final = "docs/tested.md"
RAW: Final = "docs/results/release-tests.txt"
FILES: Final = {"x86_64": "wheel for x86-64", "aarch64": "wheel for aarch64", "pure": "pure wheel", "sdist": "sdist"}
HEAD: Final = """# Tested with

`make release` wrote this page on {date}, on {system}: do not edit it.

It builds the files of a release, installs them into new environments with pip, and runs tests of the sdist against what
was installed: those contract, unit and torchrun parity tests that depend on the versions of Python and torch (all of
them with `make trials TRIALS=--all`); without torch, those of what works without it. The raw output is in
[release-tests.txt](results/release-tests.txt).

| Python | torch | installed from | result | passed | skipped | time |
|---|---|---|---|---|---|---|
"""
TAIL: Final = """
"On a second try": tests with a bound on time may fail while the machine is busy. They then run once more, alone.
"Not tried" means that the machine of this run did not have it; it says nothing about whether it works.

The wheel for aarch64 is checked by auditwheel, and its compiled part runs in QEMU. The whole wheel has never been
installed on such a machine ([Releasing](../CONTRIBUTING.md#releasing)).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of tests; `retried` are those that passed when they ran once more."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a trial.

    Attributes:
        name: The trial's.
        python: Its version, or what was looked for.
        torch: Its version, or what was looked for, or "none".
        kind: What was installed.
        files: The hash of the files.
        why: Why it was not tried.
        output: The end of pytest's output.
        seconds: How long it took.
        counts: How many tests passed.
    """

    name: str
    python: str
    torch: str
    kind: str
    files: str = ""
    why: str = ""
    output: str = ""
    seconds: float = 0
    counts: Counts = Counts()

    @classmethod
    def not_run(cls, name: str, python: str, torch: str | None, kind: str) -> Result:
        """Return the result of a trial that was not asked for."""
        return cls(name=name, python=python, torch=torch or "none", kind=kind, why="left out of this run")

    @property
    def outcome(self) -> str:
        """The result in words."""
        if self.why:
            return f"not tried: {self.why}"
        if self.counts.failed:
            return f"{self.counts.failed} failed"
        return "passed" if not self.counts.retried else f"passed, {self.counts.retried} on a second try"


def write_table(results: list[Result], root: Path) -> None:
    """Write the page and the raw output."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    system = f"Linux {platform.release().partition('-')[0]} on {platform.machine()}"
    rows = "".join(map(_row, results))
    (root / PAGE).write_text(HEAD.format(date=date, system=system) + rows + TAIL)
    raw = "".join(f"== {result.name}: {result.outcome}\n{result.output}\n\n" for result in results)
    (root / RAW).write_text(
        f"make release, {date}, {system}\nsha256 of the pure wheel and the tests: {results[0].files}\n\n{raw}".rstrip()
        + "\n"
    )


def _row(result: Result) -> str:
    counts = (
        ("", "", "")
        if result.why
        else (f"{result.counts.passed:,}", f"{result.counts.skipped}", f"{result.seconds:.0f} s")
    )
    cells = (result.python, result.torch, FILES[result.kind], result.outcome.replace("|", "/"), *counts)
    return f"| {' | '.join(cells)} |\n"
