"""The end of a job that fails: one block, the same whatever starts the ranks. These tests write failure-blocks.md.

`NUMAPIN_UPDATE_GOLDEN=1 pytest tests/integration/test_failure_block.py` records the blocks on that page again, with the
facts that differ from run to run replaced.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.forking import CommandLine
from tests.integration.launching import (
    NUMAPIN,
    TORCH_QUICKLY,
    WITHOUT_GARBAGE,
    Done,
    call,
    environment,
    numapin,
    script,
    start,
)
from tests.needs import needs_root
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.forking import Forked

PAGE = Path(__file__).with_name("failure-blocks.md")
LIMIT_S = 120
MEMORY_BYTES = 768 << 20
_CGROUP = "/sys/fs/cgroup/job_7"

# All ranks are there, and the others wait, before rank 1 does anything.
_TOGETHER = """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1] if len(sys.argv) > 1 else "marks"), os.environ["RANK"]
def mark(name=rank): (here / name).write_text(str(os.getpid()))
def wait_for(name):
    while not (here / name).exists(): time.sleep(0.01)
def wait_for_all(prefix=""):
    for number in range(int(os.environ["WORLD_SIZE"])): wait_for(f"{prefix}{number}")
def stay(): mark(); time.sleep(300)
"""
_OTHERS_STAY = """
if rank != "1": stay()
for number in range(int(os.environ["WORLD_SIZE"])):
    if number != 1: wait_for(str(number))
"""
_ALONE = f"{_TOGETHER}{_OTHERS_STAY}"
_STEP = """
def step(batch):
    if not batch:
        raise ValueError("the batch is empty")

def main():
    for batch in ([1, 2], []):
        step(batch)
"""
_GLOO = f"{TORCH_QUICKLY}import datetime, torch.distributed as dist\n{_TOGETHER}"
_GROUP = "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))\n"
_IMAGES = f"""{TORCH_QUICKLY}
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self): return 32
    def __getitem__(self, number):
        try:
            if number == 17: open("17.jpg")
        except OSError as error:
            raise ValueError("image 17.jpg is truncated") from error
        return number
for batch in DataLoader(Images(), num_workers=1): pass
"""
_OTHER_SIGNAL = "signal.SIGRTMAX - 1"  # with which numapin asks for a rank's stack
_RAISES = "raise ValueError('x')\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job that fails.

    Attributes:
        text: The script, train.py. It leaves a file for each rank that is ready in the folder `marks`.
        command: What runs the launcher, e.g. in a namespace of its own; `{cgroup}` is a memory cgroup with a limit.
        number: The signal that the launcher gets once both ranks are ready. None: it gets none.
        program: What the launcher runs: options, a program and its arguments.
        num_ranks: The number of ranks.
        beside: Other files, by their names.
        certain: How the lines of the block begin that are the same in every run; by default all are.
    """

    text: str
    command: tuple[str, ...] = ()
    number: signal.Signals | None = None
    program: tuple[str, ...] = ("train.py", "marks")
    num_ranks: int = 2
    beside: dict[str, str] = field(default_factory=dict)
    certain: tuple[str, ...] = ("",)


def shell(line: str, text: str, **beside: str) -> Scenario:
    """Return a job whose ranks are shells; `python` in it is this Python."""
    files = {f"{name}.py": content for name, content in beside.items()}
    program = ("--no-python", "sh", "-c", line.replace("python", sys.executable))
    return Scenario(text=text, program=program, beside=files)


