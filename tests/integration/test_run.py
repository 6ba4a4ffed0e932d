"""`numapin run` end to end: bindings that hold, faults, and errors about bad input."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from numapin import Plan
from tests.integration.launching import (
    DUMP,
    NUMAPIN,
    REFUSE_POLICY,
    Done,
    call,
    environment,
    numapin,
    observed,
    script,
    torchrun,
    torchs_store,
)
from tests.integration.seam import CODE, handover
from tests.needs import needs_two_cpus
from tests.waiting import wait_until

CPUS = sorted(os.sched_getaffinity(0))


def test_several_launchers_on_one_host(tmp_path: Path) -> None:
    """`mpirun -np 2 numapin run` on one host is a mistake, unless each is to run a job of its own."""

    def dry_run(*options: str, rank: str) -> Done:
        task = {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        return numapin("run", "--dry-run", *options, script(tmp_path, ""), cwd=None, **task)

    for options in ((), ("--nnodes=1",)):
        done = dry_run(*options, rank="1")
        assert done.status == 2
        assert "2 launchers are started on this host" in done.err
        assert "mpirun --map-by ppr:1:node numapin run" in done.err
    assert dry_run("--standalone", rank="1").status == 0
    two_hosts = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29511")
    assert "launchers" not in dry_run(*two_hosts, rank="0").err


class TestBinding:
    """The bindings of ranks."""

    @needs_two_cpus
    def test_exclusive_ranks_are_where_the_plan_says(self, tmp_path: Path) -> None:
        """Each exclusive rank runs on its own cores from its first instruction on, as the kernel reports.

        The table of bindings goes to stderr.
        """
        done = numapin("run", "--nproc-per-node", "2", "--bind", "exclusive", script(tmp_path, DUMP))
        assert (done.status, "rank  GPU  node  CPUs" in done.err) == (0, True), done.err
        ranks = done.json_lines()
        assert [rank["cpus"] for rank in ranks] == [json.loads(rank["NUMAPIN_BINDING"])["cpus"] for rank in ranks]
        assert ranks[0]["cpus"] != ranks[1]["cpus"]

    @needs_two_cpus
    def test_inside_a_restricted_launcher(self, tmp_path: Path) -> None:
        """A launcher that may use one CPU plans inside that CPU."""
        done = call("taskset", "-c", str(CPUS[-1]), *NUMAPIN, "run", "--nproc-per-node", "2", script(tmp_path, DUMP))
        assert done.status == 0, done.err
        assert [rank["cpus"] for rank in done.json_lines()] == [str(CPUS[-1])] * 2

    def test_numa_binding_is_bind(self, tmp_path: Path) -> None:
        """The option --numa-binding X of torchrun means --bind X, and torch's own binder stays off."""
        there = {"NUMAPIN_RUN_DIR": str(tmp_path / "runs"), "CUDA_VISIBLE_DEVICES": ""}
        done = numapin("run", "--numa-binding", "socket", script(tmp_path, DUMP), cwd=None, **there)
        assert done.status == 0, done.err
        assert json.loads(next(tmp_path.glob("runs/run-*/plan.json")).read_text())["bind"] == "socket"

    def test_dry_run_starts_nothing(self, tmp_path: Path) -> None:
        """--dry-run prints each rank's exact command and starts no rank."""
        marker = tmp_path / "ran"
        path = script(tmp_path, f"open({str(marker)!r}, 'w')")
        done = numapin("run", "--dry-run", "--nproc-per-node", "2", path, "--name", "a b")
        assert done.status == 0, done.err
        assert [line.partition(":")[0] for line in done.out.splitlines()] == ["rank 0", "rank 1"]
        assert all(line.endswith(f"-u {path} --name 'a b'") for line in done.out.splitlines())
        assert not marker.exists()

    def test_no_nic_to_name(self, tmp_path: Path) -> None:
        """Without a GPU, --nic-env sets nothing and says so once; with --strict, no rank starts."""
        options = ("--nproc-per-node", "2", "--nic-env", "ucx,nvshmem", script(tmp_path, DUMP))
        hidden = {"CUDA_VISIBLE_DEVICES": "", "UCX_NET_DEVICES": "mlx5_9:1"}
        done = numapin("run", *options, cwd=None, **hidden)
        assert done.status == 0, done.err
        assert done.err.count("warning: ranks 0-1: --nic-env ucx,nvshmem sets nothing: no GPU is known") == 1
        done = numapin("run", "--strict", *options, cwd=None, **hidden)
        assert (done.status, done.out, "--nic-env ucx,nvshmem sets nothing" in done.err) == (5, "", True)

    def test_dollar_signs_are_torchruns(self, tmp_path: Path) -> None:
        """Arguments get the rank's number and "$" as in torchrun, program names stay; --dry-run shows the same."""
        program = tmp_path / "tool$$x"
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
        options = ["--nproc-per-node", "1", "--no-python", str(program), "a$$b", "$local_rank"]
        assert numapin("run", *options).out == torchrun(*options).out == "a$b 0\n"
        assert numapin("run", "--dry-run", *options).out.endswith("tool$$x' 'a$b' 0\n")

    @pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
    def test_stderr_that_cannot_be_written(self, tmp_path: Path, redirect: str) -> None:
        """A closed or full stderr does not stop a job."""
        command = " ".join([*NUMAPIN, "run", "--nproc-per-node", "1", script(tmp_path, "print('ran')"), redirect])
        done = call("sh", "-c", command, PYTHONUNBUFFERED="")  # Python tries to flush the rest when it exits
        assert (done.status, done.out) == (0, "ran\n")


