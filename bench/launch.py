"""Start-up time and memory of `numapin run` against torchrun: python bench/launch.py [--help].

Every repeat runs each launcher once, in turn, so that a machine that slows down slows all of them. Wall time is from
before the launcher starts to after it ended; for the all-reduce, to the moment when rank 0 has its first result.
Memory is the launcher's largest resident set (ru_maxrss). Prints a table, and writes all raw figures with --output.
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
from pathlib import Path

PRINTS = "print('hello')\n"
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
    print("REDUCED", time.time(), flush=True)
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
        result = {"machine": machine(), "argv": sys.argv[1:], "commands": peers, "runs": runs}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def launchers(ranks: int, *, numa_binding: bool) -> dict[str, list[str]]:
    """Return the commands to compare; all with the same interpreter."""
    number = ["--nproc-per-node", str(ranks)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *number]
    commands = {"numapin run": [sys.executable, "-m", "numapin.cli.main", "run", *number], "torchrun": torchrun}
    if numa_binding:
        commands["torchrun --numa-binding=node"] = [*torchrun, "--numa-binding=node"]
    return commands


def measure(peers: dict[str, list[str]], script: str, repeats: int) -> list[dict[str, object]]:
    """Run every launcher once to warm the page cache, then `repeats` times in turn."""
    runs: list[dict[str, object]] = []
    for repeat in range(-1, repeats):
        for name, command in peers.items():
            run = one_run([*command, script])
            if repeat >= 0:
                runs.append({"launcher": name, "repeat": repeat, **run})
    return runs


def one_run(command: list[str]) -> dict[str, object]:
    """Run one launcher and return its wall time, memory and status."""
    start = time.time()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        end = time.time()
        out.seek(0)
        err.seek(0)
        text, errors = out.read(), err.read()
    reduced = [float(line.split()[1]) for line in text.splitlines() if line.startswith("REDUCED")]
    result: dict[str, object] = {
        "wall_s": round((reduced[0] if reduced else end) - start, 4),
        "total_s": round(end - start, 4),
        "max_rss_mb": round(usage.ru_maxrss / 1024, 1),
        "status": process.returncode,
    }
    if process.returncode:
        result["stderr"] = errors[-2000:]
    return result


def report(runs: list[dict[str, object]]) -> None:
    """Print medians, spreads, and ratios to torchrun pair by pair."""
    names = list(dict.fromkeys(str(run["launcher"]) for run in runs))
    walls = {name: [float(str(r["wall_s"])) for r in runs if r["launcher"] == name] for name in names}
    memory = {name: [float(str(r["max_rss_mb"])) for r in runs if r["launcher"] == name] for name in names}
    failed = sum(run["status"] != 0 for run in runs)
    print(f"{'launcher':32}{'median s':>10}{'min':>8}{'max':>8}{'ratio':>8}{'MB':>8}{'MB more':>9}")
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(walls[name], walls["torchrun"], strict=True))
        median, peak = statistics.median(walls[name]), statistics.median(memory[name])
        more = peak - statistics.median(memory["torchrun"])
        spread = f"{median:10.3f}{min(walls[name]):8.3f}{max(walls[name]):8.3f}"
        print(f"{name:32}{spread}{ratio:8.3f}{peak:8.1f}{more:9.1f}")
    print(f"failed runs: {failed}")


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
