"""A stand-in for a training script with roles: it writes the kernel's masks of its threads and workers to $PROBE_OUT.

    numapin run --cores-for loader=1,optimizer=1 roles_probe.py

It uses torch's intra-op threads, torch's DataLoader and numapin's, and verifies its own run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

OUT: Final = Path(os.environ["PROBE_OUT"])


def main() -> None:
    """Start every kind of thread and worker, and write where each may run."""
    first = _masks()
    import torch

    torch.ones(1 << 20).add_(1)
    after = threading.Event()
    thread = threading.Thread(target=after.wait)  # as NCCL's proxies: started by the main thread, later
    thread.start()
    loaders = {kind: _workers(kind) for kind in ("torch", "numapin")}
    answers = {
        "first": first,
        "masks": _masks(),
        "later": _mask(thread.native_id or 0),
        "torch_threads": torch.get_num_threads(),
        "workers": loaders,
        "verify": _verify(),
    }
    after.set()
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))


def _workers(kind: str) -> list[list[str]]:
    """Return the masks of all threads of a loader's workers."""
    import torch.utils.data

    import numapin

    class Masks(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, _: int) -> str:
            return json.dumps(_masks())

    loader = (numapin if kind == "numapin" else torch.utils.data).DataLoader(Masks(), num_workers=2)
    return [json.loads(text) for (text,) in loader]


def _masks() -> list[str]:
    """Return the CPUs of each thread of this process, those of the main thread first."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: (task.name != str(os.getpid()), task.name))
    return [_mask(int(task.name)) for task in tasks]


def _mask(task: int) -> str:
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))


def _verify() -> dict[str, Any] | None:
    """Let one rank verify the run; the other ranks run for as long as they do."""
    if os.environ["RANK"] != "0":
        return None
    done = subprocess.run([sys.executable, "-m", "numapin", "verify", "--json", "--pid", str(os.getpid())],
        capture_output=True, text=True, check=False)
    return {"status": done.returncode, "report": json.loads(done.stdout or "null"), "stderr": done.stderr}


if __name__ == "__main__":
    main()
