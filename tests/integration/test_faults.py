"""The outcome of a job when something fails. These tests write the table in faults.md.

`NUMAPIN_UPDATE_GOLDEN=1 pytest tests/integration/test_faults.py` rewrites it, but for the column of torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.faulty import LIMIT_S, Job, JobFromTheStart, handles, meeting, status_of
from tests.integration.launching import TORCH_QUICKLY
from tests.nvml import fake
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TABLE = Path(__file__).with_name("faults.md")
TWO = ["--nproc-per-node", "2"]
Facts = tuple[str, ...]
"""The outcome in the table's words, which has them in one line."""

STALL = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* Hold rank 1's shim of the first start where it is, before Python runs, and say so. */
__attribute__((constructor)) static void stall(void) {
    static char command[8192];
    const char *mark = getenv("STALL_MARK"), *count = getenv("TORCHELASTIC_RESTART_COUNT"), *rank = getenv("RANK");
    if (!mark || !count || !rank || strcmp(count, "0") || strcmp(rank, "1")) return;
    int file = open("/proc/self/cmdline", O_RDONLY);
    long length = read(file, command, sizeof command - 1);
    close(file);
    for (long i = 0; i < length; i++)
        if (strncmp(command + i, "numapin.rank", 12) == 0) {
            FILE *said = fopen(mark, "w");
            fprintf(said, "%d", getpid());
            fclose(said);
            for (;;) pause();
        }
}
"""


def exits(folder: Path) -> Facts:
    """A rank exits with 1, before and after its restart."""
    job = Job(
        folder,
        [*TWO, "--max-restarts", "1"],
        "mark('here'); wait_for(f'here.*.{restart}.*', 2); sys.exit(rank == '1') if rank == '1' else time.sleep(300)",
    )
    status = job.wait()
    return restarts(job), status_of(status), job.leftovers()


def shim_killed(folder: Path) -> Facts:
    """A shim gets SIGKILL before it becomes the script; one restart is allowed."""
    compiler = fake.compiler() or pytest.skip("no C compiler on PATH; type: apt-get install gcc libc6-dev")
    folder.mkdir()
    library, mark = folder / "stall.so", folder / "stalled"
    (folder / "stall.c").write_text(STALL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "stall.c"], check=True)
    variables = {"LD_PRELOAD": str(library), "STALL_MARK": str(mark)}
    job = Job(folder, [*TWO, "--max-restarts", "1"], "mark('here'); restart or time.sleep(300)", **variables)
    assert wait_until(lambda: mark.exists() and mark.read_text().isdecimal(), limit_s=LIMIT_S), job.err
    os.kill(int(mark.read_text()), signal.SIGKILL)
    status = job.wait()
    assert [restart for rank, restart, _ in job.marked("here") if rank == 1] == [1]
    return "1 restart", status_of(status), job.leftovers()


def launcher_killed(folder: Path) -> Facts:
    """The launcher gets SIGKILL; each rank has a DataLoader worker."""
    text = (
        f"{TORCH_QUICKLY}from torch.utils.data import DataLoader\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 10000\n"
        "    def __getitem__(self, i): time.sleep(0.05); return i\n"
        "for batch in DataLoader(Slow(), num_workers=1): mark('here')\n"
    )
    job = Job(folder, TWO, text)
    job.await_marks("here", 2)
    job.process.kill()
    status = job.wait()
    return status_of(status), job.leftovers()


def host_killed(folder: Path) -> Facts:
    """One of two hosts loses its whole launcher session to SIGKILL (`--nnodes 1:2`)."""
    text = (
        "mark(f'world{world}')\n"
        "wait_for('gone')\n"
        "sys.exit(world == '2')  # a collective fails where the other host is gone\n"
    )
    first, second = pair(folder, text)
    os.killpg(second.process.pid, signal.SIGKILL)
    second.wait()
    lost = second.leftovers()
    second.end()
    (folder / "marks").joinpath("gone").touch()
    status = first.wait()
    assert first.marked("world1")
    return f"lost host: {lost}", f"the other continues: {status_of(status)}", first.leftovers()


def hangs(folder: Path) -> Facts:
    """A rank hangs and ignores SIGTERM; a collective of the other rank times out (`--shutdown-timeout 2`)."""
    text = (
        f"{TORCH_QUICKLY}from datetime import timedelta\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=timedelta(seconds=60)); mark('here')\n"
        "if rank == '1': signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('hangs'); time.sleep(300)\n"
        "wait_for('hangs.*')\n"
        "dist.monitored_barrier(timeout=timedelta(seconds=1))\n"
    )
    job = Job(folder, [*TWO, "--shutdown-timeout", "2"], text)
    job.await_marks("hangs", 1)
    return ended_within(job, 20), status_of(job.wait()), job.leftovers()


def dying(folder: Path) -> Facts:
    """A rank exits with 1 and the other is killed at once (`--shutdown-timeout 0`); one restart is allowed."""
    text = (
        "mark('here')\n"
        "if restart: sys.exit(0)\n"
        "if rank == '1': wait_for('holds.*'); sys.exit(1)\n"
        "memory = b'x' * (1 << 30)  # takes its time to go, as a GPU's does\n"
        "mark('holds'); time.sleep(300)\n"
    )
    job = Job(folder, [*TWO, "--max-restarts", "1", "--shutdown-timeout", "0"], text)
    job.await_marks("holds", 1)
    pid = job.marked("holds")[0][2]
    assert wait_until(lambda: bool(job.marked("here", restart=1)), limit_s=LIMIT_S), job.err
    left = Path(f"/proc/{pid}").exists()
    there = f"{'a' if left else 'no'} rank of the round before is left"
    status = job.wait()
    return restarts(job), there, status_of(status), job.leftovers()


def terminated(folder: Path) -> Facts:
    """The launcher gets SIGTERM; one rank saves for 1 s, one ignores it (`--shutdown-timeout 4`)."""
    text = (
        "def save(*_): time.sleep(1); mark('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save if rank == '0' else signal.SIG_IGN)\n"
        "mark('here'); time.sleep(300)\n"
    )
    job = Job(folder, [*TWO, "--shutdown-timeout", "4"], text)
    job.await_marks("here", 2)
    job.process.terminate()
    ended = ended_within(job, 25)
    return "saved" if job.marked("saved") else "not saved", ended, status_of(job.wait()), job.leftovers()


SIGNALLED = (
    "took = []\n"
    "def handler(*_): took.append(1); mark(f'usr{len(took)}')\n"
    "time.sleep(0.5)  # the script is importing\n"
    "signal.signal(signal.SIGUSR1, handler)\n"
    "if os.fork() == 0: mark('worker'); wait_for('end'); os._exit(0)\n"
    "mark('here'); wait_for('end')\n"
)


def signalled(folder: Path) -> Facts:
    """The launcher gets SIGUSR1 while it starts, SIGUSR1 while the ranks run, and SIGUSR2, which no rank handles."""
    job = JobFromTheStart(folder, TWO, SIGNALLED)
    assert wait_until(lambda: handles(job.process.pid, signal.SIGUSR1), limit_s=LIMIT_S), job.err
    job.process.send_signal(signal.SIGUSR1)
    job.await_marks("usr1", 2)
    job.await_marks("worker", 2)
    job.await_marks("here", 2)
    workers = {pid for *_, pid in job.marked("worker")}
    job.process.send_signal(signal.SIGUSR1)
    job.await_marks("usr2", 2)
    job.process.send_signal(signal.SIGUSR2)
    assert wait_until(lambda: "SIGUSR2 is kept for ranks 0-1" in job.err, limit_s=LIMIT_S), job.err
    time.sleep(0.3)  # this signal must have no effect
    job.marks.joinpath("end").touch()
    status = job.wait()
    took = job.marked("usr*")
    assert not workers & {pid for *_, pid in took}
    facts = f"each rank received {len(took) // 2}, workers none; the third is kept and reported"
    return facts, status_of(status), job.leftovers()


def gpu_lost(folder: Path) -> Facts:
    """A GPU is lost before its rank restarts; one host."""
    data, variables = with_gpus(folder, 2)
    job = Job(folder, ["--max-restarts", "3"], "mark('here'); wait_for('gone'); sys.exit(1)", **variables)
    job.await_marks("here", 2)
    data.write_text(fake.render(gpus(1)))
    job.marks.joinpath("gone").touch()
    status = job.wait()
    assert "the driver no longer shows GPU 1 (GPU-00000001" in job.err, job.err
    return restarts(job), "reported", status_of(status), job.leftovers()


def gpu_lost_elsewhere(folder: Path) -> Facts:
    """A GPU is lost before its rank restarts; two hosts (`--nnodes 1:2`)."""
    data, variables = with_gpus(folder, 1)
    text = "mark(f'world{world}'); wait_for('gone'); sys.exit(world == '2')"
    first, second = pair(folder, text, **variables)
    data.write_text(fake.render([]))
    first.marks.joinpath("gone").touch()
    left, status = second.wait(), first.wait()
    assert "the driver no longer shows GPU 0" in second.err, second.err
    assert first.marked("world1")
    return f"its host: reported, {status_of(left)}", f"the other continues: {status_of(status)}", first.leftovers()


FAULTS: tuple[Callable[[Path], Facts], ...] = (
    *(exits, shim_killed, launcher_killed, host_killed, hangs, terminated, signalled, gpu_lost),
    *(gpu_lost_elsewhere, dying),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_outcome_is_the_documented_one(
    tmp_path: Path, fault: Callable[[Path], Facts], request: pytest.FixtureRequest
) -> None:
    """After each fault the job ends or continues as faults.md says, and leaves behind only what it says."""
    if "gpu" in fault.__name__:
        request.getfixturevalue("fake_nvml")
    try:
        seen, rows, name = "; ".join(fault(tmp_path / "job")), read_rows(), name_of(fault)
        if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
            rows[name] = (seen, rows.get(name, ("", "not tried"))[1])
            write_rows(rows)
    finally:
        while Job.started:
            Job.started.pop().clean()
    assert name in rows, "write the table with: NUMAPIN_UPDATE_GOLDEN=1 pytest tests/integration/test_faults.py"
    assert seen == rows[name][0]


# --- what the scenarios share -----------------------------------------------------------------------------------------


def restarts(job: Job) -> str:
    """Describe how often the ranks were restarted, and whether they were bound as before."""
    number = max(restart for _, restart, _ in job.marked("here"))
    words = "no restart" if not number else f"{number} restart{'s' if number > 1 else ''}"
    if number:
        kept = list(job.temporary.glob("numapin-*"))  # removed with the folder of a successful run
        words += (", same binding" if job.same_binding() else ", another binding") if kept else ""
    return words


def ended_within(job: Job, limit_s: int) -> str:
    """Wait for the launcher's end, and describe how long that takes."""
    start = time.monotonic()
    job.wait()
    return f"ended within {limit_s if time.monotonic() - start < limit_s else 60} s"


