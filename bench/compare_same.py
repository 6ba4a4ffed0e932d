"""Twenty comparisons of a command with itself, or with a slower one: python -m bench.compare_same [FACTOR].

Comes in: how many times as long the other command's steps take, by default 1. Goes out: the outcome of each
`numapin compare`, and how many there are of each, on stdout. The script sleeps, and steps a stand-in for torch, so that
a run takes a second.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from tests.integration.stepping import training_script

NUM_COMPARISONS: Final = 20
STEP_S: Final = 0.05
OPTIONS: Final = ("--repeats", "5", "--skip", "2", "--steps", "16", "--grace", "5", "--json")
COMPARE: Final = (sys.executable, "-c", "from numapin.cli.entry import main; main()", "compare", *OPTIONS)


def outcome(folder: Path, script: str, factor: float) -> str:
    """Compare steps of STEP_S with steps `factor` times as long, and return the outcome."""
    first, second = (shlex.join([sys.executable, script, str(folder), str(STEP_S * f)]) for f in (1, factor))
    done = subprocess.run([*COMPARE, "--a", first, "--b", second], capture_output=True, text=True, check=True)
    ratio = json.loads(done.stdout)["variants"][1]["ratio"]
    return f"{ratio['verdict']}: {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def main(factor: float) -> None:
    """Print each outcome as soon as it is there."""
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; steps of {STEP_S * 1e3:.0f} ms; {' '.join(OPTIONS)}")
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        script = training_script(Path(name))
        for number in range(NUM_COMPARISONS):
            text = outcome(Path(name), script, factor)
            found[text.partition(":")[0]] += 1
            print(f"{number + 1}: {text}", flush=True)
    counts = ", ".join(f"{count} of {NUM_COMPARISONS} {verdict}" for verdict, count in found.items())
    print(f"load {os.getloadavg()[0]:.1f}; steps {factor:g} times as long: {counts}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
