"""A job that runs until it is told to end, for tests of commands that inspect running jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.forking import CommandLine
from tests.integration.launching import environment, script, start
from tests.waiting import wait_until

# Runs until the file of the second argument exists and, if it is a report, has a verdict. A third argument is a CPU to
# which it moves its thread at the start.
JOB = """
import os, sys, threading, time
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
for cpu in sys.argv[3:]:
    os.sched_setaffinity(thread.native_id, {int(cpu)})
open(sys.argv[1] + os.environ["LOCAL_RANK"], "w").close()
while not os.path.exists(sys.argv[2]) or '"holds": null' in open(sys.argv[2]).read():
    time.sleep(0.05)
end.set()
"""

# Like a rank whose loop over numapin.DataLoader makes 50 steps/s and waits half of the time.
STEPPING_JOB = """
import os, sys, time
from numapin.steps.totals import totals_of
loops = totals_of(os.getpid())
open(sys.argv[1] + os.environ["LOCAL_RANK"], "w").close()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
    loops.add(waited_s=0.01, stepped_s=0.02, num_bytes=10**6)
"""


@contextmanager
def staying_job(
    folder: Path, *options: str, num_ranks: int = 1, job_script: str = JOB, moved_to: int | None = None, **changes: str
) -> Iterator[int]:
    """Run the job below `numapin run`; yield the launcher's process id once all ranks run; end it after the body."""
    words = [script(folder, job_script), str(folder / "ready"), str(folder / "end")]
    words += [] if moved_to is None else [str(moved_to)]
    line = CommandLine(
        module="numapin",
        arguments=["run", "--nproc-per-node", str(num_ranks), *options, *words],
        environ=environment(NUMAPIN_RUN_DIR=str(folder / "runs"), **changes),
        cwd=str(folder),
    )
    job = start(line, err=folder / "err", fork=True)
    try:
        marks = [folder / f"ready{rank}" for rank in range(num_ranks)]
        assert wait_until(lambda: job.poll() is not None or all(mark.exists() for mark in marks), limit_s=120)
        assert job.poll() is None, (folder / "err").read_text()
        yield job.pid
    finally:
        (folder / "end").touch()
        job.wait()
