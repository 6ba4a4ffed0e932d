"""The process that a rank starts as: its imports, its program's environment, its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from numapin import Bind, Memory, Plan, RankPlan
from numapin.errors import NumapinError
from tests.unit.planned import PLANNED
from tests.unit.rank.seam import CpuSet, NicLibrary, bind, exported, handover, shim
from tests.unit.rank.seam import rehearse_rehearse as rehearse

if TYPE_CHECKING:
    from pathlib import Path

CPUS = CpuSet(os.sched_getaffinity(0))
RANK = replace(PLANNED, cpus=CPUS, nodes=CpuSet({0}), node=0, reason='all of "node 0", é\n')
RANKS = tuple(replace(RANK, local_rank=number, num_threads=number + 3) for number in range(12))
PLAN = Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=RANKS)
OWN = 1  # NUMAPIN_SLICE_1 is also how the names of ranks 10 and 11 begin
BARE = "from __future__ import annotations; import ctypes, errno, gc, itertools, os"
"""The standard modules that a rank needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    modules: frozenset[str]
    stderr: str
    environ: dict[str, str]
    record: dict[str, Any]
    record_text: str


def _modules(stderr: str) -> frozenset[str]:
    return frozenset(line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:"))


def _python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-X", "importtime", "-c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environ})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    return _start(PLAN, tmp_path_factory.mktemp("run"))


def _start(plan: Plan, folder: Path) -> Started:
    """Start rank OWN; its program is Python, which prints its environment."""
    environ = {"RANK": "13", "TORCHELASTIC_RESTART_COUNT": "2"}
    handover.hand_over(plan, str(folder), environ)
    told = [f"--local-rank={OWN}", f"--launcher={os.getpid()}", f"--exec={sys.executable}"]
    done = _python(
        *(shim.CODE, *told, "-I", "-c", "import json, os; print(json.dumps(dict(os.environ)))"),
        **environ,
    )
    text = (folder / f"observed-{OWN}-2.json").read_text()
    return Started(
        modules=_modules(done.stderr),
        stderr="".join(line for line in done.stderr.splitlines() if not line.startswith("import time:")),
        environ=json.loads(done.stdout),
        record=json.loads(text),
        record_text=text,
    )


