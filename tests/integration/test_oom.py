"""Ranks that exhaust a cgroup's memory: the report says that memory was the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import NUMAPIN, Done, environment, script
from tests.needs import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_BYTES = 768 << 20
EATS = f"bytearray(b'x') * {2 * LIMIT_BYTES}"
SPAWNS = f"""
import numapin
def eat():
    return len({EATS})
if __name__ == "__main__":
    try:
        numapin.spawn(eat)
    except numapin.RankError as error:
        print(error)
"""


def _made() -> Path | None:
    """Make a memory cgroup with a limit, of either version; return None if that is not possible here."""
    name = f"numapin-test-{os.getpid()}"
    for base, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(base, name)
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                (folder / limit).write_text(str(LIMIT_BYTES))
                return folder
        with suppress(OSError):
            folder.rmdir()
    return None


@pytest.fixture(scope="module")
def cgroup() -> Iterator[Path]:
    """Give a memory cgroup with a limit."""
    folder = _made()
    if folder is None:
        pytest.skip("no memory cgroup can be made below /sys/fs/cgroup")
    yield folder
    folder.rmdir()


def _call_in(cgroup: Path, *command: str) -> Done:
    """Run a command in a cgroup, without swap."""
    into = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", into, "sh", *command], capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    return Done(status=done.returncode, out=done.stdout, err=done.stderr)


@needs_root
def test_run_names_memory(cgroup: Path, tmp_path: Path) -> None:
    """`numapin run` prints one line with the rank that the kernel killed, the cgroup and the limit."""
    done = _call_in(cgroup, *NUMAPIN, "run", "--quiet", "--nproc-per-node", "1", script(tmp_path, EATS))
    assert done.status == 1, done.err
    said = f"numapin: rank 0 killed by the kernel's out-of-memory killer: cgroup {cgroup}, {cgroup}/memory."
    (line,) = [line for line in done.err.splitlines() if line.startswith(said)]
    assert " is 768.0 MiB; hint: give the job more memory" in line


@needs_root
def test_spawn_names_memory(cgroup: Path, tmp_path: Path) -> None:
    """The RankError of numapin.spawn names the cgroup and the limit, too."""
    done = _call_in(cgroup, sys.executable, script(tmp_path, SPAWNS))
    assert done.status == 0, done.err
    assert f"was killed by SIGKILL: killed by the kernel's out-of-memory killer: cgroup {cgroup}, " in done.out
    assert " is 768.0 MiB\n  hint: give the job more memory" in done.out
