"""Small files that claim much: every reader answers soon and in little memory, with a result or an error of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests import hostile

ROOT: Final = Path(__file__).parents[2]
MOST_MB: Final = 500
ADDRESS_SPACE: Final = 2 << 30  # what is never touched counts here, too: libraries, arenas of threads
ANSWERS: Final = ("result", "MachineError: ", "MachineFileError: ", "PlanError: ", "UsageError: ", "NumapinError: ")
SECONDS: Final = 20.0
"""The most CPU time of an answer. It takes 2 s at most on a quiet machine."""


SMALL, LARGE, LARGEST = 2_000_000, 3_000_000, 5_250_000
"""What cases aim at, and the largest that does not: the largest machine that is accepted."""
MOST_MB_OF_SMALL: Final = 200
ALLOWANCE: Final = 1.05  # some cases are a little larger than asked for


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_files_are_answered_soon(tmp_path: Path) -> None:
    """With every view of a machine and every reader of a plan, in little memory; the time is the processor's.

    Two processes share the cases, because what counts is each answer's CPU time. Each answer has a child of its own,
    with no more memory than ADDRESS_SPACE.
    """
    options = {"HOSTILE_BYTES": LARGE, "HOSTILE_SIZES": f"-1 {LARGEST}", "HOSTILE_ADDRESS_SPACE": ADDRESS_SPACE}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in options.items()}}
    folders = [tmp_path / "0", tmp_path / "1"]
    with ExitStack() as running:
        processes = []
        for part, at in enumerate(folders):
            at.mkdir()
            command = [sys.executable, "-m", "tests.hostile", str(at), *hostile.KINDS]
            with (at / "rows").open("w") as out, (at / "err").open("w") as err:  # files never wait for a reader
                given = {**environ, "HOSTILE_PART": f"{part} 2"}
                process = running.enter_context(subprocess.Popen(command, cwd=ROOT, env=given, stdout=out, stderr=err))
            running.callback(process.kill)  # if the test's time is up
            processes.append(process)
        statuses = [process.wait() for process in processes]
    assert statuses == [0, 0], [(at / "err").read_text()[-2000:] for at in folders]
    rows = [json.loads(line) for at in folders for line in (at / "rows").read_text().splitlines()]
    assert len(rows) > 200
    assert {row[0].split()[0] for row in rows} == {*hostile.KINDS}
    most = {row[0]: MOST_MB_OF_SMALL if row[4] <= ALLOWANCE * SMALL else MOST_MB for row in rows}
    assert [row for row in rows if row[3] >= most[row[0]] or not row[1].startswith(ANSWERS)] == []
    assert [row for row in rows if row[2] > SECONDS] == []
