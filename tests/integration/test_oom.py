"""Ranks that exhaust a cgroup's memory: the report says that memory was the cause."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.failing import MEMORY_BYTES, limited_cgroup
from tests.integration.launching import NUMAPIN, Done, environment, script
from tests.needs import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EATS = f"bytearray(b'x') * {2 * MEMORY_BYTES}"
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


@pytest.fixture(scope="module")
def cgroup() -> Iterator[Path]:
    """Give a memory cgroup with a limit."""
    with limited_cgroup() as folder:
        if folder is None:
            pytest.skip("no memory cgroup can be made below /sys/fs/cgroup")
        yield folder


def _call_in(cgroup: Path, *command: str) -> Done:
    """Run a command in a cgroup, without swap."""
    into = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", into, "sh", *command], capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    return Done(status=done.returncode, out=done.stdout, err=done.stderr)


@needs_root
def test_run_names_memory(cgroup: Path, tmp_path: Path) -> None:
    """The block of `numapin run` has the cgroup of the rank that the kernel killed, and the limit."""
    done = _call_in(cgroup, *NUMAPIN, "run", "--quiet", "--nproc-per-node", "1", script(tmp_path, EATS))
    assert done.status == 1, done.err
    told = " ".join(done.err.split())
    said = f"likely killed by the kernel's out-of-memory killer: cgroup {cgroup}, {cgroup}/memory."
    assert said in told
    assert " is 768.0 MiB next give the job more memory" in told


@needs_root
def test_spawn_names_memory(cgroup: Path, tmp_path: Path) -> None:
    """The RankError of numapin.spawn names the cgroup and the limit, too."""
    done = _call_in(cgroup, sys.executable, script(tmp_path, SPAWNS))
    assert done.status == 0, done.err
    assert f"was killed by SIGKILL: killed by the kernel's out-of-memory killer: cgroup {cgroup}, " in done.out
    assert " is 768.0 MiB\n  hint: give the job more memory" in done.out
