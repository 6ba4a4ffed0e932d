"""Finding a running job: by a run directory that is written here and locked, and by live processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numapin import Topology, discover
from numapin.errors import MachineError, UsageError
from tests.machines.grids import grid
from tests.recorded.screens import compare_answers
from tests.unit.observe import seam
from tests.unit.observe.seam import cpu_set, find_file, find_job, handover, observe, run_folder, start_time

pytestmark = pytest.mark.usefixtures("only_places_of_the_test")

CPUS = cpu_set.render(os.sched_getaffinity(0))
RECORD = {"schema": "numapin.observed/1", "local_rank": 0, "restart": 0, "pid": 1, "applied": {}}


def _plan(num_ranks: int = 2) -> dict[str, Any]:
    common = {"gpu": None, "node": 0, "cpus": CPUS, "nodes": "0", "memory": "none", "exact": True, "reason": ""}
    ranks = [{"local_rank": rank, "num_threads": 1, **common} for rank in range(num_ranks)]
    return {"schema": "numapin.plan/1", "bind": "node", "memory": "preferred", "ranks": ranks, "warnings": []}


def _record(folder: str, rank: int, pid: int, restart: int = 0, more: dict[str, object] | None = None) -> None:
    content = RECORD | {"local_rank": rank, "restart": restart, "pid": pid, "applied": {"n": pid}} | (more or {})
    handover.write_json(folder, f"observed-{rank}-{restart}.json", content)


@contextmanager
def _run(environ: dict[str, str]) -> Iterator[str]:
    with run_folder.run_directory(environ) as folder:
        handover.write_json(folder, handover.PLAN, _plan())
        yield folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TMPDIR": str(tmp_path)}


def test_the_only_run_is_found(environ: dict[str, str]) -> None:
    """Without a name, the only active run is taken, or that of the rank which asks; the latest restart counts."""
    with _run(environ) as folder:
        _record(folder, 0, 100)
        _record(folder, 1, 101)
        _record(folder, 1, 202, restart=10)
        _record(folder, 1, 201, restart=9)
        job = find_job.find_run(None, environ)
        with _run(environ):
            assert find_job.find_run(None, {**environ, "NUMAPIN_RUN_DIR": folder}).name == Path(folder).name
    assert job.name == Path(folder).name
    assert job.pids == {0: 100, 1: 202}
    assert job.applied == {0: {"n": 100}, 1: {"n": 202}}
    assert len(job.plan.ranks) == 2


def test_several_runs(environ: dict[str, str]) -> None:
    """Their names are listed; each is found by its path, its name, the end of it, the newest by @last."""
    with _run(environ) as first, _run(environ) as second:
        with pytest.raises(UsageError, match=r"^2 runs are active") as caught:
            find_job.find_run(None, environ)
        assert all(f"    {Path(folder).name}\n" in f"{caught.value.message}\n" for folder in (first, second))
        for folder in (first, second):
            for named in (folder, Path(folder).name, folder.rpartition("-")[2]):
                assert find_job.find_run(named, environ).name == Path(folder).name
        host = Path(first).name.split("-", 3)[3].rpartition("-")[0]
        for named in ("run-x", host):
            with pytest.raises(UsageError, match=f"no active run is named {named}") as caught:
                find_job.find_run(named, environ)
            assert Path(first).name in caught.value.hint
        assert find_job.find_run("@last", environ).name == max(Path(first).name, Path(second).name)
    with pytest.raises(UsageError, match="no run of this user is active, and none has left its folder"):
        find_job.find_run("@last", environ)
    with pytest.raises(UsageError, match="@first is not a run"):
        find_job.find_run("@first", environ)


def test_the_last_run_has_failed(environ: dict[str, str]) -> None:
    """Its folder is named; an active run comes first, even an older one."""
    with _run(environ) as active:
        with pytest.raises(KeyError), _run(environ) as failed:
            raise KeyError
        assert find_job.find_run("@last", environ).name == Path(active).name
        named = find_file("@last", "plan.json", environ), find_file(failed[-8:], "plan.json", environ)
        assert named == (f"{active}/plan.json", f"{failed}/plan.json")
    assert find_file("@last", "plan.json", environ) == f"{failed}/plan.json"
    with pytest.raises(UsageError, match="has ended") as caught:
        find_job.find_run("@last", environ)
    assert failed in caught.value.hint


def test_a_file_comes_before_a_run(environ: dict[str, str], tmp_path: Path) -> None:
    """A path that exists is taken as it is, a folder stands for its file, and any other text stays unchanged."""
    (tmp_path / "plan.json").touch()
    for named, found in ((tmp_path / "plan.json",) * 2, (tmp_path, tmp_path / "plan.json"), (tmp_path / "x",) * 2):
        assert find_file(str(named), "plan.json", environ) == str(found)


def test_no_run(environ: dict[str, str], tmp_path: Path) -> None:
    """Without an active run, with one that has ended or has no plan, and with another folder, the error says so."""
    with run_folder.run_directory(environ) as folder, pytest.raises(UsageError, match="is starting or ending"):
        find_job.read_run(Path(folder))
    environ = {"NUMAPIN_RUN_DIR": str(tmp_path / "kept")}
    with _run(environ) as over:
        pass
    for named, told in (
        (None, "no numapin run of this user is active"),
        (over, "has ended"),
        (str(tmp_path), "is not an active run"),
        ("x", "no active run is named x"),
        ("", "no active run is named ''"),
    ):
        with pytest.raises(UsageError, match=told) as caught:
            find_job.find_run(named, environ)
        assert ("numapin verify" if named == over else "--pid PID,...") in caught.value.hint
    with pytest.raises(UsageError, match="no numapin run of this user is active"):
        find_job.find_run(None, {"NUMAPIN_RUN_DIR": __file__})


@pytest.mark.parametrize("moment", ["record_names", "read_at", "is_live"])
def test_a_run_that_ends_while_it_is_read(
    environ: dict[str, str], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is gone already, the error is that the run has ended, and does not name a folder that was removed."""
    with _run(environ) as folder:
        _record(folder, 0, 100)
        module: Any = run_folder if moment == "is_live" else handover
        theirs = getattr(module, moment)

        def ending(*given: Any) -> Any:
            monkeypatch.setattr(module, moment, theirs)
            shutil.rmtree(folder)
            return theirs(*given)

        monkeypatch.setattr(module, moment, ending)
        with pytest.raises(UsageError) as caught:
            find_job.read_run(Path(folder))
    assert caught.value.message == f"run {Path(folder).name} has ended"
    assert folder not in caught.value.hint


