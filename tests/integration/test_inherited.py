"""What launchers inherit and change: the limit on open files, and variables of the rank that started or submitted them.

Real launchers and ranks; a rank prints its limit and its environment.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from tests.integration.launching import NUMAPIN, Done, call, numapin, script

STALE = {
    "NUMAPIN_BINDING": '{"local_rank": 3, "num_threads": 5}',
    "TORCHELASTIC_RUN_ID": "outer",
    "OMP_NUM_THREADS": "5",
    "NUMAPIN_NIC_ENV": "UCX_NET_DEVICES",
    "UCX_NET_DEVICES": "mlx5_6:1",
    "TORCHELASTIC_TIMER_FILE": "/gone",
    "NUMAPIN_RUN_DIR": "/gone/run",
}
"""A part of the environment of a job that a rank of another host has submitted."""


@pytest.fixture
def shown(tmp_path: Path) -> str:
    text = "import json, os, resource; files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
    return script(tmp_path, f"{text}print(json.dumps(dict(os.environ, files=str(files))))\n")


def started(shown: str, *program: str, limits: str) -> list[Done]:
    """Have `run` and `exec` start the program under limits on open files."""
    limited = ("bash", "-c", f'{limits} && exec "$@"', "bash", *program)
    rank = ("--local-rank", "0", "--local-size", "1", "--", sys.executable)
    return [
        call(*limited, "run", "--verbose", "--nproc-per-node=1", shown),
        call(*limited, "exec", "--verbose", *rank, shown),
    ]


MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
ENOUGH = 65536 if MOST == resource.RLIM_INFINITY else min(MOST, 65536)


@pytest.mark.parametrize(
    ("soft", "hard", "files"), [(200, "1000", 1000), (200, "hard", ENOUGH), (ENOUGH, "hard", ENOUGH)]
)
def test_ranks_may_open_more_files(soft: int, hard: str, files: int, shown: str) -> None:
    """Below `run` and `exec`, the limit is 65536 or the hard limit; one that is no lower stays. --verbose says why."""
    for done in started(shown, *NUMAPIN, limits=f"ulimit -S -n {soft} && ulimit -H -n {hard}"):
        assert done.status == 0, done.err
        assert json.loads(done.out)["files"] == str(files)
        said = f"open files: the limit is raised from {soft} to {files}, because each DataLoader worker holds several"
        assert (said in done.err) == (files != soft), done.err


def test_a_limit_that_the_kernel_refuses_to_change(shown: str) -> None:
    """It stays, and the program starts. So it is where the hard limit is above fs.nr_open."""
    text = """
import resource, runpy

set_limit = resource.setrlimit

def refuse(kind, limits):
    if kind == resource.RLIMIT_NOFILE:
        raise ValueError("not allowed to raise maximum limit")
    set_limit(kind, limits)

resource.setrlimit = refuse
runpy.run_module("numapin", run_name="__main__", alter_sys=True)
"""
    for done in started(shown, sys.executable, "-c", text, limits="ulimit -S -n 200"):
        assert done.status == 0, done.err
        assert json.loads(done.out)["files"] == "200"


def below(shown: str, given: dict[str, str]) -> tuple[dict[str, str], str]:
    """Return the environment of a rank below an outer rank's environment, and what was said."""
    done = numapin("run", "--verbose", "--nproc-per-node=1", shown, cwd=None, **given)
    assert done.status == 0, done.err
    return json.loads(done.out), done.err


def test_an_outer_ranks_variables_are_forgotten(shown: str) -> None:
    """Its threads, NICs, timers and folder are not the new ranks'. --verbose names the variables."""
    found, err = below(shown, STALE)
    assert not found.keys() & {"UCX_NET_DEVICES", "NUMAPIN_NIC_ENV", "TORCHELASTIC_TIMER_FILE"}
    assert json.loads(found["NUMAPIN_BINDING"])["local_rank"] == 0
    assert found["OMP_NUM_THREADS"] == str(json.loads(found["NUMAPIN_BINDING"])["num_threads"])
    assert not found["NUMAPIN_RUN_DIR"].startswith("/gone")
    names = "TORCHELASTIC_TIMER_FILE, UCX_NET_DEVICES, NUMAPIN_NIC_ENV, OMP_NUM_THREADS, NUMAPIN_RUN_DIR"
    assert f"unset, because an outer rank's launcher has set them: {names}" in err


@pytest.mark.parametrize(
    "changes",
    [
        {"OMP_NUM_THREADS": "7"},  # not the number that numapin has set: the user's
        {"OMP_NUM_THREADS": "7", "NUMAPIN_BINDING": "not JSON"},
        {"OMP_NUM_THREADS": "3"},
    ],
)
def test_what_the_user_has_set_stays(changes: dict[str, str], shown: str, tmp_path: Path) -> None:
    """A number of threads that the outer launcher has not set, an existing folder, and NICs of the user stay."""
    given = {**STALE, "NUMAPIN_NIC_ENV": "", "NUMAPIN_RUN_DIR": str(tmp_path / "runs"), **changes}
    (tmp_path / "runs").mkdir()
    found, _ = below(shown, given)
    assert (found["OMP_NUM_THREADS"], found["UCX_NET_DEVICES"]) == (changes["OMP_NUM_THREADS"], "mlx5_6:1")
    assert found["NUMAPIN_RUN_DIR"].startswith(str(tmp_path / "runs"))


def test_outside_of_a_rank_nothing_is_forgotten(shown: str, tmp_path: Path) -> None:
    """The same variables are the user's if no launcher has left its own beside them; torchrun's 1 thread is not."""
    given = {"OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": "mlx5_6:1", "NUMAPIN_RUN_DIR": str(tmp_path / "runs")}
    found, _ = below(shown, given)
    assert given.items() <= {**found, "NUMAPIN_RUN_DIR": str(Path(found["NUMAPIN_RUN_DIR"]).parent)}.items()
    given |= {"TORCHELASTIC_RUN_ID": "outer"}
    assert "has set them: OMP_NUM_THREADS" in below(shown, given)[1]
    found, _ = below(shown, given | {"LOCAL_WORLD_SIZE": "1", "NUMAPIN_NIC_ENV": "PATH:HOME"})
    assert found["OMP_NUM_THREADS"] == "1", "torchrun sets none for one rank"
    assert found.keys() >= {"PATH", "HOME"}, "not the variables of NICs"
