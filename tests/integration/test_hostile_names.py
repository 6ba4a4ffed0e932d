"""Names with terminal commands: of what is invisible, a terminal gets numapin's own colors and line ends only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import numapin
from numapin import Nic, Request, discover, make_plan
from tests.integration.launching import NUMAPIN, environment
from tests.integration.seam import NicKind, run_directory, write_json
from tests.jobs.cases import HOSTILE_ARGUMENTS
from tests.pictures import golden_machine
from tests.terminals import FORGED, HOSTILE, Shown, on_terminal

if TYPE_CHECKING:
    from numapin import Plan

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hostile")]  # so that the folder is made once

FILE = HOSTILE.replace("/", "|")[:60] + f"\n{FORGED}"
"""A name that a file can have."""
NOT_TEXT = os.fsdecode(b"\xff\x9b2J")

_COMMAND_FILES = {path.name for path in Path(numapin.__file__).with_name("cli").iterdir()}
_ARGUMENTS = (HOSTILE, NOT_TEXT, *HOSTILE_ARGUMENTS)
_FAILING = "import sys; print(sys.argv[1:]) if sys.argv[1:] else sys.exit(3)\n"
# Becomes a rank whose name is not even valid text: it has a thread, and waits for the end of its standard input.
_RANK = """
import sys, threading
name = b"\\x1b]0;o\\x07\\x9b\\xc2\\x9b\\n\\xff"
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
for task in ("self", f"self/task/{thread.native_id}"):
    open(f"/proc/{task}/comm", "wb").write(name)
print("ready", flush=True)
sys.stdin.read()
end.set()
"""


# Runs each command line in its own process, forked from one that has done the slow imports.
_EACH = """
import json, os, sys
from importlib import import_module
from numapin.cli.main import main
for name in sys.argv[2:]:
    import_module(name)
for line in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv = ["numapin", *line]
        main()
    print(f"END {os.waitstatus_to_exitcode(os.wait()[1])}", flush=True)
"""


def shown(*lines: Sequence[str], cwd: Path | None = None, **changes: str) -> list[Shown]:
    """Run numapin with each line on one terminal; fail if it shows anything harmful or crashes."""
    modules = sorted({f"numapin.cli.{line[0]}" for line in lines if f"{line[0]}.py" in _COMMAND_FILES})
    if "numapin.cli.run" in modules:
        modules.append("numapin.launcher.hosts")
    done = on_terminal([sys.executable, "-c", _EACH, json.dumps(lines), *modules], changes, cwd=cwd)
    *parts, rest = re.split(rb"END (\d+)\r\n", done.raw)
    assert (done.status, rest) == (0, b""), done.raw
    found = [Shown(status=int(status), raw=raw) for raw, status in zip(parts[::2], parts[1::2], strict=True)]
    for line, each in zip(lines, found, strict=True):
        assert each.problems() == [], (line, each.raw)
        assert "Traceback" not in each.text
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a hostile name that has a machine, plans and a script in it."""
    made = tmp_path_factory.mktemp("hostile") / FILE
    made.mkdir()
    topology = golden_machine("2pkg-2node-smt2-2gpu-node0")
    topology = replace(
        topology,
        host=HOSTILE,
        source=HOSTILE,
        gpus=tuple(replace(gpu, name=HOSTILE, uuid=f"GPU-{i}{HOSTILE}") for i, gpu in enumerate(topology.gpus)),
        nics=(Nic(name=HOSTILE, node=0, kind=NicKind.INFINIBAND), Nic(name=f"é{HOSTILE}", pci=HOSTILE)),
        notes=(HOSTILE,),
    )
    (made / FILE).write_text(json.dumps(topology.to_json()))
    (made / "plan.json").write_text(json.dumps(_hostile(make_plan(topology, Request())).to_json()))
    (made / "bad.json").write_text(json.dumps({"schema": HOSTILE, HOSTILE: HOSTILE}))
    (made / f"{FILE}.py").write_text(_FAILING)
    return made


def _hostile(plan: Plan) -> Plan:
    ranks = tuple(
        replace(rank, exact=False, reason=HOSTILE, gpu=rank.gpu and replace(rank.gpu, uuid=HOSTILE))
        for rank in plan.ranks
    )
    return replace(plan, ranks=ranks, warnings=(HOSTILE, "é"))