OOM, FULL_SHM, CTRL_C, SIGTERM = "The kernel's out-of-memory killer", "A full /dev/shm", "Ctrl-C", "SIGTERM"
FULL_DISK = "A full disk under the logs"
SCENARIOS = {
    "An uncaught exception": Scenario(text=f"{_ALONE}{_STEP}\nmain()\n"),
    "The same under torch's `@record`": Scenario(
        text=f"{_ALONE}{WITHOUT_GARBAGE}from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"{_STEP}\nrecord(main)()\n"
    ),
    OOM: Scenario(
        text=f"{_ALONE}x = bytearray(b'x') * {2 * MEMORY_BYTES}\n",
        command=("sh", "-c", 'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"),
    ),
    "A segmentation fault": Scenario(text=f"{_ALONE}import ctypes; ctypes.string_at(0)\n"),
    FULL_SHM: Scenario(
        text=f"{_ALONE}import mmap\n"
        "with open('/dev/shm/batch', 'wb+') as file:\n"
        "    file.truncate(8 << 20)\n"
        "    mmap.mmap(file.fileno(), 8 << 20).write(bytes(8 << 20))\n",
        command=(*("unshare", "--mount", "sh", "-c"), *('mount -t tmpfs -o size=4m none /dev/shm && exec "$@"', "sh")),
    ),
    FULL_DISK: Scenario(
        text="import sys\nprint('a line\\n' * 10_000)\nsys.stdout.close()\n",
        program=("--redirects", "3", "--log-dir", "marks", "train.py"),
        num_ranks=1,
        command=(*("unshare", "--mount", "sh", "-c"), *('mount -t tmpfs -o size=64k none marks && exec "$@"', "sh")),
        certain=("numapin: ", "  failed", "  likely", "  next"),  # the names of the logs are random
    ),
    "A rank fails while the other waits in a collective": Scenario(
        text=f"{WITHOUT_GARBAGE}import torch.distributed as dist\ndist.init_process_group('gloo')\n{_TOGETHER}"
        f"if rank == '0': mark(); dist.new_group(); dist.barrier()\nwait_for('0')\n{_STEP}\nmain()\n"
    ),
    "A rank ends without an exception, and the other loses its connection": Scenario(
        text=f"{_TOGETHER}import atexit\n"
        "def await_end(pid):\n"
        "    mark('recorded')\n"
        "    while Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.01)\n"
        "mark(); wait_for_all()\n"
        "if rank == '1':\n"
        "    wait_for('recorded')\n"
        "    os._exit(3)\n"
        "atexit.register(await_end, int((here / '1').read_text()))\n"
        "raise RuntimeError('[/gloo/transport/tcp/pair.cc:537] Read error [::1]:41217: Connection reset by peer')\n"
    ),
    CTRL_C: Scenario(
        text=f"{_TOGETHER}signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\nstay()\n", number=signal.SIGINT
    ),
    SIGTERM: Scenario(text=f"{_TOGETHER}stay()\n", number=signal.SIGTERM),
    "A file server's reset, and a handler of SIGTERM that raises": Scenario(
        text=f"{_TOGETHER}def asked(*_): raise SystemError('asked to end')\nsignal.signal(signal.SIGTERM, asked)\n"
        f"{_OTHERS_STAY}raise ConnectionResetError(104, 'Connection reset by peer')\n"
    ),
    "A shell that becomes Python": shell(
        "exec python train.py", f"{_ALONE}def main():\n    sys.exit('cannot open data')\nmain()\n"
    ),
    "A shell around Python": shell("python train.py; exit 5", f"{_ALONE}1 / 0\n"),
    "A failure that a shell survives": shell(
        "python check.py || true; python train.py; exit $?",
        f"{_ALONE}raise ValueError('of the training')\n",
        check="raise KeyError('of the check')\n",
    ),
    "A daemon's failure before": shell(
        "setsid -w python check.py; python train.py; exit $?",
        f"{_ALONE}sys.exit(4)\n",
        check="raise KeyError('of the daemon')\n",
    ),
    "A Python that becomes another": Scenario(
        text=f"{_ALONE}1 / 0\n",
        program=("--no-python", sys.executable, "wrapper.py", sys.executable, "train.py"),
        beside={
            "wrapper.py": "import os, sys\n"
            "os.environ['PYTHONPATH'] = '/nonexistent'\nos.execl(sys.argv[1], *sys.argv[1:])\n"
        },
    ),
    "A Python that starts another": Scenario(
        text=f"{_ALONE}1 / 0\n",
        program=("--no-python", sys.executable, "starts.py"),
        beside={
            "starts.py": "import subprocess, sys\n"
            "if subprocess.call([sys.executable, 'train.py']): raise RuntimeError('the program failed')\n"
        },
    ),
    "Ranks in several places": Scenario(
        text=f"{_TOGETHER}def reads(): stay()\nif rank == '3': reads()\n{_OTHERS_STAY}{_RAISES}", num_ranks=4
    ),
    "A rank in C code that holds the interpreter's lock": Scenario(
        text=f"{_TOGETHER}from itertools import repeat\n"
        f"def busy():\n    mark()\n    sum(repeat(1))\nif rank == '0': busy()\nwait_for('0')\n{_RAISES}"
    ),
    "A rank that blocks signals": Scenario(
        text=f"{_TOGETHER}signal.pthread_sigmask(signal.SIG_BLOCK, [{_OTHER_SIGNAL}])\n{_OTHERS_STAY}{_RAISES}"
    ),
    "A rank that has given the signal its default": Scenario(
        text=f"{_TOGETHER}signal.signal({_OTHER_SIGNAL}, signal.SIG_DFL)\n{_OTHERS_STAY}{_RAISES}"
    ),
    "A rank that has closed all files": Scenario(
        text=f"{_TOGETHER}os.closerange(3, 99)\nfile = open('data', 'w')\n{_OTHERS_STAY}{_RAISES}"
    ),
    "An exception of a DataLoader's worker": Scenario(text=_IMAGES, num_ranks=1),
    "A collective whose peer has ended": Scenario(
        text=f"{_GLOO}{_GROUP}mark(); wait_for_all()\nif rank == '1': os._exit(3)\ndist.barrier()\n",
        certain=("numapin: ", "  rank", "  failed"),  # rank 0 may fail before or after the end of rank 1 is seen
    ),
    "A collective that times out": Scenario(
        # A shorter time for the collective only: on a busy machine the ranks need a while to meet.
        text=f"{_GLOO}{_GROUP}if rank == '1': stay()\n"
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))\ndist.barrier()\n"
    ),
}


