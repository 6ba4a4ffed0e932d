"""Start-up time and memory of `numapin run` against torchrun: python -m bench.launch [--help].

Every repeat runs each launcher once, in turn, so that a machine that slows down slows all of them. "total" is from
before the launcher starts to after it ended; "first" to the first line of a rank, which for the all-reduce rank 0
prints when it has the result. RSS is the largest resident set of the launcher and its ranks (ru_maxrss of wait4): with
the printing script that is the launcher's. Prints a table, and writes all raw figures with --output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PRINTS = "import os, time; os.write(1, f'MARK {time.time()}\\n'.encode())\n"  # in one piece: ranks share the file
ALL_REDUCE = """
import os, time, torch, torch.distributed as dist
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
x = torch.ones(1, device="cuda" if on_gpu else "cpu")
dist.all_reduce(x)
assert x.item() == dist.get_world_size()
if dist.get_rank() == 0:
    print("MARK", time.time(), flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--script", choices=["print", "all-reduce"], default="print")
    parser.add_argument("--numa-binding", action="store_true", help="also torchrun --numa-binding=node")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    peers = launchers(arguments.ranks, numa_binding=arguments.numa_binding)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(PRINTS if arguments.script == "print" else ALL_REDUCE)
        runs = measure(peers, str(script), arguments.repeats)
    report(runs)
    if arguments.output:
        result = {"machine": machine(), "argv": sys.argv[1:], "commands": peers, "runs": [asdict(run) for run in runs]}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def launchers(ranks: int, *, numa_binding: bool) -> dict[str, list[str]]:
    """Return the commands to compare; all with the same interpreter."""
    number = ["--nproc-per-node", str(ranks)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *number]
    commands = {"numapin run": [sys.executable, "-m", "numapin.cli.main", "run", *number], "torchrun": torchrun}
    if numa_binding:
        commands["torchrun --numa-binding=node"] = [*torchrun, "--numa-binding=node"]
    return commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one launcher. `first_s` is the time to the first output of a rank, None where there was none."""

    launcher: str
    repeat: int
    total_s: float
    first_s: float | None
    max_rss_mb: float
    status: int
    stderr: str


def measure(peers: dict[str, list[str]], script: str, repeats: int) -> list[Run]:
    """Run every launcher once to warm the page cache, then `repeats` times in turn."""
    runs = [one_run(name, repeat, [*peers[name], script]) for repeat in range(-1, repeats) for name in peers]
    return [run for run in runs if run.repeat >= 0]


def one_run(name: str, repeat: int, command: list[str]) -> Run:
    """Run one launcher and return its times, memory and status."""
    start = time.time()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        end = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        marks = [float(line.split()[1]) for line in out.read().splitlines() if line.startswith("MARK")]
        errors = err.read()
    return Run(
        launcher=name,
        repeat=repeat,
        total_s=round(end - start, 4),
        first_s=round(min(marks) - start, 4) if marks else None,
        max_rss_mb=round(usage.ru_maxrss / 1024, 1),
        status=process.returncode,
        stderr=errors[-2000:] if process.returncode else "",
    )


def report(runs: list[Run]) -> None:
    """Print medians, spreads, and ratios to torchrun pair by pair."""
    print(f"{'launcher':31}{'what':10}{'median':>8}{'min':>9}{'max':>9}{'ratio':>8}")
    columns = {"total s": "total_s", "first s": "first_s", "RSS MB": "max_rss_mb"}
    for name in dict.fromkeys(run.launcher for run in runs):
        for what, field in columns.items():
            mine, theirs = ([getattr(r, field) for r in runs if r.launcher == who] for who in (name, "torchrun"))
            if None in mine or None in theirs:
                continue  # a run failed; the last line says how many
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            figures = f"{statistics.median(mine):9.3f}{min(mine):9.3f}{max(mine):9.3f}{ratio:8.3f}"
            print(f"{name:31}{what:9}{figures}")
    print(f"failed runs: {sum(run.status != 0 for run in runs)} of {len(runs)}")


def machine() -> dict[str, object]:
    """Return what the figures depend on."""
    import torch

    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


if __name__ == "__main__":
    main()