def pair(folder: Path, text: str, **variables: str) -> tuple[Job, Job]:
    """Start two hosts of one job, one rank each; return them once the ranks of both are in one world."""
    options = [
        *(*meeting(), "--nproc-per-node", "1", "--nnodes", "1:2", "--max-restarts", "3"),
        *("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6,read_timeout=60"),
    ]
    one = Job(folder, options, text)
    one.await_marks("world1", 1)  # the store exists, and belongs to this host
    two = Job(folder, options, text, **variables)
    two.await_marks("world2", 2)
    return one, two


def gpus(count: int) -> list[fake.FakeGpu]:
    return [
        fake.FakeGpu(uuid=f"GPU-0000000{n}-0000-0000-0000-000000000000", pci=f"00000000:0{n + 1}:00.0")
        for n in range(count)
    ]


def with_gpus(folder: Path, count: int) -> tuple[Path, dict[str, str]]:
    """Return the fake's data file with this number of GPUs, and the variables that make a process see them."""
    folder.mkdir(exist_ok=True)
    data = folder / "nvml-data"
    data.write_text(fake.render(gpus(count)))
    library = fake.build(Path(__file__).parents[2] / ".cache" / "fake-nvml")
    names = ("FAKE_NVML_DATA", "LD_LIBRARY_PATH")
    seen = ",".join(str(n) for n in range(count))
    return data, {name: fake.environment(library, data)[name] for name in names} | {"CUDA_VISIBLE_DEVICES": seen}


# --- the table --------------------------------------------------------------------------------------------------------


def name_of(fault: Callable[[Path], Facts]) -> str:
    return (fault.__doc__ or "").strip().removesuffix(".")


def read_rows() -> dict[str, tuple[str, str]]:
    found = re.finditer(r"^\| (.+?) \| (.+?) \| (.+?) \|$", TABLE.read_text(), re.MULTILINE)
    return {row[1]: (row[2], row[3]) for row in found}


def write_rows(rows: dict[str, tuple[str, str]]) -> None:
    """Write the table and keep the text around it."""
    before, line, after = TABLE.read_text().partition("|---|---|---|\n")
    lines = [f"| {name} | {' | '.join(rows[name])} |\n" for name in map(name_of, FAULTS) if name in rows]
    TABLE.write_text("".join([before, line, *lines, "\n", after.partition("|\n\n")[2]]))
