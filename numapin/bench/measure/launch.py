"""The process of `bench launch`: run a launcher on a small script. Edge.

Comes in: specs (see `launch.launch_benchmark`) from the harness. Goes out: `total_s` from start to exit of the
launcher, `first_s` and `last_s` to the first line of the first and the last rank, and `rss_mb`, the largest resident
set of the launcher and its ranks (ru_maxrss of wait4): the launcher's, if the script only prints.

Modules come as cached bytecode, as installed packages have it: the first run of each launcher, which is not measured,
writes what is missing, even if PYTHONDONTWRITEBYTECODE is set here.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from numapin.bench.child import serve
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.bench.child import Harness


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Run one launcher, after a first run that fills the page cache."""
    launcher = tuple(spec["command"])
    _warm_up(launcher, spec["script"])
    harness.wait_for_start(lambda: time.sleep(0.001))
    harness.report(_run_script(launcher, spec["script"]), details={}, idle=lambda: time.sleep(0.001))


@cache
def _warm_up(launcher: tuple[str, ...], script: str) -> None:
    _run_script(launcher, script)


def _run_script(launcher: tuple[str, ...], script: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script, encoding="utf-8")
        return run((*launcher, str(path)))


def run(command: Sequence[str]) -> dict[str, float]:
    """Run a launcher and return its figures. Raises NumapinError if it fails or no rank prints."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        end = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        marks = [float(line.split()[1]) for line in _lines(out) if line.startswith("MARK ")]
        last = _last_line(errors)
    if process.returncode or not marks:
        raise NumapinError(f"{' '.join(command)} exited with status {process.returncode}: {last}")
    first_s, last_s = min(marks) - start, max(marks) - start
    return {"total_s": end - start, "first_s": first_s, "last_s": last_s, "rss_mb": usage.ru_maxrss / 1024}


def _last_line(errors: IO[str]) -> str:
    return next((line for line in reversed(_lines(errors)) if line.strip()), "nothing on stderr")


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().splitlines()


if __name__ == "__main__":
    serve(measure)
