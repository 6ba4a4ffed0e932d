"""Hints of errors: each can be followed where it is shown."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

from numapin.errors import PlanError, UsageError
from tests.unit.cli import seam
from tests.unit.cli.seam import numapin as commands


def _error(*words: str) -> UsageError:
    """Return the error with which a command ends, in this process."""
    with pytest.raises(UsageError) as caught:
        commands.main(list(words), standalone_mode=False)
    return caught.value


def test_a_number_of_gpus_for_children() -> None:
    """`exec --children` takes no --nproc-per-node, so the hint for --gpus 900 does not name it."""
    error = _error("exec", "--children", "--gpus", "900", "--", "true")
    assert "no GPU matches '900'" in error.message
    assert "--nproc-per-node" not in error.hint


@pytest.mark.parametrize(("line", "hint"), [(("--pid", "7"), "pgrep -af"), ((), "the active run")])
def test_a_job_that_ends_while_verify_reads_it(
    line: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that were given by their ids need not be of a run, so the hint is how to list processes."""
    verify = seam.verify
    monkeypatch.setattr(verify, "find_job", lambda *_, **__: SimpleNamespace(name="x", pids={}, gone=frozenset()))
    monkeypatch.setattr(verify, "verify_running", lambda _: SimpleNamespace(ranks=()))
    error = _error("verify", *line)
    assert error.message == "x: the job ended while it was read"
    assert hint in error.hint


def test_too_few_cores_for_ranks_that_run_already() -> None:
    """The number of ranks of a running job cannot be chosen, so the hint of `attach` does not name it."""
    too_many = len(os.sched_getaffinity(0)) + 1
    environ = {**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(too_many)}
    with subprocess.Popen(("cat",), stdin=subprocess.PIPE, env=environ) as rank:
        with pytest.raises(PlanError, match=f"too few exclusive cores for {too_many} ranks") as caught:
            commands.main(["attach", "--bind", "exclusive", "--pid", str(rank.pid)], standalone_mode=False)
        rank.communicate()
    assert caught.value.hint == "reserve fewer CPUs (--reserve-cpus), or share them: --bind node"
