"""The end of a job that fails: one block, the same whatever starts the ranks. These tests write failure-blocks.md.

`NUMAPIN_UPDATE_GOLDEN=1 pytest tests/integration/test_failure_block.py` records the blocks on that page again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.failing import (
    CTRL_C,
    FULL_SHM,
    MEMORY_BYTES,
    OOM,
    SCENARIOS,
    SIGTERM,
    block_of,
    limited_cgroup,
    run,
    settled,
)
from tests.integration.launching import NUMAPIN, call, environment, numapin, script
from tests.integration.test_init import IN_NAMESPACE
from tests.needs import needs_root
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).with_name("failure-blocks.md")
STATUSES = {CTRL_C: -signal.SIGINT, SIGTERM: 128 + signal.SIGTERM}


@pytest.fixture(scope="module")
def cgroup() -> Iterator[Path]:
    """Give a memory cgroup with a limit."""
    with limited_cgroup() as folder:
        if folder is None:
            pytest.skip("no memory cgroup can be made below /sys/fs/cgroup")
        yield folder


def pages() -> dict[str, str]:
    """Return the block on the page below each heading."""
    return dict(re.findall(r"^## (.+?)\n\n```text\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "about", [pytest.param(about, marks=needs_root) if about in (OOM, FULL_SHM) else about for about in SCENARIOS]
)
def test_block(tmp_path: Path, about: str, request: pytest.FixtureRequest) -> None:
    """A failed job ends with the recorded block, of at most 20 lines and 80 columns.

    It names the rank that failed first, says what is known of its failure, and states nothing else.
    """
    cgroup = request.getfixturevalue("cgroup") if about == OOM else None
    done = run(SCENARIOS[about], tmp_path, cgroup=cgroup)
    lines, recorded = block_of(done.err), pages()
    assert done.status == STATUSES.get(about, 1), done.err
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert done.err.count("numapin: ") == 1, done.err
    block = settled([line for line in lines if line.startswith(SCENARIOS[about].certain)])
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        recorded = {name: recorded.get(name, "") for name in SCENARIOS} | {about: block}
        blocks = "".join(f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in recorded.items())
        PAGE.write_text(PAGE.read_text().partition("\n## ")[0] + blocks)
    # a rank that does not answer in 0.2 s, as on a busy machine, has no place
    assert block in (recorded[about], re.sub(r"  were in .*\n", "", recorded[about]))


FAILS = "import sys\ndef step():\n    raise ValueError('x\\x1b[2J')\nprint('out', file=sys.stderr)\nstep()\n"


def test_traceback_report_and_file(tmp_path: Path) -> None:
    """--traceback, the file in the run's folder and --report have all frames, without control characters."""
    path, report = script(tmp_path, FAILS), tmp_path / "report.json"
    options = ("--quiet", "--report", str(report), "--traceback")
    done = numapin("run", *options, path, TMPDIR=str(tmp_path))
    assert done.status == 1
    own, _, ours = done.err.partition("numapin: all frames of rank 0:\n")
    assert own.startswith("out\nTraceback (most recent call last):\n")
    assert ours.startswith(f'Traceback (most recent call last):\n  File "{path}", line 5, in <module>\n')
    assert "ValueError: x\ufffd[2J" in ours
    assert all(line.isprintable() for line in ours.split("\n"))
    failure = json.loads(report.read_text())["failure"]
    assert (failure["first"], failure["program"], failure["cause"]) == (0, path, None)
    (rank,) = failure["ranks"]
    assert (rank["state"], rank["exit_status"], rank["signal"], rank["gpu"]) == ("failed", 1, None, None)
    assert rank["exception"] == "ValueError: x\x1b[2J"
    assert json.loads(Path(rank["error_file"]).read_text())["message"]["extraInfo"]["py_callstack"] in own
    (file,) = tmp_path.glob("numapin-*/failure.txt")
    assert str(file) in done.err.replace("\n          ", "")
    assert rank["traceback"].replace("\x1b", "\ufffd") in file.read_text()


def test_what_stopped_a_job_is_in_the_report(tmp_path: Path) -> None:
    """The report of a job that a signal stopped names the signal."""
    report = tmp_path / "report.json"
    assert run(SCENARIOS[SIGTERM], tmp_path, "--report", str(report)).status == 143
    assert json.loads(report.read_text())["stopped_by"] == "SIGTERM"


def test_own_error_with_its_frames(tmp_path: Path) -> None:
    """--traceback shows where an error of numapin's own comes from; without it there is the message alone."""
    options = ("run", "--quiet", "--virtual-local-rank", "--nproc-per-node", "2", script(tmp_path, ""))
    hidden = {"CUDA_VISIBLE_DEVICES": "7"}
    plain, traced = (
        numapin(*options, cwd=None, **hidden),
        numapin("run", "--traceback", *options[1:], cwd=None, **hidden),
    )
    assert (plain.status, traced.status) == (2, 2)
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last):" in traced.err
    assert traced.err.endswith(plain.err)


def test_restarts_and_logs(tmp_path: Path) -> None:
    """Each failed round has one line; the block at the end names the rank's log."""
    options = ("--quiet", "--max-restarts", "2", "--redirects", "2", "--log-dir", str(tmp_path / "logs"))
    done = numapin("run", *options, script(tmp_path, FAILS))
    assert done.status == 1
    first, second, *block = done.err.splitlines()
    said = "rank 0 failed first: ValueError: x\ufffd[2J; the ranks are restarted"
    assert first == f"numapin: round 1: {said}, 1 restart left"
    assert second == f"numapin: round 2: {said}, 0 restarts left"
    (log,) = (tmp_path / "logs").glob("*/attempt_2/0/stderr.log")
    assert "ValueError" in log.read_text()
    joined = "\n".join(block).replace("\n          ", "")
    assert f"\n  log     {log}\n" in joined


