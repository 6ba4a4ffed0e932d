"""A stand-in for a training script with roles: it writes the kernel's masks of its threads and workers to $PROBE_OUT.

    numapin run --cores-for loader=1,optimizer=1 roles_probe.py

It uses torch's intra-op threads, torch's DataLoader and numapin's. Rank 0 verifies the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

OUT: Final = Path(os.environ["PROBE_OUT"])


def main() -> None:
    """Start every kind of thread and worker, and write where each may run."""
    first = _masks()
    import torch

    torch.ones(1 << 20).add_(1)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)  # as NCCL's proxies: started by the main thread, later
    thread.start()
    loaders = {kind: _loader(kind) for kind in ("torch", "numapin")}
    answers = {
        "first": first,
        "workers": {kind: [json.loads(text) for (text,) in loader] for kind, loader in loaders.items()},
        "masks": _masks(),
        "later": _mask(Path(f"/proc/self/task/{thread.native_id}"))[0],
        "torch_threads": torch.get_num_threads(),
    }
    (OUT / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
    try:
        _look()  # the workers are persistent
    finally:
        end.set()


def _loader(kind: str) -> Any:
    """Return a loader whose batches are the masks of all threads of a worker."""
    import torch.utils.data

    import numapin

    class Masks(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, _: int) -> str:
            return json.dumps(_masks())

    made = numapin if kind == "numapin" else torch.utils.data
    return made.DataLoader(Masks(), num_workers=2, persistent_workers=True)


def _look() -> None:
    """Let rank 0 verify the run, as it is and after it has moved a thread; the other ranks wait."""
    if os.environ["RANK"] != "0":
        (OUT / "ready").touch()
        _wait_for("done")
        return
    _wait_for("ready")
    try:
        _verify("green")
        planned = os.sched_getaffinity(0)
        os.sched_setaffinity(0, _optimizers_cpus())
        _verify("moved")
        os.sched_setaffinity(0, planned)
    finally:
        (OUT / "done").touch()


def _optimizers_cpus() -> set[int]:
    """Return the CPUs of a thread of this process that are not the main thread's."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            if (cpus := os.sched_getaffinity(int(task.name))) != os.sched_getaffinity(0):
                return cpus
    raise LookupError("all threads have the main thread's CPUs")


def _verify(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "numapin", "verify", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout) if done.stdout else None
    (OUT / f"{name}.json").write_text(json.dumps({"status": done.returncode, "report": report, "stderr": done.stderr}))


def _wait_for(name: str) -> None:
    while not (OUT / name).exists():
        time.sleep(0.1)


def _masks() -> list[str]:
    """Return the CPUs of each thread of this process, those of the main thread first; a thread may have ended."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: (task.name != str(os.getpid()), task.name))
    return [mask for task in tasks for mask in _mask(task)]


def _mask(task: Path) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = (task / "status").read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]
    return []


if __name__ == "__main__":
    main()