def test_the_check_sees_what_is_hostile() -> None:
    """The check finds each hostile name, a forged line, live-display sequences and bytes that are not valid text."""
    names = (*"\x1b\x07\x9b\x85\x7f\t\b\r\u202e\u2066\u200e\u061c\u2028\u2029", "\x1b[7m", "\x1b[38;5;1m")
    for bad in (*(f"a{name}b\r\n".encode() for name in names), f"a\r\n{FORGED}".encode(), b"\x1b[2K", b"\x9b"):
        assert Shown(status=0, raw=bad).problems(), bad
    assert not Shown(status=0, raw="\x1b[1;31mé 名前\x1b[0m\r\n".encode()).problems()


def test_machine(folder: Path) -> None:
    """Tree, matrix and plan show the names' visible characters; JSON and saved files keep the exact value."""
    machine, plan = ("--machine", str(folder / FILE)), ("--plan", str(folder / "plan.json"))
    saved, page = folder / "saved.json", folder / "topo.html"
    tree, matrix, planned, told, *_ = shown(
        ("topo", *machine, *plan),
        ("topo", *machine, "--format", "matrix"),
        ("plan", *machine),
        ("topo", *machine, "--json"),
        ("plan", *machine, "--json"),
        ("topo", *machine, "--save", str(saved)),
        ("topo", *machine, "--format", "html", "--output", str(page), *plan),
    )
    assert (tree.status, matrix.status, planned.status) == (0, 0, 0)
    assert "]0;owned" in tree.text
    assert "]0;owned" in matrix.text
    assert json.loads(told.text)["gpus"][0]["name"] == HOSTILE
    assert json.loads(saved.read_text())["nics"][1]["name"] == f"é{HOSTILE}"
    assert all(line.isprintable() for file in (saved, page) for line in file.read_text().split("\n"))


