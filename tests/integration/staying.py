"""A job that runs until it is told to end, for tests of commands that inspect running jobs."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.integration.launching import environment, script
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Runs until the file of the second argument exists and, if it is a report, has a verdict. A third argument is a CPU to
# which it moves its thread at the start.
JOB = """
import os, sys, threading, time
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
for cpu in sys.argv[3:]:
    os.sched_setaffinity(thread.native_id, {int(cpu)})
open(sys.argv[1] + os.environ.get("LOCAL_RANK", ""), "w").close()
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
    folder: Path, *command: str, moved_to: int | None = None, num_ranks: int = 0, job_script: str = JOB
) -> Iterator[int]:
    """Run the job, yield the process id of the command once all ranks are running, and end the job after the body."""
    arguments = [script(folder, job_script), str(folder / "ready"), str(folder / "end")]
    moved = [] if moved_to is None else [str(moved_to)]
    with subprocess.Popen(
        [*command, *arguments, *moved], env=environment(NUMAPIN_RUN_DIR=str(folder / "runs")), stderr=subprocess.PIPE
    ) as job:
        try:
            names = [f"ready{rank}" for rank in range(num_ranks)] or ["ready"]
            ready = wait_until(
                lambda: job.poll() is not None or all((folder / name).exists() for name in names), limit_s=120
            )
            assert (ready, job.poll()) == (True, None)
            yield job.pid
        finally:
            (folder / "end").touch()
            job.communicate()