def run(scenario: Scenario, folder: Path, *options: str, cgroup: Path | None = None) -> Done:
    """Run a scenario to its end: numapin is in a fork, or in a new process below the scenario's command."""
    marks = folder / "marks"
    marks.mkdir()
    for name, text in {"train.py": scenario.text, **scenario.beside}.items():
        (folder / name).write_text(text)
    words = ("run", "--quiet", "--nproc-per-node", str(scenario.num_ranks), *options, *scenario.program)
    environ = environment(TMPDIR=str(folder), CUDA_VISIBLE_DEVICES="")
    process: Forked | subprocess.Popen[bytes]
    if scenario.command:
        before = [word.format(cgroup=cgroup) if "{cgroup}" in word else word for word in scenario.command]
        null = subprocess.DEVNULL
        with (folder / "err").open("w") as err:
            command = [*before, *NUMAPIN, *words]
            process = subprocess.Popen(command, cwd=folder, stdin=null, stdout=null, stderr=err, env=environ)
    else:
        line = CommandLine(module="numapin", arguments=words, environ=environ, cwd=str(folder))
        process = start(line, err=folder / "err", fork=True)
    try:
        if scenario.number is not None:
            assert wait_until(lambda: len(list(marks.iterdir())) == 2, limit_s=LIMIT_S), (folder / "err").read_text()
            process.send_signal(scenario.number)
        status = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return Done(status=status, out="", err=(folder / "err").read_text())


