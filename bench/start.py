"""Start-up under torchrun and under numapin, in turn: the time until every rank has printed its line.

    python -m bench.start                                  the first all-reduce: NCCL, or gloo without GPUs
    python -m bench.start --script print --ranks 4         a script that imports nothing
    python -m bench.start --script print --hosts 4         the launchers of four hosts, all on this one
    python -m bench.start --repeats 1 --json start.json    a quick look

With several hosts, numapin gets torchrun's static options; --rendezvous says how those under torchrun meet. Each
repeat runs both launchers once, and the next one in the other order. All times are in seconds: until the last rank's
line, and of the whole run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from numapin.base.files import write_text_to
from numapin.base.stats import faster
from numapin.bench.machine import read_machine

SCRIPTS: Final = {
    "print": """
import os
os.write(1, b"rank is there\\n")
""",
    "import-torch": """
import os, torch
os.write(1, b"rank is there\\n")
""",
    "all-reduce": """
import os, torch, torch.distributed as dist
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
ones = torch.ones(1, device=device)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
os.write(1, b"rank is there\\n")
dist.destroy_process_group()
""",
}
LAUNCHERS: Final = {
    "torchrun": ("-m", "torch.distributed.run"),
    "numapin": ("-m", "numapin", "run", "--quiet"),
}


def _meeting(launcher: str, rendezvous: str, num_hosts: int) -> list[tuple[str, ...]]:
    """Return the options of each host."""
    if num_hosts == 1:
        return [("--standalone",) if launcher == "torchrun" else ()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if launcher == "torchrun" and rendezvous == "c10d":
        endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
        return [(f"--nnodes={num_hosts}", "--rdzv-backend=c10d", endpoint)] * num_hosts
    address = ("--master-addr=127.0.0.1", f"--master-port={port}")
    return [(f"--nnodes={num_hosts}", f"--node-rank={number}", *address) for number in range(num_hosts)]


def measure(
    launcher: str, script: Path, num_ranks: int, *, num_hosts: int = 1, rendezvous: str = "static"
) -> dict[str, float]:
    """Run the script once; return `last_line_s` and `total_s`. Raises RuntimeError if a rank printed no line.

    `num_ranks` is the number on each host.
    """
    words = (sys.executable, *LAUNCHERS[launcher], "--nproc-per-node", str(num_ranks))
    commands = [(*words, *meeting, str(script)) for meeting in _meeting(launcher, rendezvous, num_hosts)]
    begin_s = time.perf_counter()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors:
        with os.fdopen(reader, "rb") as lines:
            runs = [subprocess.Popen(command, stdout=writer, stderr=errors) for command in commands]
            os.close(writer)
            num_lines = sum(1 for _ in itertools.islice(lines, num_ranks * num_hosts))
            last_line_s = time.perf_counter() - begin_s
            statuses = [run.wait() for run in runs]
        total_s = time.perf_counter() - begin_s
        if any(statuses) or num_lines != num_ranks * num_hosts:
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            raise RuntimeError(f"{launcher} ended with status {max(statuses)} after {num_lines} lines:\n{said}")
    return {"last_line_s": last_line_s, "total_s": total_s}


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Return a line for each figure: the median of both launchers, and numapin's speed as a multiple of torchrun's."""
    lines = [f"{'':12} {'torchrun':>9} {'numapin':>9}  times as fast (99 % interval)"]
    for figure in ("last_line_s", "total_s"):
        sides = {name: {n: run[figure] for n, run in enumerate(runs[name])} for name in LAUNCHERS}
        medians = " ".join(f"{statistics.median(sides[name].values()):9.3f}" for name in LAUNCHERS)
        verdict = faster(sides["torchrun"], sides["numapin"], margin=0.05)
        assert verdict is not None
        interval = f" ({verdict.low:.2f} to {verdict.high:.2f})" if verdict.low is not None else ""
        lines.append(f"{figure:12} {medians}  {verdict.ratio:.2f}{interval}, {verdict.verdict}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run both launchers in turn, print the table, and write every run."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--script", choices=[*SCRIPTS], default="all-reduce", help="default: all-reduce")
    parser.add_argument("--ranks", type=int, help="ranks of each host; default: one per GPU, or 4")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of the job, all on this one (default: 1)")
    parser.add_argument(
        "--rendezvous", choices=["static", "c10d"], default="static", help="torchrun's (default: static)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each launcher; a verdict needs 5 (default: 5)")
    parser.add_argument("--json", type=Path, help="file for every run")
    options = parser.parse_args(arguments)
    machine = read_machine()
    num_ranks = options.ranks or len(machine.gpus) or 4
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPTS[options.script])
        for repeat in range(options.repeats):
            for launcher in list(LAUNCHERS)[:: -1 if repeat % 2 else 1]:
                hosts = {"num_hosts": options.hosts, "rendezvous": options.rendezvous}
                runs[launcher].append(measure(launcher, script, num_ranks, **hosts))
    hosts_text = f", {options.hosts} hosts (torchrun: {options.rendezvous})" if options.hosts > 1 else ""
    print(f"{options.script}, {num_ranks} ranks{hosts_text}, {options.repeats} repeats, {os.cpu_count()} CPUs")
    print(table(runs))
    if options.json is not None:
        report = {"script": options.script, "ranks": num_ranks, "machine": machine.to_json(), "runs": runs}
        write_text_to(str(options.json), json.dumps(report, indent=1) + "\n", remedy="choose another --json")


if __name__ == "__main__":
    main()