def test_refused_policy_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    """Under a seccomp filter the ranks keep their CPUs; the launcher reports the refusal once, with the remedy."""
    options = ("run", "--memory", "bind=0", "--nproc-per-node", "2", script(tmp_path, DUMP))
    done = call(*REFUSE_POLICY, *NUMAPIN, *options, NUMAPIN_RUN_DIR=str(tmp_path / "runs"))
    assert done.status == 0, done.err
    assert done.err.count("memory policy 'bind' was refused") == 1, done.err
    assert "--cap-add SYS_NICE" in done.err
    first, second = observed(tmp_path / "runs")
    for record in (first, second):
        assert record["applied"]["cpus"] == record["requested"]["cpus"]
        assert record["applied"]["memory"] is None
        assert "refused" in record["requested"]["reason"]


def test_a_refusal_that_was_not_foreseen(tmp_path: Path) -> None:
    """A rank reports a refusal that the rehearsal did not meet, and its program sees it in its binding."""
    plan = json.loads(numapin("plan", "--nproc-per-node", "1", "--json", CUDA_VISIBLE_DEVICES="").out)
    plan["ranks"][0] |= {"memory": "bind", "nodes": "63", "num_threads": 0}
    shim = (sys.executable, "-I", "-S", "-c", CODE, "--local-rank=0", f"--launcher={os.getpid()}")
    done = call(
        *(*shim, f"--exec={sys.executable}", script(tmp_path, DUMP)),
        NUMAPIN_SLICE=handover.slice_text(Plan.from_json(json.dumps(plan)).ranks[0]),
        NUMAPIN_RUN_DIR=str(tmp_path),
        RANK="0",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    assert done.err.startswith("numapin: rank 0: memory policy 'bind' was refused"), done.err
    (rank,) = done.json_lines()
    binding = json.loads(rank["NUMAPIN_BINDING"])
    assert (binding["exact"], binding["reason"].count("was refused")) == (False, 1)
    assert ("NUMAPIN_SLICE" in rank, rank["OMP_NUM_THREADS"]) == (False, "1")
    requested = json.loads((tmp_path / "observed-0-0.json").read_text())["requested"]
    assert requested == plan["ranks"][0]


def test_interrupt_while_starting(tmp_path: Path) -> None:
    """Ctrl-C before the ranks start ends the launcher by SIGINT, as torchrun does, so that a shell's loop ends."""
    words = ("run", *torchs_store(), "--nproc-per-node", "1", script(tmp_path, "import time; time.sleep(300)"))
    with subprocess.Popen([*NUMAPIN, *words], stderr=subprocess.PIPE, env=environment()) as process:
        assert wait_until(lambda: "/torch/" in Path(f"/proc/{process.pid}/maps").read_text(), limit_s=120)
        time.sleep(0.3)  # it is importing torch then, and part of that catches every exception
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, err.decode()


def test_unresolvable_host_name(tmp_path: Path) -> None:
    """A host whose name does not resolve starts as fast as any other, because the name is never looked up."""
    path = script(tmp_path, "import os; print(os.environ['MASTER_ADDR'])")
    probe = call("unshare", "--uts", "true") if shutil.which("unshare") else Done(status=1, out="", err="")
    if probe.status != 0:
        pytest.skip("no right to make a UTS namespace here (unshare --uts)")
    lookups = tmp_path / "lookups"
    lookups.mkdir()
    (lookups / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*args, **kwargs):\n"
        "    if args[0] not in (None, '127.0.0.1', 'localhost'): raise AssertionError(f'asked for {args[0]}')\n"
        "    return real(*args, **kwargs)\n"
        "real, socket.getaddrinfo = socket.getaddrinfo, refuse\n"
        "socket.gethostbyaddr = socket.gethostbyname = refuse\n"
    )
    line = f"hostname nowhere.invalid && exec {' '.join(NUMAPIN)} run --nproc-per-node 1 {path}"
    done = call("unshare", "--uts", "sh", "-c", line, PYTHONPATH=str(lookups))
    assert (done.status, done.out.strip()) == (0, "127.0.0.1"), done.err


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--memory", "bind=63", "s.py"], 2, "node 63 has no host memory that this process may use; usable: 0"),
        (["--reserve-cpus", "4000-4001", "s.py"], 2, "CPUs 4000-4001 do not exist; online are 0"),
        (["--nproc-per-node", "gpu", "s.py"], 2, "CUDA shows no GPU\n  hint: see why with: numapin doctor"),
        (
            ["--virtual-local-rank", "--nproc-per-node", "2", "s.py"],
            2,
            "--virtual-local-rank shows each rank one GPU; there are 2 ranks and 1 GPU\n",
        ),
        (["--reserve-cpus", ",".join(map(str, CPUS)), "s.py"], 4, "no CPU is left"),
    ],
)
def test_told(tmp_path: Path, arguments: list[str], status: int, told: str) -> None:
    """The status fits the kind of error, and the message names the input."""
    script(tmp_path, "raise SystemExit('a rank was started')", "s.py")
    done = numapin("run", *arguments, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (done.status, told in done.err) == (status, True), done.err
    assert "a rank was started" not in done.err
    assert "Traceback" not in done.err


def test_missing_libnuma(tmp_path: Path) -> None:
    """Without libnuma, which py-libnuma reports as AttributeError, the status is 3 and the package is named."""
    stand_in = tmp_path / "numa"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text("raise AttributeError('undefined symbol: numa_num_possible_nodes')")
    for command in (["topo"], ["run", "--nproc-per-node", "1", script(tmp_path, "")]):
        done = numapin(*command, PYTHONPATH=str(tmp_path))
        assert done.status == 3, done.err
        assert "libnuma could not be loaded" in done.err
        assert "apt-get install libnuma1" in done.err


@pytest.mark.parametrize("most", [9, 31])
def test_too_few_open_files(tmp_path: Path, most: int) -> None:
    """A launcher that may not open as many files as it needs says so before it starts anything."""
    limited = ("bash", "-c", f'ulimit -n {most}; exec "$@"', "bash")
    done = call(*limited, *NUMAPIN, "run", "--nproc-per-node", "1", script(tmp_path, ""))
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        f"numapin: error: a launcher needs at least 32 open files; {most} are allowed\n  hint: ulimit -n 1024\n"
    )