class TestStart:
    def test_it_imports_next_to_nothing(self, started: Started) -> None:
        """Before its program it loads os, ctypes and some modules of ours: no json, no dataclasses, no plan."""
        bare = _modules(_python(BARE).stderr)
        assert {"os", "ctypes"} < bare & started.modules
        ours = {name for name in started.modules if name.partition(".")[0] == "numapin"}
        assert started.modules - ours - bare == set()
        assert {".".join(name.split(".")[:2]) for name in ours} == {
            *("numapin", "numapin.base", "numapin.errors", "numapin.rank", "numapin.system")
        }
        costly = {"typing", "enum", "dataclasses", "json", "re", "contextlib", "functools", "collections", "inspect"}
        assert not bare & {*costly, "signal"}, "this Python loads them by itself: the assertions above hold nothing"

    def test_the_program_finds_its_own_slice_only(self, started: Started) -> None:
        """NUMAPIN_BINDING is the rank's slice of the plan; the slices of other ranks are removed."""
        assert json.loads(started.environ["NUMAPIN_BINDING"]) == RANKS[OWN].to_json()
        assert started.environ["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(RANKS[OWN].num_threads))
        assert not [name for name in started.environ if name.startswith(handover.SLICE_VARIABLE)]

    def test_the_variables_of_its_nic(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are in the program's environment, and what another rank's launcher set there is replaced."""
        monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")
        own = replace(RANKS[OWN], nics=("mlx5_3", "mlx5_1"), nic_env=tuple(NicLibrary))
        ranks = tuple(own if rank.local_rank == OWN else rank for rank in RANKS)
        started = _start(replace(PLAN, ranks=ranks), tmp_path)
        assert exported(own).items() <= started.environ.items()
        assert started.environ["NVSHMEM_HCA_LIST"] == "mlx5_3:1"

    def test_the_record(self, started: Started) -> None:
        """It has the request and the kernel's report, as JSON that json itself would write."""
        record = started.record
        assert list(record) == [
            *("schema", "local_rank", "rank", "restart", "pid", "start", "host", "requested", "applied")
        ]
        assert (record["schema"], record["local_rank"], record["rank"]) == ("numapin.observed/1", OWN, 13)
        assert (record["restart"], record["host"]) == (2, os.uname().nodename)
        assert isinstance(record["start"], int)
        assert record["requested"] == RANKS[OWN].to_json()
        applied = {"cpus": RANK.to_json()["cpus"], "memory": "preferred", "nodes": "0", "shortfalls": []}
        assert record["applied"] == applied
        assert started.record_text.isascii()


def test_a_refusal_that_was_foreseen(tmp_path: Path) -> None:
    """A refusal that the rehearsal found, as in most containers, causes no imports and no second message in a rank."""
    refused = tuple(replace(rank, memory=Memory.BIND, nodes=CpuSet({63})) for rank in RANKS)
    plan = rehearse(replace(PLAN, ranks=refused), strict=False)
    assert "was refused" in plan.ranks[OWN].reason
    started = _start(plan, tmp_path)
    assert started.stderr == ""
    assert not {"json", "typing", "numapin.plan"} & started.modules
    assert json.loads(started.environ["NUMAPIN_BINDING"]) == started.record["requested"] == plan.ranks[OWN].to_json()
    (shortfall,) = started.record["applied"]["shortfalls"]
    assert shortfall in plan.ranks[OWN].reason


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


class TestSlices:
    @pytest.mark.parametrize(
        "rank",
        [
            RANK,
            replace(RANK, node=None, nodes=CpuSet(), memory=Memory.NONE, gpu=None),
            replace(RANK, nics=("mlx5_3", "mlx5_10"), nic_env=tuple(NicLibrary)),
            replace(RANK, memory=Memory.INTERLEAVE, cpus=CpuSet({0, 1, 2, 8}), nodes=CpuSet({0, 2}), reason="{=}"),
            replace(RANK, within=CpuSet({0, 1, 8})),
        ],
    )
    def test_they_have_what_binds_a_rank(self, rank: RankPlan) -> None:
        """A slice has everything that `bind.apply` needs of a RankPlan, and its whole JSON."""
        own = handover.RankSlice(handover.slice_text(rank))
        for name in set(handover.RankSlice.__slots__) - {"json", "nic_variables"}:
            assert getattr(own, name) == getattr(rank, name), name
        assert own.nic_variables == exported(rank)
        assert json.loads(own.json) == rank.to_json()

    def test_there_is_a_mode_for_every_policy(self) -> None:
        """Binding knows every word of `Memory`."""
        assert {*bind._MODES, "none"} == set(Memory)
        assert set(bind._NAMES.values()) == set(Memory)

    @pytest.mark.parametrize(
        "text", ["", "0-3", "cpus=0-x nodes= memory=none within= node= num_threads=1 {}", "cpus=0 {}"]
    )
    def test_one_that_is_not_ours(self, text: str) -> None:
        """A malformed variable is an error that names it."""
        with pytest.raises(NumapinError, match=r"NUMAPIN_SLICE_0 is not what numapin writes: '"):
            handover.take_slice(0, {"NUMAPIN_SLICE_0": text})


def test_a_rank_without_a_record(tmp_path: Path) -> None:
    """A run directory that cannot be written causes a message, and the job goes on."""
    (tmp_path / "file").touch()
    environ = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    handover.hand_over(replace(PLAN, ranks=RANKS[:1]), str(tmp_path / "file" / "run"), environ)
    done = _python(
        *(shim.CODE, "--local-rank=0", f"--launcher={os.getpid()}", f"--exec={sys.executable}"),
        *("-c", "print('on')"),
        **environ,
    )
    assert done.stdout == "on\n"
    assert "numapin: rank 0: no record of the binding: " in done.stderr
