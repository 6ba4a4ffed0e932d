"""A rank of the tests that saves when it is told to, ends well, and goes on from there in another turn.

Usage: saver.py FOLDER. Writes FOLDER/ready-RANK-TURN when it can be told, FOLDER/saved-RANK when SIGUSR1 or SIGTERM
told it, and in the turn that finds that file, FOLDER/resumed-RANK with what was saved.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Resume, or wait for the signal and save."""
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