def test_doctor(folder: Path) -> None:
    """`numapin doctor` on a captured machine with hostile files prints visible characters only."""
    root = folder / "root"
    for name in ("proc/sys/kernel/hostname", "sys/kernel/mm/transparent_hugepage/enabled", "proc/cmdline"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(HOSTILE)
    shown(("doctor", "--root", str(root)))
    shown(
        ("doctor",), CUDA_VISIBLE_DEVICES=HOSTILE, OMP_PROC_BIND=HOSTILE, LD_PRELOAD_X=HOSTILE, NCCL_TOPO_FILE=HOSTILE
    )


_WRONG: dict[tuple[str, ...], str] = {
    tuple(
        word.replace("QUOTED", repr(HOSTILE)).replace("HOSTILE", HOSTILE).replace("NOT_TEXT", NOT_TEXT)
        for word in line.split()
    ): ""
    for line in Path(__file__).with_name("hostile-lines.txt").read_text().splitlines()
}
_WRONG_FOR_RUN: dict[tuple[str, ...], str] = {
    ("run", f"--{HOSTILE.replace(' ', '')}=1", "bad.json"): "no such option",
    ("run", HOSTILE): "does not exist in",
    **{
        ("run", option, HOSTILE, "bad.json"): f"{option}{says}"
        for option, says in (("--nnodes", " is "), ("--nproc-per-node", ""), ("--bind", ""), ("--max-restarts", " is "))
    },
}


def test_command_lines(folder: Path) -> None:
    """Messages that quote the command line, click's or numapin's, have visible characters only."""
    lines = {**_WRONG, **_WRONG_FOR_RUN, ("bench", "--help"): ""}
    found = shown(*lines, cwd=folder, NUMAPIN_RUN_DIR=str(folder), LOGLEVEL="INFO")
    for (line, says), done in zip(lines.items(), found, strict=True):
        assert (done.status == 0) == ("--help" in line), done.text
        assert done.text.strip()
        assert says in done.text
        assert done.status == 2 or line not in _WRONG_FOR_RUN


@contextmanager
def _process(**changes: str) -> Iterator[int]:
    """Run a process with a hostile name and environment, which is not a child of the launcher that it names."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _RANK], stdin=pipe, stdout=pipe, env=environment(**changes)) as rank:
        assert rank.stdin
        assert rank.stdout
        assert rank.stdout.readline() == b"ready\n"
        yield rank.pid
        rank.stdin.close()


@contextmanager
def _run(base: Path, pid: int, plan: dict[str, Any]) -> Iterator[Path]:
    with run_directory({"NUMAPIN_RUN_DIR": str(base)}) as made:
        record = {"schema": "numapin.observed/1", "local_rank": 0, "restart": 0, "pid": pid, "host": None}
        write_json(made, "plan.json", plan)
        write_json(made, "observed-0-0.json", {**record, "start": None, "applied": {HOSTILE: HOSTILE}})
        folder = base / f"{Path(made).name}{FILE}"
        Path(made).rename(folder)
        yield folder


def test_running_job(folder: Path) -> None:
    """Both verify and top show a run by name and by process; if there are several, they list them."""
    allowed = sorted(os.sched_getaffinity(0))
    plan = make_plan(discover(environ={"CUDA_VISIBLE_DEVICES": ""}), Request(num_ranks=1, cpus_per_rank=1)).to_json()
    plan["ranks"][0]["reason"] = HOSTILE  # type: ignore[index] # JSON
    base = folder / "runs"
    variables = {"LOCAL_RANK": HOSTILE, "OMP_PLACES": HOSTILE, "OMP_PROC_BIND": HOSTILE, "GOMP_CPU_AFFINITY": "0"}
    with ExitStack() as stack:
        pid = stack.enter_context(_process(**variables))
        run = stack.enter_context(_run(base, pid, plan))
        there = {"NUMAPIN_RUN_DIR": str(base)}
        verified, told, attached, once, *_ = shown(
            ("verify",),
            ("verify", "--json", str(run)),
            ("attach", "--job", str(run)),
            ("top", "--once", "--interval", "0.1"),
            ("verify", "--pid", str(pid)),
            ("attach", "--pid", str(pid)),
            ("top", "--once", "--json", "--interval", "0.1", str(run)),
            cwd=None,
            **there,
        )
        assert verified.status == (1 if len(allowed) > 1 else 0)
        assert "�]0;o�" in verified.text or len(allowed) == 1
        assert json.loads(told.text)["ranks"][0]["applied"] == {HOSTILE: HOSTILE}
        assert (attached.status, "�]0;o�" in attached.text, once.status) == (0, True, 0)
        interrupted = ("timeout", "--foreground", "--preserve-status", "--signal=INT", "5")
        live = on_terminal([*interrupted, *NUMAPIN, "top", "--interval", "0.1", str(run)])
        assert "swap:" in live.text
        assert (live.status, live.problems(live=True)) == (0, [])
        stack.enter_context(_run(base, pid, plan))
        (both,) = shown(("verify",), cwd=None, **there)
        assert (both.status, both.text.count("    run-")) == (2, 2)


def test_run(folder: Path) -> None:
    """The table, the verification and the block of a hostile script have visible characters only.

    --dry-run writes lines that bash accepts, with the exact arguments and no invisible characters.
    """
    ranks, name = ("--nproc-per-node", "1"), f"{FILE}.py"
    options = (*ranks, "--bind", "exclusive", "--report", str(folder / f"{FILE}.json"))
    lines = (("run", *options, name), ("run", *ranks, "--dry-run", name, *_ARGUMENTS))
    fails, dry = shown(*lines, cwd=folder, NUMAPIN_RUN_DIR=str(folder), LOGLEVEL="INFO")
    assert (fails.status, dry.status) == (1, 0)
    assert "numapin: error: <b>a�[38;5;196mr" in fails.text
    assert "  failed  exit status 3" in fails.text
    (line,) = [line for line in dry.text.replace("\r", "").split("\n") if line.startswith("rank 0: ")]
    told = subprocess.run(["bash", "-c", line.removeprefix("rank 0: ")], capture_output=True, check=True, cwd=folder)
    assert told.stdout.decode() == f"{list(_ARGUMENTS)}\n"


def test_job(folder: Path) -> None:
    """Scripts and manifests have visible characters only, on a terminal and in a file, and keep the exact arguments."""
    engines = ("slurm", "mpi", "pbs", "lsf", "kubernetes")
    files, lines = [folder / f"{engine}{FILE}" for engine in engines], []
    for engine, file in zip(engines, files, strict=True):
        pod = ("--container", "a/b:c", "--mem-per-node", "1G") if engine == "kubernetes" else ()
        options = ("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "2", *pod)
        script = (f"./{FILE}.py", HOSTILE, *HOSTILE_ARGUMENTS)
        lines += [("job", engine, *options, *script), ("job", engine, "--output", str(file), *options, *script)]
    found = shown(*lines)
    assert [done.status for done in found] == [0] * len(lines)
    for on_screen, file in zip(found[::2], files, strict=True):
        written = file.read_text().split("\n")
        assert all(line.isprintable() for line in written)
        screen = on_screen.text.replace("\r\n", "\n").split("\n")
        command = [line.startswith("# Written by numapin ") for line in screen].index(True)  # one has no --output
        assert (screen[:command], screen[command + 1 :]) == (written[:command], written[command + 1 :])
    *_, job = yaml.safe_load_all(files[-1].read_text())
    assert HOSTILE in job["spec"]["template"]["spec"]["containers"][0]["args"]
