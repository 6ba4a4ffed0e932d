"""Jobs of two ranks that fail in ten ways, and what `numapin run` says at their end.

Input: a way to start the ranks. Output: the block, with the facts that differ from run to run replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.forking import CommandLine
from tests.integration.launching import NUMAPIN, WITHOUT_GARBAGE, Done, environment, start
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.integration.forking import Forked

LIMIT_S = 120
MEMORY_BYTES = 768 << 20
_CGROUP = "/sys/fs/cgroup/job_7"

# Rank 0 is there, and waits, before rank 1 does anything.
_TOGETHER = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
def mark(): (here / os.environ["RANK"]).touch()
def wait_for(number):
    while len(list(here.iterdir())) < number: time.sleep(0.01)
if os.environ["RANK"] == "0":
    mark(); time.sleep(300)
wait_for(1)
"""
_STEP = """
def step(batch):
    if not batch:
        raise ValueError("the batch is empty")

def main():
    for batch in ([1, 2], []):
        step(batch)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job that fails.

    Attributes:
        about: What happens, as the documentation says it.
        text: The script, which leaves a file for each rank that is ready.
        command: What runs the launcher, e.g. in a namespace of its own; `{cgroup}` is a memory cgroup with a limit.
        number: The signal that the launcher gets once both ranks are ready. None: it gets none.
    """

    about: str
    text: str
    command: tuple[str, ...] = ()
    number: signal.Signals | None = None


SCENARIOS = {
    "exception": Scenario(about="An uncaught exception", text=f"{_TOGETHER}{_STEP}\nmain()\n"),
    "record": Scenario(
        about="The same under torch's `@record`",
        text=f"{_TOGETHER}{WITHOUT_GARBAGE}from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"{_STEP}\nrecord(main)()\n",
    ),
    "exit": Scenario(about="`sys.exit(3)`", text=f"{_TOGETHER}sys.exit(3)\n"),
    "oom": Scenario(
        about="The kernel's out-of-memory killer",
        text=f"{_TOGETHER}x = bytearray(b'x') * {2 * MEMORY_BYTES}\n",
        command=("sh", "-c", 'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"),
    ),
    "segv": Scenario(about="A segmentation fault", text=f"{_TOGETHER}import ctypes; ctypes.string_at(0)\n"),
    "bus": Scenario(
        about="A full /dev/shm",
        text=f"{_TOGETHER}import mmap\n"
        "with open('/dev/shm/batch', 'wb+') as file:\n"
        "    file.truncate(8 << 20)\n"
        "    mmap.mmap(file.fileno(), 8 << 20).write(bytes(8 << 20))\n",
        command=(
            *("unshare", "--mount", "sh", "-c"),
            *('mount -t tmpfs -o size=4m none /dev/shm && exec "$@"', "sh"),
        ),
    ),
    "hang": Scenario(
        about="A rank fails while the other waits in a collective",
        text=f"{WITHOUT_GARBAGE}import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"{_TOGETHER.replace('time.sleep(300)', 'dist.new_group(); dist.barrier()')}{_STEP}\nmain()\n",
    ),
    "silent": Scenario(
        about="A rank ends without an exception, and the other loses its connection",
        text="import atexit, os, sys, time\nfrom pathlib import Path\nhere = Path(sys.argv[1])\n"
        "def read(name): return (here / name).read_text() if (here / name).exists() else ''\n"
        "def await_end(pid):\n"
        "    (here / '0').write_text('recorded')\n"
        "    while Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1':\n"
        "    (here / '1').write_text(str(os.getpid()))\n"
        "    while not read('0'): time.sleep(0.01)\n"
        "    os._exit(3)\n"
        "while not read('1'): time.sleep(0.01)\n"
        "atexit.register(await_end, read('1'))\n"
        "raise RuntimeError('[/gloo/transport/tcp/pair.cc:537] Read error [::1]:41217: Connection reset by peer')\n",
    ),
    "ctrl-c": Scenario(
        about="Ctrl-C",
        text="import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n"
        f"{_TOGETHER}mark(); time.sleep(300)\n",
        number=signal.SIGINT,
    ),
    "sigterm": Scenario(about="SIGTERM", text=f"{_TOGETHER}mark(); time.sleep(300)\n", number=signal.SIGTERM),
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
    (folder / "train.py").write_text(scenario.text)
    words = ("run", "--quiet", "--nproc-per-node", "2", *options, "train.py", str(marks))
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
        return start(line, err=folder / "err", fork=False)
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
        (r'File "[^"]*train\.py"', 'File "/home/ada/train.py"'),
    ):
        text = re.sub(pattern, example, text, flags=re.DOTALL)
    return text
