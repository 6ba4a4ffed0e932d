"""`--cores-for` in run, exec, plan and spawn: the program's main thread, its environment, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

import numapin as package
from numapin.base.cpu_set import CpuSet
from numapin.rank.roles import ROLES
from tests.integration.launching import NUMAPIN, call, numapin, script

if TYPE_CHECKING:
    from pathlib import Path

CPUS = sorted(os.sched_getaffinity(0))
OTHER = CPUS[-1]
DUMP = f"""
import json, os
roles = os.environ.get({ROLES!r})
hooks = os.environ.get("PYTHONPATH", "").count("rolehook")
print(json.dumps({{"RANK": os.environ.get("RANK", "0"), "cpus": sorted(os.sched_getaffinity(0)), "roles": roles,
    "hooks": hooks, "threads": os.environ["OMP_NUM_THREADS"]}}))
"""
MAINS = CPUS[:-1]
MAIN_TEXT = str(CpuSet(MAINS))

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def _one_core_each() -> bool:
    """Return whether each CPU of this machine is a core: the sets of CPUs below are for such machines."""
    cores = json.loads(call(*NUMAPIN, "topo", "--json").out)["cores"]
    return all(core["cpus"].isdecimal() for core in cores)


@pytest.fixture(scope="module", autouse=True)
def _simple_cores() -> None:
    if not _one_core_each():
        pytest.skip("needs a machine without hardware threads")


def _last_json(out: str) -> dict[str, object]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_run(tmp_path: Path) -> None:
    """The program starts on the main thread's CPUs, with the optimizer's threads and the hook; roles are shown."""
    done = numapin("run", "--nproc-per-node", "1", "--cores-for", "optimizer=1", script(tmp_path, DUMP))
    roles = f"main={MAIN_TEXT} optimizer={OTHER}"
    assert _last_json(done.out) == {"RANK": "0", "cpus": MAINS, "roles": roles, "hooks": 1, "threads": "2"}
    assert f"optimizer {OTHER}" in done.err
    assert "warning" not in done.err


def test_exec_and_exec_in_a_rank(tmp_path: Path) -> None:
    """`exec` does as `run`; inside a rank it keeps what the rank was given; a rank of other options replaces it."""
    program = (sys.executable, script(tmp_path, DUMP))
    alone = ("exec", "--local-rank", "0", "--local-size", "1", "--cores-for", "loader=1", "--strict", "--")
    found = numapin(*alone, *program)
    assert (found.status, found.err) == (0, "")
    assert _last_json(found.out)["roles"] == f"main={MAIN_TEXT} loader={OTHER}"
    inner = (*NUMAPIN, "exec", "--strict", "--", *program)
    nested = numapin("run", "--quiet", "--nproc-per-node", "1", "--cores-for", "loader=1", "--no-python", *inner)
    assert (nested.status, "warning" in nested.err) == (0, False)
    assert _last_json(nested.out) == _last_json(found.out)
    other = (*NUMAPIN, "exec", "--bind", "none", "--", *program)
    without = numapin("run", "--quiet", "--nproc-per-node", "1", "--cores-for", "loader=1", "--no-python", *other)
    assert (_last_json(without.out)["roles"], _last_json(without.out)["hooks"]) == (None, 0)


def test_what_cannot_be_done(tmp_path: Path) -> None:
    """Too many cores end the command before a rank starts; what reaches no thread is a warning, or status 5."""
    path = script(tmp_path, DUMP)
    run = ("run", "--quiet", "--nproc-per-node", "1", "--cores-for")
    many = numapin(*run, f"loader={len(CPUS)}", path)
    assert (many.status, many.out, many.err.count("leaves no core for the main thread")) == (4, "", 1)
    wrong = numapin(*run, "loader=1,loader=1", path)
    assert (wrong.status, wrong.out, wrong.err.count("loader is given twice")) == (2, "", 1)
    bound = numapin(*run, "optimizer=1", path, OMP_PROC_BIND="true")
    assert (_last_json(bound.out)["cpus"], bound.err.count("warning: rank 0: --cores-for")) == (CPUS, 1)
    assert numapin(*run, "optimizer=1", "--strict", path, OMP_PROC_BIND="true").status == 5
    isolated = ("--no-python", sys.executable, "-I", path)
    alone = numapin(*run, "loader=1", *isolated)
    assert (alone.status, alone.err.count("warning: --cores-for reaches the main thread")) == (0, 1)
    assert numapin(*run, "loader=1", "--strict", *isolated).status == 5
    task = ("exec", "--local-rank", "0", "--local-size", "1", "--cores-for", "loader=1")
    entered = numapin(*task, "--", *isolated[1:])
    assert (entered.status, entered.err.count("warning: --cores-for reaches the main thread")) == (0, 1)
    assert numapin(*task, "--strict", "--", *isolated[1:]).status == 5


def test_plan() -> None:
    """The table has a line for each role, the shell lines a variable, JSON both."""
    options = ("plan", "--machine", "example:dgx-a100", "--bind", "exclusive", "--cores-for", "loader=2,optimizer=4")
    table = numapin(*options).out.splitlines()
    assert [line.strip() for line in table[2:5]] == [
        "main 48-49,176-177",
        "optimizer 50-53,178-181",
        "loader 54-55,182-183",
    ]
    line = numapin(*options, "--format", "env").out.splitlines()[0]
    words = "NUMAPIN_CPUS_MAIN=48-49,176-177 NUMAPIN_CPUS_OPTIMIZER=50-53,178-181 NUMAPIN_CPUS_LOADER=54-55,182-183"
    assert words in line
    assert "OMP_NUM_THREADS=5" in line
    rank = json.loads(numapin(*options, "--json").out)["ranks"][0]
    assert rank["roles"] == {"main": "48-49,176-177", "loader": "54-55,182-183", "optimizer": "50-53,178-181"}


def _own_cpus() -> tuple[list[int], str | None]:
    return sorted(os.sched_getaffinity(0)), os.environ.get(ROLES)


def test_spawn() -> None:
    """`numapin.spawn` takes the same text, and refuses the same mistakes."""
    (found,) = package.spawn(_own_cpus, num_ranks=1, cores_for="loader=1")
    assert found == (MAINS, f"main={MAIN_TEXT} loader={OTHER}")
    with pytest.raises(package.UsageError, match="cores_for: loader=0"):
        package.spawn(_own_cpus, num_ranks=1, cores_for="loader=0")
