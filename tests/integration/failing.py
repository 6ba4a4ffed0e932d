"""Jobs that fail in many ways, each named as the documentation names it, and what `numapin run` says at their end.

Input: a way to start the ranks. Output: the block, with the facts that differ from run to run replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.forking import CommandLine
from tests.integration.launching import NUMAPIN, TORCH_QUICKLY, WITHOUT_GARBAGE, Done, environment, start
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.integration.forking import Forked

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


def _shell(line: str, text: str, **beside: str) -> Scenario:
    """Return a job whose ranks are shells; `python` in it is this Python."""
    files = {f"{name}.py": content for name, content in beside.items()}
    program = ("--no-python", "sh", "-c", line.replace("python", sys.executable))
    return Scenario(text=text, program=program, beside=files)


OOM, FULL_SHM, CTRL_C, SIGTERM = "The kernel's out-of-memory killer", "A full /dev/shm", "Ctrl-C", "SIGTERM"
SCENARIOS = {
    "An uncaught exception": Scenario(text=f"{_ALONE}{_STEP}\nmain()\n"),
    "The same under torch's `@record`": Scenario(
        text=f"{_ALONE}{WITHOUT_GARBAGE}from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"{_STEP}\nrecord(main)()\n",
    ),
    "`sys.exit(3)`": Scenario(text=f"{_ALONE}sys.exit(3)\n"),
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
        command=(
            *("unshare", "--mount", "sh", "-c"),
            *('mount -t tmpfs -o size=4m none /dev/shm && exec "$@"', "sh"),
        ),
    ),
    "A rank fails while the other waits in a collective": Scenario(
        text=f"{WITHOUT_GARBAGE}import torch.distributed as dist\ndist.init_process_group('gloo')\n{_TOGETHER}"
        f"if rank == '0': mark(); dist.new_group(); dist.barrier()\nwait_for('0')\n{_STEP}\nmain()\n",
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
        "raise RuntimeError('[/gloo/transport/tcp/pair.cc:537] Read error [::1]:41217: Connection reset by peer')\n",
    ),
    CTRL_C: Scenario(
        text=f"{_TOGETHER}signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\nstay()\n", number=signal.SIGINT
    ),
    SIGTERM: Scenario(text=f"{_TOGETHER}stay()\n", number=signal.SIGTERM),
    "A file server's reset, and a handler of SIGTERM that raises": Scenario(
        text=f"{_TOGETHER}def asked(*_): raise SystemError('asked to end')\nsignal.signal(signal.SIGTERM, asked)\n"
        f"{_OTHERS_STAY}raise ConnectionResetError(104, 'Connection reset by peer')\n",
    ),
    "A shell that becomes Python": _shell(
        "exec python train.py", f"{_ALONE}def main():\n    sys.exit('cannot open data')\nmain()\n"
    ),
    "A shell around Python": _shell("python train.py; exit 5", f"{_ALONE}1 / 0\n"),
    "A failure that a shell survives": _shell(
        "python check.py || true; python train.py; exit $?",
        f"{_ALONE}raise ValueError('of the training')\n",
        check="raise KeyError('of the check')\n",
    ),
    "A daemon's failure before": _shell(
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
        f"def busy():\n    mark()\n    sum(repeat(1))\nif rank == '0': busy()\nwait_for('0')\n{_RAISES}",
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
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))\ndist.barrier()\n",
    ),
}


@contextmanager
def limited_cgroup() -> Iterator[Path | None]:
    """Make a memory cgroup with a limit, of either version; yield None if that is not possible here."""
    folder = _made_cgroup()
    try:
        yield folder
    finally:
        if folder is not None:
            with suppress(OSError):
                folder.rmdir()


def _made_cgroup() -> Path | None:
    name = f"numapin-test-{os.getpid()}"
    for base, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(base, name)
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                (folder / limit).write_text(str(MEMORY_BYTES))
                return folder
        with suppress(OSError):
            folder.rmdir()
    return None


def run(scenario: Scenario, folder: Path, *options: str, cgroup: Path | None = None) -> Done:
    """Run a scenario in this folder to its end."""
    marks = folder / "marks"
    for path in (folder, marks):
        path.mkdir(exist_ok=True)
    for mark in marks.iterdir():
        mark.unlink()
    for name, text in {"train.py": scenario.text, **scenario.beside}.items():
        (folder / name).write_text(text)
    words = ("run", "--quiet", "--nproc-per-node", str(scenario.num_ranks), *options, *scenario.program)
    process = _started(scenario, folder, words, cgroup)
    try:
        if scenario.number is not None:
            assert wait_until(lambda: len(list(marks.iterdir())) == 2, limit_s=LIMIT_S), (folder / "err").read_text()
            process.send_signal(scenario.number)
        status = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return Done(status=status, out="", err=(folder / "err").read_text())


def _started(
    scenario: Scenario, folder: Path, words: Sequence[str], cgroup: Path | None
) -> Forked | subprocess.Popen[bytes]:
    """Start numapin in a fork, or in a new process below the scenario's command."""
    changes = {"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    if not scenario.command:
        line = CommandLine(module="numapin", arguments=words, environ=environment(**changes), cwd=str(folder))
        return start(line, err=folder / "err", fork=True)
    before = [word.format(cgroup=cgroup) if "{cgroup}" in word else word for word in scenario.command]
    with (folder / "err").open("w") as err:
        return subprocess.Popen(
            [*before, *NUMAPIN, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=environment(**changes),
        )


def block_of(text: str) -> list[str]:
    """Return the last message of numapin's, with the lines that belong to it."""
    lines = text.splitlines()
    first = max(number for number, line in enumerate(lines) if line.startswith("numapin: "))
    return lines[first:]


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
