"""The process that a rank starts as: its imports, its program's environment, its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from numapin import Bind, Memory, Plan, RankPlan
from numapin.errors import NumapinError
from tests.unit.planned import PLANNED
from tests.unit.rank.seam import CpuSet, NicLibrary, exported, handover, shim

CPUS = CpuSet(os.sched_getaffinity(0))
RANK = replace(PLANNED, cpus=CPUS, nodes=CpuSet({0}), node=0, reason='all of "node 0", é\n')
NICS = replace(RANK, nics=("mlx5_3", "mlx5_1"), nic_env=tuple(NicLibrary))
RANKS = tuple(replace(NICS, local_rank=number, num_threads=number + 3) for number in range(12))
PLAN = Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=RANKS)
OWN = 1
BARE = "from __future__ import annotations; import ctypes, errno, gc, itertools, os"
"""The standard modules that a rank needs."""


def _modules(stderr: str) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}


def _python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-X", "importtime", "-c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environ})


def _started(plan: Plan, folder: Path) -> tuple[str, dict[str, str], str]:
    """Start rank OWN, whose program prints its environment; return its stderr, the environment, and its record."""
    environ = {"RANK": "13", "TORCHELASTIC_RESTART_COUNT": "2", "UCX_NET_DEVICES": "mlx5_9:1"}
    handover.hand_over(plan, str(folder), environ)
    environ[handover.SLICE] = handover.slice_text(plan.ranks[OWN])
    told = [f"--local-rank={OWN}", f"--launcher={os.getpid()}", f"--exec={sys.executable}"]
    done = _python(shim.CODE, *told, "-I", "-c", "import json, os; print(json.dumps(dict(os.environ)))", **environ)
    return done.stderr, json.loads(done.stdout), (folder / f"observed-{OWN}-2.json").read_text()


def test_a_rank_that_is_bound_as_planned(tmp_path: Path) -> None:
    """Before its program it loads os, ctypes and some modules of ours: no json, no dataclasses, no plan.

    The program finds its slice of the plan, and the variables of its NIC, which replace those that
    another rank's launcher set. The record has the request and the kernel's report, as JSON that json itself would
    write.
    """
    stderr, environ, text = _started(PLAN, tmp_path)
    bare, modules = _modules(_python(BARE).stderr), _modules(stderr)
    assert {"os", "ctypes"} < bare & modules
    ours = {name for name in modules if name.partition(".")[0] == "numapin"}
    assert modules - ours - bare == set()
    assert {".".join(name.split(".")[:2]) for name in ours} == {
        *("numapin", "numapin.base", "numapin.errors", "numapin.rank", "numapin.system")
    }
    costly = {"typing", "enum", "dataclasses", "json", "re", "contextlib", "functools", "collections", "inspect"}
    assert not bare & {*costly, "signal"}, "this Python loads them by itself: the assertions above hold nothing"

    own = RANKS[OWN]
    assert json.loads(environ["NUMAPIN_BINDING"]) == own.to_json()
    assert environ["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(own.num_threads))
    assert handover.SLICE not in environ
    assert exported(own).items() <= environ.items()
    assert environ["UCX_NET_DEVICES"] == environ["NVSHMEM_HCA_LIST"] == "mlx5_3:1"

    record = json.loads(text)
    assert text.isascii()
    assert {type(record.pop(name)) for name in ("start", "pid")} == {int}
    assert record == {
        "schema": "numapin.observed/1",
        "local_rank": OWN,
        "rank": 13,
        "restart": 2,
        "host": os.uname().nodename,
        "requested": own.to_json(),
        "applied": {"cpus": own.to_json()["cpus"], "memory": "preferred", "nodes": "0", "shortfalls": []},
    }


@pytest.mark.parametrize(
    "value",
    [None, 0, 1 << 63, "host-1", "", 'a"b', "a\\b", "a\nb", "é\x7f", [], ["a 'b'", 'c"'], {"a": None, "b": ["c"]}, {}],
)
def test_json_without_json(value: object) -> None:
    """Each value reads back as itself, including values that json has to write."""
    text = shim._json(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert text.isprintable()


@pytest.mark.parametrize(
    "rank",
    [
        replace(RANK, node=None, nodes=CpuSet(), memory=Memory.NONE, gpu=None),
        replace(NICS, cpus=CpuSet({0, 1, 2, 8}), nodes=CpuSet({0, 2}), within=CpuSet({0, 1, 8}), reason="{=}"),
    ],
)
def test_a_slice_has_what_binds_a_rank(rank: RankPlan) -> None:
    """A slice has everything that `bind.apply` needs of a RankPlan, and its whole JSON."""
    own = handover.RankSlice(handover.slice_text(rank))
    for name in set(handover.RankSlice.__slots__) - {"json", "nic_variables"}:
        assert getattr(own, name) == getattr(rank, name), name
    assert own.nic_variables == exported(rank)
    assert json.loads(own.json) == rank.to_json()


@pytest.mark.parametrize("text", ["", "0-3", "cpus=0-x nodes= memory=none within= node= num_threads=1 {}", "cpus=0 {}"])
def test_a_slice_that_is_not_ours(text: str) -> None:
    """A malformed variable is an error that names it."""
    with pytest.raises(NumapinError, match=r"NUMAPIN_SLICE is not what numapin writes: '"):
        handover.take_slice({"NUMAPIN_SLICE": text})


def test_a_rank_without_a_plan() -> None:
    """One line says so, and no program starts."""
    told = ["--local-rank=0", f"--launcher={os.getpid()}", f"--exec={sys.executable}", "-c", "print('on')"]
    command = [sys.executable, "-I", "-S", "-c", shim.CODE, *told]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"NUMAPIN_RUN_DIR": "/gone"})
    assert (done.returncode, done.stdout) == (1, "")
    said = "NUMAPIN_SLICE is not what numapin writes: ''; hint: start the run again"
    assert done.stderr == f"numapin: rank 0 does not start: {said}\n"


def test_a_rank_without_a_record(tmp_path: Path) -> None:
    """A run directory that cannot be written causes a message, and the job goes on."""
    (tmp_path / "file").touch()
    environ = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", handover.SLICE: handover.slice_text(RANKS[0])}
    handover.hand_over(replace(PLAN, ranks=RANKS[:1]), str(tmp_path / "file" / "run"), environ)
    done = _python(
        *(shim.CODE, "--local-rank=0", f"--launcher={os.getpid()}", f"--exec={sys.executable}"),
        *("-c", "print('on')"),
        **environ,
    )
    assert done.stdout == "on\n"
    assert "numapin: rank 0: no record of the binding: " in done.stderr