def settled(lines: Sequence[str]) -> str:
    """Return a block with the facts of this run replaced by those of an example."""
    text = "\n".join(lines)
    for pattern, example in (
        (r"pid \d+,\s+host \S+", "pid 41217, host node7"),
        (r"(GPU|, node) \S+, pid", r"\1 0, pid"),
        (r"(  more  +)/.*?/failure\.txt", r"\1/tmp/numapin-1000-20261122-221507-node7-3f9c01d2/failure.txt"),
        (r"cgroup\s+/.*?768\.0\s+MiB", f"cgroup\n{' ' * 10}{_CGROUP}, {_CGROUP}/memory.max is 768.0 MiB"),
        (r"failed \d+\.\d s before", "failed 0.4 s before"),
        (r'File "[^"]*(train|starts)\.py"', r'File "/home/ada/\1.py"'),
        (r"were in rank 0: \w+, starts", "were in rank 0: wait, starts"),
        (r'(File "[^"]*/torch/[^\n]*\n[^\n]*\n( {10}(?=File "[^"]*/torch/))?)+', "frames of torch\n"),
        (f"{re.escape(sys.executable)} failed", "python failed"),
        (r"\[[^\[\]]*/gloo/[^\[\]]*\]", "[gloo.cc:1]"),
    ):
        text = re.sub(pattern, example, text, flags=re.DOTALL)
    return text


@pytest.fixture(scope="module")
def cgroup() -> Iterator[Path]:
    """Make a memory cgroup with a limit, of either version."""
    for base, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(base, f"numapin-test-{os.getpid()}")
        try:
            with suppress(OSError):
                folder.mkdir()
                if (folder / limit).exists():
                    (folder / limit).write_text(str(MEMORY_BYTES))
                    yield folder
                    return
        finally:
            with suppress(OSError):
                folder.rmdir()
    pytest.skip("no memory cgroup can be made below /sys/fs/cgroup")


@pytest.mark.parametrize(
    "about",
    [pytest.param(about, marks=needs_root) if about in (OOM, FULL_SHM, FULL_DISK) else about for about in SCENARIOS],
)
def test_block(tmp_path: Path, about: str, request: pytest.FixtureRequest) -> None:
    """A failed job ends with the recorded block, of at most 20 lines and 80 columns.

    It names the rank that failed first, says what is known of its failure, and states nothing else.
    """
    cgroup = request.getfixturevalue("cgroup") if about == OOM else None
    done = run(SCENARIOS[about], tmp_path, cgroup=cgroup)
    blocks = re.findall(r"^## (.+?)\n\n```text\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines, recorded = done.err[done.err.rindex("numapin: ") :].splitlines(), dict(blocks)
    assert done.status == {CTRL_C: -signal.SIGINT, SIGTERM: 128 + signal.SIGTERM}.get(about, 1), done.err
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert done.err.count("numapin: ") == 1, done.err
    block = settled([line for line in lines if line.startswith(SCENARIOS[about].certain)])
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        recorded = {name: recorded.get(name, "") for name in SCENARIOS} | {about: block}
        page = "".join(f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in recorded.items())
        PAGE.write_text(PAGE.read_text().partition("\n## ")[0] + page)
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
    options = ("--quiet", "--virtual-local-rank", "--nproc-per-node", "2", script(tmp_path, ""))
    plain, traced = (numapin("run", *shown, *options, CUDA_VISIBLE_DEVICES="7") for shown in ((), ("--traceback",)))
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


@needs_root
def test_logs_on_a_file_system_without_a_size(tmp_path: Path) -> None:
    """One that reports 0 free blocks of 0, as ramfs does, is not called full."""
    (tmp_path / "logs").mkdir()
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t ramfs none logs && exec "$@"', "sh")
    path = script(tmp_path, "raise SystemExit(3)")
    done = call(*mount, *NUMAPIN, "run", "--redirects", "3", "--log-dir", "logs", path, cwd=tmp_path)
    assert "  failed  exit status 3" in done.err
    assert "  likely" not in done.err


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
    loop = f"for n in 1 2 3; do echo $n; {' '.join(NUMAPIN)} run --quiet {path}; done; echo after"
    interrupts = (
        "import os, signal, subprocess, sys, time\n"
        "job = subprocess.Popen(['bash', '-c', sys.argv[1]], start_new_session=True)\n"
        "while not os.path.exists('here'): time.sleep(0.02)\n"
        "os.killpg(job.pid, signal.SIGINT)\n"
        "sys.exit(job.wait(60) % 256)\n"
    )
    done = call(*NUMAPIN[:1], "-c", interrupts, loop, cwd=tmp_path)
    assert done.out == "1\n", done.err


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
