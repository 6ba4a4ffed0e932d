"""The process of `bench offload`: start one launcher on a job that measures every case. Edge.

Comes in: specs (see `offload.offload_benchmark`) from the harness. Goes out: the figures of the spec's case. The job's
answers are kept in the benchmark's folder, a file for each start: the other cases of the same repeat are read from it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numapin.bench.child import serve
from numapin.bench.measure import offload_rank
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from numapin.bench.child import Harness

_DROPPED: Final = ("OMP_", "KMP_", "GOMP_", "NUMAPIN_")
_MOST_CHARS: Final = 300
_RANK: Final = re.compile(r"^(\[rank\d+\]: |\s*failed  )")  # what torch and numapin put before an exception
_EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception)\b")


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Report the figures of one case under one launcher. Raises NumapinError if its job failed."""
    folder = Path(spec["folder"])
    answer = folder / f"{spec['peer']}-{_times_asked(folder, spec['case'], spec['peer'])}.json"
    if not answer.exists():
        _start(spec, answer)
    content = json.loads(answer.read_text(encoding="utf-8"))
    if "failed" in content:
        raise NumapinError(content["failed"])
    found = content["cases"][spec["case"]]
    harness.wait_for_start(lambda: time.sleep(0.001))
    harness.report(found["figures"], details=found["details"], idle=lambda: time.sleep(0.001))


def _times_asked(folder: Path, case: str, peer: str) -> int:
    """Return how often this case and peer was asked for before: the number of the repeat."""
    with (folder / f"asked-{case}-{peer}").open("a+b") as file:
        before = file.tell()
        file.write(b".")
    return before


def _start(spec: dict[str, Any], answer: Path) -> None:
    """Run a job to its end. Its answer is in the file afterwards; the last line of its stderr, if it failed."""
    job = answer.with_suffix(".job")
    job.write_text(json.dumps({**spec["job"], "answer": str(answer)}), encoding="utf-8")
    script = answer.with_name("offload_rank.py")  # Python puts the script's folder on the path of modules
    script.write_text(Path(offload_rank.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    done = subprocess.run(
        [*spec["command"], str(script), str(job)],
        env={"GLOO_SOCKET_IFNAME": "lo", **environ, **spec["variables"]},  # the host's name may not resolve
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if not answer.exists():
        reason = _last_error(done.stderr.decode(errors="replace"))
        text = f"{spec['peer']} exited with status {done.returncode}: {reason}"
        answer.write_text(json.dumps({"failed": text}), encoding="utf-8")


def _last_error(text: str) -> str:
    """Return the most useful line of stderr: an exception's, or else an error message, or else the last one."""
    lines = [_RANK.sub("", line).strip() for line in text.splitlines() if line.strip()] or ["nothing on stderr"]
    exceptions, messages = filter(_EXCEPTION.match, lines), (line for line in lines if "error:" in line)
    return next(chain(exceptions, messages, lines[-1:]))[:_MOST_CHARS]


if __name__ == "__main__":
    serve(measure)