def test_below_another_elastic_launcher(tmp_path: Path) -> None:
    """The error of a rank reaches the error file that another launcher gave to numapin."""
    file = tmp_path / "outer.json"
    done = numapin("run", "--quiet", script(tmp_path, FAILS), TORCHELASTIC_ERROR_FILE=str(file))
    assert done.status == 1
    message = json.loads(file.read_text())["message"]
    assert message["errorCode"] == 1
    assert message["message"].startswith("ValueError: ")


UNTOUCHED = """
import json, os, sys, subprocess
me = {
    "hook": sys.excepthook is sys.__excepthook__, "path": os.environ.get("PYTHONPATH"),
    "entries": [entry for entry in sys.path if "rank/hook" in entry], "customized": "sitecustomize" in sys.modules,
}
os.write(1, (json.dumps(me) + "\\n").encode())
child = "import sys, os; 1 / 0"
subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL)
if os.fork() == 0:
    sys.last_value = ValueError("the fork's")
    sys.exit(1)
os.wait()
sys.exit(4)
"""


@pytest.mark.parametrize("path", ["/nonexistent:/proc", ":"])
def test_ranks_are_not_changed_by_the_record(tmp_path: Path, path: str) -> None:
    """A rank's path, environment and hooks are as without numapin; its children and forks record nothing."""
    report = tmp_path / "report.json"
    done = numapin("run", "--quiet", "--report", str(report), script(tmp_path, UNTOUCHED), PYTHONPATH=path)
    plain = call(*NUMAPIN[:1], script(tmp_path, UNTOUCHED), PYTHONPATH=path)
    assert (done.status, plain.status) == (1, 4)
    assert done.out == plain.out
    (rank,) = json.loads(report.read_text())["failure"]["ranks"]
    assert (rank["exit_status"], rank["exception"], rank["error_file"]) == (4, None, None)


def test_a_python_below_a_wrapper_sees_no_hook(tmp_path: Path) -> None:
    """The wrapper, whose arguments may look like those of a rank's Python, has one more entry in PYTHONPATH."""
    text = f'echo "<$PYTHONPATH>"; {sys.executable} -c \'import os; print(os.environ["PYTHONPATH"])\''
    done = numapin("run", "--no-python", "bash", "-u", script(tmp_path, text, "job.sh"), PYTHONPATH="/x")
    wrappers, pythons = done.out.splitlines()
    assert (done.status, wrappers.endswith("/rank/hook:/x>"), pythons) == (0, True, "/x")


def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    """No part of the file is left."""
    text = (
        "import os, resource\n"
        "open('folder', 'w').write(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "raise ValueError(9)\n"
    )
    report = ("--report", str(tmp_path / "report.json"))
    done = numapin("run", "--quiet", *report, script(tmp_path, text), cwd=tmp_path)
    assert done.status == 1
    assert "rank    0, the first to fail" in done.err
    assert "JSONDecodeError" not in done.err
    assert list(Path((tmp_path / "folder").read_text()).glob("error*")) == []


def test_a_shells_loop_ends_with_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C on a terminal ends a loop of bash's around the launcher, too."""
    path = script(tmp_path, "import os, time; open('here', 'w'); time.sleep(300)\n")
    loop = f"set -m; for n in 1 2 3; do echo $n; {' '.join(NUMAPIN)} run --quiet {path}; done; echo after"
    interrupts = (
        "import os, signal, subprocess, sys, time\n"
        "job = subprocess.Popen(['bash', '-c', sys.argv[1]], start_new_session=True)\n"
        "while not os.path.exists('here'): time.sleep(0.02)\n"
        "os.killpg(job.pid, signal.SIGINT)\n"
        "sys.exit(job.wait(60) % 256)\n"
    )
    done = subprocess.run(
        [*NUMAPIN[:1], "-c", interrupts, loop.removeprefix("set -m; ")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(),
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_status_of_a_container(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """As process 1, the launcher ends its container with the status that a shell would show."""
    if subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("PID namespaces cannot be made here")
    path = script(tmp_path, "import time\nopen('here', 'w').close()\ntime.sleep(300)\n")
    with subprocess.Popen(
        [*IN_NAMESPACE, *NUMAPIN, "run", "--quiet", path],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert wait_until((tmp_path / "here").exists, limit_s=60)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), number)
        assert process.stderr is not None
        assert process.stderr.read().endswith(f"numapin: stopped by {number.name}; all ranks have ended\n")
    assert process.returncode == status


SPAWNS = f"""
import numapin
def eat():
    return len(bytearray(b'x') * {2 * MEMORY_BYTES})
if __name__ == "__main__":
    try:
        numapin.spawn(eat)
    except numapin.RankError as error:
        print(error)
"""


@needs_root
def test_spawn_names_memory(cgroup: Path, tmp_path: Path) -> None:
    """The RankError of numapin.spawn names the cgroup of the rank that the kernel killed, and the limit."""
    into = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    done = call("sh", "-c", into, "sh", sys.executable, script(tmp_path, SPAWNS))
    assert done.status == 0, done.err
    assert f"was killed by SIGKILL: killed by the kernel's out-of-memory killer: cgroup {cgroup}, " in done.out
    assert " is 768.0 MiB\n  hint: give the job more memory" in done.out