def test_a_record_that_is_replaced_while_it_is_read(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process below `exec --children` may replace its record; the run is active, and its other ranks are found."""
    theirs = handover.record_names

    def replaced(descriptor: int) -> list[str]:
        names = theirs(descriptor)
        os.unlink("observed-0-0.json", dir_fd=descriptor)
        return names

    monkeypatch.setattr(handover, "record_names", replaced)
    with _run(environ) as folder:
        _record(folder, 0, 100)
        _record(folder, 1, 101)
        assert find_job.read_run(Path(folder)).pids == {1: 101}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("plan.json", "{", "not JSON"),
        ("plan.json", "[]", ""),
        ("observed-0-0.json", json.dumps({**RECORD, "pid": "x"}), ""),
        ("observed-0-0.json", json.dumps({**RECORD, "applied": None}), ""),
        ("observed-0-0.json", '{"schema": "other/1"}', ""),
        ("observed-7-0.json", json.dumps({**RECORD, "local_rank": 7}), "the plan has no rank 7"),
    ],
)
def test_broken_files_are_named(environ: dict[str, str], name: str, text: str, told: str) -> None:
    """A file that numapin did not write like this is an error with status 3 that names it."""
    with _run(environ) as folder:
        Path(folder, name).write_text(text)
        with pytest.raises(MachineError, match=told or None) as caught:
            find_job.find_run(None, environ)
    assert f"{folder}/{name}" in caught.value.message
    assert caught.value.exit_code == 3


@contextmanager
def _processes(*environs: dict[str, str]) -> Iterator[list[int]]:
    """Start a launcher with a child of each environment; yield its pid and theirs."""
    code = (
        "import json, os, subprocess, sys\n"
        "environs = json.loads(sys.argv[1])\n"
        "pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'bufsize': 0}\n"
        "children = [subprocess.Popen(['cat'], env=os.environ | e, **pipes) for e in environs]\n"
        "for child in children:\n"
        "    child.stdin.write(b'there?'); child.stdout.read(1)  # /proc shows an environment a little after exec\n"
        "print(*[child.pid for child in children], flush=True)\n"
        "sys.stdin.read()\n"
        "for child in children: child.communicate()\n"
    )
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "NUMAPIN_"))}
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(environs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ours | {"CUDA_VISIBLE_DEVICES": ""},
    ) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        try:
            yield [process.pid, *children]
        finally:
            process.communicate("")


def test_no_folder_is_not_this_one(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without NUMAPIN_RUN_DIR belongs to no run, even if our current directory is a run's folder.

    A process above it and a rank of the run is refused; the error has the processes of each job.
    """
    alone = {"LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    with _run(environ) as folder, _processes(alone, alone | {"NUMAPIN_RUN_DIR": folder}) as (launcher, rank, ours):
        monkeypatch.chdir(folder)
        assert not run_folder.is_live("")
        assert find_job.job_of_processes([rank]).name == f"pid {rank}"
        monkeypatch.chdir(Path(folder).parent)
        assert find_job.find_run(Path(folder).name, {}).name == Path(folder).name
        with pytest.raises(UsageError, match="includes ranks of 2 jobs") as caught:
            find_job.job_of_processes([launcher])
        assert f"MASTER_PORT=29500: --pid {rank}\n" in caught.value.message
        assert f"run {Path(folder).name}: --pid {ours}" in caught.value.message


def test_a_process_id_that_is_another_process_now(environ: dict[str, str]) -> None:
    """If the recorded process started at another time, the rank is gone; a run of another host is an error."""
    start, host = start_time(), os.uname().nodename
    assert start is not None
    with _run(environ) as folder:
        for more, is_gone in (
            ({"start": start, "host": host}, False),
            ({}, False),
            ({"start": start + 1, "host": host}, True),
        ):
            _record(folder, 0, os.getpid(), more=dict(more))
            job = find_job.find_run(None, environ)
            assert (0 in job.gone) == is_gone, more
            assert observe(job.pids, gone=job.gone).ranks[0].is_gone == is_gone
        _record(folder, 0, os.getpid(), more={"start": start, "host": f"not-{host}"})
        with pytest.raises(UsageError, match=f"run {Path(folder).name} is on not-{host}, not on this host"):
            find_job.find_run(None, environ)


def test_ranks_of_a_run_have_its_plan(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with the folder of an active run in their environment get its plan; no machine is read.

    A worker's process id stands for its rank; a process in no rank of its run is an error.
    """
    monkeypatch.setattr(find_job, "discover", lambda **_: pytest.fail("the plan is there: no machine need be read"))
    with _run(environ) as folder:
        ranks = [{"LOCAL_RANK": str(rank), "NUMAPIN_RUN_DIR": folder} for rank in range(2)]
        with _processes(*ranks) as (launcher, first, second):
            _record(folder, 0, launcher)
            assert find_job.job_of_processes([first]).pids == {0: launcher}
            _record(folder, 0, first)
            with pytest.raises(UsageError, match=f"pid {second} belongs to no rank of run {Path(folder).name}"):
                find_job.job_of_processes([second])
            _record(folder, 1, second)
            job = find_job.job_of_processes([launcher])
            assert (job.name, job.pids) == (Path(folder).name, {0: first, 1: second})
            assert find_job.job_of_processes([second]).pids == {1: second}


def _dgx() -> Topology:
    """Return a machine with eight GPUs whose driver has answered, so that they have UUIDs."""
    topology = discover(machine="example:dgx-h100")
    return replace(topology, gpus=tuple(replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in topology.gpus))


def _answer(line: str) -> str:
    """Return the ranks of made processes, the GPU of each in the plan, and in whose environment the machine was read.

    A line has PID<PARENT with the variables of each process and `gpu=` with what the driver sees it compute on, then
    the options: the processes that are named, and `--host` for a host without GPUs.
    """
    text, _, options = line.partition(" --pid ")
    given, *hosts = options.split(" --host ")
    environs: dict[int, dict[str, str]] = {}
    children: dict[int, list[int]] = {}
    driver: dict[int, tuple[str, ...]] = {}
    for each in text.split("; "):
        place, *words = each.split()
        pid, *parents = map(int, place.split("<"))
        environs[pid] = dict(word.split("=", 1) for word in words) | {"PID": str(pid)}
        computing = environs[pid].pop("gpu", "")
        driver |= {pid: tuple(f"GPU-{index}" for index in computing.split(","))} if computing else {}
        for parent in parents:
            children.setdefault(parent, []).append(pid)
    read_in = []

    def machine(*, environ: dict[str, str]) -> Topology:
        read_in.append(environ["PID"])
        return grid() if hosts else _dgx()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_job, "discover", machine)
        patch.setattr(find_job, "require_program", lambda _: None)
        patch.setattr(find_job, "read_processes", lambda: driver)
        patch.setattr(seam.proc, "children_of", lambda *_: children)
        patch.setattr(seam.proc, "environment_of", environs.get)
        patch.setattr(seam.proc, "pid_namespace", lambda: 0xEFFFFFFC)
        try:
            job = find_job.job_of_processes([int(pid) for pid in given.split(",")])
        except UsageError as error:
            return "error: " + f"{error.message} ({error.hint})".replace("\n", "\n  ")
    assert job.applied == {}
    ranks = {rank.local_rank: rank for rank in job.plan.ranks}
    found = "; ".join(f"rank {number} is {pid} on {ranks[number].gpu}" for number, pid in sorted(job.pids.items()))
    return f"{found}; of {len(ranks)}; the machine of {', '.join(read_in)}"


def test_ranks_at_and_below_processes() -> None:
    """Each rank, and its GPU in the plan, is the recorded one; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    compare_answers(Path(__file__).parent / "recorded/ranks.txt", _answer)


def test_a_long_chain_of_processes() -> None:
    """Ranks are found at the end of a chain of a thousand processes, whose last is above the first again."""
    chain = "; ".join(f"{pid}<{pid - 1}" for pid in range(101, 1200))
    assert _answer(f"100<1199; {chain}; 1200<1199 LOCAL_RANK=0 --pid 100 --host x").startswith("rank 0 is 1200 on None")
