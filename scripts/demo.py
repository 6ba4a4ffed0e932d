"""Run the main job and show its bindings: `make demo`.

Starts examples/train_ddp.py under `numapin run`, on all GPUs with NCCL, or without GPUs as two ranks on the CPU with
gloo. Then prints the binding that each rank requested beside the one that the kernel reports, and fails if they differ
or the loss did not fall.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_ddp.py"


def main() -> int:
    """Run the example, show its bindings and loss, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="numapin-demo-") as folder:
        output = train(folder)
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("run-*/observed-*.json"))]
    exact = show_bindings(records)
    losses = re.findall(r"loss went from ([\d.]+) to ([\d.]+)", output)
    if len(losses) != 1:
        print(f"the loss was printed {len(losses)} times instead of once")
        return 1
    first, last = losses[0]
    print(f"loss: {first} -> {last}")
    return 0 if exact and float(last) < float(first) else 1


def train(run_dir: str) -> str:
    """Run the example, print its output as it comes, and return it."""
    command = [sys.executable, "-m", "numapin", "run", *number_of_ranks(), str(EXAMPLE)]
    print("$ numapin", *command[3:-1], "examples/train_ddp.py", flush=True)
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NUMAPIN_RUN_DIR": run_dir}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(process.returncode)
    return "".join(lines)


def number_of_ranks() -> list[str]:
    """Return the option for two ranks, if there is no GPU that decides the number."""
    topo = subprocess.run(
        [sys.executable, "-m", "numapin", "topo", "--json"], capture_output=True, text=True, check=True
    )
    return [] if any(gpu["visible"] for gpu in json.loads(topo.stdout)["gpus"]) else ["--nproc-per-node", "2"]


def show_bindings(records: list[dict[str, dict[str, str]]]) -> bool:
    """Print the requested and applied bindings; return whether they agree for every rank."""
    table = Table("rank", "CPUs requested", "CPUs per kernel", "memory requested", "memory per kernel", box=None)
    for record in records:
        requested, applied = record["requested"], record["applied"]
        memory = memory_of(requested), memory_of(applied)
        table.add_row(str(record["local_rank"]), requested["cpus"], applied["cpus"], *memory)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return bool(records) and all(map(agrees, records))


def agrees(record: dict[str, dict[str, str]]) -> bool:
    """Return whether a rank got the binding that it requested."""
    requested, applied = record["requested"], record["applied"]
    return requested["cpus"] == applied["cpus"] and memory_of(requested) == memory_of(applied)


def memory_of(binding: dict[str, str]) -> str:
    """Return the memory policy and its nodes."""
    return "none" if binding["memory"] == "none" else f"{binding['memory']} {binding['nodes']}"


if __name__ == "__main__":
    sys.exit(main())
