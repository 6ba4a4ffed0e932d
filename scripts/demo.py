"""Run the main job and show what it did: `make demo`.

Starts examples/train_ddp.py under `numapin run`, on all GPUs with NCCL where there are any, else as two ranks on the
CPU with gloo. Then prints what each rank asked for and what the kernel says it got, and fails where the two differ or
the loss did not fall.
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
    """Run, show, judge; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="numapin-demo-") as folder:
        output = train(folder)
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("run-*/observed-*.json"))]
    exact = show_bindings(records)
    losses = re.findall(r"loss went from ([\d.]+) to ([\d.]+)", output)
    fell = len(losses) == 1 and float(losses[0][1]) < float(losses[0][0])
    print(f"loss: {losses[0][0]} -> {losses[0][1]}" if losses else "no loss was printed")
    return 0 if exact and fell else 1


def train(run_dir: str) -> str:
    """Run the example and return what it printed; its output is shown as it comes."""
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
    """Ask for two ranks where no GPU decides the number."""
    topo = subprocess.run(
        [sys.executable, "-m", "numapin", "topo", "--json"], capture_output=True, text=True, check=True
    )
    return [] if any(gpu["visible"] for gpu in json.loads(topo.stdout)["gpus"]) else ["--nproc-per-node", "2"]


def show_bindings(records: list[dict[str, dict[str, str]]]) -> bool:
    """Print requested beside applied; return whether they agree for every rank."""
    table = Table("rank", "CPUs asked", "CPUs the kernel says", "memory asked", "memory the kernel says", box=None)
    agree = bool(records)
    for record in records:
        asked, got = record["requested"], record["applied"]
        memory = [f"{side['memory']} {side['nodes'] if side['memory'] != 'none' else ''}" for side in (asked, got)]
        agree = agree and asked["cpus"] == got["cpus"] and memory[0] == memory[1]
        table.add_row(str(record["local_rank"]), asked["cpus"], got["cpus"], *memory)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return agree


if __name__ == "__main__":
    sys.exit(main())