@needs_two_cpus
def test_importing_torch_does_not_bind_the_launcher(tmp_path: Path) -> None:
    """With OMP_PROC_BIND, torch's import binds the thread that imports it; the launcher keeps its CPUs."""
    path = script(tmp_path, "import os; print(*sorted(os.sched_getaffinity(os.getppid())))")
    options = ("--quiet", "--nproc-per-node", "1", *torchs_store())
    done = call(*NUMAPIN, "run", *options, path, OMP_PROC_BIND="true")
    assert (done.status, done.out.split()) == (0, [*map(str, sorted(os.sched_getaffinity(0)))]), done.err


# --- what launchers inherit: the limit on open files, and variables of the rank that started or submitted them --------

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
    return script(tmp_path, DUMP)


MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
ENOUGH = 65536 if MOST == resource.RLIM_INFINITY else min(MOST, 65536)


@pytest.mark.parametrize(
    ("soft", "hard", "files"), [(200, "1000", 1000), (200, "hard", ENOUGH), (ENOUGH, "hard", ENOUGH)]
)
def test_ranks_may_open_more_files(soft: int, hard: str, files: int, shown: str) -> None:
    """Below `run` and `exec`, the limit is 65536 or the hard limit; one that is no lower stays. --verbose says why."""
    limited = ("bash", "-c", f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"', "bash", *NUMAPIN)
    rank = ("--local-rank", "0", "--local-size", "1", "--", sys.executable)
    for words in (("run", "--verbose", "--nproc-per-node=1"), ("exec", "--verbose", *rank)):
        done = call(*limited, *words, shown)
        assert done.status == 0, done.err
        assert json.loads(done.out)["files"] == str(files)
        said = f"open files: the limit is raised from {soft} to {files}, because each DataLoader worker holds several"
        assert (said in done.err) == (files != soft), done.err


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
        {"OMP_NUM_THREADS": "3"},  # not the number that numapin has set: the user's
        {"OMP_NUM_THREADS": "7", "NUMAPIN_BINDING": "not JSON"},
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
