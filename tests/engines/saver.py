"""A rank for the tests that saves on a signal, exits with status 0, and resumes when the job is requeued.

Usage: saver.py FOLDER. Writes FOLDER/ready-RANK-TURN when it is ready for signals, FOLDER/saved-RANK on SIGUSR1 or
SIGTERM, and, in the turn that finds that file, FOLDER/resumed-RANK with its content.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    turn = os.environ.get("SLURM_RESTART_COUNT", "0")
    saved = folder / f"saved-{rank}"
    if saved.exists():
        (folder / f"resumed-{rank}").write_text(f"{saved.read_text()} then turn {turn}")
        return
    told = {signal.SIGUSR1, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    (folder / f"ready-{rank}-{turn}").touch()
    signal.sigwait(told)
    saved.write_text(f"turn {turn}")


if __name__ == "__main__":
    main()
